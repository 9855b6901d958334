"""The draft vocabulary: the target tokens that the drafter's head can name, and the maps between both numberings.

Chosen once from the supervised tokens of the training data by train_drafter.py, saved with the drafter and never
rebuilt. `target_id = draft_id + d2t[draft_id]`; `t2d[target_id]` says whether a target token is in it.
"""

import torch

from common.errors import UserError

TILE = 64  # rows of a matrix that its products take at once


def build_draft_vocab(counts: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `size` most frequent target tokens, ties broken by the smaller id; 0 means the whole target vocabulary.

    counts: int64 [V], how often each was supervised (`batches.scan`). Returns d2t int64 [N] and t2d bool [V], draft ids
    in ascending order of target id. N is smaller than `size` when fewer distinct tokens were supervised: the caller
    says so. It is then a multiple of TILE, from 16 of them on: the head's products run at half speed on a GPU
    otherwise, and what is left out are its rarest tokens. Raises UserError when nothing was supervised.
    """
    vocab_size = counts.shape[0]
    if size < 0:
        raise UserError(f"draft vocabulary size {size}: expected 0 (full) or a positive number of tokens")
    if size == 0 or size >= vocab_size:
        return torch.zeros(vocab_size, dtype=torch.int64), torch.ones(vocab_size, dtype=torch.bool)
    distinct = int((counts > 0).sum())
    if distinct == 0:
        raise UserError("the draft vocabulary cannot be built: no supervised token in the training data")
    by_frequency = torch.argsort(counts, descending=True, stable=True)  # stable: ties stay in order of id
    if size > distinct >= 16 * TILE:
        distinct -= distinct % TILE
    chosen = by_frequency[: min(size, distinct)].sort().values  # [N] target ids, ascending
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    return chosen - torch.arange(chosen.shape[0]), t2d


def target_ids(d2t: torch.Tensor) -> torch.Tensor:
    """Target id of every draft id, int64 [N]: the rows of the target's head that the drafter can name."""
    return d2t + torch.arange(d2t.shape[0], device=d2t.device)


def draft_ids(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Draft id of every target id, int64 [vocab_size]; -1 outside the draft vocabulary."""
    back = torch.full((vocab_size,), -1, dtype=torch.int64, device=d2t.device)
    back[target_ids(d2t)] = torch.arange(d2t.shape[0], device=d2t.device)
    return back
