"""The Triton kernels behind common/ttt_attention.py: gathered queries, shared step-0 keys, own keys of later steps.

One forward kernel and three backward kernels. Query blocks read their first and last visible key from `rows` and
`starts` and walk that range only, with masks at its two ends alone; the k own keys of each query join the same online
softmax, so nothing is merged afterwards. Query heads that share a kv head are summed inside the kernels: no atomics,
the same bits on every run. Only common/ttt_attention.py calls this file. With TRITON_INTERPRET=1 it runs on the CPU.
"""

import torch
import triton
import triton.language as tl

from common.ttt_attention import fused_width

LOG2E = 1.4426950408889634


def settings(head_dim: int) -> dict:
    """Block sizes, warps and stages of each kernel by head size (up to 128: chosen by benchmarks/kernels.py on an H200;
    256: those of several that the compiler fits into registers and shared memory of a Hopper, not timed yet)."""
    if head_dim > 128:
        return {
            "forward": dict(BLOCK_Q=64, BLOCK_K=64, num_warps=8, num_stages=2),
            "queries": dict(BLOCK_Q=64, BLOCK_K=32, num_warps=8, num_stages=2),
            "keys": dict(BLOCK_Q=32, BLOCK_K=64, num_warps=8, num_stages=2),
            "own": dict(BLOCK_Q=16, num_warps=4, num_stages=1),
        }
    if head_dim <= 64:
        return {
            "forward": dict(BLOCK_Q=64, BLOCK_K=64, num_warps=4, num_stages=3),
            "queries": dict(BLOCK_Q=64, BLOCK_K=32, num_warps=4, num_stages=3),
            "keys": dict(BLOCK_Q=64, BLOCK_K=64, num_warps=4, num_stages=2),
            "own": dict(BLOCK_Q=16, num_warps=4, num_stages=1),
        }
    return {
        "forward": dict(BLOCK_Q=64, BLOCK_K=64, num_warps=4, num_stages=3),
        "queries": dict(BLOCK_Q=64, BLOCK_K=32, num_warps=4, num_stages=3),
        "keys": dict(BLOCK_Q=64, BLOCK_K=64, num_warps=4, num_stages=2),
        "own": dict(BLOCK_Q=16, num_warps=4, num_stages=1),
    }


@triton.jit
def _seen(n, row, start):
    """start <= n <= row in one unsigned comparison; never for the filler row -1, start 2^31 - 1."""
    return (n - start).to(tl.uint32, bitcast=True) <= (row - start).to(tl.uint32, bitcast=True)


