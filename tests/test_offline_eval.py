"""The evaluation loop on a target and drafters whose every draft is known beforehand (tests/acceptance_fixtures.py)."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common.offline_eval
from common.acceptance import AcceptanceCounts, counted_positions
from common.conversations import hash_of
from common.drafter import Drafter
from common.drafting import DraftChain
from common.errors import UserError
from common.offline_eval import Setting, check_fit, evaluate, evaluation_target
from common.packing import pack_documents
from common.target import load_target_parts
from tests.acceptance_fixtures import (
    POINTS,
    VOCAB,
    conversation,
    copying_drafter,
    permutation,
    states_of,
    write_target,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return evaluation_target(load_target_parts(write_target(tmp_path_factory.mktemp("target"))), "cpu")


def sample(successor, lengths=(5, 40, 3, 30), seed=0, index=0):
    ids, mask = conversation(successor, list(lengths), seed)
    record = SimpleNamespace(path=None, index=index, category=None, source=None)
    return SimpleNamespace(input_ids=ids, loss_mask=mask, states=states_of(ids, successor), record=record)


def run(drafter, target, samples, **setting) -> AcceptanceCounts:
    drafter.set_embedding(target.embed_tokens)
    by_record = {id(s.record): s for s in samples}
    return evaluate(drafter, target, lambda r: by_record[id(r)], [s.record for s in samples], Setting(**setting))


def wrong_at(successor, tokens) -> torch.Tensor:
    """A permutation that differs from `successor` exactly at these tokens (their successors rotated)."""
    other = successor.clone()
    other[torch.tensor(tokens)] = successor[torch.tensor(tokens)].roll(1)
    return other


def test_drafter_that_copies_the_target(target):
    successor = permutation()
    for k in (1, 3, 7):
        summary = run(copying_drafter(successor), target, [sample(successor)], num_steps=k).summary()
        assert summary["cumulative"] == [1.0] * k and summary["tau"] == k + 1
        assert summary["length_per_position"] == k + 1


def test_random_weights_get_chance(target):
    successor = permutation()
    drafter = copying_drafter(successor)
    drafter.init_weights(seed=3)
    summary = run(drafter, target, [sample(successor, (5, 200), seed) for seed in range(3)], num_steps=3).summary()
    assert summary["step0_accuracy"] < 0.15 and summary["tau"] < 1.15


def by_hand(successor, other, samples, num_steps):
    """Counts of the figures by following the two permutations through each row, token by token."""
    counts = {name: [0] * num_steps for name in ("reached", "accepted", "walk_reached", "walk_accepted")}
    hits_of_step = [[] for _ in range(num_steps)]  # marginal: right or wrong whatever came before
    for s in samples:
        ids, mask = s.input_ids.tolist(), s.loss_mask.tolist()
        advance = {}
        for name, ts in (("", range(len(ids) - 2)), ("walk_", None)):
            if ts is None:
                ts, t = [], 0
                while t < len(ids) - 2:
                    if mask[t + 1] and mask[t + 2]:  # x[t+1] is known and part of the reply
                        ts.append(t)
                        t += advance[t]
                    t += 1
            for t in ts:
                if not mask[t + 2]:
                    continue
                guess, alive, advance[t] = int(successor[ids[t]]), True, 0
                for k in range(num_steps):
                    if t + 2 + k >= len(ids) or not mask[t + 2 + k]:
                        break
                    guess = int(other[guess])
                    hit = guess == ids[t + 2 + k]
                    counts[name + "reached"][k] += alive
                    alive = alive and hit
                    counts[name + "accepted"][k] += alive
                    advance[t] += alive
                    if name == "":
                        hits_of_step[k].append(hit)
    return counts, [np.mean(hits) for hits in hits_of_step]


def product_limit(reached, accepted):
    return np.cumprod([a / r for a, r in zip(accepted, reached, strict=True)])


def test_partly_wrong_drafter_against_two_permutations(target):
    successor = permutation()
    other = wrong_at(successor, [3, 17, 40, 41, 42])
    samples = [sample(successor, (4, 120, 6, 90), seed, index=seed) for seed in range(4)]
    summary = run(copying_drafter(other), target, samples, num_steps=3).summary()
    counts, marginal = by_hand(successor, other, samples, 3)
    for name, expected in counts.items():
        assert summary[f"{name}_count"] == expected, name
    assert summary["cycles"] == counts["walk_reached"][0]
    assert summary["cumulative"] == pytest.approx(product_limit(counts["reached"], counts["accepted"]))
    assert summary["tau"] == pytest.approx(1 + product_limit(counts["walk_reached"], counts["walk_accepted"]).sum())
    assert summary["cumulative"][2] != pytest.approx(np.prod(marginal), abs=1e-3)
    assert summary["tau"] != pytest.approx(summary["length_per_position"], abs=1e-3)


def test_tokens_outside_the_draft_vocabulary_are_misses(target):
    successor = permutation()
    kept = torch.ones(VOCAB, dtype=torch.bool)
    kept[[7, 23]] = False
    samples = [sample(successor, (4, 200), seed=1)]
    drafter = copying_drafter(successor, draft_vocab=kept)
    summary = run(drafter, target, samples, num_steps=3).summary()
    predicted = samples[0].input_ids[2:][samples[0].loss_mask[2:] != 0]
    outside = int((predicted == 7).sum() + (predicted == 23).sum())
    assert outside > 3
    assert summary["positions"] - summary["accepted_count"][0] == outside
    assert summary["vocab_share_of_misses"] == 1.0
    tree = run(drafter, target, samples, num_steps=3, topk=4, tree_tokens=12).summary()
    assert tree["positions"] - tree["accepted_count"][0] == outside  # a wider tree cannot draft them either
    warm = run(drafter, target, samples, num_steps=3, temperature=1.0).summary()
    assert warm["expected_min_pq"][0] < 1 - 0.5 * outside / len(predicted)


def test_data_sampled_at_a_temperature_is_judged_by_the_targets_own_token(target):
    successor = permutation()
    s = sample(successor, (4, 60))
    ids = s.input_ids.clone()
    for position in range(10, 60, 7):  # the row takes another token here and follows the target again after it
        ids[position] = (ids[position] + 1) % VOCAB
        for later in range(position + 1, len(ids)):
            ids[later] = successor[ids[later - 1]]
    s.input_ids, s.states = ids, states_of(ids, successor)
    # the drafter reads x[t+1] through states that say what the target wanted there; after a deviation it is told
    # a token that the row does not hold, so it is wrong exactly at the position of the deviation
    summary = run(copying_drafter(successor), target, [s], num_steps=3).summary()
    deviations = len(range(10, 60, 7))
    assert summary["off_row_share"] == pytest.approx(deviations / summary["positions"])
    assert summary["left_row_count"] > 0
    assert summary["positions"] - summary["accepted_count"][0] == deviations
    assert summary["walk_reached_count"][0] == summary["cycles"]


def test_tree_of_one_branch_equals_the_chain_and_wider_trees_accept_more(target):
    successor = permutation()
    drafter = copying_drafter(wrong_at(successor, list(range(0, VOCAB, 4))))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # a soft head, so that the second best guess is sometimes right
        noise = torch.randn(drafter.lm_head.weight.shape, generator=generator)
        drafter.lm_head.weight.add_(0.4 * noise)
    samples = [sample(successor, (4, 150), seed, index=seed) for seed in range(2)]
    chain = run(drafter, target, samples, num_steps=3).summary()
    from common import offline_eval

    wide = run(drafter, target, samples, num_steps=3, topk=8, tree_tokens=60).summary()
    assert wide["tau"] > chain["tau"] + 0.05
    assert all(w >= c for w, c in zip(wide["cumulative"], chain["cumulative"], strict=True))
    # topk 1 through the tree code: same drafts as the chain
    drafter.set_embedding(target.embed_tokens)
    batch = offline_eval.pack_documents([samples[0]], 3)
    own = offline_eval.target_tokens(target, batch)
    chained = offline_eval.draft(drafter, batch, 3)
    grown = offline_eval.DraftChain(drafter, batch)
    for k in range(3):
        ids, _ = grown.top(1)
        assert torch.equal(ids[:, 0], chained[:, k])
        grown.advance(ids[:, 0])
    path = offline_eval.draft_batch(drafter, batch, own, Setting(num_steps=3, topk=2, tree_tokens=3))
    assert ((path[:, 0] == own[batch.teacher_rows[:, 0]]) | (path[:, 0] == -1)).all()


def test_expected_acceptance_agrees_with_sampling(target):
    """sum min(p, q) against a simulation of rejection sampling at step 0, from both models' own logits."""
    successor = permutation()
    drafter = copying_drafter(wrong_at(successor, [1, 2, 3, 4, 5, 6, 7, 8]))
    s = sample(successor, (4, 120))
    heat = 3.0
    summary = run(drafter, target, [s], num_steps=2, temperature=heat).summary()
    from common import offline_eval

    batch = offline_eval.pack_documents([s], 2)
    with offline_eval.rounded_weights(drafter):
        chain = offline_eval.DraftChain(drafter, batch)
        ((_, logits),) = list(chain.logit_chunks())
        greedy = chain.top(1)[0]
    (target_logits,) = list(target.logit_chunks(batch.last_states))
    whole = batch.counts.all(1)
    q = (logits / heat).softmax(-1)[whole]
    p = (target_logits / heat).softmax(-1)[batch.teacher_rows[whole, 0]]
    assert summary["expected_min_pq"][0] == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), abs=1e-5)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(q, 2000, replacement=True, generator=generator)
    accept = torch.rand(drawn.shape, generator=generator) < p.gather(1, drawn) / q.gather(1, drawn)
    assert summary["expected_min_pq"][0] == pytest.approx(float(accept.float().mean()), abs=0.01)
    assert summary["expected_match"][0] == pytest.approx(float(p.gather(1, greedy[whole]).mean()), abs=1e-5)


