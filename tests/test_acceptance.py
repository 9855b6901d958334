"""Acceptance figures against cases computed by hand: every expected number below was worked out on paper."""

import itertools
import math

import numpy as np
import pytest
import torch

from common.acceptance import (
    AcceptanceCounts,
    bootstrap_totals,
    chain_outcome,
    counted_positions,
    figures,
    reply_spans,
    temperature_terms,
    walk_starts,
)
from common.draft_tree import check_tree_arguments, grow_tree, tokens_on_target_path
from common.errors import UserError


def score(drafted_of, length=13, num_steps=3, mask=None, ids=None, target_next=None, draft_vocab=None, **labels):
    """Counts of one sample of tokens 0, 1, 2 ...; drafted_of(t) lists the K tokens drafted at t."""
    ids = np.arange(length) if ids is None else np.asarray(ids)
    mask = np.array([0, 0] + [1] * (length - 2)) if mask is None else np.asarray(mask)
    target_next = np.append(ids[1:], 0) if target_next is None else np.asarray(target_next)
    positions = counted_positions(mask)
    drafted = np.array([drafted_of(int(t)) for t in positions]).reshape(len(positions), num_steps)
    counts = AcceptanceCounts(num_steps)
    counts.add(labels.pop("sample", 0), drafted, positions, ids, mask, target_next, draft_vocab, **labels)
    return counts


def right(t, num_steps=3):
    return [t + 2 + k for k in range(num_steps)]


def with_wrong(t, steps, num_steps=3):
    return [99 if k in steps else t + 2 + k for k in range(num_steps)]


# --- chains ---------------------------------------------------------------------------------------------------------


def test_chain_table():
    # target = row = 5, 6, 7 everywhere; columns: drafted, reached, accepted
    table = [
        ([5, 6, 7], [1, 1, 1], [1, 1, 1]),
        ([5, 6, 9], [1, 1, 1], [1, 1, 0]),
        ([5, 9, 7], [1, 1, 0], [1, 0, 0]),  # right again after a miss: never reached
        ([9, 6, 7], [1, 0, 0], [0, 0, 0]),
    ]
    outcome = chain_outcome([d for d, _, _ in table], [[5, 6, 7]] * 4, [[5, 6, 7]] * 4, np.ones((4, 3)))
    assert outcome.reached.astype(int).tolist() == [r for _, r, _ in table]
    assert outcome.accepted.astype(int).tolist() == [a for _, _, a in table]
    assert outcome.num_accepted.tolist() == [3, 2, 1, 0]
    assert not outcome.left_row.any()


def test_row_that_left_the_target_censors_what_follows():
    # the target says 5, the row (sampled at a temperature) holds 8: drafting 5 is right, but nothing is known after it
    outcome = chain_outcome([[5, 6, 7], [8, 6, 7]], [[5, 6, 7]] * 2, [[8, 6, 7]] * 2, np.ones((2, 3)))
    assert outcome.reached.astype(int).tolist() == [[1, 0, 0], [1, 0, 0]]
    assert outcome.accepted.astype(int).tolist() == [[1, 0, 0], [0, 0, 0]]  # equal to the row is not accepted
    assert outcome.left_row.tolist() == [True, False]
    assert outcome.num_in_row.tolist() == [0, 0]


def test_step_beyond_a_hole_in_the_mask_is_not_reached():
    outcome = chain_outcome([[5, 6, 7]], [[5, 6, 7]], [[5, 6, 7]], [[1, 0, 1]])
    assert outcome.reached.astype(int).tolist() == [[1, 0, 0]]


def test_spans_and_positions():
    assert reply_spans([0, 1, 1, 0, 0, 1]) == [(1, 2), (5, 5)]
    assert reply_spans([1, 1]) == [(0, 1)]
    assert reply_spans([0, 0]) == []
    assert counted_positions([1, 1, 0, 1, 1]).tolist() == [1, 2]  # x[0], x[1] cannot be drafted; x[3], x[4] can


# --- figures --------------------------------------------------------------------------------------------------------