@triton.jit
def _visible(rows_ptr, starts_ptr, i, inside, BLOCK_K: tl.constexpr):
    """Row and start of each query, and key ranges of the block: masked [low, a), plain [a, b), masked [b, high)."""
    row = tl.load(rows_ptr + i, mask=inside, other=-1).to(tl.int32)
    start = tl.load(starts_ptr + i, mask=inside, other=2147483647).to(tl.int32)
    low = tl.min(start) // BLOCK_K * BLOCK_K
    high = tl.max(row) + 1
    last_start = tl.max(tl.where(inside, start, 0))
    first_row = tl.min(tl.where(inside, row, 2147483647))
    a = tl.minimum(tl.cdiv(last_start, BLOCK_K) * BLOCK_K, tl.cdiv(high, BLOCK_K) * BLOCK_K)
    b = tl.maximum((first_row + 1) // BLOCK_K * BLOCK_K, a)
    return row, start, low, a, b, high


@triton.jit
def _forward_range(
    acc, m, total, q, k_base, v_base, row, start, first, last, num_keys, scale_log2,
    STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    tile = tl.arange(0, BLOCK_K)[:, None] * STRIDE + tl.arange(0, D)[None, :]
    for n0 in range(first, last, BLOCK_K):
        n = n0 + tl.arange(0, BLOCK_K)
        step = n0 * STRIDE  # one scalar a block moves the whole tile of addresses
        if MASKED:
            k = tl.load(k_base + step + tile, mask=(n < num_keys)[:, None], other=0.0)
        else:
            k = tl.load(k_base + step + tile)
        s = tl.dot(q, tl.trans(k))  # [Q, K]
        if MASKED:
            s = tl.where(_seen(n[None, :], row[:, None], start[:, None]), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)  # in units of log2
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        shrink = tl.exp2(m - m_safe)
        p = tl.exp2(s * scale_log2 - m_safe[:, None])
        total = total * shrink + tl.sum(p, 1)
        if MASKED:
            v = tl.load(v_base + step + tile, mask=(n < num_keys)[:, None], other=0.0)
        else:
            v = tl.load(v_base + step + tile)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        m = m_new
    return acc, m, total


@triton.jit(do_not_specialize=["num_own"])  # one compilation for all steps
def forward_kernel(
    q_ptr, k_ptr, v_ptr, own_k_ptr, own_v_ptr, rows_ptr, starts_ptr, out_ptr, lse_ptr,
    num_queries, num_keys, num_own, scale_log2,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head. lse [HEADS, C] is in units of log2."""
    KV: tl.constexpr = HEADS // GROUP
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # long rows first
    i = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside = i < num_queries
    row, start, low, a, b, high = _visible(rows_ptr, starts_ptr, i, inside, BLOCK_K)
    d = tl.arange(0, D)
    q_offsets = (i.to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=inside[:, None], other=0.0)
    k_base, v_base = k_ptr + (head // GROUP) * D, v_ptr + (head // GROUP) * D
    acc = tl.zeros([BLOCK_Q, D], tl.float32)
    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc, m, total = _forward_range(
        acc, m, total, q, k_base, v_base, row, start, low, a, num_keys, scale_log2, KV * D, D, BLOCK_K, True
    )
    acc, m, total = _forward_range(
        acc, m, total, q, k_base, v_base, row, start, a, b, num_keys, scale_log2, KV * D, D, BLOCK_K, False
    )
    acc, m, total = _forward_range(
        acc, m, total, q, k_base, v_base, row, start, b, high, num_keys, scale_log2, KV * D, D, BLOCK_K, True
    )
    for j in range(num_own):
        own = ((j * num_queries + i).to(tl.int64) * KV + head // GROUP)[:, None] * D + d[None, :]
        k = tl.load(own_k_ptr + own, mask=inside[:, None], other=0.0)
        s = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale_log2
        m_new = tl.maximum(m, s)
        shrink, p = tl.exp2(m - m_new), tl.exp2(s - m_new)
        total = total * shrink + p
        v = tl.load(own_v_ptr + own, mask=inside[:, None], other=0.0)
        acc = acc * shrink[:, None] + p[:, None] * v.to(tl.float32)
        m = m_new
    total = tl.where(inside, total, 1.0)
    tl.store(out_ptr + q_offsets, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(lse_ptr + head * num_queries + i, m + tl.log2(total), mask=inside)


@triton.jit
def _queries_range(
    dq, q, do, lse, delta, k_base, v_base, row, start, first, last, num_keys, scale_log2,
    STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    tile = tl.arange(0, BLOCK_K)[:, None] * STRIDE + tl.arange(0, D)[None, :]
    for n0 in range(first, last, BLOCK_K):
        n = n0 + tl.arange(0, BLOCK_K)
        step = n0 * STRIDE
        if MASKED:
            k = tl.load(k_base + step + tile, mask=(n < num_keys)[:, None], other=0.0)
            v = tl.load(v_base + step + tile, mask=(n < num_keys)[:, None], other=0.0)
        else:
            k = tl.load(k_base + step + tile)
            v = tl.load(v_base + step + tile)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
        if MASKED:
            p = tl.where(_seen(n[None, :], row[:, None], start[:, None]), p, 0.0)
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit(do_not_specialize=["num_own"])  # one compilation for all steps
def queries_kernel(
    q_ptr, k_ptr, v_ptr, own_k_ptr, own_v_ptr, rows_ptr, starts_ptr, out_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    num_queries, num_keys, num_own, scale, scale_log2,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of queries of one head; also stores delta = sum(dO * O) for the two kernels after it."""
    KV: tl.constexpr = HEADS // GROUP
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    i = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside = i < num_queries
    row, start, low, a, b, high = _visible(rows_ptr, starts_ptr, i, inside, BLOCK_K)
    d = tl.arange(0, D)
    q_offsets = (i.to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=inside[:, None], other=0.0)
    do = tl.load(do_ptr + q_offsets, mask=inside[:, None], other=0.0)
    out = tl.load(out_ptr + q_offsets, mask=inside[:, None], other=0.0)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + head * num_queries + i, delta, mask=inside)
    lse = tl.load(lse_ptr + head * num_queries + i, mask=inside, other=0.0)
    k_base, v_base = k_ptr + (head // GROUP) * D, v_ptr + (head // GROUP) * D
    dq = tl.zeros([BLOCK_Q, D], tl.float32)
    dq = _queries_range(
        dq, q, do, lse, delta, k_base, v_base, row, start, low, a, num_keys, scale_log2, KV * D, D, BLOCK_K, True
    )
    dq = _queries_range(
        dq, q, do, lse, delta, k_base, v_base, row, start, a, b, num_keys, scale_log2, KV * D, D, BLOCK_K, False
    )
    dq = _queries_range(
        dq, q, do, lse, delta, k_base, v_base, row, start, b, high, num_keys, scale_log2, KV * D, D, BLOCK_K, True
    )
    for j in range(num_own):
        own = ((j * num_queries + i).to(tl.int64) * KV + head // GROUP)[:, None] * D + d[None, :]
        k = tl.load(own_k_ptr + own, mask=inside[:, None], other=0.0).to(tl.float32)
        v = tl.load(own_v_ptr + own, mask=inside[:, None], other=0.0).to(tl.float32)
        p = tl.exp2(tl.sum(q.to(tl.float32) * k, 1) * scale_log2 - lse)
        ds = p * (tl.sum(do.to(tl.float32) * v, 1) - delta)
        dq += ds[:, None] * k
    tl.store(dq_ptr + q_offsets, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def keys_kernel(
    q_ptr, k_ptr, v_ptr, rows_ptr, starts_ptr, range_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    num_queries, num_keys, num_blocks, scale, scale_log2,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of step-0 keys and values, summed over the query heads of its kv head.

    range_ptr: int64 [3, num_blocks] as made by `_query_ranges`.
    """
    KV: tl.constexpr = HEADS // GROUP
    kv, place = tl.program_id(0), tl.program_id(1)
    block = tl.load(range_ptr + place)
    first = tl.load(range_ptr + num_blocks + place).to(tl.int32) // BLOCK_Q * BLOCK_Q
    last = tl.load(range_ptr + 2 * num_blocks + place).to(tl.int32)
    n = block.to(tl.int32) * BLOCK_K + tl.arange(0, BLOCK_K)
    d = tl.arange(0, D)
    k_offsets = (n.to(tl.int64) * KV + kv)[:, None] * D + d[None, :]
    k = tl.load(k_ptr + k_offsets, mask=(n < num_keys)[:, None], other=0.0)
    v = tl.load(v_ptr + k_offsets, mask=(n < num_keys)[:, None], other=0.0)
    dk = tl.zeros([BLOCK_K, D], tl.float32)
    dv = tl.zeros([BLOCK_K, D], tl.float32)
    for g in range(GROUP):
        head = kv * GROUP + g
        q_base, do_base = q_ptr + head * D, do_ptr + head * D
        lse_base, delta_base = lse_ptr + head * num_queries, delta_ptr + head * num_queries
        for i0 in range(first, last, BLOCK_Q):
            i = i0 + tl.arange(0, BLOCK_Q)
            inside = i < num_queries
            row = tl.load(rows_ptr + i, mask=inside, other=-1).to(tl.int32)
            start = tl.load(starts_ptr + i, mask=inside, other=2147483647).to(tl.int32)
            offsets = i[:, None] * (HEADS * D) + d[None, :]
            q = tl.load(q_base + offsets, mask=inside[:, None], other=0.0)
            do = tl.load(do_base + offsets, mask=inside[:, None], other=0.0)
            lse = tl.load(lse_base + i, mask=inside, other=0.0)
            delta = tl.load(delta_base + i, mask=inside, other=0.0)
            p = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :])  # [K, Q]
            p = tl.where((n[:, None] >= start[None, :]) & (n[:, None] <= row[None, :]), p, 0.0)
            dv = tl.dot(p.to(do.dtype), do, dv)
            ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(dk_ptr + k_offsets, (dk * scale).to(dk_ptr.dtype.element_ty), mask=(n < num_keys)[:, None])
    tl.store(dv_ptr + k_offsets, dv.to(dv_ptr.dtype.element_ty), mask=(n < num_keys)[:, None])


def _query_ranges(rows: torch.Tensor, starts: torch.Tensor, num_keys: int, block: int) -> torch.Tensor:
    """int64 [3, blocks]: blocks of `block` keys, most work first, and the queries [first, last) that see any of each.

    They are consecutive because `rows` and `starts` ascend: a query sees a key n when start <= n <= row.
    """
    low = torch.arange(0, num_keys, block, device=rows.device)
    first = torch.searchsorted(rows, low)
    last = torch.searchsorted(starts, low + (block - 1), right=True)
    order = (first - last).argsort()
    return torch.stack((order, first[order], last[order]))


@triton.jit(do_not_specialize=["num_own"])  # one compilation for all steps
def own_kernel(
    q_ptr, own_k_ptr, own_v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, num_queries, num_own, scale, scale_log2,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Gradient of the own keys and values of one block of queries, summed over the query heads of one kv head."""
    KV: tl.constexpr = HEADS // GROUP
    kv = tl.program_id(1)
    i = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside = i < num_queries
    d = tl.arange(0, D)
    for j in range(num_own):
        own = ((j * num_queries + i).to(tl.int64) * KV + kv)[:, None] * D + d[None, :]
        k = tl.load(own_k_ptr + own, mask=inside[:, None], other=0.0).to(tl.float32)
        v = tl.load(own_v_ptr + own, mask=inside[:, None], other=0.0).to(tl.float32)
        dk = tl.zeros([BLOCK_Q, D], tl.float32)
        dv = tl.zeros([BLOCK_Q, D], tl.float32)
        for g in range(GROUP):
            head = kv * GROUP + g
            q_offsets = (i.to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
            q = tl.load(q_ptr + q_offsets, mask=inside[:, None], other=0.0).to(tl.float32)
            do = tl.load(do_ptr + q_offsets, mask=inside[:, None], other=0.0).to(tl.float32)
            lse = tl.load(lse_ptr + head * num_queries + i, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + head * num_queries + i, mask=inside, other=0.0)
            p = tl.exp2(tl.sum(q * k, 1) * scale_log2 - lse)
            ds = p * (tl.sum(do * v, 1) - delta)
            dk += ds[:, None] * q
            dv += p[:, None] * do
        tl.store(dk_ptr + own, (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside[:, None])
        tl.store(dv_ptr + own, dv.to(dv_ptr.dtype.element_ty), mask=inside[:, None])


@torch.library.custom_op("eagle3::ttt_attention", mutates_args=())
def _attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, own_keys: torch.Tensor, own_values: torch.Tensor,
    rows: torch.Tensor, starts: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out [C, heads, d], lse float32 [heads, C] in units of log2)."""
    query, keys, values, own_keys, own_values = (x.contiguous() for x in (query, keys, values, own_keys, own_values))
    count, heads, d = query.shape
    if max(count * heads, keys.shape[0] * keys.shape[1]) * d >= 2**31:
        raise ValueError(f"{count} query rows of {heads} heads of {d} are too many: offsets have 32 bits")
    out, lse = torch.empty_like(query), query.new_empty((heads, count), dtype=torch.float32)
    use = settings(d)["forward"]
    forward_kernel[(triton.cdiv(count, use["BLOCK_Q"]), heads)](
        query, keys, values, own_keys, own_values, rows, starts, out, lse,
        count, keys.shape[0], own_keys.shape[0], scale * LOG2E,
        HEADS=heads, GROUP=heads // keys.shape[1], D=d, **use,
    )  # fmt: skip
    return out, lse


@_attention.register_fake
def _(query, keys, values, own_keys, own_values, rows, starts, scale):
    return torch.empty_like(query), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


@torch.library.custom_op("eagle3::ttt_attention_backward", mutates_args=())
def _attention_backward(
    grad_out: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, own_keys: torch.Tensor,
    own_values: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, scale: float, out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    grad_out, query, keys, values, own_keys, own_values = (
        x.contiguous() for x in (grad_out, query, keys, values, own_keys, own_values)
    )
    count, heads, d = query.shape
    num_keys, kv = keys.shape[:2]
    dq, dk, dv, d_own_k, d_own_v = (torch.empty_like(x) for x in (query, keys, values, own_keys, own_values))
    delta = torch.empty_like(lse)
    sizes = dict(HEADS=heads, GROUP=heads // kv, D=d)
    use = settings(d)
    queries_kernel[(triton.cdiv(count, use["queries"]["BLOCK_Q"]), heads)](
        query, keys, values, own_keys, own_values, rows, starts, out, grad_out, lse, delta, dq,
        count, num_keys, own_keys.shape[0], scale, scale * LOG2E, **sizes, **use["queries"],
    )  # fmt: skip
    ranges = _query_ranges(rows, starts, num_keys, use["keys"]["BLOCK_K"])
    keys_kernel[(kv, ranges.shape[1])](
        query, keys, values, rows, starts, ranges, grad_out, lse, delta, dk, dv,
        count, num_keys, ranges.shape[1], scale, scale * LOG2E, **sizes, **use["keys"],
    )  # fmt: skip
    if own_keys.shape[0]:
        own_kernel[(triton.cdiv(count, use["own"]["BLOCK_Q"]), kv)](
            query, own_keys, own_values, grad_out, lse, delta, d_own_k, d_own_v,
            count, own_keys.shape[0], scale, scale * LOG2E, **sizes, **use["own"],
        )  # fmt: skip
    return dq, dk, dv, d_own_k, d_own_v


@_attention_backward.register_fake
def _(grad_out, query, keys, values, own_keys, own_values, rows, starts, scale, out, lse):
    return tuple(torch.empty_like(x) for x in (query, keys, values, own_keys, own_values))


def _save(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, _grad_lse):
    if grad_out is None:
        return (None,) * 8
    *inputs, out, lse = ctx.saved_tensors
    return *_attention_backward(grad_out, *inputs, ctx.scale, out, lse), None, None, None


_attention.register_autograd(_backward, setup_context=_save)


def fused_ttt_attention(query, keys, values, own_keys, own_values, rows, starts, scale=None) -> torch.Tensor:
    """The same function as common.ttt_attention.ttt_attention, for heads of at most 256.

    The kernels want queries, keys and values of one width, 16, 32, 64, 128 or 256: others are filled up with zeros,
    which changes no score but for the default scale, and that is undone in the query. It costs a copy of each tensor
    that is filled up, kept for the backward pass, and the products over the zeros: heads of 192 with values of 128
    (DeepSeek, Kimi) take 512 multiply-adds a pair in place of 320. A caller whose heads are filled up already pays the
    products alone.
    """
    d, value_width = query.shape[-1], values.shape[-1]
    if max(d, value_width) > 256:
        raise ValueError(f"heads of {d}, values of {value_width}: the attention kernels take 256; use fused=False")
    wide = fused_width(d, value_width)
    if scale is None:
        scale = wide**-0.5
        query = query if wide == d else query * (wide / d) ** 0.5

    def fill(x):
        return x if x.shape[-1] == wide else torch.nn.functional.pad(x, (0, wide - x.shape[-1]))

    query, keys, values, own_keys, own_values = (fill(x) for x in (query, keys, values, own_keys, own_values))
    return _attention(query, keys, values, own_keys, own_values, rows, starts, scale)[0][..., :value_width]
