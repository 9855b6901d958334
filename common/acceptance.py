"""What "accepted" means: the figures of a drafter, from drafted tokens, the target's tokens and the row's tokens.

Pure numpy, no model: offline_eval.py (and through it the trainer's held-out evaluation and eval_acceptance.py) calls
`AcceptanceCounts.add` once a sample and `summary()` at the end, so that one definition serves all of them.

The estimator, precisely. A row is tokens x[0..L-1] with states stored under that row. At position t the drafter holds
the states at t and the token x[t+1]; with its own states and its own tokens it drafts d_0 ... d_{K-1}, guesses for
x[t+2] ... x[t+1+K]. The target's own token is y_k = argmax of the target's logits at t+1+k, recomputed from the stored
last state; it is the target's answer to the drafted prefix only while that prefix is the row: d_j = x[t+2+j] for j < k.

* Step k of position t is *reached* when steps 0..k-1 were accepted, their tokens are the row's, and x[t+2] ... x[t+2+k]
  exist and are supervised. A reached step is *accepted* when d_k = y_k. A chain that stops being reached without a miss
  (the reply ends, or the target's greedy token is not what the row holds, as in data sampled at a temperature) is
  censored: it says nothing about later steps, neither good nor bad.
* conditional_k = accepted_k / reached_k, and A_k = product of conditional_0 ... conditional_k: the product-limit
  estimator (Kaplan and Meier, 1958) of P(a_0 = ... = a_k = 1). Without censoring it *is* the mean of a_0 a_1 ... a_k.
  It is not a product of marginal accuracies: step k is judged only on positions that survived to k.
* per-position length = 1 + sum_k A_k over all supervised positions.
* tau (walked): the engine's own path. A reply is a maximal run of supervised tokens x[s..e]; x[s] comes from the
  prefill, so the first cycle drafts at t = s-1; a cycle that gets n of the row's tokens accepted moves to t + n + 1.
  tau = 1 + sum_k A_k with reached and accepted counted over the starts of cycles only; without censoring this is
  1 + accepted drafts / cycles, which SGLang reports as 1 + spec_num_correct_drafts / spec_verify_ct.
  `emitted_per_cycle` = tokens that the reply really received / cycles, cut at the end of the reply, the twin of
  SGLang's (completion_tokens - 1) / spec_verify_ct.
* A target token outside the draft vocabulary can never be drafted: it is a miss in every figure, and counted.
* Intervals: percentile bootstrap over samples (Efron, 1979), 95%, fixed seed; samples, not positions, are resampled
  because the positions of one reply are not independent.
* Temperature (`expected_min_pq`, `expected_match`, only where `add` got them): see `temperature_terms`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from common.errors import UserError

POSITION_BUCKETS = (0, 16, 64, 256, 1024)  # token offset in the reply, lower edges
LAST_TURN = 8  # turns beyond this one share a group


@dataclass
class ChainOutcome:
    """What happened to C chains of K drafted tokens; all arrays are bool [C, K] unless said otherwise."""

    reached: np.ndarray
    accepted: np.ndarray  # subset of reached
    in_row: np.ndarray  # accepted and equal to the row's token: what a walk may advance over
    left_row: np.ndarray  # bool [C]: censored because the target's token is not the row's

    @property
    def num_accepted(self) -> np.ndarray:
        """int64 [C]: accepted drafts, 0..K."""
        return self.accepted.sum(axis=1)

    @property
    def num_in_row(self) -> np.ndarray:
        """int64 [C]: accepted drafts that are the row's own tokens, 0..K."""
        return self.in_row.sum(axis=1)