def test_copying_drafter_gets_everything():
    summary = score(right).summary()
    assert summary["cumulative"] == [1, 1, 1] and summary["conditional"] == [1, 1, 1]
    assert summary["length_per_position"] == 4 and summary["tau"] == 4
    assert summary["reached_count"] == [11, 10, 9]  # the last positions have no second, third step
    assert summary["vocab_share_of_misses"] is None  # no miss, no share


def test_marginals_multiplied_are_not_what_is_printed():
    # 10 full positions (13 + 2 tokens, the last two chains cut): even t miss step 0, odd t get all.
    # marginal accuracy of step 1 and 2 is 1/2 each as well if the misses line up: A_1 = 1/2, product of marginals 1/4.
    counts = score(lambda t: [99, 99, 99] if t % 2 == 0 else right(t), length=12)
    summary = counts.summary()
    assert summary["step0_accuracy"] == pytest.approx(0.5)
    assert summary["cumulative"] == pytest.approx([0.5, 0.5, 0.5])
    assert summary["conditional"] == [0.5, 1.0, 1.0]
    product_of_marginals = [0.5, 0.25, 0.125]
    assert summary["cumulative"] != pytest.approx(product_of_marginals)
    assert summary["length_per_position"] == pytest.approx(2.5)


def test_walked_tau_is_not_the_length_per_position():
    # Tokens 2..11 are the reply (first = 2), so a walk starts at t = 1 (predicts x[3]). Drafts at t = 1 miss at once,
    # t = 2, 3, ... are right: walk 1 (n=0) -> 2 (n=3) -> 6 (n=3) -> done at 10? x[12] does not exist.
    counts = score(lambda t: [99, 99, 99] if t == 1 else right(t), length=12)
    summary = counts.summary()
    assert summary["cycles"] == 3 and summary["walk_histogram_count"] == [1, 0, 0, 2]
    assert summary["tau"] == pytest.approx(1 + 2 / 3 * 3)  # (0 + 3 + 3) accepted in 3 cycles
    assert summary["emitted_per_cycle"] == pytest.approx((1 + 4 + 4) / 3)
    # per position: t = 0..9; reached 10, 8 and 7 (t = 9 has one step, t = 8 two); step 0 accepted 9 of 10
    assert summary["reached_count"] == [10, 8, 7] and summary["accepted_count"] == [9, 8, 7]
    assert summary["length_per_position"] == pytest.approx(1 + 3 * 0.9)
    assert abs(summary["tau"] - summary["length_per_position"]) > 0.5


def test_walk_spends_more_steps_where_acceptance_is_poor():
    # reply x[2..41]; drafts at t < 20 always miss, at t >= 20 always hit: half the positions, but most of the cycles
    counts = score(lambda t: [99] * 3 if t < 20 else right(t), length=42)
    summary = counts.summary()
    # t = 1..19: 19 cycles of nothing; then 20, 24, 28, 32, 36: five cycles of 3; x[42] does not exist
    assert summary["walk_histogram_count"] == [19, 0, 0, 5]
    assert summary["tau"] == pytest.approx(1 + 15 / 24)
    assert summary["length_per_position"] == pytest.approx(1 + 0.5 + 2 * 0.5)


def test_end_of_reply_is_censored_and_emitted_is_cut():
    # reply x[2..5]: t = 1 drafts x[3], x[4], x[5]: all right and the reply is over: 3 tokens in one cycle, tau still 4
    summary = score(right, length=6).summary()
    assert summary["cycles"] == 1 and summary["tau"] == 4
    assert summary["emitted_per_cycle"] == 3


def test_two_replies_are_walked_separately():
    mask = [0, 1, 1, 1, 0, 0, 1, 1, 1]
    counts = score(right, length=9, mask=mask)
    # reply 1 = x[1..3]: t = 0; reply 2 = x[6..8]: t = 5. t = 4 predicts x[6], the prefill's token: no cycle there.
    assert walk_starts({0: 2, 1: 1, 4: 3, 5: 2, 6: 1}, reply_spans(mask)) == [0, 5]
    assert counts.summary()["cycles"] == 2
    assert counts.summary()["positions"] == 5
    assert set(counts.breakdown(0)["turn"]) == {"1", "2"}
    assert counts.breakdown(0)["turn"]["1"]["positions"] == 2


