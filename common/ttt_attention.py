"""Attention over the steps of training-time test, for the query rows only.

At step k the query of position t sees the step-0 keys of its own document up to t, and its own keys of steps 1..k
(CONVENTIONS 5: the drafter continues its own guess while every earlier position is still the target's). Only rows that
need a query have one, and no [T, T] mask or score matrix exists: query blocks walk over the keys they can see, and the
backward pass recomputes their scores from the saved log-sum-exp (Dao et al. 2022, FlashAttention, algorithm 4).

`ttt_attention` is called by common/drafter.py. On CUDA in bf16/fp16 it runs the kernels of
common/ttt_attention_triton.py; everywhere else, and as their reference, the blocks below in plain PyTorch.
"""

import torch

QUERIES_PER_BLOCK = 128


def ttt_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    fused: bool | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention output [C, heads, e], dtype of query; scores are multiplied by `scale`, d ** -0.5 where it is None.

    query: [C, heads, d] of the current step k. keys [T, kv_heads, d], values [T, kv_heads, e] of step 0, all rows.
    own_keys [k, C, kv_heads, d], own_values [k, C, kv_heads, e]: the query rows' own of steps 1..k (k may be 0). rows,
    starts: [C] int64, the key row of each query's position and of its document's first token; queries see rows
    starts..rows inclusive. Head h reads kv head h // (heads // kv_heads). fused: None chooses by device and dtype; the
    fused kernels need `rows` and `starts` ascending for their backward pass. Differentiable in the five first
    arguments.
    """
    if fused is None:
        fused = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    if fused:
        from common.ttt_attention_triton import fused_ttt_attention

        return fused_ttt_attention(query, keys, values, own_keys, own_values, rows, starts, scale)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _Blocks.apply(query, keys, values, own_keys, own_values, rows, starts, scale)


def fused_width(d: int, e: int) -> int:
    """The one width that the fused kernels give queries and keys of d and values of e: a power of two, 16 or more."""
    return max(16, 1 << (max(d, e) - 1).bit_length())


def _spans(rows: torch.Tensor, starts: torch.Tensor):
    """(slice of queries, slice of keys) of each block; key slices cover all that any query of the block sees."""
    for first in range(0, rows.shape[0], QUERIES_PER_BLOCK):
        block = slice(first, min(first + QUERIES_PER_BLOCK, rows.shape[0]))
        yield block, slice(int(starts[block].min()), int(rows[block].max()) + 1)


def _scores(q, k, own_k, rows, starts, span: slice, scale: float) -> torch.Tensor:
    """Scaled, masked scores [kv, G, B, n + k] of one block: step-0 keys first, own keys after them.

    q: [B, kv, G, d]; k: [n, kv, d]; own_k: [k, B, kv, d].
    """
    key_rows = torch.arange(span.start, span.stop, device=q.device)
    seen = (key_rows >= starts[:, None]) & (key_rows <= rows[:, None])  # [B, n]
    shared = torch.einsum("bkgd,nkd->kgbn", q, k).mul_(scale).masked_fill_(~seen, float("-inf"))
    own = torch.einsum("bkgd,jbkd->kgbj", q, own_k).mul_(scale)
    return torch.cat((shared, own), dim=-1)


class _Blocks(torch.autograd.Function):
    """Blockwise attention in float32 (float64 if the inputs are), linear memory forward and backward."""

    @staticmethod
    def forward(ctx, query, keys, values, own_keys, own_values, rows, starts, scale):
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        count, heads, d = query.shape
        kv = keys.shape[1]
        q = query.to(wide).view(count, kv, heads // kv, d)
        k, v, own_k, own_v = (x.to(wide) for x in (keys, values, own_keys, own_values))
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(kv, heads // kv, count)
        for block, span in _spans(rows, starts):
            s = _scores(q[block], k[span], own_k[:, block], rows[block], starts[block], span, scale)
            lse[..., block] = torch.logsumexp(s, dim=-1)
            p = s.sub_(lse[..., block, None]).exp_()
            n = span.stop - span.start
            out[block] = torch.einsum("kgbn,nkd->bkgd", p[..., :n], v[span])
            out[block] += torch.einsum("kgbj,jbkd->bkgd", p[..., n:], own_v[:, block])
        ctx.save_for_backward(q, k, v, own_k, own_v, rows, starts, out, lse)
        ctx.dtype, ctx.scale = query.dtype, scale
        return out.reshape(count, heads, v.shape[-1]).to(query.dtype)

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, own_k, own_v, rows, starts, out, lse = ctx.saved_tensors
        do = grad_out.to(q.dtype).view_as(out)
        scale = ctx.scale
        dq, dk, dv, d_own_k, d_own_v = (torch.zeros_like(x) for x in (q, k, v, own_k, own_v))
        delta = (do * out).sum(-1).permute(1, 2, 0)  # [kv, G, C]
        for block, span in _spans(rows, starts):
            s = _scores(q[block], k[span], own_k[:, block], rows[block], starts[block], span, scale)
            p = s.sub_(lse[..., block, None]).exp_()
            n = span.stop - span.start
            dp = torch.cat(
                (
                    torch.einsum("bkgd,nkd->kgbn", do[block], v[span]),
                    torch.einsum("bkgd,jbkd->kgbj", do[block], own_v[:, block]),
                ),
                dim=-1,
            )
            ds = p * (dp - delta[..., block, None]) * scale
            dq[block] = torch.einsum("kgbn,nkd->bkgd", ds[..., :n], k[span])
            dq[block] += torch.einsum("kgbj,jbkd->bkgd", ds[..., n:], own_k[:, block])
            dk[span] += torch.einsum("kgbn,bkgd->nkd", ds[..., :n], q[block])
            dv[span] += torch.einsum("kgbn,bkgd->nkd", p[..., :n], do[block])
            d_own_k[:, block] = torch.einsum("kgbj,bkgd->jbkd", ds[..., n:], q[block])
            d_own_v[:, block] = torch.einsum("kgbj,bkgd->jbkd", p[..., n:], do[block])
        grads = (dq.view(dq.shape[0], -1, dq.shape[-1]), dk, dv, d_own_k, d_own_v)
        return *(g.to(ctx.dtype) for g in grads), None, None, None
