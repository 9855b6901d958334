"""The Triton kernels behind common/ttt_attention.py: gathered queries, shared step-0 keys, own keys of later steps.

One forward kernel and two backward kernels. A block of queries is BLOCK_Q // GROUP positions with all the query heads
that share a kv head: each key is loaded once for them, and the own keys of a block are so few that they are one more
tile of keys in which a row sees those of its own position. Blocks of queries read their first and last visible key from
`rows` and `starts`, blocks of keys their first and last query from `_query_ranges`; they walk that range only, with
masks at its two ends alone. Own keys join the same online softmax, so nothing is merged afterwards, and every gradient
is summed inside one program: no atomics, the same bits on every run. Only common/ttt_attention.py calls this file. With
TRITON_INTERPRET=1 it runs on the CPU.
"""

import torch
import triton
import triton.language as tl

from common.ttt_attention import fused_width

LOG2E = 1.4426950408889634


def settings(head_dim: int) -> dict:
    """Block sizes, warps and stages of each kernel by head size: those that fit into registers and shared memory of a
    Hopper, at 65 to 128 the fastest of those timed on an H200 (benchmarks/LOG.md, benchmarks/kernels.py)."""
    if head_dim > 128:
        return {
            "forward": dict(BLOCK_Q=64, BLOCK_K=64, num_warps=8, num_stages=2),
            "queries": dict(BLOCK_Q=64, BLOCK_K=32, num_warps=8, num_stages=2),
            "keys": dict(BLOCK_Q=32, BLOCK_K=64, num_warps=8, num_stages=2),
        }
    if head_dim > 64:
        return {
            "forward": dict(BLOCK_Q=64, BLOCK_K=64, num_warps=4, num_stages=3),
            "queries": dict(BLOCK_Q=64, BLOCK_K=64, num_warps=4, num_stages=2),
            "keys": dict(BLOCK_Q=64, BLOCK_K=128, num_warps=8, num_stages=3),
        }
    return {
        "forward": dict(BLOCK_Q=64, BLOCK_K=64, num_warps=4, num_stages=3),
        "queries": dict(BLOCK_Q=64, BLOCK_K=64, num_warps=4, num_stages=3),
        "keys": dict(BLOCK_Q=64, BLOCK_K=64, num_warps=4, num_stages=3),
    }


@triton.constexpr_function
def _power_of_2(n):
    """The smallest one that is at least n. Triton's own is replaced in processes that have imported SGLang."""
    return 1 << (n - 1).bit_length()


@triton.jit
def _seen(n, row, start):
    """start <= n <= row in one unsigned comparison; never for the filler row -1, start 2^31 - 1."""
    return (n - start).to(tl.uint32, bitcast=True) <= (row - start).to(tl.uint32, bitcast=True)