def test_hole_inside_steps_is_not_counted_as_accepted():
    mask = [0, 0, 1, 0, 1, 1]
    summary = score(right, length=6, mask=mask).summary()
    assert summary["reached_count"] == [3, 1, 0]  # t = 0: x[3] is not supervised; t = 2: x[4], x[5]; t = 3: x[5]
    assert summary["cumulative"] == [1, 1, None]  # nobody ever saw step 2


def test_outside_the_draft_vocabulary_is_a_miss_everywhere():
    vocab = np.ones(120, dtype=bool)
    vocab[[5, 8]] = False  # tokens 5 and 8 cannot be drafted: the drafter says 99 there
    drafted = lambda t: [v if vocab[v] else 99 for v in right(t)]  # noqa: E731
    summary = score(drafted, length=12, draft_vocab=vocab).summary()
    # t = 0..9 predicts 2..11: 2 of 10 miss at step 0
    assert summary["step0_accuracy"] == pytest.approx(0.8)
    # step 1 reached by t = 0,1,2,4,5,7,8 (t = 3, 6 missed; t = 9 has no x[12]); x[t+3] = 5 or 8 at t = 2, 5
    assert summary["reached_count"][1] == 7 and summary["accepted_count"][1] == 5
    # step 2 reached by t = 0,1,4,7 (t = 8 has no x[12]); x[t+4] = 5 or 8 at t = 1, 4
    assert summary["reached_count"][2] == 4 and summary["accepted_count"][2] == 2
    assert summary["vocab_share_of_misses"] == 1 and summary["vocab_share_of_step0_misses"] == 1
    assert summary["misses_count"] == 2 + 2 + 2
    # walk: t = 1 (3, 4, then 5: n = 2) -> 4 (6, 7, then 8: n = 2) -> 7 (9, 10, 11: n = 3) -> 11 over
    assert summary["walk_histogram_count"] == [0, 0, 2, 1] and summary["tau"] == pytest.approx(1 + 7 / 3)


def test_misses_inside_and_outside_the_vocabulary_are_told_apart():
    vocab = np.ones(120, dtype=bool)
    vocab[5] = False
    summary = score(lambda t: [99, 99, 99] if t in (3, 6) else right(t)[:1] + [98, 98], length=12, draft_vocab=vocab)
    summary = summary.summary()
    assert summary["vocab_share_of_step0_misses"] == pytest.approx(0.5)  # t = 3 wants 5 (outside), t = 6 wants 8
    # chain misses: t = 3, 6 at step 0; t = 0,1,2,4,5,7,8 at step 1 (t = 9 ends): at t = 2 the target is 5
    assert summary["misses_count"] == 9 and summary["vocab_misses_count"] == 2


def test_data_sampled_at_a_temperature_uses_the_survivors():
    # rows leave the target at x[4] (target says 50): the drafter says what the target says, always
    ids = np.arange(12)
    target_next = np.append(ids[1:], 0)
    target_next[3] = 50
    says = lambda t: [int(target_next[min(t + 1 + k, 11)]) for k in range(3)]  # noqa: E731
    summary = score(says, length=12, target_next=target_next).summary()
    assert summary["cumulative"] == [1, 1, 1] and summary["tau"] == 4
    # x[4] is step 2 of t = 0, step 1 of t = 1, step 0 of t = 2: accepted there, unknown after. Step 1 is not reached
    # by t = 2 and t = 9 (end), step 2 not by t = 1, 2, 8, 9
    assert summary["left_row_count"] == 3
    assert summary["reached_count"] == [10, 8, 6]
    assert summary["off_row_share"] == pytest.approx(0.1)
    # the same data scored against the row instead of the target would not give 1: the check can fail
    wrong = score(says, length=12).summary()
    assert wrong["step0_accuracy"] == pytest.approx(0.9)


