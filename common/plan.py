"""The arithmetic of an extraction before it is run: tokens, bytes, host memory, time. Called by `extract.py --plan`."""

import time

import numpy as np

from common.errors import UserError
from common.progress import duration
from common.shard_check import last_state_bytes, plan_bytes, point_bytes
from common.target import text_config

H200_TFLOPS = 790.0  # dense bf16 matrix products, measured on one H200
MEASURED_SHARE = 0.56  # of that, reached by plain prefill at Kimi-K2.5 dimensions (7,300 tokens/s of 13,000)


def plan_of(args, samples: list, target: dict, gpus: int) -> dict:
    """Figures of capturing `samples` (tokenized rows) with extract.py's arguments: counts, bytes, and seconds on `gpus`
    H200s. `bytes_per_token` is an average where the last state is kept at some rows only."""
    lengths = [len(sample.input_ids) for sample in samples]
    points, hidden = len(target["points"].points), target["hidden_size"]
    layout, kept = args.layout or "v1", last_rows_kept(args.last_state, samples)
    kept_share = sum(kept) / sum(lengths)
    last = last_state_bytes(hidden, args.state_dtype, layout)
    try:
        active = active_parameters(target["config"])
    except KeyError as error:
        raise UserError(f"--plan: the target's config.json has no {error}, which its arithmetic needs") from None
    floor = sum(lengths) * 2 * active / (H200_TFLOPS * 1e12) / gpus
    nbytes = plan_bytes(lengths, points, hidden, args.state_dtype, layout, kept)
    return {
        "samples": len(samples),
        "tokens": sum(lengths),
        "supervised_tokens": int(sum(int(sample.loss_mask.sum()) for sample in samples)),
        "longest": max(lengths),
        "capture_points": list(target["points"].points),
        "bytes_per_token": round(point_bytes(points, hidden, args.state_dtype) + kept_share * last),
        "last_state_share": round(kept_share, 4),
        "bytes": nbytes,
        "host_memory_bytes": int(gpus * args.ring_gb * 1e9),
        "active_parameters": active,
        "gpus": gpus,
        "floor_seconds_h200": floor,
        "expected_seconds_h200": floor / MEASURED_SHARE,
        "write_gb_per_second": nbytes / (floor / MEASURED_SHARE) / 1e9,
    }


def last_rows_kept(last_state: str, samples: list) -> list[int]:
    """Rows of each sample at which its last state is stored under --last-state (`shards.last_state_rows`)."""
    if last_state == "all":
        return [len(sample.input_ids) for sample in samples]
    return [int((np.asarray(sample.loss_mask)[1:] != 0).sum()) for sample in samples]


def cpu_tflops(seconds: float = 0.3) -> float:
    """Of this machine's CPU, in float32 matrix products timed now."""
    import torch

    a, b, number = torch.rand(1024, 1024), torch.rand(1024, 1024), 0
    a @ b
    started = time.perf_counter()
    while (took := time.perf_counter() - started) < seconds:
        a @ b
        number += 1
    return number * 2 * 1024**3 / took / 1e12


def cpu_text(plan: dict, training: dict | None) -> str:
    """What takes how long where there is no GPU."""
    tflops = cpu_tflops()
    capture = 2 * plan["active_parameters"] * plan["tokens"] / tflops / 1e12
    times = f"capture {time_text(capture)}"
    times += f", training {time_text(training['flops_per_epoch'] / tflops / 1e12)} an epoch" if training else ""
    return (f"no GPU here; on this CPU ({1000 * tflops:,.0f} GFLOP/s in a product of matrices) by arithmetic: {times}; "
            f"expect two to four times that, and a minute for the engine. On an H200:")  # fmt: skip


def time_text(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 else "less than a second"


def plan_text(plan: dict) -> str:
    floor, seconds, disk = plan["floor_seconds_h200"], plan["expected_seconds_h200"], plan["write_gb_per_second"]
    took = (f"{time_text(floor)} by arithmetic, about {time_text(seconds)} at the measured {MEASURED_SHARE:.0%} of it; "
            f"a disk that writes less than {disk:.2f} GB/s is the limit instead")  # fmt: skip
    return "\n".join(
        [
            f"{plan['samples']:,} samples, {plan['tokens']:,} tokens ({plan['supervised_tokens']:,} supervised), "
            f"longest {plan['longest']:,}; capture points {plan['capture_points']} and the last state",
            f"disk: {plan['bytes'] / 1e9:,.3f} GB ({plan['bytes_per_token']:,} bytes a token, the last state at "
            f"{plan['last_state_share']:.0%} of them); host memory: "
            f"{plan['host_memory_bytes'] / 1e9:g} GB of ring, {plan['gpus']} x --ring-gb",
            f"prefill of {plan['active_parameters'] / 1e9:.3g} B active parameters on {plan['gpus']} H200: "
            f"{took if seconds >= 1 else time_text(seconds)}",
        ]
    )


def active_parameters(config: dict) -> int:
    """Parameters that one token passes through (matrix products only), from config.json: dense, MLA and MoE layers."""
    text = text_config(config)
    hidden, layers = text["hidden_size"], text["num_hidden_layers"]
    heads = text["num_attention_heads"]
    if text.get("kv_lora_rank"):
        queries = text.get("q_lora_rank") or 0
        head = text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
        attention = hidden * (queries + text["kv_lora_rank"] + text["qk_rope_head_dim"])
        attention += (queries or hidden) * heads * head
        attention += text["kv_lora_rank"] * heads * (text["qk_nope_head_dim"] + text["v_head_dim"])
        attention += heads * text["v_head_dim"] * hidden
    else:
        head = text.get("head_dim") or hidden // heads
        attention = hidden * head * (2 * heads + 2 * (text.get("num_key_value_heads") or heads))
    dense = 3 * hidden * text["intermediate_size"]
    routed = text.get("num_experts_per_tok") or 0
    if not routed:
        return layers * (attention + dense)
    expert = 3 * hidden * (text.get("moe_intermediate_size") or text["intermediate_size"])
    first_dense = text.get("first_k_dense_replace") or 0
    moe = (routed + (text.get("n_shared_experts") or 0)) * expert
    return layers * attention + first_dense * dense + (layers - first_dense) * moe