def chain_outcome(drafted, target, row, counted) -> ChainOutcome:
    """drafted, target, row: int [C, K] token ids d_k, y_k, x[t+2+k]; counted: bool [C, K], x[t+2+k] is supervised.

    A step counts only while all earlier ones do (a hole in the mask ends the chain, it is not skipped).
    """
    drafted, target, row = (np.asarray(a) for a in (drafted, target, row))
    counted = np.logical_and.accumulate(np.asarray(counted, dtype=bool), axis=1)
    hit = drafted == target
    follows = hit & (drafted == row)  # the next step has a stored state for this prefix
    before = np.ones_like(counted)
    before[:, 1:] = np.logical_and.accumulate(follows, axis=1)[:, :-1]
    reached = before & counted
    accepted = reached & hit
    in_row = reached & follows
    return ChainOutcome(reached, accepted, in_row, left_row=(accepted & ~in_row).any(axis=1))


def reply_spans(loss_mask) -> list[tuple[int, int]]:
    """[(first, last)] token indices, both inclusive, of each maximal run of supervised tokens in loss_mask [L]."""
    mask = np.asarray(loss_mask).astype(bool).astype(np.int8)
    edges = np.diff(np.concatenate(([0], mask, [0])))
    return list(zip(np.flatnonzero(edges == 1).tolist(), (np.flatnonzero(edges == -1) - 1).tolist(), strict=True))


def counted_positions(loss_mask) -> np.ndarray:
    """int64 [C]: every t >= 0 whose first drafted token x[t+2] is supervised, ascending."""
    positions = np.flatnonzero(np.asarray(loss_mask)[2:])
    return positions.astype(np.int64)


def walk_starts(advance_at: dict[int, int], spans: list[tuple[int, int]]) -> list[int]:
    """Positions t at which the engine would draft: advance_at maps t to the tokens accepted there (num_in_row)."""
    starts = []
    for first, last in spans:
        t = max(first - 1, 0)
        while t + 2 <= last:
            starts.append(t)
            t += advance_at[t] + 1
    return starts


def temperature_terms(beta, ratio, prob_of_drafted, drafted, row):
    """Expected acceptance of speculative sampling per position and step, two ways; float64 [C, K] each.

    beta [C, K]: sum_v min(p(v), q(v)) at step k (Leviathan et al. 2023, eq. for alpha), the drafter fed the row's
    tokens; ratio [C, K]: min(1, q(x)/p(x)) of the row's token there. For rows sampled from the target at the same
    temperature, E[prod_{j<k} ratio_j * beta_k] is exactly P(drafts 0..k accepted) under rejection sampling: a draft v
    is proposed and accepted with probability min(p, q), and p(x) * min(1, q(x)/p(x)) is just that. (Step 0 needs no
    such assumption about the token drawn.)

    prob_of_drafted [C, K]: p(d_k) of the greedily drafted token, the drafter fed its own tokens. SGLang's default
    verification at a temperature keeps the greedy draft with the target's probability of it: prod_{j<k} [d_j = x_j]
    times p(d_k).
    """
    ratio = np.asarray(ratio, dtype=np.float64)
    before = np.ones_like(ratio)
    before[:, 1:] = np.cumprod(ratio, axis=1)[:, :-1]
    same = np.ones(ratio.shape, dtype=np.float64)
    same[:, 1:] = np.cumprod((np.asarray(drafted) == np.asarray(row)).astype(np.float64), axis=1)[:, :-1]
    return before * np.asarray(beta, dtype=np.float64), same * np.asarray(prob_of_drafted, dtype=np.float64)


def _fields(num_steps: int) -> dict[str, slice]:
    """Names of the columns of one row of counts (float64; whole numbers are exact up to 2**53)."""
    widths = {
        "reached": num_steps, "accepted": num_steps, "walk_reached": num_steps, "walk_accepted": num_steps,
        "walk_histogram": num_steps + 1, "walk_emitted": 1, "misses": 1, "vocab_misses": 1, "first_misses": 1,
        "first_vocab_misses": 1, "off_row_targets": 1, "left_row": 1,
        "expected_steps": num_steps, "expected_min_pq": num_steps, "expected_match": num_steps,
    }  # fmt: skip
    edges = np.concatenate(([0], np.cumsum(list(widths.values())))).tolist()
    return {name: slice(edges[i], edges[i + 1]) for i, name in enumerate(widths)}