def test_breakdown_by_position_and_labels():
    counts = score(lambda t: [99] * 3 if t < 16 else right(t), length=102, category="math", source="a.jsonl")
    other = score(right, length=12, sample=1, category="chat", source="a.jsonl")
    counts = counts.merge([other])
    assert counts.positions == counts.summary(0)["positions"] == 110
    groups = counts.breakdown(0)
    assert groups["category"]["chat"]["step0_accuracy"] == 1
    assert groups["category"]["math"]["step0_accuracy"] == pytest.approx(84 / 100)
    assert set(groups["source"]) == {"a.jsonl"}
    # replies start at x[2]: offsets of x[t+2] are t; 0-15 holds t = 0..15 of the first sample (16) + 10 of the other
    assert groups["position"]["0-15"]["positions"] == 26
    assert groups["position"]["16-63"]["step0_accuracy"] == 1
    assert sum(g["positions"] for g in groups["position"].values()) == 110
    assert sum(g["cycles"] for g in groups["position"].values()) == counts.summary(0)["cycles"]


def test_random_drafter_gets_chance():
    random = np.random.default_rng(1)
    vocab, counts = 50, AcceptanceCounts(3)
    for sample in range(20):
        ids = random.integers(0, vocab, 400)
        mask = np.ones(400, dtype=int)
        positions = counted_positions(mask)
        counts.add(sample, random.integers(0, vocab, (len(positions), 3)), positions, ids, mask, np.append(ids[1:], 0))
    summary = counts.summary()
    low, high = summary["step0_accuracy_95"]
    assert low < 1 / vocab < high and high - low < 0.01
    assert summary["tau"] == pytest.approx(1 + 1 / vocab, abs=0.01)


def test_bad_input_names_the_sample():
    with pytest.raises(UserError, match="sample 7: drafted at 3 positions, but its loss mask counts 2"):
        AcceptanceCounts(1).add(7, np.zeros((3, 1)), np.array([0, 1, 2]), np.arange(5), np.array([0, 0, 0, 1, 1]),
                                np.arange(5))  # fmt: skip
    with pytest.raises(UserError, match="sample 7: drafted tokens have shape"):
        AcceptanceCounts(2).add(7, np.zeros((2, 1)), np.array([1, 2]), np.arange(5), np.ones(5), np.arange(5))
    with pytest.raises(UserError, match="no supervised position"):
        AcceptanceCounts(2).summary()
    one = score(right)
    with pytest.raises(UserError, match="sample 0 was evaluated twice, on two ranks"):
        one.merge([score(right)])


# --- bootstrap ------------------------------------------------------------------------------------------------------


def test_bootstrap_of_two_samples_has_the_three_hand_computed_totals():
    # samples with 1 of 4 and 4 of 4 accepted: resamples are (a, a), (a, b), (b, b): 2, 5, 8 of 8 with odds 1 : 2 : 1
    table = np.array([[4.0, 1.0], [4.0, 4.0]])
    totals = bootstrap_totals(table, 4000, seed=3)
    values, counts = np.unique(totals[:, 1], return_counts=True)
    assert values.tolist() == [2, 5, 8] and set(totals[:, 0]) == {8}
    assert counts / 4000 == pytest.approx([0.25, 0.5, 0.25], abs=0.03)


def test_bootstrap_is_deterministic_and_resamples_samples_not_positions():
    def counts(samples, order=1):
        drafters = [lambda t: [99] * 3, right]
        parts = [score(drafters[s % 2], length=102, sample=s) for s in range(samples)]
        return parts[0].merge(parts[1:][::order])

    ten = counts(10)
    assert ten.summary() == counts(10, order=-1).summary()
    table = ten.per_sample()
    assert not np.array_equal(bootstrap_totals(table, 50, seed=0), bootstrap_totals(table, 50, seed=5))
    low, high = ten.summary()["step0_accuracy_95"]
    # 10 samples that are all 0 or all 1: binomial(10, 1/2) / 10, 2.5% and 97.5% points 0.2 and 0.8. Resampling the
    # 1,000 positions instead would give 0.47 to 0.53.
    assert (low, high) == pytest.approx((0.2, 0.8), abs=0.05)
    one = score(right).summary()
    assert one["tau_95"] is None


