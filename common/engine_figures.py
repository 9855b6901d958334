"""Acceptance figures of replies that SGLang's engine gave, from their `meta_info`; no engine is needed here.

    tau = 1 + sum(spec_num_correct_drafts) / sum(spec_verify_ct), step-0 accuracy = 1 - hist[0] / sum(hist) at topk 1,
    emitted per cycle = sum(completion_tokens - 1) / sum(spec_verify_ct): the first token comes from the prefill.

SGLang's own `spec_accept_length` is completion_tokens / spec_verify_ct, which counts the prefill's token too, and is
not used. Called by common/engine_eval.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.acceptance import bootstrap_totals
from common.errors import UserError
from common.offline_eval import Setting


@dataclass
class Reply:
    """One answer of the engine."""

    row: int
    turn: int
    category: str | None
    prompt: list[int]
    output: list[int]
    meta: dict


def summarise(replies: list[Reply], setting: Setting, bootstrap: int = 1000, seed: int = 0) -> dict:
    """Acceptance of replies from their `meta_info`, with 95% bootstrap intervals over conversations.

    Replies without a verify step (their only token came from the prefill) are counted as `without_verify`. Raises
    UserError when no reply has one: the engine did not speculate.
    """
    width = setting.num_steps + 1
    per_row: dict[int, np.ndarray] = {}  # row -> [correct, cycles, emitted, histogram ...]
    without = 0
    for reply in replies:
        meta = reply.meta
        if not meta.get("spec_verify_ct"):
            without += 1
            continue
        histogram = list(meta.get("spec_correct_drafts_histogram") or [])
        if len(histogram) > width:
            raise UserError(f"the engine accepted {len(histogram) - 1} drafts in a cycle of {setting.num_steps} steps")
        counts = [meta["spec_num_correct_drafts"], meta["spec_verify_ct"], meta["completion_tokens"] - 1]
        row = np.array(counts + histogram + [0] * (width - len(histogram)), dtype=np.float64)
        per_row[reply.row] = per_row.get(reply.row, 0) + row
    if not per_row:
        raise UserError("no reply of the engine has a verify step in its meta_info: it did not speculate")
    table = np.array([per_row[row] for row in sorted(per_row)])

    def figures(totals):
        correct, cycles, emitted, histogram = totals[..., 0], totals[..., 1], totals[..., 2], totals[..., 3:]
        seen = histogram.sum(-1)
        with np.errstate(invalid="ignore", divide="ignore"):
            step0 = np.where((seen > 0) & (setting.topk == 1), 1 - histogram[..., 0] / seen, np.nan)
        return {"tau": 1 + correct / cycles, "step0_accuracy": step0, "emitted_per_cycle": emitted / cycles}

    total = table.sum(0)
    out: dict = {}
    for name, value in figures(total).items():
        out[name] = None if np.isnan(value) else float(value)
    draws = figures(bootstrap_totals(table, bootstrap, seed)) if bootstrap and len(table) > 1 else {}
    for name in list(out):
        seen = draws.get(name)
        out[f"{name}_95"] = None if seen is None or np.isnan(seen).any() else np.percentile(seen, [2.5, 97.5]).tolist()
    out["histogram"] = total[3:].astype(int).tolist()
    out["cycles"], out["replies"], out["without_verify"] = int(total[1]), len(replies), without
    return out


def by_category(replies: list[Reply], setting: Setting) -> dict[str, dict]:
    """`summarise` of each category, without intervals; a tau of None where no reply has a verify step."""
    groups: dict[str, list[Reply]] = {}
    for reply in replies:
        groups.setdefault(reply.category or "(none)", []).append(reply)
    nothing = {"tau": None, "step0_accuracy": None, "cycles": 0}
    return {
        name: summarise(group, setting, bootstrap=0)
        if any(reply.meta.get("spec_verify_ct") for reply in group)
        else {**nothing, "replies": len(group), "without_verify": len(group)}
        for name, group in sorted(groups.items())
    }


def compare_outputs(with_drafter: list[Reply], plain: list[Reply]) -> dict:
    """Which answers to equal prompts are equal: {"identical_share", "compared", "other_prompt", "differences"}.

    A later turn whose prompt differs because an earlier answer did, or that only one of the two answered, is
    `other_prompt`, not compared; where nothing is compared the share is None. differences: row, turn, position of the
    first different token, the two tokens (None: the reply had ended), and the prompt up to there.
    """
    mine = {(reply.row, reply.turn): reply for reply in with_drafter}
    only_mine = mine.keys() - {(reply.row, reply.turn) for reply in plain}
    differences, compared, other = [], 0, len(only_mine)
    for reply in plain:
        twin = mine.get((reply.row, reply.turn))
        if twin is None or twin.prompt != reply.prompt:
            other += 1
            continue
        compared += 1
        if twin.output != reply.output:
            pairs = zip(twin.output, reply.output, strict=False)
            shorter = min(len(twin.output), len(reply.output))
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
            tokens = [output[at] if at < len(output) else None for output in (twin.output, reply.output)]
            differences.append({"row": reply.row, "turn": reply.turn, "position": at, "with_drafter": tokens[0],
                                "plain": tokens[1], "context": reply.prompt + reply.output[:at]})  # fmt: skip
    share = 1 - len(differences) / compared if compared else None
    return {"identical_share": share, "compared": compared, "other_prompt": other, "differences": differences}