def figures(counts: np.ndarray, num_steps: int) -> dict[str, np.ndarray]:
    """The figures of count rows [..., F]: arrays [...] or [..., K]; a figure without a single observation is NaN."""
    at = _fields(num_steps)
    part = {name: counts[..., where] for name, where in at.items()}

    def ratio(a, b):
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(b > 0, a / b, np.nan)

    def cumulative(conditional):
        out = np.empty_like(conditional)
        so_far = np.ones(conditional.shape[:-1])
        for k in range(num_steps):
            so_far = np.where(so_far == 0, 0.0, so_far * conditional[..., k])  # after a sure miss the rest is zero
            out[..., k] = so_far
        return out

    conditional = ratio(part["accepted"], part["reached"])
    walked = cumulative(ratio(part["walk_accepted"], part["walk_reached"]))
    accepted = cumulative(conditional)
    cycles = part["walk_histogram"].sum(-1)
    positions = part["reached"][..., 0]
    min_pq = ratio(part["expected_min_pq"], part["expected_steps"])
    match = ratio(part["expected_match"], part["expected_steps"])
    return {
        "step0_accuracy": accepted[..., 0],
        "cumulative": accepted,
        "conditional": conditional,
        "length_per_position": np.where(positions > 0, 1 + np.nansum(accepted, axis=-1), np.nan),
        "tau": np.where(cycles > 0, 1 + np.nansum(walked, axis=-1), np.nan),
        "walk_step0_accuracy": walked[..., 0],
        "emitted_per_cycle": ratio(part["walk_emitted"][..., 0], cycles),
        "vocab_share_of_misses": ratio(part["vocab_misses"], part["misses"])[..., 0],
        "vocab_share_of_step0_misses": ratio(part["first_vocab_misses"], part["first_misses"])[..., 0],
        "off_row_share": ratio(part["off_row_targets"][..., 0], positions),
        "expected_min_pq": min_pq,
        "expected_length_min_pq": 1 + min_pq.sum(-1),
        "expected_match": match,
        "expected_length_match": 1 + match.sum(-1),
    }


