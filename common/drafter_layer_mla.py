"""The drafter's decoder layer with DeepSeek's multi-head latent attention (MLA): sibling of common/drafter_layer.py.

common/drafter.py takes its three functions from here when `DrafterConfig.drafter_type` is "mla". The arithmetic is
SGLang's `Eagle3DeepseekV2ForCausalLM`: everything is as in the Llama layer but for what stands between
concat(input_layernorm(embedding), hidden_norm(state)) and attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1). That
is projected down to a query latent and to one latent for keys and values, both normed, and to one rotated key part that
all heads share. SGLang serves with the up-projections absorbed into query and output, so that its cache holds latents;
training expands them, which is the same function with as many kv heads as query heads.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from common import drafter_layer as layer
from common.losses import rms_norm
from common.rope import cos_sin, rotate_pairs


class Sizes(NamedTuple):
    heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope: int  # width of a head's plain part
    rope: int  # and of its rotated part
    value: int  # width of a head's values
    eps: float
    rope_magnitude: float
    width: int = 0  # 0, or what queries, keys and values are filled up to with zeros for the attention kernels


class LatentWeights(NamedTuple):
    """What a Llama layer has no place for; `Weights.qkv` is q_a_proj over kv_a_proj_with_mqa here."""

    q_norm: torch.Tensor  # [q_lora_rank]
    q_up: torch.Tensor  # [heads * (nope + rope), q_lora_rank]
    kv_norm: torch.Tensor  # [kv_lora_rank]
    kv_up: torch.Tensor  # [heads * (nope + value), kv_lora_rank]


def _fill(x: torch.Tensor, width: int) -> torch.Tensor:
    """[n, heads, d] with zeros after d, up to `width` where it is not 0."""
    return F.pad(x, (0, width - x.shape[-1])) if width else x


def _query(w: layer.Weights, sizes: Sizes, down: torch.Tensor, cos, sin) -> torch.Tensor:
    """Query [n, heads, nope + rope] of latents [n, q_lora_rank]."""
    heads = F.linear(rms_norm(down, w.latent.q_norm, sizes.eps), w.latent.q_up).unflatten(1, (sizes.heads, -1))
    plain, turning = heads.split((sizes.nope, sizes.rope), dim=-1)
    return _fill(torch.cat((plain, rotate_pairs(turning, cos, sin)), dim=-1), sizes.width)


def _keys_values(w: layer.Weights, sizes: Sizes, down: torch.Tensor, cos, sin) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [n, heads, nope + rope] and values [n, heads, value] of [n, kv_lora_rank + rope]."""
    latent, shared = down.split((sizes.kv_lora_rank, sizes.rope), dim=-1)
    heads = F.linear(rms_norm(latent, w.latent.kv_norm, sizes.eps), w.latent.kv_up).unflatten(1, (sizes.heads, -1))
    plain, values = heads.split((sizes.nope, sizes.value), dim=-1)
    shared = rotate_pairs(shared[:, None], cos, sin).expand(-1, sizes.heads, -1)
    return _fill(torch.cat((plain, shared), dim=-1), sizes.width), _fill(values, sizes.width).contiguous()


def before_attention_first(w: layer.Weights, sizes: Sizes, aux_states, aux_scales, embed_ids, positions, rows):
    """Step 0; arguments as in common/drafter_layer.py.

    Returns query [C, heads, nope + rope], keys [T, heads, nope + rope], values [T, heads, value], state of the query
    rows [C, H].
    """
    state = layer.fused_points(w, sizes, aux_states, aux_scales)  # [T, H]
    x = layer.layer_input(w, sizes, embed_ids, state)  # [T, 2H]
    cos, sin = cos_sin(positions, w.rope_frequencies, sizes.rope_magnitude)
    query = F.linear(layer.TakeRows.apply(x, rows), w.qkv[: sizes.q_lora_rank])
    keys, values = _keys_values(w, sizes, F.linear(x, w.qkv[sizes.q_lora_rank :]), cos, sin)
    return _query(w, sizes, query, cos[rows], sin[rows]), keys, values, layer.TakeRows.apply(state, rows)


def before_attention_later(w: layer.Weights, sizes: Sizes, state, token_ids, positions):
    """Step k > 0, for states [C, H] of step k-1, tokens [C] and rotary positions t+k [C].

    Returns query [C, heads, nope + rope], own key [C, heads, nope + rope], own value [C, heads, value].
    """
    down = F.linear(layer.layer_input(w, sizes, token_ids, state), w.qkv)
    query, kv = down.split((sizes.q_lora_rank, sizes.kv_lora_rank + sizes.rope), dim=-1)
    cos, sin = cos_sin(positions, w.rope_frequencies, sizes.rope_magnitude)
    return _query(w, sizes, query, cos, sin), *_keys_values(w, sizes, kv, cos, sin)


def after_attention(w: layer.Weights, sizes: Sizes, attended, residual):
    """attended: [C, heads, value], or filled up; residual: [C, H]. Returns state and normed state, each [C, H]."""
    return layer.after_attention(w, sizes, attended[..., : sizes.value], residual)