# --- temperature ----------------------------------------------------------------------------------------------------


def test_min_pq_by_hand_and_by_enumeration():
    # a drafter and a target whose distributions depend on the token before: enumerate all pairs of tokens
    p0, q0 = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.6, 0.1])
    p1 = np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [1.0, 0.0, 0.0]])
    q1 = np.array([[0.25, 0.5, 0.25], [0.4, 0.4, 0.2], [0.5, 0.5, 0.0]])
    assert np.minimum(p0, q0).sum() == pytest.approx(0.3 + 0.2 + 0.1)
    exact = sum(min(p0[v], q0[v]) * min(p1[v, w], q1[v, w]) for v, w in itertools.product(range(3), repeat=2))
    mean = np.zeros(2)
    for v in range(3):  # expectation over rows, whose first token is drawn from p0
        beta = [[np.minimum(p0, q0).sum(), np.minimum(p1[v], q1[v]).sum()]]
        ratio = [[min(1, q0[v] / p0[v]), 1.0]]
        by_rejection, _ = temperature_terms(beta, ratio, [[0, 0]], [[0, 0]], [[0, 0]])
        mean += p0[v] * by_rejection[0]
    assert mean == pytest.approx([0.6, exact])
    # the product of the two steps' averages is something else
    assert 0.6 * sum(p0[v] * np.minimum(p1[v], q1[v]).sum() for v in range(3)) != pytest.approx(exact, abs=0.01)


def test_greedy_draft_kept_with_the_targets_probability():
    # drafted 4 then 5; rows 4, 5 and 3, 5: the second step counts only where the row took the drafted first token
    zeros, p_of_drafted = np.zeros((2, 2)), [[0.6, 0.5], [0.6, 0.9]]
    _, match = temperature_terms(zeros, zeros, p_of_drafted, [[4, 5], [4, 5]], [[4, 5], [3, 5]])
    assert match.tolist() == [[0.6, 0.5], [0.6, 0.0]]


def test_expected_acceptance_reaches_the_summary():
    counts = AcceptanceCounts(2)
    mask = np.array([0, 0, 1, 1, 1])
    positions = counted_positions(mask)  # 0, 1, 2; t = 2 has one step only and is left out
    terms = np.array([[0.5, 0.25], [1.0, 0.75], [0.9, 0.9]]), np.array([[0.2, 0.1], [0.4, 0.3], [0.9, 0.9]])
    ids = np.arange(5)
    counts.add(0, np.zeros((3, 2)), positions, ids, mask, ids, expected=terms)
    summary = counts.summary()
    assert summary["expected_min_pq"] == pytest.approx([0.75, 0.5])
    assert summary["expected_length_min_pq"] == pytest.approx(2.25)
    assert summary["expected_match"] == pytest.approx([0.3, 0.2])
    assert score(right).summary()["expected_length_min_pq"] is None


# --- trees ----------------------------------------------------------------------------------------------------------


def table_tree(num_steps, topk, tree_tokens, step0, children):
    """A tree over tokens 0..9; step0 {token: p}, children {token: {token: p}}: the next tokens after any token."""

    def expand(step, tokens, parent_beam):
        nodes = [step0] if tokens is None else [children[int(t)] for t in tokens[0]]
        best = [sorted(n.items(), key=lambda item: -item[1])[:topk] for n in nodes]
        probs = torch.tensor([[[p for _, p in b] for b in best]], dtype=torch.float64)
        return probs, torch.tensor([[[t for t, _ in b] for b in best]])

    return grow_tree(expand, num_steps, topk, tree_tokens)


STEP0 = {1: 0.6, 2: 0.3, 3: 0.1}
CHILDREN = {1: {4: 0.5, 5: 0.4}, 2: {6: 0.9, 7: 0.1}, 4: {8: 0.8, 9: 0.2}, 5: {8: 0.6, 9: 0.4}, 6: {8: 1.0, 9: 0.0},
            7: {8: 0.5, 9: 0.5}}  # fmt: skip