@triton.jit
def _rows_of(GROUP: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Of each row of a block: its position within the block, its head within the group, whether it is in use.

    Rows left over where GROUP does not divide BLOCK_Q repeat rows of the last position.
    """
    r = tl.arange(0, BLOCK_Q)
    return tl.minimum(r // GROUP, BLOCK_Q // GROUP - 1), r % GROUP, r < BLOCK_Q // GROUP * GROUP


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
def _own_tile(
    s0, first, kv, num_queries, num_own,
    KV: tl.constexpr, POSITIONS: tl.constexpr, PLACES: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_K own keys of a block from slot s0 on, where every step has PLACES slots: POSITIONS and some empty ones.

    Of each: its position within the block, its elements' offsets, whether it exists.
    """
    slot = s0 + tl.arange(0, BLOCK_K)
    local, j = slot % PLACES, slot // PLACES
    offset = (j.to(tl.int64) * num_queries + first + local) * KV + kv
    real = (local < POSITIONS) & (first + local < num_queries) & (j < num_own)
    return local, offset[:, None] * D + tl.arange(0, D)[None, :], real


@triton.jit
def _attend(acc, m, total, q, k, v, seen, scale_log2):
    """One tile of keys joins the online softmax; `seen` is None where all of it is seen. m is in units of log2."""
    s = tl.dot(q, tl.trans(k))  # [Q, K]
    if seen is not None:
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
    m_safe = m_new if seen is None else tl.where(m_new == float("-inf"), 0.0, m_new)
    shrink = tl.exp2(m - m_safe)
    p = tl.exp2(s * scale_log2 - m_safe[:, None])
    total = total * shrink + tl.sum(p, 1)
    return tl.dot(p.to(v.dtype), v, acc * shrink[:, None]), m_new, total


@triton.jit
def _forward_range(
    acc, m, total, q, k_base, v_base, row, start, first, last, num_keys, scale_log2,
    STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    tile = tl.arange(0, BLOCK_K)[:, None] * STRIDE + tl.arange(0, D)[None, :]
    for n0 in range(first, last, BLOCK_K):
        step = n0 * STRIDE  # one scalar a block moves the whole tile of addresses
        if MASKED:
            n = n0 + tl.arange(0, BLOCK_K)
            k = tl.load(k_base + step + tile, mask=(n < num_keys)[:, None], other=0.0)
            v = tl.load(v_base + step + tile, mask=(n < num_keys)[:, None], other=0.0)
            seen = _seen(n[None, :], row[:, None], start[:, None])
            acc, m, total = _attend(acc, m, total, q, k, v, seen, scale_log2)
        else:
            k = tl.load(k_base + step + tile)
            v = tl.load(v_base + step + tile)
            acc, m, total = _attend(acc, m, total, q, k, v, None, scale_log2)
    return acc, m, total


@triton.jit(do_not_specialize=["num_own"])  # one compilation for all steps
def forward_kernel(
    q_ptr, k_ptr, v_ptr, own_k_ptr, own_v_ptr, rows_ptr, starts_ptr, out_ptr, lse_ptr,
    num_queries, num_keys, num_own, scale_log2,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One block of queries of one kv head. lse [C, HEADS] is in units of log2."""
    KV: tl.constexpr = HEADS // GROUP
    POSITIONS: tl.constexpr = BLOCK_Q // GROUP
    PLACES: tl.constexpr = _power_of_2(POSITIONS)
    first, kv = (tl.num_programs(0) - 1 - tl.program_id(0)) * POSITIONS, tl.program_id(1)  # long rows first
    local, member, used = _rows_of(GROUP, BLOCK_Q)
    inside = (first + local < num_queries) & used
    row, start, low, a, b, high = _visible(rows_ptr, starts_ptr, first + local, inside, BLOCK_K)
    d = tl.arange(0, D)
    offset = (first + local) * HEADS + kv * GROUP + member
    q_offsets = offset[:, None] * D + d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=inside[:, None], other=0.0)
    k_base, v_base = k_ptr + kv * D, v_ptr + kv * D
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
    for s0 in tl.range(0, num_own * PLACES, BLOCK_K, num_stages=1):
        own, own_offsets, real = _own_tile(s0, first, kv, num_queries, num_own, KV, POSITIONS, PLACES, D, BLOCK_K)
        k = tl.load(own_k_ptr + own_offsets, mask=real[:, None], other=0.0)
        v = tl.load(own_v_ptr + own_offsets, mask=real[:, None], other=0.0)
        seen = (own[None, :] == local[:, None]) & real[None, :]
        acc, m, total = _attend(acc, m, total, q, k, v, seen, scale_log2)
    total = tl.where(inside, total, 1.0)
    tl.store(out_ptr + q_offsets, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(lse_ptr + offset, m + tl.log2(total), mask=inside)


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
    q_ptr, k_ptr, v_ptr, own_k_ptr, own_v_ptr, rows_ptr, starts_ptr, out_ptr, do_ptr, lse_ptr, stats_ptr, dq_ptr,
    d_own_k_ptr, d_own_v_ptr, num_queries, num_keys, num_own, scale, scale_log2,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of queries of one kv head and of their own keys and values.

    Also stores lse and delta = sum(dO * O) side by side for `keys_kernel` after it: stats [KV, C, GROUP, 2].
    """
    KV: tl.constexpr = HEADS // GROUP
    POSITIONS: tl.constexpr = BLOCK_Q // GROUP
    PLACES: tl.constexpr = _power_of_2(POSITIONS)
    first, kv = (tl.num_programs(0) - 1 - tl.program_id(0)) * POSITIONS, tl.program_id(1)
    local, member, used = _rows_of(GROUP, BLOCK_Q)
    inside = (first + local < num_queries) & used
    row, start, low, a, b, high = _visible(rows_ptr, starts_ptr, first + local, inside, BLOCK_K)
    d = tl.arange(0, D)
    offset = (first + local) * HEADS + kv * GROUP + member
    q_offsets = offset[:, None] * D + d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=inside[:, None], other=0.0)
    do = tl.load(do_ptr + q_offsets, mask=inside[:, None], other=0.0)
    out = tl.load(out_ptr + q_offsets, mask=inside[:, None], other=0.0)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    lse = tl.load(lse_ptr + offset, mask=inside, other=0.0)
    stats_ptr += ((kv * num_queries + first + local) * GROUP + member) * 2
    tl.store(stats_ptr, lse, mask=inside)
    tl.store(stats_ptr + 1, delta, mask=inside)
    k_base, v_base = k_ptr + kv * D, v_ptr + kv * D
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
    for s0 in tl.range(0, num_own * PLACES, BLOCK_K, num_stages=1):
        own, own_offsets, real = _own_tile(s0, first, kv, num_queries, num_own, KV, POSITIONS, PLACES, D, BLOCK_K)
        k = tl.load(own_k_ptr + own_offsets, mask=real[:, None], other=0.0)
        v = tl.load(own_v_ptr + own_offsets, mask=real[:, None], other=0.0)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
        p = tl.where((own[None, :] == local[:, None]) & inside[:, None] & real[None, :], p, 0.0)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do)
        tl.store(d_own_v_ptr + own_offsets, dv.to(d_own_v_ptr.dtype.element_ty), mask=real[:, None])
        ds = (p * (tl.dot(do, tl.trans(v)) - delta[:, None])).to(q.dtype)
        dq = tl.dot(ds, k, dq)
        dk = tl.dot(tl.trans(ds), q) * scale
        tl.store(d_own_k_ptr + own_offsets, dk.to(d_own_k_ptr.dtype.element_ty), mask=real[:, None])
    tl.store(dq_ptr + q_offsets, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _keys_range(
    dk, dv, k, v, n, q_base, do_base, stats_base, rows_ptr, starts_ptr, first, last, end, scale_log2,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Queries [first, last) in whole blocks; those from `end` on are left out, which plain blocks do not reach."""
    local, member, used = _rows_of(GROUP, BLOCK_Q)
    two = tl.arange(0, 2)[None, :]
    tile = (local * HEADS + member)[:, None] * D + tl.arange(0, D)[None, :]
    pairs = (local * GROUP + member)[:, None] * 2 + two
    for i0 in range(first, last, BLOCK_Q // GROUP):
        step = i0 * (HEADS * D)
        if MASKED:
            i = i0 + local
            inside = (i < end) & used
            spans = tl.load(tl.where(two == 0, rows_ptr, starts_ptr) + i[:, None], mask=inside[:, None], other=0)
            q = tl.load(q_base + step + tile, mask=inside[:, None], other=0.0)
            do = tl.load(do_base + step + tile, mask=inside[:, None], other=0.0)
            stats = tl.load(stats_base + i0 * (GROUP * 2) + pairs, mask=inside[:, None], other=0.0)
        else:
            q = tl.load(q_base + step + tile)
            do = tl.load(do_base + step + tile)
            stats = tl.load(stats_base + i0 * (GROUP * 2) + pairs)
        lse, delta = tl.split(stats)
        if MASKED:
            lse = tl.where(inside, lse, float("inf"))
        elif BLOCK_Q % GROUP:
            lse = tl.where(used, lse, float("inf"))
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :])  # [K, Q]
        if MASKED:
            row, start = tl.split(spans.to(tl.int32))
            p = tl.where(_seen(n[:, None], row[None, :], start[None, :]), p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=["num_blocks"])
def keys_kernel(
    q_ptr, k_ptr, v_ptr, rows_ptr, starts_ptr, range_ptr, do_ptr, stats_ptr, dk_ptr, dv_ptr,
    num_queries, num_keys, num_blocks, scale, scale_log2,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of step-0 keys and values, summed over the query heads of its kv head.

    range_ptr: int64 [5, num_blocks] as made by `_query_ranges`.
    """
    KV: tl.constexpr = HEADS // GROUP
    POSITIONS: tl.constexpr = BLOCK_Q // GROUP
    kv, place = tl.program_id(0), range_ptr + tl.program_id(1)
    n = tl.load(place).to(tl.int32) * BLOCK_K + tl.arange(0, BLOCK_K)
    first, last = tl.load(place + num_blocks).to(tl.int32), tl.load(place + 2 * num_blocks).to(tl.int32)
    a, b = tl.load(place + 3 * num_blocks).to(tl.int32), tl.load(place + 4 * num_blocks).to(tl.int32)
    a = first + tl.cdiv(tl.maximum(a - first, 0), POSITIONS) * POSITIONS
    b = a + tl.maximum(b - a, 0) // POSITIONS * POSITIONS
    d = tl.arange(0, D)
    k_offsets = (n.to(tl.int64) * KV + kv)[:, None] * D + d[None, :]
    k = tl.load(k_ptr + k_offsets, mask=(n < num_keys)[:, None], other=0.0)
    v = tl.load(v_ptr + k_offsets, mask=(n < num_keys)[:, None], other=0.0)
    dk = tl.zeros([BLOCK_K, D], tl.float32)
    dv = tl.zeros([BLOCK_K, D], tl.float32)
    head = kv * GROUP
    q_base, do_base, stats_base = q_ptr + head * D, do_ptr + head * D, stats_ptr + head * num_queries * 2
    dk, dv = _keys_range(
        dk, dv, k, v, n, q_base, do_base, stats_base, rows_ptr, starts_ptr, first, a, last, scale_log2,
        HEADS, GROUP, D, BLOCK_Q, True,
    )  # fmt: skip
    dk, dv = _keys_range(
        dk, dv, k, v, n, q_base, do_base, stats_base, rows_ptr, starts_ptr, a, b, last, scale_log2,
        HEADS, GROUP, D, BLOCK_Q, False,
    )  # fmt: skip
    dk, dv = _keys_range(
        dk, dv, k, v, n, q_base, do_base, stats_base, rows_ptr, starts_ptr, b, last, last, scale_log2,
        HEADS, GROUP, D, BLOCK_Q, True,
    )  # fmt: skip
    tl.store(dk_ptr + k_offsets, (dk * scale).to(dk_ptr.dtype.element_ty), mask=(n < num_keys)[:, None])
    tl.store(dv_ptr + k_offsets, dv.to(dv_ptr.dtype.element_ty), mask=(n < num_keys)[:, None])


def _query_ranges(rows: torch.Tensor, starts: torch.Tensor, num_keys: int, block: int) -> torch.Tensor:
    """int64 [5, blocks]: blocks of `block` keys, most work first; the queries [first, last) that see any key of each;
    those [a, b) that see all of them.

    They are consecutive because `rows` and `starts` ascend: a query sees a key n when start <= n <= row.
    """
    low = torch.arange(0, num_keys, block, device=rows.device)
    ends = torch.stack((low, low + (block - 1)))
    first, a = torch.searchsorted(rows, ends)
    b, last = torch.searchsorted(starts, ends, right=True)
    order = (first - last).argsort()
    return torch.stack((order, *torch.stack((first, last, a, b))[:, order]))


def _query_grid(query: torch.Tensor, keys: torch.Tensor, use: dict) -> tuple[int, int]:
    """Programs for all positions: blocks of whole positions, times kv heads."""
    group = query.shape[1] // keys.shape[1]
    if use["BLOCK_Q"] < group:
        raise ValueError(f"{group} query heads for a kv head: the attention kernels take {use['BLOCK_Q']}")
    return triton.cdiv(query.shape[0], use["BLOCK_Q"] // group), keys.shape[1]


def _sizes(query: torch.Tensor, keys: torch.Tensor) -> dict:
    return dict(HEADS=query.shape[1], GROUP=query.shape[1] // keys.shape[1], D=query.shape[2])


def run_forward(use: dict, query, keys, values, own_keys, own_values, rows, starts, scale: float):
    """(out, lse) of contiguous tensors; `use`: an entry of `settings`, likewise below."""
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
    forward_kernel[_query_grid(query, keys, use)](
        query, keys, values, own_keys, own_values, rows, starts, out, lse,
        query.shape[0], keys.shape[0], own_keys.shape[0], scale * LOG2E, **_sizes(query, keys), **use,
    )  # fmt: skip
    return out, lse


def run_queries(use: dict, query, keys, values, own_keys, own_values, rows, starts, scale: float, out, grad_out, lse):
    """(dq, d_own_keys, d_own_values, stats for `run_keys`)."""
    dq, d_own_k, d_own_v = (torch.empty_like(x) for x in (query, own_keys, own_values))
    stats = lse.new_empty((*lse.shape, 2))
    queries_kernel[_query_grid(query, keys, use)](
        query, keys, values, own_keys, own_values, rows, starts, out, grad_out, lse, stats, dq, d_own_k, d_own_v,
        query.shape[0], keys.shape[0], own_keys.shape[0], scale, scale * LOG2E, **_sizes(query, keys), **use,
    )  # fmt: skip
    return dq, d_own_k, d_own_v, stats


def run_keys(use: dict, query, keys, values, rows, starts, scale: float, grad_out, stats):
    """(dk, dv)."""
    dk, dv = torch.empty_like(keys), torch.empty_like(values)
    ranges = _query_ranges(rows, starts, keys.shape[0], use["BLOCK_K"])
    keys_kernel[(keys.shape[1], ranges.shape[1])](
        query, keys, values, rows, starts, ranges, grad_out, stats, dk, dv,
        query.shape[0], keys.shape[0], ranges.shape[1], scale, scale * LOG2E, **_sizes(query, keys), **use,
    )  # fmt: skip
    return dk, dv


@torch.library.custom_op("eagle3::ttt_attention", mutates_args=())
def _attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, own_keys: torch.Tensor, own_values: torch.Tensor,
    rows: torch.Tensor, starts: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out [C, heads, d], lse float32 [C, heads] in units of log2)."""
    query, keys, values, own_keys, own_values = (x.contiguous() for x in (query, keys, values, own_keys, own_values))
    count, heads, d = query.shape
    if max(count * heads, keys.shape[0] * keys.shape[1]) * d >= 2**31:
        raise ValueError(f"{count} query rows of {heads} heads of {d} are too many: offsets have 32 bits")
    return run_forward(settings(d)["forward"], query, keys, values, own_keys, own_values, rows, starts, scale)


@_attention.register_fake
def _(query, keys, values, own_keys, own_values, rows, starts, scale):
    return torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op("eagle3::ttt_attention_backward", mutates_args=())
def _attention_backward(
    grad_out: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, own_keys: torch.Tensor,
    own_values: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, scale: float, out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    grad_out, query, keys, values, own_keys, own_values = (
        x.contiguous() for x in (grad_out, query, keys, values, own_keys, own_values)
    )
    use, where = settings(query.shape[2]), (rows, starts, scale)
    dq, d_own_k, d_own_v, stats = run_queries(
        use["queries"], query, keys, values, own_keys, own_values, *where, out, grad_out, lse
    )
    dk, dv = run_keys(use["keys"], query, keys, values, *where, grad_out, stats)
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
