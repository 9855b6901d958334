"""Soft-target cross-entropy of all TTT steps, fused with both heads and computed in chunks of predicted tokens.

For each chunk of predicted tokens the teacher's logits over the draft vocabulary are made once; each of the K steps
has at most one query row that predicts the token, and their logits, loss and gradient follow at once, so no
[tokens, vocabulary] tensor outlives a chunk and the backward pass only scales what the forward pass has stored.

Called by common/drafter.py. On CUDA in bf16 the row arithmetic runs in common/losses_triton.py; the plain PyTorch
below serves every other case and is its reference.
"""

import functools
from dataclasses import dataclass

import torch

LOGITS_PER_CHUNK = {"cuda": 1 << 29, "cpu": 1 << 23}  # of the student, all steps together: 1 GiB in bf16 on CUDA


@dataclass
class Teacher:
    """The target's head as the drafter's teacher: p = softmax(head @ norm(last state)) over the draft vocabulary.

    Probability outside the draft vocabulary is dropped and the rest renormalised, which is what the softmax over the
    kept rows is.
    """

    norm: torch.Tensor  # [H_target] weight of the target's final RMS norm
    head: torch.Tensor  # [N, H_target] rows of the target's head, in order of draft id
    eps: float

    @classmethod
    def from_target(cls, parts, target_token_ids: torch.Tensor) -> "Teacher":
        """parts: common.target.TargetParts; target_token_ids: [N], common.vocab.target_ids(d2t)."""
        return cls(parts.norm, parts.lm_head[target_token_ids], parts.eps)

    def to(self, device=None, dtype=None) -> "Teacher":
        return Teacher(self.norm.to(device, dtype), self.head.to(device, dtype), self.eps)

    def logits(self, last_states: torch.Tensor) -> torch.Tensor:
        """[r, N] in the head's dtype, for last states [r, H_target] (pre-norm)."""
        return rms_norm(last_states, self.norm, self.eps, self.head.dtype) @ self.head.T


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 (float64 if x is), cast to `dtype`
    (default: that of x). Zhang and Sennrich 2019."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    return wide.to(x.dtype if dtype is None else dtype)


