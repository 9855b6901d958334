"""The drafter's decoder layer as plain functions of tensors: what common/drafter.py calls, eager or compiled.

Attention stands between them (common/ttt_attention.py), so these three functions are all that torch.compile sees, at
fixed shapes: one graph for step 0, one for every later step up to attention, one for everything after it. The
arithmetic is SGLang's `LlamaForCausalLMEagle3` (CONVENTIONS 5): q, k and v read concat(input_layernorm(embedding),
hidden_norm(state)), the residual is the state before `hidden_norm`, and the state fed to the next step is the layer's
output before (with `norm_output`, after) the final norm. The same three for latent attention, which share the pieces
that are public here, are in common/drafter_layer_mla.py.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from common.losses import rms_norm
from common.rope import cos_sin, rotate
from common.state_dtypes import widen


class Sizes(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_magnitude: float


class Weights(NamedTuple):
    """All weights of one forward pass in compute dtype (norms as stored); q/k/v and gate/up side by side."""

    fc: torch.Tensor  # [H, P * H_target]
    fc_norm: tuple[torch.Tensor, ...]  # P of [H_target], or none
    qkv: torch.Tensor  # [(heads + 2 kv_heads) * d, 2H]; MLA: [q_lora_rank + kv_lora_rank + rope, 2H]
    o: torch.Tensor  # [H, heads * d]
    gate_up: torch.Tensor  # [2F, H]
    down: torch.Tensor  # [H, F]
    input_norm: torch.Tensor  # [H], likewise the three below
    hidden_norm: torch.Tensor
    post_norm: torch.Tensor
    norm: torch.Tensor
    embed_tokens: torch.Tensor  # [V, H], frozen
    rope_frequencies: torch.Tensor  # [d / 2]
    code_values: torch.Tensor  # [256] float32: what each code of eight-bit states stands for
    latent: tuple = ()  # MLA: drafter_layer_mla.LatentWeights


class TakeRows(torch.autograd.Function):
    """x[rows] whose gradient is a plain scatter: rows are distinct wherever a gradient is not zero.

    Query rows are distinct but for padding, which stands at the last row; no real query is there (a position needs two
    tokens after it), and padding receives no gradient.
    """

    @staticmethod
    def forward(ctx, x, rows):
        ctx.save_for_backward(rows)
        ctx.num_rows = x.shape[0]
        return x[rows]

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        full = grad.new_zeros(ctx.num_rows, grad.shape[1])
        full[rows] = grad
        return full, None


def layer_input(w: Weights, sizes: Sizes, token_ids: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """[n, 2H] what q, k and v read."""
    embedding = F.embedding(token_ids, w.embed_tokens).to(state.dtype)
    return torch.cat((rms_norm(embedding, w.input_norm, sizes.eps), rms_norm(state, w.hidden_norm, sizes.eps)), dim=-1)


def fused_points(w: Weights, sizes: Sizes, aux_states: torch.Tensor, aux_scales: torch.Tensor | None) -> torch.Tensor:
    """[T, H] the state that step 0 begins with, of capture points [T, P * H_target], or of their codes and scales."""
    if aux_scales is not None:
        aux_states = widen(aux_states, aux_scales, w.code_values)
    aux_states = aux_states.to(w.fc.dtype)
    if w.fc_norm:
        points = aux_states.chunk(len(w.fc_norm), dim=-1)
        normed = [rms_norm(point, weight, sizes.eps) for point, weight in zip(points, w.fc_norm, strict=True)]
        aux_states = torch.cat(normed, dim=-1)
    return F.linear(aux_states, w.fc)


def before_attention_first(w: Weights, sizes: Sizes, aux_states, aux_scales, embed_ids, positions, rows):
    """Step 0, all T rows for keys and values and the C query rows for the rest.

    aux_states: [T, P * H_target]; aux_scales: None, or [T, P] where those are codes; embed_ids, positions: [T]; rows:
    [C]. Returns query [C, heads, d], keys and values
    [T, kv_heads, d], state of the query rows [C, H].
    """
    state = fused_points(w, sizes, aux_states, aux_scales)  # [T, H]
    x = layer_input(w, sizes, embed_ids, state)  # [T, 2H]
    cos, sin = cos_sin(positions, w.rope_frequencies, sizes.rope_magnitude)
    width = sizes.heads * sizes.head_dim
    query = F.linear(TakeRows.apply(x, rows), w.qkv[:width]).unflatten(1, (-1, sizes.head_dim))
    keys, values = F.linear(x, w.qkv[width:]).unflatten(1, (-1, sizes.head_dim)).chunk(2, dim=1)
    keys, values = rotate(keys, cos, sin), values.contiguous()
    return rotate(query, cos[rows], sin[rows]), keys, values, TakeRows.apply(state, rows)


def before_attention_later(w: Weights, sizes: Sizes, state, token_ids, positions):
    """Step k > 0, for states [C, H] of step k-1, tokens [C] and rotary positions t+k [C].

    Returns query [C, heads, d], own key and value [C, kv_heads, d].
    """
    heads = F.linear(layer_input(w, sizes, token_ids, state), w.qkv).unflatten(1, (-1, sizes.head_dim))
    query, key, value = heads.split((sizes.heads, sizes.kv_heads, sizes.kv_heads), dim=1)
    cos, sin = cos_sin(positions, w.rope_frequencies, sizes.rope_magnitude)
    return rotate(query, cos, sin), rotate(key, cos, sin), value.contiguous()


def after_attention(w: Weights, sizes: Sizes, attended, residual):
    """attended: [C, heads, d]; residual: [C, H]. Returns state and normed state, each [C, H]."""
    state = residual + F.linear(attended.flatten(1), w.o)
    gate, up = F.linear(rms_norm(state, w.post_norm, sizes.eps), w.gate_up).chunk(2, dim=-1)
    state = state + F.linear(F.silu(gate) * up, w.down)
    return state, rms_norm(state, w.norm, sizes.eps)