@dataclass
class AcceptanceCounts:
    """Counts of a run, one row a (sample, turn, position bucket); add samples, merge ranks, then `summary()`."""

    num_steps: int
    rows: list[tuple] = field(default_factory=list)  # (sample key, category, source, turn, bucket, float64 [F])
    positions: int = 0  # supervised positions counted so far, for progress lines

    def add(self, sample, drafted, positions, input_ids, loss_mask, target_next, draft_vocab=None,
            category=None, source=None, expected=None) -> None:  # fmt: skip
        """Count one sample.

        sample: int or str, unique over the run (the record's index); drafted: int [C, K] target ids drafted at
        positions int [C] (any order, `counted_positions(loss_mask)` all present); input_ids, loss_mask: int [L];
        target_next: int [L], target_next[j] = the target's own token after x[0..j] (needed for j with x[j+1]
        supervised, anything elsewhere); draft_vocab: bool [V] (`t2d`), None for a full vocabulary; expected: the pair
        returned by `temperature_terms` for the same positions. Torch CPU tensors are accepted. Raises UserError.
        """
        drafted, positions, ids, mask, target_next = (
            np.asarray(a) for a in (drafted, positions, input_ids, loss_mask, target_next)
        )
        num_steps, length = self.num_steps, len(ids)
        if drafted.shape != (len(positions), num_steps):
            raise UserError(
                f"sample {sample}: drafted tokens have shape {drafted.shape}, expected {(len(positions), num_steps)}"
            )
        if not np.array_equal(np.sort(positions), counted_positions(mask)):
            raise UserError(
                f"sample {sample}: drafted at {len(positions)} positions, but its loss mask counts "
                f"{len(counted_positions(mask))}: every supervised token after the first two must be drafted once"
            )
        if len(positions) == 0:
            return
        index = positions[:, None] + 2 + np.arange(num_steps)  # [C, K] index of the token that step k predicts
        inside = index < length
        index = np.minimum(index, length - 1)
        target = target_next[index - 1]
        outcome = chain_outcome(drafted, target, ids[index], inside & (mask[index] != 0))

        spans = reply_spans(mask)
        starts = walk_starts(dict(zip(positions.tolist(), outcome.num_in_row.tolist(), strict=True)), spans)
        is_start = np.isin(positions, starts)
        first_of_span = np.array([s for s, _ in spans])
        span = np.searchsorted(first_of_span, positions + 2, side="right") - 1  # [C] reply of the predicted token
        offset = positions + 2 - first_of_span[span]
        bucket = np.searchsorted(POSITION_BUCKETS, offset, side="right") - 1
        turn = np.minimum(span + 1, LAST_TURN)
        last = np.array([e for _, e in spans])[span]
        emitted = np.minimum(outcome.num_in_row + 1, last - (positions + 2) + 1)  # tokens this cycle adds to the reply

        missed = outcome.reached & ~outcome.accepted  # at most one a chain
        outside = np.zeros_like(missed) if draft_vocab is None else ~np.asarray(draft_vocab, dtype=bool)[target]
        histogram = np.eye(num_steps + 1)[outcome.num_accepted] * is_start[:, None]
        walk = is_start[:, None]
        columns = {
            "reached": outcome.reached, "accepted": outcome.accepted,
            "walk_reached": outcome.reached & walk, "walk_accepted": outcome.accepted & walk,
            "walk_histogram": histogram, "walk_emitted": emitted[:, None] * walk,
            "misses": missed.any(1, keepdims=True), "vocab_misses": (missed & outside).any(1, keepdims=True),
            "first_misses": missed[:, :1], "first_vocab_misses": (missed & outside)[:, :1],
            "off_row_targets": (target[:, :1] != ids[index][:, :1]), "left_row": outcome.left_row[:, None],
        }  # fmt: skip
        table = np.zeros((len(positions), _fields(num_steps)["expected_match"].stop))
        for name, where in _fields(num_steps).items():
            if name in columns:
                table[:, where] = columns[name]
        if expected is not None:
            whole = (inside & (mask[index] != 0)).all(1, keepdims=True)  # all K steps exist: one set for every k
            at = _fields(num_steps)
            table[:, at["expected_steps"]] = whole
            table[:, at["expected_min_pq"]] = np.where(whole, expected[0], 0.0)
            table[:, at["expected_match"]] = np.where(whole, expected[1], 0.0)
        self.positions += len(positions)
        for group in sorted(set(zip(turn.tolist(), bucket.tolist(), strict=True))):
            chosen = (turn == group[0]) & (bucket == group[1])
            self.rows.append((sample, category, source, *group, table[chosen].sum(0)))

    def merge(self, others) -> AcceptanceCounts:
        """One AcceptanceCounts of self and others (e.g. of all ranks); the figures do not depend on their order.

        Raises UserError when two of them counted the same sample.
        """
        parts = (self, *others)
        seen: set = set()
        for counts in parts:
            samples = {row[0] for row in counts.rows}
            if seen & samples:
                raise UserError(f"sample {min(seen & samples)} was evaluated twice, on two ranks; give it to one")
            seen |= samples
        rows = [row for counts in parts for row in counts.rows]
        return AcceptanceCounts(self.num_steps, rows, sum(counts.positions for counts in parts))

    def per_sample(self, rows=None) -> np.ndarray:
        """float64 [N, F]: summed over the groups of each sample, in the order of the sample keys."""
        rows = sorted(self.rows if rows is None else rows, key=lambda r: (str(type(r[0])), r[0], r[3], r[4]))
        width = _fields(self.num_steps)["expected_match"].stop
        totals: dict = {}
        for row in rows:
            totals.setdefault(row[0], np.zeros(width))
            totals[row[0]] += row[5]
        return np.array(list(totals.values())).reshape(-1, width)

    def summary(self, bootstrap: int = 1000, seed: int = 0, rows=None) -> dict:
        """Plain dict for report.json: every figure of `figures`, `<figure>_95` = [low, high], and the counts.

        NaN (nothing observed) becomes None. The intervals are None for a single sample or bootstrap=0.
        """
        table = self.per_sample(rows)
        if len(table) == 0:
            raise UserError("no supervised position to evaluate: the split is empty; use more data or another --split")
        total = table.sum(0)
        point = figures(total, self.num_steps)
        out = {name: _plain(value) for name, value in point.items()}
        if bootstrap and len(table) > 1:
            draws = figures(bootstrap_totals(table, bootstrap, seed), self.num_steps)
            for name, value in draws.items():
                out[f"{name}_95"] = _interval(value)
        else:
            out.update({f"{name}_95": None for name in point})
        at = _fields(self.num_steps)
        out["samples"] = len(table)
        out["positions"] = int(total[at["reached"]][0])
        out["cycles"] = int(total[at["walk_histogram"]].sum())
        for name in ("reached", "accepted", "walk_reached", "walk_accepted", "walk_histogram"):
            out[f"{name}_count"] = total[at[name]].astype(int).tolist()
        for name in ("misses", "vocab_misses", "left_row"):
            out[f"{name}_count"] = int(total[at[name]][0])
        return out

    def breakdown(self, bootstrap: int = 1000, seed: int = 0) -> dict[str, dict[str, dict]]:
        """{"category" | "turn" | "position" | "source": {group: summary}}; unnamed dimensions are left out."""
        names = {
            "category": lambda r: r[1], "source": lambda r: r[2],
            "turn": lambda r: f"{r[3]}" if r[3] < LAST_TURN else f"{LAST_TURN}+",
            "position": lambda r: _bucket_name(r[4]),
        }  # fmt: skip
        out: dict = {}
        for dimension, name_of in names.items():
            groups: dict = {}
            for row in sorted(self.rows, key=lambda r: (r[3], r[4])):
                groups.setdefault(name_of(row), []).append(row)
            if set(groups) - {None}:
                ordered = groups if dimension in ("turn", "position") else dict(sorted(groups.items(), key=str))
                out[dimension] = {
                    str(group or "(none)"): self.summary(bootstrap, seed, rows) for group, rows in ordered.items()
                }
        return out


