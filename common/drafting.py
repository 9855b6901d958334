"""Drafting for evaluation: the drafter on its own states and its own tokens, as the engine runs it.

Step 0 reads true captured states (the engine's draft-extend does), every later step the drafter's own previous state
and the token it drafted. `draft` gives the greedy chain of every query row of a batch; `DraftChain` is the same one
step at a time, with branches, for temperatures and draft trees. Called by common/acceptance.py, eval_acceptance.py and
the held-out evaluation of train_drafter.py. No gradients; bit-reproducible on the CPU.
"""

from collections.abc import Callable

import torch

from common.drafter import Drafter
from common.packing import PackedBatch
from common.ttt_attention import ttt_attention
from common.vocab import target_ids

LOGITS_PER_CHUNK = 1 << 26


class DraftChain:
    """C drafts under way, one for each query row of the batch (or each branch after `select`).

    `step` is the number of the step whose logits are on offer: 0 after construction. Attributes that other code may
    read: `normed` [C, H] (head input), `state` [C, H] (fed back), `rows` [C] (row of the batch where each draft began).
    """

    @torch.no_grad()
    def __init__(self, drafter: Drafter, batch: PackedBatch):
        self.drafter, self.weights, self.step = drafter, drafter.weights(), 0
        self.head = drafter.lm_head.weight.to(self.weights.fc.dtype)  # [N, H]
        self.rows, self.starts = batch.query_rows, batch.query_starts
        self.positions = batch.positions[self.rows]
        query, self.keys, self.values, residual = drafter.first_step(self.weights, batch)
        count = self.rows.shape[0]
        self.own_keys = self.keys.new_empty(0, count, *self.keys.shape[1:])  # [steps, C, kv, d]
        self.own_values = self.values.new_empty(0, count, *self.values.shape[1:])
        self._finish(query, residual)

    def _finish(self, query, residual):
        own, seen = (self.own_keys, self.own_values), (self.rows, self.starts)
        attended = ttt_attention(query, self.keys, self.values, *own, *seen, scale=self.drafter.score_scale)
        self.state, self.normed = self.drafter.finish_step(self.weights, attended, residual)

    @torch.no_grad()
    def logit_chunks(self):
        """Yield (slice of drafts, logits [n, N] over draft ids) for all C drafts at this step."""
        size = max(1, LOGITS_PER_CHUNK // self.head.shape[0])
        for first in range(0, self.normed.shape[0], size):
            chunk = slice(first, min(first + size, self.normed.shape[0]))
            yield chunk, self.normed[chunk] @ self.head.T

    @torch.no_grad()
    def top(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(target ids int64 [C, count], log-probabilities float32 [C, count]), most likely first."""
        ids, logprobs = [], []
        names = target_ids(self.drafter.d2t)
        for _, logits in self.logit_chunks():
            values, draft = torch.topk(logits.float().log_softmax(-1), count, dim=-1)
            ids.append(names[draft])
            logprobs.append(values)
        return torch.cat(ids), torch.cat(logprobs)

    @torch.no_grad()
    def advance(self, token_ids: torch.Tensor) -> None:
        """Take one step with these target ids [C] as the drafted tokens."""
        self.step += 1
        residual = self.state
        query, key, value = self.drafter.later_step(self.weights, residual, token_ids, self.positions + self.step)
        self.own_keys = torch.cat((self.own_keys, key[None]))
        self.own_values = torch.cat((self.own_values, value[None]))
        self._finish(query, residual)

    @torch.no_grad()
    def select(self, index: torch.Tensor) -> "DraftChain":
        """A chain of the drafts `index` [n] of this one; an index may repeat, which is how trees branch."""
        chain = object.__new__(DraftChain)
        chain.drafter, chain.weights, chain.step = self.drafter, self.weights, self.step
        chain.head, chain.keys, chain.values = self.head, self.keys, self.values
        chain.rows, chain.starts, chain.positions = self.rows[index], self.starts[index], self.positions[index]
        chain.own_keys, chain.own_values = self.own_keys[:, index], self.own_values[:, index]
        chain.state, chain.normed = self.state[index], self.normed[index]
        return chain


@torch.no_grad()
def draft(
    drafter: Drafter,
    batch: PackedBatch,
    num_steps: int,
    *,
    own_tokens: bool = True,
    on_logits: Callable[[int, slice, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Greedy drafts, target ids int64 [C, num_steps], for every query row of the batch (padding rows included).

    own_tokens: False feeds the text's tokens instead (the training condition); then num_steps <= batch.num_steps.
    on_logits(step, slice of rows, logits [n, N]): called for every chunk of every step, for probabilities.
    Draft token k of row c stands against the token batch.chain_ids[c, k + 1] and the teacher row
    batch.teacher_rows[c, k]; it exists where batch.counts[c, k]. Equal logits are won by the smaller draft id.
    """
    chain = DraftChain(drafter, batch)
    names = target_ids(drafter.d2t)
    drafted = torch.empty(batch.query_rows.shape[0], num_steps, dtype=torch.int64, device=batch.query_rows.device)
    for step in range(num_steps):
        if step:
            chain.advance(drafted[:, step - 1] if own_tokens else batch.chain_ids[:, step])
        for rows, logits in chain.logit_chunks():
            drafted[rows, step] = names[logits.argmax(-1)]
            if on_logits is not None:
                on_logits(step, rows, logits)
    return drafted