def entangled_drafter() -> Drafter:
    """Random weights, so that every token and state on a path matters; half of the vocabulary can be drafted."""
    kept = torch.zeros(VOCAB, dtype=torch.bool)
    kept[::2] = True
    drafter = copying_drafter(permutation(), draft_vocab=kept)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(4)
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator)).copy_(parameter.bfloat16())
    return drafter


def test_every_node_of_a_grown_tree_has_the_probability_of_its_path(target):
    """Each candidate's score against a chain that is walked from the root along the same tokens, one by one."""
    from common import offline_eval

    drafter, grown = entangled_drafter(), []
    drafter.set_embedding(target.embed_tokens)
    batch = pack_documents([sample(permutation(), (4, 20))], 3)
    own = offline_eval.target_tokens(target, batch)
    remember = offline_eval.tokens_on_target_path
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline_eval, "tokens_on_target_path", lambda tree, y: grown.append(tree) or remember(tree, y))
        offline_eval.draft_batch(drafter, batch, own, Setting(num_steps=3, topk=3, tree_tokens=16))
    (tree,) = grown
    c = 7  # one position is enough: all others run in the same batch
    for node in range(tree.tokens.shape[1]):
        path, at = [], node
        while at >= 0:
            path.append(int(tree.tokens[c, at]))
            at = int(tree.parents[c, at])
        assert len(path) == int(tree.depth[node]) + 1
        chain, probability = DraftChain(drafter, batch), 1.0
        for step, token in enumerate(reversed(path)):
            ids, logprobs = chain.top(VOCAB // 2)
            probability *= float(logprobs[c][ids[c] == token].exp())
            if step < len(path) - 1:
                chain.advance(torch.full_like(batch.query_rows, token))
        assert float(tree.scores[c, node]) == pytest.approx(probability, rel=1e-4)
    kept = tree.scores[c][tree.kept[c]]
    assert len(kept) == 15 and float(kept.min()) >= float(tree.scores[c][~tree.kept[c]].max())


def test_expected_acceptance_of_the_second_step(target):
    """Row tokens outside the draft vocabulary end a chain: nothing after them is ever accepted."""
    drafter, s = entangled_drafter(), sample(permutation(), (4, 60))
    summary = run(drafter, target, [s], num_steps=2, temperature=2.0).summary()
    batch = pack_documents([s], 2)
    whole = batch.counts.all(1)
    (target_logits,) = list(target.logit_chunks(batch.last_states))
    p = (target_logits / 2.0).softmax(-1)  # [R, V]
    names = torch.nonzero(drafter.t2d).flatten()
    chain, q = DraftChain(drafter, batch), []
    for step in range(2):
        ((_, logits),) = list(chain.logit_chunks())
        full = torch.zeros(len(batch.query_rows), VOCAB)
        full[:, names] = (logits / 2.0).softmax(-1)
        q.append(full)
        if step == 0:
            chain.advance(batch.chain_ids[:, 1])
    x, first, second = batch.chain_ids[:, 1], p[batch.teacher_rows[:, 0]], p[batch.teacher_rows[:, 1]]
    accepted = (q[0].gather(1, x[:, None]) / first.gather(1, x[:, None])).clamp(max=1).squeeze(1)
    assert bool((accepted[whole] == 0).any()) and bool((accepted[whole] > 0).any())
    expected = accepted * torch.minimum(second, q[1]).sum(-1)
    assert summary["expected_min_pq"][1] == pytest.approx(float(expected[whole].mean()), rel=1e-4)


def test_order_and_split_over_ranks_change_no_bit(target):
    successor = permutation()
    drafter = copying_drafter(wrong_at(successor, [3, 17, 40]))
    samples = [sample(successor, (4, 60 + 7 * i), seed=i, index=i) for i in range(5)]
    whole = run(drafter, target, samples, num_steps=4)
    ranks = [run(drafter, target, samples[r::2], num_steps=4) for r in range(2)]
    assert whole.summary() == ranks[1].merge([ranks[0]]).summary()
    assert run(drafter, target, samples[::-1], num_steps=4).summary() == whole.summary()


@pytest.mark.parametrize("setting", [
    Setting(num_steps=3), Setting(num_steps=3, temperature=2.0), Setting(num_steps=2, topk=3, tree_tokens=8),
], ids=["chain", "temperature", "tree"])  # fmt: skip
def test_samples_that_share_a_batch_count_as_if_alone(target, setting):
    """As on a GPU: the same counts, in batches of one, of several, and all in one; with samples that add nothing."""
    drafter, lengths = entangled_drafter(), [(5, 40, 3, 30), (2, 1), (4, 60), (1, 2, 2), (3, 9, 6, 1)]
    samples = [sample(permutation(), each, seed, index=seed) for seed, each in enumerate(lengths)]
    samples[2].loss_mask[:] = 0
    drafter.set_embedding(target.embed_tokens)
    by_record, records, told = {id(s.record): s for s in samples}, [s.record for s in samples], []

    def counted(tokens):
        return evaluate(drafter, target, lambda r: by_record[id(r)], records, setting,
                        lambda done, counts: told.append(done), tokens_per_batch=tokens)  # fmt: skip

    alone = counted(1)
    assert told == [1, 2, 3, 4, 5] and len({row[0] for row in alone.rows}) == 4
    for tokens, calls in ((8, [1, 4, 5]), (10**6, [5])):
        told.clear()
        shared = counted(tokens)
        assert told == calls
        assert [row[:5] for row in shared.rows] == [row[:5] for row in alone.rows]
        for row, expected in zip(shared.rows, alone.rows, strict=True):
            np.testing.assert_allclose(row[5], expected[5], atol=1e-5)


def test_samples_are_packed_by_one_thread_and_drafted_by_all(target, monkeypatch):
    drafter, each, seen = entangled_drafter(), sample(permutation(), (5, 9), 1), []
    drafter.set_embedding(target.embed_tokens)
    for name in ("pack_documents", "draft_batch"):
        whole = getattr(common.offline_eval, name)
        monkeypatch.setattr(common.offline_eval, name, lambda *arguments, name=name, whole=whole: (
            seen.append((name, torch.get_num_threads())), whole(*arguments))[1])  # fmt: skip
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        evaluate(drafter, target, lambda record: each, [each.record], Setting(num_steps=3))
    finally:
        torch.set_num_threads(before)
    assert seen == [("pack_documents", 1), ("draft_batch", 3)]


def test_weights_are_judged_as_exported_and_masters_come_back(target):
    drafter = copying_drafter(permutation())
    drafter.init_weights(seed=1)  # full float32 values
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    seen = {}

    def tick(done, counts):
        seen.update({name: p.detach().clone() for name, p in drafter.named_parameters()})

    s = sample(permutation())
    drafter.set_embedding(target.embed_tokens)
    evaluate(drafter, target, lambda r: s, [s.record], Setting(num_steps=2), tick)
    for name, p in drafter.named_parameters():
        assert torch.equal(p, before[name]) and torch.equal(seen[name], before[name].bfloat16().float())
    assert not torch.equal(seen["fc.weight"], before["fc.weight"])


def test_samples_without_supervision_add_nothing(target):
    successor = permutation()
    empty = sample(successor, (4, 1), index=1)
    empty.loss_mask[:] = 0
    short = sample(successor, (1, 1), index=2)
    counts = run(copying_drafter(successor), target, [sample(successor), empty, short], num_steps=2)
    assert counts.summary()["samples"] == 1
    assert len(counted_positions(short.loss_mask)) == 0


def test_what_does_not_fit_is_named(target):
    successor = permutation()
    config, s = copying_drafter(successor).config, sample(successor)
    info = {"capture_points": list(POINTS), "last_state": "pre-norm"}
    check_fit(config, info, target, s, "drafter/", "states/")

    def refused(message, config=config, info=info, s=s, target=target):
        with pytest.raises(UserError, match=message):
            check_fit(config, info, target, s, "drafter/", "states/")

    refused(r"drafter/: capture points \[2, 4, 6\] does not fit .* states/, which have \[3, 5, 7\]",
            info={"capture_points": [3, 5, 7]})  # fmt: skip
    from dataclasses import replace

    refused("target hidden size 128", config=replace(config, target_hidden_size=128))
    refused("number of capture points 2", config=replace(config, capture_points=(2, 4)), info={})
    refused("vocabulary 99 is larger than the target's 64", config=replace(config, vocab_size=99))
    refused("norm option: .*'post-norm'", info={**info, "last_state": "post-norm"})
    same = {**info, "config_hash": hash_of(target.config)}
    check_fit(config, same, target, s, "drafter/", "states/")
    other = {**same, "model": "theirs", "architecture": "Qwen3ForCausalLM", "num_layers": 28}
    refused(r"states/ are of theirs \(Qwen3ForCausalLM, 28 layers\), but the target's config.json is another",
            info={**other, "config_hash": hash_of({**target.config, "num_hidden_layers": 28})})  # fmt: skip
    big = sample(successor)
    big.input_ids[3] = 64
    refused("vocabulary 64 .* token id 64", s=big)