def ttt_cross_entropy(
    hidden: list[torch.Tensor],
    head: torch.Tensor,
    teacher: Teacher,
    last_states: torch.Tensor,
    slots: torch.Tensor,
    coefficients: torch.Tensor,
    predicted_ids: torch.Tensor,
    fused: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """loss = sum over r, k of coefficients[r, k] * H(teacher_r, softmax(head @ hidden[k][slots[r, k]])).

    hidden: K tensors [C, H], normed, whose dtype is the compute dtype. head: [N, H], any float dtype: a float32 master
    gets its gradient in float32, summed over all chunks without rounding in between. last_states: [R, H_target].
    slots: [R, K] int64; at each step a query row appears at most once among the pairs of non-zero coefficient.
    coefficients: [R, K] float32; a pair with 0 adds nothing. predicted_ids: [R] int64 draft ids of the text's tokens,
    -1 outside. fused: None chooses the kernel on CUDA.
    Returns (loss scalar, differentiable in `hidden` and `head`; entropy [K], the unweighted sums of H over pairs with
    non-zero coefficients; hits [K], pairs whose most likely draft token is the text's), float32 (float64 for
    float64 inputs).
    """
    if fused is None:
        fused = head.is_cuda and head.dtype != torch.float64
    return _ChunkedCrossEntropy.apply(head, teacher, last_states, slots, coefficients, predicted_ids, fused, *hidden)


def row_cross_entropy(student, teacher, coefficients, predicted_ids):
    """Entropy [n, K], hits bool [n, K] and the gradient by student logits [n, K, N], in plain PyTorch.

    student: [n, K, N]; teacher: [n, N]; coefficients: [n, K]; predicted_ids: [n].
    """
    wide = torch.float64 if student.dtype == torch.float64 else torch.float32
    p = teacher.to(wide).softmax(-1)  # [n, N]
    logq = student.to(wide).log_softmax(-1)  # [n, K, N]
    entropy = -torch.einsum("nv,nkv->nk", p, logq)
    hits = student.argmax(-1) == predicted_ids[:, None]
    gradient = logq.exp_().sub_(p[:, None]).mul_(coefficients[..., None].to(wide))
    return entropy, hits, gradient.to(student.dtype)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head, teacher, last_states, slots, coefficients, predicted_ids, fused, *hidden):
        arithmetic = row_cross_entropy
        if fused:
            from common.losses_triton import row_cross_entropy as arithmetic
        num_predicted, num_steps = slots.shape
        rows, compute = hidden[0].shape[0], hidden[0].dtype
        wide = torch.float64 if compute == torch.float64 else torch.float32
        every = torch.cat(hidden)  # [K * C, H]
        place = slots + rows * torch.arange(num_steps, device=slots.device)  # [R, K] rows of it
        counted = coefficients != 0
        # one row more, at the end, swallows the gradients of pairs that do not count
        target_place = torch.where(counted, place, every.shape[0])
        d_every = every.new_zeros(every.shape[0] + 1, every.shape[1]) if any(ctx.needs_input_grad[7:]) else None
        d_head = torch.zeros_like(head, dtype=wide) if ctx.needs_input_grad[0] else None
        sums = torch.zeros(3, num_steps, dtype=wide, device=head.device)  # weighted entropy, entropy, hits
        weight = head.to(compute)
        room = LOGITS_PER_CHUNK.get(head.device.type, LOGITS_PER_CHUNK["cpu"])
        at_once = rows_at_once(num_predicted, room // (num_steps * head.shape[0]))
        for first in range(0, num_predicted, at_once):
            chunk = slice(first, min(first + at_once, num_predicted))
            x = every[place[chunk].flatten()]  # [n * K, H]
            logits = (x @ weight.T).view(-1, num_steps, head.shape[0])
            c = coefficients[chunk]
            entropy, hits, gradient = arithmetic(logits, teacher.logits(last_states[chunk]), c, predicted_ids[chunk])
            entropy = torch.where(counted[chunk], entropy, 0)
            sums += torch.stack((entropy * c, entropy, (hits & counted[chunk]).to(wide))).sum(1)
            gradient = gradient.view(x.shape[0], -1)
            if d_head is not None:
                _add_product(d_head, gradient, x)
            if d_every is not None:
                d_every[target_place[chunk].flatten()] = gradient @ weight
        ctx.save_for_backward(d_head, d_every)
        ctx.head_dtype, ctx.num_steps, ctx.rows = head.dtype, num_steps, rows
        entropy, hits = sums[1].clone(), sums[2].clone()
        ctx.mark_non_differentiable(entropy, hits)
        return sums[0].sum(), entropy, hits

    @staticmethod
    def backward(ctx, grad_loss, _entropy, _hits):
        d_head, d_every = ctx.saved_tensors
        if d_head is not None:
            d_head = (d_head * grad_loss).to(ctx.head_dtype)
        d_hidden = (None,) * ctx.num_steps
        if d_every is not None:
            d_hidden = (d_every[:-1] * grad_loss.to(d_every.dtype)).view(ctx.num_steps, ctx.rows, -1).unbind()
        return d_head, None, None, None, None, None, None, *d_hidden


def rows_at_once(rows: int, most: int) -> int:
    """Rows of a chunk, at most `most`: chunks of about equal size, whole tiles of the matrix units where they fit."""
    most = max(1, min(rows, most))
    even = -(-rows // -(-rows // most))
    whole = -(-even // 128) * 128
    return whole if whole <= most else even


def _add_product(total: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor) -> None:
    """total += gradient.T @ x, summed in the dtype of `total`: on CUDA bf16 factors go straight into float32."""
    if not total.is_cuda or total.dtype == gradient.dtype:
        total += (gradient.T @ x).to(total.dtype)
    elif cublas_adds_in_place(total.device):
        torch.addmm(total, gradient.T, x, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(gradient.T, x, out_dtype=total.dtype)


@functools.cache
def cublas_adds_in_place(device: torch.device) -> bool:
    """Whether this build of PyTorch adds bf16 products into a float32 tensor in place; tried once on the device."""
    total, factor = torch.ones(16, 16, device=device), torch.ones(16, 16, device=device, dtype=torch.bfloat16)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return bool((total == 17).all())
