"""Where the time of a training step goes, how its figures reach the host, and the peak that MFU is measured by.

train_drafter.py marks the end of each phase; on a GPU the marks are events in its queue, read when the step is over, so
that measuring never waits. There "fetch" and "h2d" are the times that the GPU itself stood idle for data. While the GPU
computes a step, the host prepares the next one: nothing here or in that loop may wait for what was queued last.
"""

import time
from collections.abc import Callable

import torch

PHASES = ("fetch", "h2d", "forward", "backward", "optimizer")
# Dense bf16 peak by the makers' data sheets, in TFLOP/s, by a part of the device's name.
PEAK_TFLOPS = {"B200": 2250.0, "H200": 989.0, "H100": 989.0, "H800": 989.0, "A100": 312.0, "L40S": 362.0}


class StepClock:
    """Marks of one step: `mark(phase)` ends a phase, which began at the mark before.

    The first phase begins where the step before ended (its clock is given), so that nothing between two steps is left
    out, or at the making of the clock.
    """

    def __init__(self, device: torch.device, before: "StepClock | None" = None):
        self.on_gpu = device.type == "cuda"
        self.marks: list[tuple[str, object]] = []
        if before is None:
            self.mark("")
        else:
            self.marks.append(("", before.marks[-1][1]))

    def mark(self, phase: str) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((phase, event))
        else:
            self.marks.append((phase, time.perf_counter()))

    def milliseconds(self) -> dict[str, float]:
        """Total time of each phase; on a GPU it first waits for the last mark."""
        if self.on_gpu:
            self.marks[-1][1].synchronize()
        total = dict.fromkeys(PHASES, 0.0)
        for (_, before), (phase, after) in zip(self.marks, self.marks[1:], strict=False):
            total[phase] += before.elapsed_time(after) if self.on_gpu else 1e3 * (after - before)
        return total


def to_device(numbers: list[float], tensor: torch.Tensor) -> None:
    """Overwrite a small tensor; on a GPU that is queued, and the host does not wait for what was queued before."""
    on_gpu = tensor.device.type == "cuda"
    tensor.copy_(torch.tensor(numbers, dtype=tensor.dtype, pin_memory=on_gpu), non_blocking=on_gpu)


def to_host(tensor: torch.Tensor) -> Callable[[], list]:
    """Start to copy a small tensor to the host. Returns a function that gives its numbers: it waits for what the tensor
    is made of, not for what is queued afterwards, as `tensor.tolist()` would."""
    if tensor.device.type != "cuda":
        return tensor.clone().tolist
    numbers = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    numbers.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)  # the processor is for the reading threads while this one waits
    copied.record()

    def read():
        copied.synchronize()
        return numbers.tolist()

    return read


def peak_tflops(device: torch.device) -> float | None:
    """The dense bf16 peak of the device, or None where it is not known (then no MFU is shown)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)
