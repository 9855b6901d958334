"""Captures a handful of samples again, for comparison: by SGLang's engine through the suite's own tap, or by
transformers as a second, independent implementation.

Called by common/doctor_run.py (what are these stored states really?) and common/engine_eval.py (score the engine's own
replies offline). Not the way to capture a data set: that is extract.py.
"""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import torch

from common.capture_points import CapturePoints
from common.errors import OWN_CODE, UserError
from common.target import text_config

TokenRow = namedtuple("TokenRow", "index input_ids loss_mask row_hash source category", defaults=(None, None))
TokenRow.__doc__ = "What Capture.take wants of a sample: input_ids, loss_mask int64 [L]; index unique, from 0."


def model_dtype(config: dict) -> str:
    """What the target computes in, by its config.json; bfloat16 where it does not say."""
    text = text_config(config)
    named = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return str(named or "bfloat16").removeprefix("torch.")


@torch.no_grad()
def by_transformers(model: str, rows: list[TokenRow], points: list[int], trust_remote_code: bool = False,
                    device: str = "cpu") -> list[list[torch.Tensor]]:  # fmt: skip
    """For each row: len(points) + 1 tensors [L, H] on the CPU, the points in order and the pre-norm last state.

    Transformers' `hidden_states[k]` is what enters layer k; its last one is post-norm, so the last state is taken from
    the input of the final norm. Raises UserError when the model cannot be loaded or has no such norm.
    """
    from transformers import AutoModelForCausalLM

    try:
        network = AutoModelForCausalLM.from_pretrained(model, dtype="auto", trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        reason = OWN_CODE if "custom code" in str(error) and not trust_remote_code else str(error).splitlines()[0]
        raise UserError(f"{model}: transformers cannot load it ({reason}); or use --reference sglang") from None
    network = network.to(device).eval()
    norm = getattr(network.get_decoder(), "norm", None)
    if norm is None:
        raise UserError(f"{model}: {type(network).__name__} has no final norm called `norm`; use --reference sglang")
    inputs: list[torch.Tensor] = []
    handle = norm.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    out = []
    for row in rows:
        inputs.clear()
        ids = torch.as_tensor(row.input_ids, device=device)[None]
        hidden = network.get_decoder()(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        out.append([hidden[point][0].cpu() for point in points] + [inputs[0][0].cpu()])
    handle.remove()
    return out


def by_engine(model: str, config: dict, rows: list[TokenRow], points: CapturePoints, folder: Path, tp: int = 1,
              trust_remote_code: bool = False, extra: dict | None = None, seed: int = 0):  # fmt: skip
    """Write the rows' states as shards into `folder` (new) with an engine of its own; returns their ShardReader.

    Every self-check of extract.py applies: the first batch is compared with SGLang's own capture, every sample with
    the engine's own token. Raises UserError, also where it would set a row aside: every row is compared with something.
    """
    from common.capture import Capture
    from common.engine import EngineSettings, available_device, start_engine, stop_engine
    from common.offline_eval import free_gpu
    from common.shard_run import RunDirectory
    from common.shards import ShardReader

    text = text_config(config)
    device, _ = available_device()
    settings = EngineSettings(
        model=model, points=points, tp=tp, trust_remote_code=trust_remote_code, device=device, seed=seed,
        extra=extra or {},
    )  # fmt: skip
    free_gpu()
    engine = start_engine(settings, folder / "logs" / "engine.log")
    identity = {
        "model": model, "capture_points": list(points.points), "num_layers": points.num_layers,
        "hidden_size": text["hidden_size"], "vocab_size": text["vocab_size"], "last_state": "pre-norm",
        "dtype": "bfloat16",
    }  # fmt: skip
    longest = max(len(row.input_ids) for row in rows)
    token_bytes = (len(points.points) + 1) * text["hidden_size"] * 2
    capture_settings = {
        "hidden_size": text["hidden_size"], "dtype": "bfloat16", "last_state": "all",
        "ring_bytes": 4 * (longest + 16_384) * token_bytes, "tokens_in_flight": 4 * max(longest, 4096),
    }  # fmt: skip

    told: list[str] = []

    async def capture(run):
        async with Capture(engine, run, points, capture_settings, on_note=told.append) as session:
            await session.take(rows)

    try:
        with RunDirectory(folder / "states", identity, rows=len(rows)) as run:
            engine.loop.run_until_complete(capture(run))
            if aside := len(run.set_aside):
                raise UserError(f"{model}: {aside} of {len(rows)} samples cannot be captured again: {'; '.join(told)}")
            run.finish()
    finally:
        stop_engine(engine)
    return ShardReader(folder / "states")
