"""Offline against engine: a stand-in engine serves a drafter with one thing wrong, which must be named."""

import gc
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import eval_acceptance
from common import recapture
from common.capture_points import CapturePoints
from common.drafter import Drafter, DrafterConfig
from common.engine_figures import Reply
from common.errors import UserError
from common.losses import rms_norm
from common.offline_eval import Setting, evaluate
from common.parity import (
    NormedResidual,
    candidates,
    find_causes,
    gap,
    parity_of_all,
    pick_points,
    rebuilt,
    verdict,
    with_vocabulary,
)
from common.report import Report
from common.shards import Sample, ShardReader
from common.target import TargetParts
from tests.acceptance_fixtures import (
    conversation,
    copying_drafter,
    permutation,
    states_of,
    target_config,
    write_shards,
    write_target,
)

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


def count_alive() -> int:
    """Parts of a target as they are on the device (float32 on the CPU), and drafters that hold an embedding."""
    gc.collect()
    there = gc.get_objects()  # by type(): some of these objects answer isinstance with a warning
    parts = [each for each in there if type(each) is TargetParts and each.norm.dtype == torch.float32]
    return len(parts) + sum(issubclass(type(each), Drafter) and each.embed_tokens is not None for each in there)


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """compared(engine_taus): (report.json's content, alive) of `parity_of_all` on replies of the permutation target,
    which two drafters of the same name that copy it get right, so that offline tau is 3; engine_taus: what the engine
    said. What captures is a stand-in: it writes the states that the target has, twice. alive: `count_alive` of what the
    comparison made, each time it was asked."""
    successor, alive, engines = permutation(), [], []
    target = write_target(tmp_path / "t")
    drafters = {f"{name}/final": (copying_drafter(successor), {}) for name in "ab"}
    ids, mask = conversation(successor, [4, 41], 0)
    prompt, output = ids[:4].tolist(), ids[4:].tolist()

    def by_engine(model, config, rows, points, folder, *_):
        alive.append(count_alive() - before)
        engines.append(folder.name)
        if len(engines) > 2:
            raise UserError("no third engine")
        states = [states_of(row.input_ids, successor)[:1] * (len(points.points) + 1) for row in rows]
        samples = [(row.input_ids, row.loss_mask, each) for row, each in zip(rows, states, strict=True)]
        return ShardReader(write_shards(folder, target, samples, capture_points=list(points.points)))

    monkeypatch.setattr(recapture, "by_engine", by_engine)
    before = count_alive()  # those of other tests

    def compare(*engine_taus):
        speculative = {}
        for path, tau in zip(drafters, engine_taus, strict=True):
            cycles = 100
            meta = {"spec_verify_ct": cycles, "spec_num_correct_drafts": round((tau - 1) * cycles),
                    "completion_tokens": len(output)}  # fmt: skip
            speculative[path, SETTING] = {1: {"replies": [Reply(0, 1, None, prompt, output, meta)]}}
        found = Report(tmp_path / "report.json", {})
        arguments = eval_acceptance.Arguments(model=str(target), batch_sizes=[1], device="cpu")
        try:
            parity_of_all(arguments, target_config(), drafters, speculative, tmp_path, found)
        except UserError as error:
            found.failed(error)
        return json.loads((tmp_path / "report.json").read_text()), alive

    return compare


def test_nothing_of_the_scoring_is_left_when_an_engine_starts(compared):
    content, alive = compared(3.0, 3.0)
    assert [run["offline_tau"] for run in content["parity"]["runs"]] == [3.0, 3.0]
    assert alive == [0, 0]
    names = [line.split(":")[0] for line in content["parity"]["lines"]]
    assert names == ["a/final 2/1/3", "b/final 2/1/3"]


def test_nor_when_the_causes_of_a_gap_are_looked_for_and_what_is_compared_stays(compared):
    content, alive = compared(1.5, 3.0)  # the first disagrees: a second engine; the third, for b, does not start
    (run,) = content["parity"]["runs"]
    assert run["drafter"] == "a/final" and run["gap"] == 1.0 and run["causes"]
    assert alive == [0, 0, 0] and content["parity"]["agrees"] is None
    assert content["unfinished"]["part"] == "the comparison of offline and engine for b/final 2/1/3"


def test_an_engine_that_captures_finds_the_reserve_of_the_gpu_given_back(tmp_path, monkeypatch):
    from common import engine

    done = []

    def start_engine(*_):
        done.append("started")
        raise UserError("no GPU here")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(engine, "start_engine", start_engine)
    with pytest.raises(UserError, match="no GPU here"):
        recapture.by_engine("m", target_config(), [], CapturePoints(POINTS, LAYERS), tmp_path)
    assert done == ["emptied", "started"]
