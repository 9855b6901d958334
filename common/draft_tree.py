"""The draft tree of SGLang's EAGLE (topk > 1), on tensors: how it is grown, cut to size, and walked by the target.

offline_eval.py grows trees with a drafter; tests grow them from tables of probabilities. The rules are those of SGLang
0.5.14 (speculative/spec_utils.py `select_top_k_tokens`, eagle_utils.py `organize_draft_results`, EAGLE-2's dynamic
tree, Li et al. 2024): step 0 gives the topk most likely tokens; each later step expands the topk best nodes of the step
before into topk children each, a child's score being the product of probabilities along its path, and keeps the
topk best children as the next step's nodes. Of all topk + (steps - 1) * topk**2 candidates the `tree_tokens` - 1 best
are verified (the remaining one is the last token already known). The greedy target follows the path of its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.errors import UserError


@dataclass
class DraftTree:
    """M candidates of each of C positions, in the order SGLang lists them (step by step, parent by parent)."""

    tokens: torch.Tensor  # int64 [C, M]
    scores: torch.Tensor  # float [C, M], product of probabilities along the path
    parents: torch.Tensor  # int64 [C, M], candidate number of the parent, -1 for the root
    depth: torch.Tensor  # int64 [M], 0 for children of the root
    kept: torch.Tensor  # bool [C, M], verified by the target


def check_tree_arguments(num_steps: int, topk: int, tree_tokens: int) -> None:
    """Raises UserError for sizes that SGLang would refuse or silently change."""
    candidates = topk + (num_steps - 1) * topk**2
    if topk == 1 and tree_tokens != num_steps + 1:
        raise UserError(f"--topk 1 is a chain: --tree-tokens must be --num-steps + 1 = {num_steps + 1}: {tree_tokens}")
    if not 2 <= tree_tokens <= candidates + 1:
        raise UserError(
            f"--tree-tokens {tree_tokens} is out of range: {num_steps} steps of topk {topk} give {candidates} "
            f"candidates, so 2 to {candidates + 1} (one is the last known token)"
        )


def grow_tree(
    expand: Callable[[int, torch.Tensor | None, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]],
    num_steps: int,
    topk: int,
    tree_tokens: int,
) -> DraftTree:
    """Grow the trees of C positions.

    expand(step, tokens, parent_beam) returns (probabilities [C, B, topk], token ids [C, B, topk]) of the most likely
    next tokens after each of the B nodes of the step before: B = 1, tokens = parent_beam = None at step 0; after that
    B = topk, tokens int64 [C, topk] are the nodes and parent_beam int64 [C, topk] says which beam (0..B_before-1) of
    the previous call each node grew from, so that the caller can carry states along.
    """
    check_tree_arguments(num_steps, topk, tree_tokens)
    probs, tokens = expand(0, None, None)  # [C, 1, topk]
    count = probs.shape[0]
    beam_scores, beam_tokens = probs[:, 0], tokens[:, 0]  # [C, topk]
    beam_nodes = torch.arange(topk, device=probs.device).expand(count, topk)  # candidate number of each beam
    parent_beam = torch.zeros_like(beam_nodes)
    all_scores, all_tokens = [beam_scores], [beam_tokens]
    all_parents = [torch.full_like(beam_nodes, -1)]
    depth = [0] * topk
    for step in range(1, num_steps):
        probs, tokens = expand(step, beam_tokens, parent_beam)  # [C, topk, topk]
        scores = (beam_scores.unsqueeze(2) * probs).flatten(1)  # [C, topk * topk]
        first = len(depth)
        all_scores.append(scores)
        all_tokens.append(tokens.flatten(1))
        all_parents.append(beam_nodes.repeat_interleave(topk, dim=1))
        depth += [step] * topk**2
        beam_scores, chosen = _best(scores, topk)  # [C, topk]
        beam_tokens = tokens.flatten(1).gather(1, chosen)
        parent_beam = chosen // topk
        beam_nodes = chosen + first
    scores = torch.cat(all_scores, dim=1)  # [C, M]
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, _best(scores, tree_tokens - 1)[1], True)
    depth_tensor = torch.tensor(depth, device=scores.device)
    return DraftTree(torch.cat(all_tokens, dim=1), scores, torch.cat(all_parents, dim=1), depth_tensor, kept)


def tokens_on_target_path(tree: DraftTree, target: torch.Tensor) -> torch.Tensor:
    """int64 [C, K] for target tokens [C, K]: the target's token at step k while the tree holds the path to it, else -1.

    In this form a tree is scored like a chain (`acceptance.AcceptanceCounts.add`): a step is accepted while the
    verified nodes contain the target's tokens so far.
    """
    count, num_steps = target.shape
    out = torch.full_like(target, -1)
    node = torch.full((count,), -1, device=target.device)
    alive = torch.ones(count, dtype=torch.bool, device=target.device)
    for k in range(num_steps):
        fits = tree.kept & (tree.parents == node[:, None]) & (tree.tokens == target[:, k, None])
        fits &= (tree.depth == k)[None]  # [C, M]
        alive = alive & fits.any(1)
        node = fits.int().argmax(1)
        out[:, k] = torch.where(alive, target[:, k], out[:, k])
    return out


def _best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, indices) of the `count` largest of scores [C, M]; the earlier of equals first, so parents win ties."""
    values, order = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :count], order[:, :count]
