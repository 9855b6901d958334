"""The Triton kernel behind common/losses.py: entropy, hit and gradient of one predicted token at all steps at once.

The teacher's row is read once for its sums; logits of teacher and student are then read twice (sums first, gradient
then) and the gradient is written over the student's logits. Running sums are kept for every eighth of a block's
columns, so threads do not talk to each other before the end of a row. Only common/losses.py calls this file. With
TRITON_INTERPRET=1 it runs on the CPU.
"""

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 1024, 4
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(-1e30)  # what absent columns hold: finite, and its exponential is 0


@triton.jit
def cross_entropy_kernel(
    student_ptr, teacher_ptr, coefficients_ptr, ids_ptr, entropy_ptr, hits_ptr, num_logits,
    STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One predicted token: STEPS rows of student logits (ROWS: the next power of two) against one of the teacher."""
    EIGHTHS: tl.constexpr = BLOCK // 8
    r = tl.program_id(0).to(tl.int64)
    teacher = teacher_ptr + r * num_logits
    m_t = tl.full([EIGHTHS], NOTHING, tl.float32)
    total_t = tl.zeros([EIGHTHS], tl.float32)
    for v0 in range(0, num_logits, BLOCK):
        v = v0 + tl.arange(0, BLOCK)
        t = tl.load(teacher + v, mask=v < num_logits, other=NOTHING).to(tl.float32)
        t = tl.reshape(t, [EIGHTHS, 8])
        new = tl.maximum(m_t, tl.max(t, 1))
        total_t = total_t * tl.exp2((m_t - new) * LOG2E) + tl.sum(tl.exp2((t - new[:, None]) * LOG2E), 1)
        m_t = new
    top_t = tl.max(m_t, 0)
    lse_t = top_t * LOG2E + tl.log2(tl.sum(total_t * tl.exp2((m_t - top_t) * LOG2E), 0))  # in units of log2

    k = tl.arange(0, ROWS)
    real = k < STEPS
    student = student_ptr + ((r * STEPS + k) * num_logits)[:, None]  # [K, 1]
    wanted = tl.load(ids_ptr + r)
    inside = (wanted >= 0) & (wanted < num_logits)
    # read here: the reductions below wait for every thread, so none has yet written a gradient over it
    own = tl.load(student_ptr + (r * STEPS + k) * num_logits + wanted, mask=real & inside, other=NOTHING)
    m = tl.full([ROWS, EIGHTHS], NOTHING, tl.float32)
    before = tl.full([ROWS, EIGHTHS], NOTHING, tl.float32)  # the largest logit left of the wanted one
    total = tl.zeros([ROWS, EIGHTHS], tl.float32)
    cross = tl.zeros([ROWS, EIGHTHS], tl.float32)  # sum of teacher's probability * s
    for v0 in range(0, num_logits, BLOCK):
        v = v0 + tl.arange(0, BLOCK)
        there = v < num_logits
        t = tl.load(teacher + v, mask=there, other=NOTHING).to(tl.float32)
        p = tl.where(there, tl.exp2(t * LOG2E - lse_t), 0.0)
        s = tl.load(student + v[None, :], mask=real[:, None] & there[None, :], other=NOTHING).to(tl.float32)
        left = tl.where((v < wanted)[None, :], s, NOTHING)
        cross += tl.sum(tl.reshape(p[None, :] * s, [ROWS, EIGHTHS, 8]), 2)
        before = tl.maximum(before, tl.max(tl.reshape(left, [ROWS, EIGHTHS, 8]), 2))
        s = tl.reshape(s, [ROWS, EIGHTHS, 8])
        new = tl.maximum(m, tl.max(s, 2))
        total = total * tl.exp2((m - new) * LOG2E) + tl.sum(tl.exp2((s - new[:, :, None]) * LOG2E), 2)
        m = new
    top = tl.max(m, 1)
    lse = top * LOG2E + tl.log2(tl.sum(total * tl.exp2((m - top[:, None]) * LOG2E), 1))  # [K], in units of log2
    tl.store(entropy_ptr + r * STEPS + k, lse * LN2 - tl.sum(cross, 1), mask=real)
    hit = inside & (own.to(tl.float32) == top) & (tl.max(before, 1) < top)  # the first of the largest, as argmax
    tl.store(hits_ptr + r * STEPS + k, hit.to(tl.int8), mask=real)

    c = tl.load(coefficients_ptr + r * STEPS + k, mask=real, other=0.0)
    for v0 in range(0, num_logits, BLOCK):
        v = v0 + tl.arange(0, BLOCK)
        there = v < num_logits
        both = real[:, None] & there[None, :]
        t = tl.load(teacher + v, mask=there, other=NOTHING).to(tl.float32)
        s = tl.load(student + v[None, :], mask=both, other=NOTHING).to(tl.float32)
        gradient = (tl.exp2(s * LOG2E - lse[:, None]) - tl.exp2(t * LOG2E - lse_t)[None, :]) * c[:, None]
        tl.store(student + v[None, :], gradient.to(student_ptr.dtype.element_ty), mask=both)


def row_cross_entropy(student, teacher, coefficients, predicted_ids):
    """As common.losses.row_cross_entropy; the gradient overwrites `student` [n, K, N] and is returned as it."""
    n, steps, num_logits = student.shape
    entropy = torch.empty(n, steps, dtype=torch.float32, device=student.device)
    hits = torch.empty(n, steps, dtype=torch.int8, device=student.device)
    cross_entropy_kernel[(n,)](
        student, teacher.contiguous(), coefficients.float().contiguous(), predicted_ids.contiguous(), entropy, hits,
        num_logits, STEPS=steps, ROWS=triton.next_power_of_2(steps), BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return entropy, hits.bool(), student
