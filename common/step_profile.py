"""Where the time of a training step goes, and the arithmetic peak that MFU is measured by.

train_drafter.py marks the end of each phase; on a GPU the marks are events in its queue, read when the step is over, so
that measuring never waits. There "fetch" and "h2d" are the times that the GPU itself stood idle for data.
"""

import time

import torch

PHASES = ("fetch", "h2d", "forward", "backward", "optimizer")
# Dense bf16 peak by the makers' data sheets, in TFLOP/s, by a part of the device's name.
PEAK_TFLOPS = {"B200": 2250.0, "H200": 989.0, "H100": 989.0, "H800": 989.0, "A100": 312.0, "L40S": 362.0}


class StepClock:
    """Marks of one step: `mark(phase)` ends a phase, which began at the mark before (or at the making of the clock)."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.marks: list[tuple[str, object]] = []
        self.mark("")

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


def peak_tflops(device: torch.device) -> float | None:
    """The dense bf16 peak of the device, or None where it is not known (then no MFU is shown)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)
