"""The arithmetic of an extraction before it is run: tokens, bytes, host memory, time. Called by `extract.py --plan`."""

from common.progress import duration
from common.shard_check import bytes_per_token, plan_bytes
from common.target import text_config

H200_TFLOPS = 790.0  # dense bf16 matrix products, measured on one H200
MEASURED_SHARE = 0.56  # of that, reached by plain prefill at Kimi-K2.5 dimensions (7,300 tokens/s of 13,000)


def plan_of(samples: list, target: dict, state_dtype: str, ring_gb: float, gpus: int) -> dict:
    """Figures of capturing `samples` (tokenized rows): counts, bytes, and seconds on `gpus` H200s."""
    lengths = [len(sample.input_ids) for sample in samples]
    points, hidden = len(target["points"].points), target["hidden_size"]
    active = active_parameters(target["config"])
    floor = sum(lengths) * 2 * active / (H200_TFLOPS * 1e12) / gpus
    return {
        "samples": len(samples),
        "tokens": sum(lengths),
        "supervised_tokens": int(sum(int(sample.loss_mask.sum()) for sample in samples)),
        "longest": max(lengths),
        "capture_points": list(target["points"].points),
        "bytes_per_token": bytes_per_token(points, hidden, state_dtype),
        "bytes": plan_bytes(lengths, points, hidden, state_dtype),
        "host_memory_bytes": int(gpus * ring_gb * 1e9),
        "active_parameters": active,
        "gpus": gpus,
        "floor_seconds_h200": floor,
        "expected_seconds_h200": floor / MEASURED_SHARE,
        "write_gb_per_second": plan_bytes(lengths, points, hidden, state_dtype) / (floor / MEASURED_SHARE) / 1e9,
    }


def plan_text(plan: dict) -> str:
    return "\n".join(
        [
            f"{plan['samples']:,} samples, {plan['tokens']:,} tokens ({plan['supervised_tokens']:,} supervised), "
            f"longest {plan['longest']:,}; capture points {plan['capture_points']} and the last state",
            f"disk: {plan['bytes'] / 1e9:,.3f} GB ({plan['bytes_per_token']:,} bytes a token); host memory: "
            f"{plan['host_memory_bytes'] / 1e9:g} GB of ring, {plan['gpus']} x --ring-gb",
            f"prefill of {plan['active_parameters'] / 1e9:.3g} B active parameters on {plan['gpus']} H200: "
            f"{duration(plan['floor_seconds_h200'])} by arithmetic, about "
            f"{duration(plan['expected_seconds_h200'])} at the measured {MEASURED_SHARE:.0%} of it; a disk that writes "
            f"less than {plan['write_gb_per_second']:.2f} GB/s is the limit instead",
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
    expert = 3 * hidden * text["moe_intermediate_size"]
    first_dense = text.get("first_k_dense_replace") or 0
    moe = (routed + (text.get("n_shared_experts") or 0)) * expert
    return layers * attention + first_dense * dense + (layers - first_dense) * moe