def bootstrap_totals(table: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """float64 [draws, F]: totals of `draws` resamples, with replacement, of the N rows of table [N, F]."""
    random = np.random.default_rng(seed)
    counts = np.empty((draws, table.shape[1]))
    for i in range(draws):  # one draw at a time: [draws, N] weights of 10,000 samples would be 80 MB
        weights = np.bincount(random.integers(0, len(table), len(table)), minlength=len(table))
        counts[i] = weights @ table
    return counts


def _bucket_name(bucket: int) -> str:
    if bucket + 1 == len(POSITION_BUCKETS):
        return f"{POSITION_BUCKETS[bucket]}+"
    return f"{POSITION_BUCKETS[bucket]}-{POSITION_BUCKETS[bucket + 1] - 1}"


def _plain(value: np.ndarray):
    """float or list of floats, NaN as None."""
    if np.ndim(value):
        return [_plain(v) for v in value]
    return None if np.isnan(value) else float(value)


def _interval(draws: np.ndarray):
    """[low, high] of draws [B], or K such pairs of draws [B, K]; draws without an observation are left out."""
    if draws.ndim == 2:
        return [_interval(draws[:, k]) for k in range(draws.shape[1])]
    seen = draws[~np.isnan(draws)]
    return None if len(seen) == 0 else [float(v) for v in np.percentile(seen, [2.5, 97.5])]
