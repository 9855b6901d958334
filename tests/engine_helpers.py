"""What the engine tests share: starting a real engine on the CPU, capturing samples with it, and the reference states.

The reference is transformers on the same checkpoint in float32: `hidden_states[k]` for the capture points, and the
output of the last decoder layer, before the final norm, for the last state.
"""

import contextlib
import threading
from pathlib import Path

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM

import faults
from common import tap
from common.capture import Capture
from common.capture_points import CapturePoints
from common.engine import EngineSettings, start_engine
from common.recapture import TokenRow
from common.shard_run import RunDirectory
from common.shards import ShardReader


def samples_of(lengths, seed=0, vocab=512, first=0) -> list[TokenRow]:
    """Random prompts of these lengths; ids from 100 on, so that faults can use smaller ones as marks."""
    rng = np.random.default_rng(seed)
    return [
        TokenRow(first + i, rng.integers(100, vocab, length), np.ones(length, np.int64), f"row-{first + i}")
        for i, length in enumerate(lengths)
    ]


def start(folder: Path, points: CapturePoints, log: Path, tp: int = 1, chunk_tokens: int = 2048):
    """A real engine in float32 on the CPU, with tests/faults.py in its schedulers."""
    real, tap.run_scheduler = tap.run_scheduler, faults.run_scheduler
    try:
        settings = EngineSettings(
            str(folder), points, device="cpu", dtype="float32", tp=tp, chunk_tokens=chunk_tokens, writers=2
        )
        return start_engine(settings, log)
    finally:
        tap.run_scheduler = real


def capture(engine, out: Path, samples, points, *, dtype="float32", layout="v1", hidden=64, ring_bytes=64 << 20,
            tokens_in_flight=8192, last_state="all"):
    """Capture `samples` into `out` and return (Capture, ShardReader or None)."""
    run = RunDirectory(out, {"model": "test"}, rows=max(sample.index for sample in samples) + 1, layout=layout)
    settings = {
        "hidden_size": hidden, "dtype": dtype, "last_state": last_state, "ring_bytes": ring_bytes,
        "tokens_in_flight": tokens_in_flight,
    }  # fmt: skip

    async def go():
        async with Capture(engine, run, points, settings) as session:
            await session.take(samples)
        return session

    try:
        session = engine.loop.run_until_complete(go())
        run.finish()
    finally:
        run.close()
    return session, ShardReader(out) if run.committed else None


@contextlib.contextmanager
def writers_stopped(engine, out: Path, seconds: float = 600.0):
    """The writer processes of `engine` stand still from the first file in `out` on, as with a disk that hangs, for so
    long, or until the block is left."""
    descendants = psutil.Process().children(recursive=True)
    writers = [process for process in descendants if "common.tap_writer" in process.cmdline()]
    assert len(writers) == engine.links.processes - engine.links.ranks > 0
    over = threading.Event()

    def stop_them():
        while not any(out.rglob("data_*.pt")) and not over.wait(0.001):
            pass
        for writer in writers:
            writer.suspend()
        over.wait(seconds)
        for writer in writers:
            writer.resume()

    thread = threading.Thread(target=stop_them)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Reference:
    """States of the same checkpoint by transformers, float32 unless asked otherwise."""

    def __init__(self, folder: Path, points: CapturePoints, dtype: torch.dtype = torch.float32):
        self.points = points
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    @torch.no_grad()
    def states(self, input_ids) -> list[torch.Tensor]:
        """P + 1 tensors [L, H]: the points in order, the last state at the end."""
        last = {}

        def keep(module, args, output):
            last["state"] = output[0] if isinstance(output, tuple) else output

        handle = self.model.model.layers[-1].register_forward_hook(keep)
        try:
            ids = torch.as_tensor(np.asarray(input_ids))[None]
            output = self.model(ids, output_hidden_states=True)
        finally:
            handle.remove()
        length = ids.shape[1]
        states = [output.hidden_states[point] for point in self.points.points] + [last["state"]]
        return [state.reshape(length, -1) for state in states]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected|| over the whole tensor."""
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


@torch.no_grad()
def single_layers(model, input_ids, into: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """What each layer i of `into` makes of the states [L, H] given there, [L, H]: by transformers, one layer at a time,
    because 61 layers with routing in between turn the rounding of bfloat16 into other experts."""
    made, handles = {}, []
    for i, states in into.items():
        layer = model.model.layers[i]

        def replace(module, arguments, states=states):
            return (states[None].to(model.dtype), *arguments[1:])

        def keep(module, arguments, output, i=i):
            made[i] = (output[0] if isinstance(output, tuple) else output).reshape(len(input_ids), -1).float()

        handles += [layer.register_forward_pre_hook(replace), layer.register_forward_hook(keep)]
    model.model(torch.as_tensor(input_ids)[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return made


def layer_errors(found: dict, expected: dict, into: dict) -> dict[int, float]:
    """Median over rows of ||found - expected||, as a share of what the layer adds to its input."""
    return {
        i: ((found[i].float() - want).norm(dim=-1) / (want - into[i].float()).norm(dim=-1)).median().item()
        for i, want in expected.items()
    }
