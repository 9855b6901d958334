"""Rotary position embedding as SGLang's `get_rope` computes it: plain, linear, llama3 and yarn.

Called by common/drafter.py. Frequencies: Su et al. 2021 (RoPE); llama3 scaling as published with Llama 3.1; YaRN,
Peng et al. 2023. Every kind rotates half against half ("neox").
"""

import math

import torch

from common.errors import UserError

KNOWN = ("default", "linear", "llama3", "yarn")


def inverse_frequencies(head_dim: int, theta: float, scaling: dict | None) -> tuple[torch.Tensor, float]:
    """float32 [head_dim / 2] angles per position, and the factor on cos and sin (1 but for yarn).

    scaling: the Hugging Face dict (`rope_type` or `type`, `factor`, ...), or None. Raises UserError for an unknown
    kind or a missing field.
    """
    scaling = scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if kind == "default":
        return plain, 1.0
    if kind not in KNOWN:
        raise UserError(f"rope scaling {kind!r} is not supported by the drafter; choose one of {', '.join(KNOWN)}")
    needed = {"linear": ("factor",), "yarn": ("factor", "original_max_position_embeddings")}.get(
        kind, ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    missing = [name for name in needed if name not in scaling]
    if missing:
        raise UserError(f"rope scaling {kind!r} lacks {', '.join(missing)}: {scaling}")
    factor = float(scaling["factor"])
    if kind == "linear":
        return plain / factor, 1.0
    original = float(scaling["original_max_position_embeddings"])
    if kind == "llama3":
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        wavelength = 2 * math.pi / plain
        # 0 where a wave is long against the original context (slowed fully), 1 where it is short (kept)
        keep = ((original / wavelength - low) / (high - low)).clamp(0, 1) if high != low else torch.zeros_like(plain)
        keep = torch.where(wavelength < original / high, torch.ones_like(keep), keep)
        keep = torch.where(wavelength > original / low, torch.zeros_like(keep), keep)
        return plain * (keep + (1 - keep) / factor), 1.0

    def dimension(rotations: float) -> float:
        """The (fractional) frequency index that turns `rotations` times within the original context."""
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(float(scaling.get("beta_fast", 32))), dimension(float(scaling.get("beta_slow", 1)))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first if last != first else 0.001)
    slowed = ramp.clamp(0, 1)
    magnitude = (0.1 * math.log(factor) + 1.0) if factor > 1 else 1.0
    return plain * (1 - slowed) + plain / factor * slowed, magnitude * float(scaling.get("attn_factor", 1.0))


def cos_sin(positions: torch.Tensor, frequencies: torch.Tensor, magnitude: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [n, head_dim / 2] in the dtype of `frequencies`, for integer positions [n]."""
    angles = positions.to(frequencies.dtype)[:, None] * frequencies
    return angles.cos() * magnitude, angles.sin() * magnitude


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads x [n, heads, head_dim] by cos, sin [n, head_dim / 2]; keeps the dtype of x."""
    cos, sin = cos[:, None], sin[:, None]
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
