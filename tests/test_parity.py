"""Offline against engine: a stand-in engine serves a drafter with one thing wrong, which must be named."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from common.drafter import Drafter, DrafterConfig
from common.losses import rms_norm
from common.offline_eval import Setting, evaluate
from common.parity import NormedResidual, candidates, find_causes, gap, pick_points, rebuilt, verdict, with_vocabulary
from common.shards import Sample
from common.target import TargetParts

VOCAB, WIDTH, LAYERS, POINTS = 64, 64, 8, (2, 4, 6)
CAPTURED = [1, 2, 3, 4, 5, 6, 7]
SETTING = Setting(num_steps=2, topk=1, tree_tokens=3)
LAYERS_OF = {
    "llama": dict(num_key_value_heads=2, head_dim=16, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "mla": dict(
        num_key_value_heads=4, head_dim=24, q_lora_rank=32, kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=16,
        v_head_dim=12, rope_scaling={"rope_type": "deepseek_yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                                     "original_max_position_embeddings": 16},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=LAYERS_OF)
def drafter(request) -> Drafter:
    """Random weights large enough that attention, rope and norms decide tokens; half of the vocabulary is drafted."""
    config = DrafterConfig(
        hidden_size=WIDTH, target_hidden_size=WIDTH, num_attention_heads=4, intermediate_size=64, vocab_size=VOCAB,
        draft_vocab_size=VOCAB // 2, capture_points=POINTS, max_position_embeddings=512, rope_theta=500.0, fc_norm=True,
        initializer_range=0.4, **LAYERS_OF[request.param],
    )  # fmt: skip
    made = Drafter(config)
    kept = torch.zeros(VOCAB, dtype=torch.bool)
    kept[1::2] = True
    made.set_vocab(torch.nonzero(kept).flatten() - torch.arange(VOCAB // 2), kept)
    made.init_weights(seed=1)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
            parameter.copy_(parameter.bfloat16())
    made.set_embedding(torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(3)))
    return made


@pytest.fixture(scope="module")
def target() -> TargetParts:
    """Its last state is the one-hot vector of the token that it says next."""
    return TargetParts({}, torch.zeros(VOCAB, WIDTH), torch.eye(VOCAB), torch.ones(VOCAB), 1e-6, False)


@pytest.fixture(scope="module")
def samples(drafter):
    """Replies that the drafter itself would write: its step-0 guess is right as long as it is served so."""
    from common.drafting import draft
    from common.packing import pack_documents

    out = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        length = 60
        states = [torch.randn(length, WIDTH, generator=generator) for _ in CAPTURED]
        ids, mask = torch.randint(VOCAB, (length,), generator=generator), torch.ones(length, dtype=torch.int64)
        chosen = [states[CAPTURED.index(point)] for point in POINTS] + [torch.zeros(length, WIDTH)]
        for position in range(2, length):
            document = SimpleNamespace(input_ids=ids[: position + 1], loss_mask=mask[: position + 1],
                                       states=[s[: position + 1] for s in chosen])  # fmt: skip
            ids[position] = draft(drafter, pack_documents([document], 1), 1)[position - 2, 0]
        last = torch.nn.functional.one_hot(ids.roll(-1), VOCAB).float()
        record = SimpleNamespace(path=None, index=seed, category=None, source=None)
        out.append(Sample(ids, mask, [*states, last], record))
    return out


def score_with(target, samples):
    def score(drafter, shift):
        points = [point + shift for point in POINTS]
        by_index = {s.record.index: pick_points(s, CAPTURED, points) for s in samples}
        counts = evaluate(drafter, target, lambda r: by_index[r.index], [s.record for s in samples], SETTING)
        return counts.summary(0)["tau"]

    return score


def test_agreement(drafter, target, samples):
    tau = score_with(target, samples)(drafter, 0)
    assert tau > 1.9
    (line,) = verdict("d", tau, tau * 1.02, [])
    assert "they agree (-2.0%)" in line


CASES = {
    "layer ids, +1": ("layer ids", lambda d: d, 1),
    "layer ids, -1": ("layer ids", lambda d: d, -1),
    "norm_output": ("norm options", lambda d: rebuilt(d, norm_output=True), 0),
    "norm_before_residual": ("norm options", lambda d: rebuilt(d, NormedResidual), 0),
    "fc_norm": ("norm options", lambda d: rebuilt(d, fc_norm=False), 0),
    "rope scaling": ("rope", lambda d: rebuilt(d, rope_scaling=None), 0),
    "rope theta": ("rope", lambda d: rebuilt(d, rope_theta=10000.0), 0),
    "d2t ignored": ("vocabulary map", lambda d: with_vocabulary(d, torch.arange(VOCAB // 2)), 0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_wrong_thing_is_tried_and_lands_on_the_engines_tau(drafter, target, samples, case):
    cause, broken, shift = CASES[case]
    score = score_with(target, samples)
    engine_tau = score(broken(drafter), shift)  # what an engine with this mistake would report
    causes = find_causes(engine_tau, candidates(drafter, LAYERS), score)
    exact = [each for each in causes if each["tau"] == engine_tau]
    assert cause in {each["cause"] for each in exact} and causes[0]["closes"]
    assert causes[0]["tau"] == engine_tau
    assert [abs(each["gap"]) for each in causes] == sorted(abs(each["gap"]) for each in causes)


def test_mistakes_that_cost_acceptance_are_told_apart(drafter, target, samples):
    score = score_with(target, samples)
    right = score(drafter, 0)
    taus = {name: score(broken(drafter), shift) for name, (_, broken, shift) in CASES.items()}
    assert all(gap(right, taus[name]) > 0.03 for name in taus if name != "norm_output"), taus
    # a mistake in rope alone is not explained by shifted layers, nor the other way round
    causes = find_causes(taus["rope scaling"], candidates(drafter, LAYERS), score)
    assert not any(each["closes"] for each in causes if each["cause"] == "layer ids")
    lines = verdict("d", right, taus["rope scaling"], causes)
    assert "not served as it was trained" in lines[0] and "rope" in lines[1] and "CLOSES THE GAP" in lines[1]
    assert verdict("d", right, right * 2, [{**each, "closes": False} for each in causes])[-1].startswith("  none of")


def test_nothing_is_tried_that_changes_nothing(drafter):
    plain = replace(drafter.config, rope_scaling=None, rope_theta=10000.0, fc_norm=False, draft_vocab_size=VOCAB)
    full = Drafter(plain)
    full.init_weights(seed=0)
    full.set_vocab(torch.zeros(VOCAB, dtype=torch.int64), torch.ones(VOCAB, dtype=torch.bool))
    assert {each.cause for each in candidates(full, LAYERS)} == {"layer ids", "norm options"}
    everything = {"layer ids", "norm options", "rope", "vocabulary map"}
    assert {each.cause for each in candidates(drafter, LAYERS)} == everything


def test_normed_residual_differs_from_the_drafter_as_it_says(drafter):
    from common.packing import pack_documents

    states = [torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    document = SimpleNamespace(input_ids=torch.arange(9), loss_mask=torch.ones(9, dtype=torch.int64), states=states)
    batch, other = pack_documents([document], 2), rebuilt(drafter, NormedResidual)
    w = drafter.weights()
    query, *_, residual = drafter.first_step(w, batch)
    attended = torch.zeros_like(query)
    expected = drafter.finish_step(w, attended, rms_norm(residual, w.hidden_norm, drafter.config.rms_norm_eps))
    assert torch.equal(other.finish_step(other.weights(), attended, residual)[0], expected[0])
    assert not torch.allclose(drafter.finish_step(w, attended, residual)[0], expected[0])
