"""One training step around `ttt_loss`: operations, learning rate, clipping inside the optimizer, and CUDA graphs.

Small drafters are bound by kernel launches, so forward and backward can be captured once and replayed
(`GraphedStep`); clipping and the guard against non-finite gradients ride in the fused AdamW kernel and never wait for
the device (`clipped_step`). Called by train_drafter.py and benchmarks/training.py.
"""

import math

import torch
from torch import nn

from common.drafter import DrafterConfig, ttt_loss
from common.losses import Teacher
from common.packing import PackedBatch


def useful_flops(
    config: DrafterConfig,
    tokens: int,
    queries: int,
    predicted: int,
    pairs: int,
    num_steps: int,
    head_trained: bool = True,
) -> float:
    """Floating-point operations of one forward and backward pass that no exact method can leave out.

    tokens, queries, predicted, pairs: the real counts of a PackedBatch (num_tokens, num_queries, ...), no padding. A
    product counts 2 per multiply-add, three times (forward, both gradients) where both sides are trained, twice where
    the input (fc) or the weight (a frozen head) needs no gradient; the teacher forward only; no recomputation. Latent
    attention counts with keys and values expanded, without the zeros that fill up its heads.
    """
    h, h_target, n = config.hidden_size, config.target_hidden_size, config.draft_vocab_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    v, query, keys = q, 2 * h * q, 2 * h * 2 * kv  # width of the values; multiply-adds of a query, of a key and value
    if config.drafter_type == "mla":
        latent, v = config.kv_lora_rank, config.num_attention_heads * config.v_head_dim
        query = 2 * h * config.q_lora_rank + config.q_lora_rank * q
        keys = 2 * h * (latent + config.qk_rope_head_dim)
        keys += latent * (config.num_attention_heads * config.qk_nope_head_dim + v)
    fc = 2 * 2 * tokens * config.num_points * h_target * h
    first_keys = 3 * 2 * tokens * keys
    later_keys = 3 * 2 * queries * keys * (num_steps - 1)
    rest = 3 * 2 * queries * (query + v * h + 3 * h * config.intermediate_size) * num_steps
    attention = sum(3 * 2 * (q + v) * (pairs + queries * k) for k in range(num_steps))
    head = (3 if head_trained else 2) * 2 * predicted * h * n * num_steps
    teacher = 2 * predicted * h_target * n
    return float(fc + first_keys + later_keys + rest + attention + head + teacher)


def make_optimizer(parameters, learning_rate: float, weight_decay: float = 0.0, betas=(0.9, 0.95)) -> torch.optim.AdamW:
    """Fused AdamW over the trainable master weights, in their own (full) precision."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=True)


def learning_rate(arguments, step: int, total_steps: int) -> float:
    """Linear warm-up from zero, then a cosine from the peak to `min_lr_ratio` of it (Loshchilov and Hutter 2017).

    arguments: train_drafter.TrainArguments.
    """
    warmup = max(1, round(arguments.warmup_ratio * total_steps))
    if step < warmup:
        return arguments.learning_rate * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    share = arguments.min_lr_ratio + (1 - arguments.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
    return arguments.learning_rate * share


@torch.no_grad()
def clipped_step(optimizer: torch.optim.AdamW, max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip to the global norm and step, in one pass over the gradients; a non-finite norm changes nothing.

    The fused kernel divides gradients by `grad_scale` and does nothing where `found_inf` is 1 (the hooks that
    torch.amp.GradScaler uses), so neither needs a separate pass or the host. Gradients are on one device, whole or
    sharded by FSDP2. Returns (norm before clipping, 1.0 if the step was skipped), on the device.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients, foreach=True)
    norm = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).float()  # FSDP2's norm is sharded, too
    finite = norm.isfinite()
    optimizer.grad_scale = torch.where(finite, (norm / max_norm).clamp(min=1.0), torch.ones_like(norm))
    optimizer.found_inf = 1.0 - finite.float()
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    return norm, 1.0 - finite.float()


class GraphedStep:
    """Forward and backward of `ttt_loss` as one CUDA graph over fixed budgets.

    Call it with a batch of the budgets of the first one, on the device: its tensors are copied into the graph's own,
    the graph is replayed, and (loss, metrics) are the graph's own tensors, overwritten by the next call. Gradients are
    in `.grad`: overwritten by each call, or added to when `accumulate` (then clear them with
    `zero_grad(set_to_none=False)`).
    """

    def __init__(
        self, drafter: nn.Module, teacher: Teacher, batch: PackedBatch, num_steps: int, decay: float,
        counted: torch.Tensor | None = None, accumulate: bool = False,
    ):  # fmt: skip
        self.batch = batch
        self.counted = counted  # static too: overwrite its values in place
        self.parameters = [p for p in drafter.parameters() if p.requires_grad]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles, tunes and allocates outside the capture
            for _ in range(2):
                ttt_loss(drafter, batch, teacher, num_steps, decay, counted)[0].backward()
        torch.cuda.current_stream().wait_stream(stream)
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter) if accumulate else None
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # others may page-lock memory meanwhile
            self.loss, self.metrics = ttt_loss(drafter, batch, teacher, num_steps, decay, counted)
            self.loss.backward()
        self.gradients = [p.grad for p in self.parameters]

    def __call__(self, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if batch is not self.batch:
            batch.copy_into(self.batch)
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        self.graph.replay()
        return self.loss.detach(), self.metrics
