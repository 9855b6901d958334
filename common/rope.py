"""Rotary position embedding as SGLang's `get_rope` computes it: plain, linear, llama3, yarn and deepseek_yarn.

Called by common/drafter.py and the two layers. Frequencies: Su et al. 2021 (RoPE); llama3 scaling as published with
Llama 3.1; YaRN, Peng et al. 2023; deepseek_yarn as DeepSeek-V2 scales latent attention: yarn's frequencies, another
magnitude (`mscale` over `mscale_all_dim`), and softmax scores that grow with the context (`score_factor`). A Llama
layer rotates half against half ("neox", `rotate`), latent attention neighbour against neighbour (`rotate_pairs`).
"""

import math

import torch

from common.errors import UserError

KNOWN = ("default", "linear", "llama3", "yarn", "deepseek_yarn")


def inverse_frequencies(head_dim: int, theta: float, scaling: dict | None) -> tuple[torch.Tensor, float]:
    """float32 [head_dim / 2] angles per position, and the factor on cos and sin (1 but for the two kinds of yarn).

    scaling: the Hugging Face dict (`rope_type` or `type`, `factor`, ...), or None. Raises UserError for an unknown
    kind or a missing field.
    """
    kind = kind_of(scaling)
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if kind == "default":
        return plain, 1.0
    if kind not in KNOWN:
        raise UserError(f"rope scaling {kind!r} is not supported by the drafter; choose one of {', '.join(KNOWN)}")
    needed = ("factor",) if kind == "linear" else ("factor", "original_max_position_embeddings")
    needed += ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ()
    missing = [name for name in needed if scaling.get(name) is None]
    if missing:
        raise UserError(f"rope scaling {kind!r} lacks {', '.join(missing)}: {scaling}")
    factor = positive(scaling, "factor")
    if kind == "linear":
        return plain / factor, 1.0
    original = positive(scaling, "original_max_position_embeddings")
    if number(scaling, "extrapolation_factor", 1.0) != 1.0:
        raise UserError(f"rope scaling {kind!r}: only extrapolation_factor 1 is computed here: {scaling}")
    if kind == "llama3":
        low, high = positive(scaling, "low_freq_factor"), positive(scaling, "high_freq_factor")
        wavelength = 2 * math.pi / plain
        # 0 where a wave is long against the original context (slowed fully), 1 where it is short (kept)
        keep = ((original / wavelength - low) / (high - low)).clamp(0, 1) if high != low else torch.zeros_like(plain)
        keep = torch.where(wavelength < original / high, torch.ones_like(keep), keep)
        keep = torch.where(wavelength > original / low, torch.zeros_like(keep), keep)
        return plain * (keep + (1 - keep) / factor), 1.0

    def dimension(rotations: float) -> float:
        """The (fractional) frequency index that turns `rotations` times within the original context."""
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(positive(scaling, "beta_fast", 32)), dimension(positive(scaling, "beta_slow", 1))
    if scaling.get("truncate", True) or kind == "deepseek_yarn":
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first if last != first else 0.001)
    slowed = ramp.clamp(0, 1)
    magnitude = _mscale(factor, 1.0)
    if kind == "deepseek_yarn":
        magnitude = _mscale(factor, number(scaling, "mscale", 1.0))
        magnitude /= _mscale(factor, number(scaling, "mscale_all_dim", 0.0))
    return plain * (1 - slowed) + plain / factor * slowed, magnitude * number(scaling, "attn_factor", 1.0)


def kind_of(scaling: dict | None) -> str:
    """Its `rope_type`, or the older `type` where that is absent or null; "default" for None."""
    if scaling is not None and not isinstance(scaling, dict):
        raise UserError(f"rope scaling {scaling!r}: expected a mapping with rope_type, or null for plain rope")
    kind = (scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default"
    if not isinstance(kind, str):
        raise UserError(f"rope scaling {scaling}: rope_type is {kind!r}, expected one of {', '.join(KNOWN)}")
    return kind


def number(scaling: dict, name: str, default: float | None = None) -> float:
    """A field of the scaling; the default where it is absent or null. `UserError` for what is no finite number."""
    value = default if scaling.get(name) is None else scaling[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"rope scaling: {name} is {value!r}, expected a number; correct it in config.json: {scaling}")
    return float(value)


def positive(scaling: dict, name: str, default: float | None = None) -> float:
    if (value := number(scaling, name, default)) <= 0:
        raise UserError(f"rope scaling: {name} is {value}, expected more than 0; correct it in config.json: {scaling}")
    return value


def _mscale(factor: float, weight: float) -> float:
    """YaRN's correction for a context that is `factor` times as long."""
    return 0.1 * float(weight) * math.log(factor) + 1.0 if factor > 1 else 1.0


def score_factor(scaling: dict | None) -> float:
    """What deepseek_yarn multiplies softmax scores by; 1 for every other kind, and where the config switches it off.

    Twice the correction of `mscale_all_dim`, for the query and for the key.
    """
    scaling = scaling or {}
    on = scaling.get("apply_yarn_scaling", True) and scaling.get("apply_scale", True)
    if kind_of(scaling) != "deepseek_yarn" or not on:
        return 1.0
    return _mscale(positive(scaling, "factor"), number(scaling, "mscale_all_dim", 0.0)) ** 2


def cos_sin(positions: torch.Tensor, frequencies: torch.Tensor, magnitude: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [n, head_dim / 2] in the dtype of `frequencies`, for integer positions [n]."""
    angles = positions.to(frequencies.dtype)[:, None] * frequencies
    return angles.cos() * magnitude, angles.sin() * magnitude


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads x [n, heads, head_dim] by cos, sin [n, head_dim / 2]; keeps the dtype of x."""
    cos, sin = cos[:, None], sin[:, None]
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As `rotate`, but element 2 i against 2 i + 1 instead of i against head_dim / 2 + i."""
    cos, sin = cos[:, None], sin[:, None]
    first, second = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)
