"""The Triton kernel behind common/losses.py: entropy, hit and gradient of one predicted token at all steps at once.

Logits of teacher and student are read twice (sums first, gradient then) and the gradient is written over the student's
logits. Only common/losses.py calls this file. With TRITON_INTERPRET=1 it runs on the CPU.
"""

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 1024, 8


@triton.jit
def cross_entropy_kernel(
    student_ptr, teacher_ptr, coefficients_ptr, ids_ptr, entropy_ptr, hits_ptr, num_logits,
    STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One predicted token: STEPS rows of student logits (ROWS: the next power of two) against one of the teacher."""
    r = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, ROWS)
    real = k < STEPS
    rows = (r * STEPS + k) * num_logits  # [K]
    m_t, total_t = float("-inf"), 0.0
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    cross = tl.zeros([ROWS], tl.float32)  # sum of exp(t - m_t) * s
    best = tl.zeros([ROWS], tl.int32)
    for v0 in range(0, num_logits, BLOCK):
        v = v0 + tl.arange(0, BLOCK)
        there = v < num_logits
        t = tl.load(teacher_ptr + r * num_logits + v, mask=there, other=float("-inf")).to(tl.float32)
        both = real[:, None] & there[None, :]
        s = tl.load(student_ptr + rows[:, None] + v[None, :], mask=both, other=float("-inf")).to(tl.float32)
        s = tl.where(real[:, None], s, 0.0)  # idle rows of the tile stay finite
        m_t_new = tl.maximum(m_t, tl.max(t, 0))
        p = tl.exp(t - m_t_new)
        shrink_t = tl.exp(m_t - m_t_new)
        total_t = total_t * shrink_t + tl.sum(p, 0)
        cross = cross * shrink_t + tl.sum(tl.where(there[None, :], p[None, :] * s, 0.0), 1)
        top = tl.max(s, 1)
        best = tl.where(top > m, v0 + tl.argmax(s, 1).to(tl.int32), best)
        m_new = tl.maximum(m, top)
        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(s - m_new[:, None]), 1)
        m, m_t = m_new, m_t_new
    lse = m + tl.log(total)
    tl.store(entropy_ptr + r * STEPS + k, lse - cross / total_t, mask=real)
    tl.store(hits_ptr + r * STEPS + k, (best == tl.load(ids_ptr + r)).to(tl.int8), mask=real)
    c = tl.load(coefficients_ptr + r * STEPS + k, mask=real, other=0.0)
    for v0 in range(0, num_logits, BLOCK):
        v = v0 + tl.arange(0, BLOCK)
        there = v < num_logits
        both = real[:, None] & there[None, :]
        t = tl.load(teacher_ptr + r * num_logits + v, mask=there, other=float("-inf")).to(tl.float32)
        s = tl.load(student_ptr + rows[:, None] + v[None, :], mask=both, other=float("-inf")).to(tl.float32)
        gradient = (tl.exp(s - lse[:, None]) - (tl.exp(t - m_t) / total_t)[None, :]) * c[:, None]
        tl.store(student_ptr + rows[:, None] + v[None, :], gradient.to(student_ptr.dtype.element_ty), mask=both)


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