def test_tree_by_hand():
    # step 0: 1 (.6), 2 (.3). step 1: 1-4 (.30), 1-5 (.24), 2-6 (.27), 2-7 (.03); best two: 4 (.30) and 6 (.27).
    # step 2: 4-8 (.24), 4-9 (.06), 6-8 (.27), 6-9 (0). Ten candidates; the five best: 1, 2, 4, 6, 6-8.
    tree = table_tree(3, 2, 6, STEP0, CHILDREN)
    assert tree.tokens[0].tolist() == [1, 2, 4, 5, 6, 7, 8, 9, 8, 9]
    assert tree.scores[0].tolist() == pytest.approx([0.6, 0.3, 0.3, 0.24, 0.27, 0.03, 0.24, 0.06, 0.27, 0.0])
    assert tree.parents[0].tolist() == [-1, -1, 0, 0, 1, 1, 2, 2, 4, 4]
    assert tree.kept[0].tolist() == [True, True, True, False, True, False, False, False, True, False]
    assert tree.depth.tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    "target, accepted",
    [
        ([1, 4, 8], [1, 4, -1]),  # 1-4-8 was a candidate, but not among the five best
        ([2, 6, 8], [2, 6, 8]),  # the second branch, to the end
        ([1, 5, 8], [1, -1, -1]),
        ([1, 6, 8], [1, -1, -1]),  # 6 hangs below 2, not below 1
        ([3, 4, 8], [-1, -1, -1]),  # third best
    ],
)
def test_tree_acceptance_by_hand(target, accepted):
    tree = table_tree(3, 2, 6, STEP0, CHILDREN)
    assert tokens_on_target_path(tree, torch.tensor([target])).tolist() == [accepted]


def test_tree_of_topk_1_is_the_chain():
    tree = table_tree(3, 1, 4, STEP0, CHILDREN)
    assert tree.tokens[0].tolist() == [1, 4, 8] and tree.kept.all()


def test_bigger_tree_never_accepts_less():
    random = np.random.default_rng(0)
    probabilities = {v: dict(zip(range(10), random.dirichlet(np.ones(10)), strict=True)) for v in range(10)}
    total = []
    for tree_tokens in (2, 4, 8, 22):
        tree = table_tree(3, 3, tree_tokens, probabilities[0], probabilities)
        paths = torch.tensor(list(itertools.product(range(10), repeat=3)))
        wide = [t.expand(1000, -1) for t in (tree.tokens, tree.scores, tree.parents, tree.kept)]
        hits = tokens_on_target_path(type(tree)(wide[0], wide[1], wide[2], tree.depth, wide[3]), paths) >= 0
        total.append(int(hits.sum()))
    assert total == sorted(total) and total[0] < total[-1]


@pytest.mark.parametrize("sizes, message", [((3, 1, 6), "is a chain"), ((2, 2, 8), "so 2 to 7"), ((3, 2, 1), "out of")])
def test_tree_sizes_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        check_tree_arguments(*sizes)


# --- the formulas themselves ----------------------------------------------------------------------------------------


def test_product_limit_equals_the_mean_of_products_without_censoring():
    random = np.random.default_rng(2)
    hits = random.random((500, 4)) < [0.8, 0.7, 0.6, 0.5]
    outcome = chain_outcome(np.where(hits, 1, 2), np.ones((500, 4)), np.ones((500, 4)), np.ones((500, 4)))
    row = np.concatenate([outcome.reached.sum(0), outcome.accepted.sum(0)]).astype(float)
    from common.acceptance import _fields

    counts = np.zeros(_fields(4)["expected_match"].stop)
    counts[:8] = row
    expected = np.cumprod(hits, axis=1).mean(0)
    assert figures(counts, 4)["cumulative"] == pytest.approx(expected, abs=1e-12)


def test_after_a_sure_miss_the_rest_is_zero_not_unknown():
    summary = score(lambda t: [99] * 3).summary()
    assert summary["cumulative"] == [0, 0, 0] and summary["length_per_position"] == 1 and summary["tau"] == 1
    assert summary["conditional"] == [0, None, None]
    assert not any(isinstance(v, float) and math.isnan(v) for v in summary.values())
