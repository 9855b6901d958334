"""Kimi-K2.5's own class, from conversations to the layers that a server would capture, on a miniature of it
(tests/kimi_miniature.py): 61 layers, multi-head latent attention, experts, a tokenizer that is Python code.

extract.py runs as a person starts it, over one and over two tensor-parallel ranks; its states must equal those of
transformers' DeepSeek-V3 with the same weights. What is INT4 needs a GPU: tests/test_kimi_gpu.py. Three engines.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import engine_helpers as helpers
import kimi_miniature
import serving
import training_fixtures
from common.capture_points import CapturePoints
from common.engine import stop_engine
from common.errors import UserError
from common.load_drafter import load_drafter
from common.shards import ShardReader
from common.target import load_target_parts
from common.tokenizing import load_tokenizer
from common.vocab import target_ids

ROOT = Path(__file__).resolve().parent.parent
POINTS = CapturePoints((3, 31, 59), 61)
TOLERANCE = 1e-5
CALL = {"function": {"name": "weather", "arguments": {"at": "Paris"}}}
CHATS = [
    {"messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": "", "reasoning_content": "ask", "tool_calls": [CALL]},
        {"role": "tool", "content": "dry"}, {"role": "assistant", "content": "no rain", "reasoning_content": "dry"},
    ], "tools": [{"type": "function", "function": {"name": "weather"}}]},
    {"messages": [
        {"role": "user", "content": "What is the weather?"}, {"role": "assistant", "content": "plain"},
        {"role": "user", "content": "and in Spain?"},
        {"role": "assistant", "content": "the rain stays mainly in the plain", "reasoning_content": "a song"},
    ]},
]  # fmt: skip
SAID = [
    ['ask</think><|tool_calls_begin|>weather({"at": "Paris"})<|tool_calls_end|><|im_end|>',
     "dry</think>no rain<|im_end|>"],
    ["</think>plain<|im_end|>", "a song</think>the rain stays mainly in the plain<|im_end|>"],
]  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """The checkpoint with tokenizer and config class as code; both leave a line in ../ran when they run."""
    folder = tmp_path_factory.mktemp("kimi") / "Kimi-miniature"
    kimi_miniature.kimi_k25(folder)
    kimi_miniature.add_remote_code(folder, folder.parent / "ran")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Chats and tokenised rows of several lengths, over the whole vocabulary."""
    samples = helpers.samples_of([23, 130, 1, 64], vocab=kimi_miniature.VOCAB)
    tokenised = [{"input_ids": one.input_ids.tolist(), "loss_mask": [1] * len(one.input_ids)} for one in samples]
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*CHATS, *tokenised]))
    return path


@pytest.fixture(scope="module")
def reference(target):
    return kimi_miniature.reference(kimi_miniature.as_deepseek_v3(target, target.parent / "twin"), POINTS)


def run(script: str, *arguments, expect: int = 0) -> str:
    """What a script prints, run as a person runs it."""
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=850, env=training_fixtures.environment(),
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == expect, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def captured(target, data, tmp_path_factory):
    """Shards of `data` by extract.py over this many ranks, captured once; more ranks also get prompts in chunks."""
    made = {}

    def capture(tp: int) -> Path:
        if tp not in made:
            made[tp] = tmp_path_factory.mktemp(f"tp{tp}") / "states"
            further = ["--tp", tp, "--chunk-tokens", 48] if tp > 1 else []
            run("extract.py", "--model", target, "--data", data, "--output", made[tp], "--dtype", "float32",
                "--state-dtype", "float32", "--ring-gb", 0.2, "--trust-remote-code", *further)  # fmt: skip
        return made[tp]

    return capture


@pytest.mark.engine
@pytest.mark.parametrize("tp", [1, 2])
def test_extract_equals_transformers_and_sglangs_own_capture(target, data, captured, reference, tp):
    out = captured(tp)
    info, reader = json.loads((out / "dataset.json").read_text()), ShardReader(out)
    assert info["architecture"] == "KimiK25ForConditionalGeneration" and info["capture_points"] == [3, 31, 59]
    assert (info["num_layers"], info["hidden_size"], info["vocab_size"]) == (61, 64, 163_840)
    assert len(reader.records) == 6
    for record in reader.records:
        sample = reader.load(record)
        expected = reference.states(sample.input_ids)
        for name, state, want in zip(POINTS.names(), sample.states, expected, strict=True):
            assert helpers.relative_error(state, want) <= TOLERANCE, (record.index, name)

    (checks,) = info["run"]["self_checks"]
    assert {proof["rank"] for proof in checks["first_batch"]} == set(range(tp))
    for proof in checks["first_batch"]:  # against the model's own EAGLE capture, and its neighbours are far
        assert set(proof["bit_equal"]) == set(POINTS.names()) == set(proof["relative_error"])
        assert max(proof["relative_error"].values()) <= TOLERANCE
        assert min(proof["neighbour_error"][f"point {point}"] for point in POINTS.points) > 0.01
    assert checks["own_token"] == {"checked": 6, "ties": 0, "near_ties": 0, "mismatches": 0}


def test_a_shifted_point_would_not_pass(reference):
    shifted = helpers.Reference.__new__(helpers.Reference)
    shifted.model, shifted.points = reference.model, CapturePoints((4, 32, 60), 61)
    ids = helpers.samples_of([40], vocab=kimi_miniature.VOCAB)[0].input_ids
    for state, other in zip(reference.states(ids)[:-1], shifted.states(ids)[:-1], strict=True):
        assert helpers.relative_error(other, state) > 1000 * TOLERANCE


@pytest.mark.engine
def test_what_the_model_said_is_supervised_and_thinking_survives(target, captured):
    tokenizer, reader = load_tokenizer(str(target), trust_remote_code=True), ShardReader(captured(1))
    for record, said in zip(reader.records[:2], SAID, strict=True):
        sample = reader.load(record)
        ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
        starts = [t for t in range(len(ids)) if mask[t] and not mask[t - 1]]
        ends = [t + 1 for t in range(len(ids)) if mask[t] and not (mask + [0])[t + 1]]
        assert [tokenizer.decode(ids[a:b]) for a, b in zip(starts, ends, strict=True)] == said
        assert [ids[a - 1] for a in starts] == [163606, 163606] and ids.count(163607) == 2
        assert all(mask[t] for t, token in enumerate(ids) if token == 163607)


@pytest.mark.engine
def test_a_drafter_trained_on_these_states_is_served_its_points(target, captured, tmp_path):
    """Training, export and offline evaluation need the target's folder, but none of its code."""
    ran = target.parent / "ran"
    states = captured(1)
    assert set(ran.read_text().split()) == {"tokenizer"}  # ran where allowed; the engine has its own config class
    before = ran.read_text()
    out = tmp_path / "drafter"
    training_fixtures.train("--data", states, "--output", out, "--max-steps", 2, "--eval-fraction", 0)
    written = json.loads((out / "config.json").read_text())
    assert written["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [3, 31, 59], "use_aux_hidden_state": True}
    assert (written["target_hidden_size"], written["vocab_size"]) == (64, 163_840)
    parts = load_target_parts(target)
    drafter, _ = load_drafter(out, parts.config)
    assert drafter.config.capture_points == (3, 31, 59) and len(target_ids(drafter.d2t)) == written["draft_vocab_size"]
    run("eval_acceptance.py", "--drafter", out, "--data", states, "--split", "all", "--output", tmp_path / "report")
    assert ran.read_text() == before


@pytest.mark.engine
def test_an_exported_drafter_makes_the_engine_capture_its_points(target, tmp_path):
    """SGLang takes this family's ids as they are; with those of the Llama family the evaluation refuses to report.

    Without --trust-remote-code the engine itself runs on its own classes. One engine.
    """
    ran = target.parent / "ran"
    before = ran.read_text() if ran.exists() else None
    engine = helpers.start(target, POINTS, tmp_path / "engine.log")
    try:
        drafter = serving.random_drafter(target, tmp_path / "drafter", POINTS.points)
        assert serving.layers_read_back(engine, drafter, [3, 31, 59], tmp_path / "layers.json") == [3, 31, 59]
        wrong = serving.random_drafter(target, tmp_path / "wrong", POINTS.points, serving_ids=[2, 30, 58])
        with pytest.raises(UserError, match=r"at \[3, 31, 59\], but the engine feeds it those at \[2, 30, 58\]"):
            serving.layers_read_back(engine, wrong, [3, 31, 59], tmp_path / "wrong.json")
    finally:
        stop_engine(engine)
    assert (ran.read_text() if ran.exists() else None) == before


def test_without_the_flag_no_code_of_the_model_runs(target, data, tmp_path):
    ran = target.parent / "ran"
    before = ran.read_text() if ran.exists() else None
    drafter = serving.random_drafter(target, tmp_path / "drafter", POINTS.points)
    for script, *arguments in (
        ("extract.py", "--data", data, "--output", tmp_path / "out"),
        ("eval_acceptance.py", "--drafter", drafter, "--prompts", data, "--output", tmp_path / "report"),
    ):
        told = run(script, "--model", target, *arguments, expect=2)
        assert "brings its own code; look at it, then pass --trust-remote-code" in told and "Traceback" not in told
    assert (ran.read_text() if ran.exists() else None) == before and not (tmp_path / "out").exists()


def test_packed_experts_are_the_weights_to_within_a_step(tmp_path):
    """INT4 as in the real checkpoint, unpacked here by hand and by the library; the parts that training reads."""
    sizes = {"num_hidden_layers": 3, "vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    plain = kimi_miniature.kimi_k25(tmp_path / "plain", **sizes)
    packed = kimi_miniature.kimi_k25(tmp_path / "packed", int4=True, **sizes)
    tensors, stored = kimi_miniature.read(plain), kimi_miniature.read(packed)
    experts = [name.removesuffix(".weight") for name in tensors if ".mlp.experts." in name]
    assert len(experts) == 2 * 8 * 3 and not [name for name in experts if f"{name}.weight" in stored]
    twin = kimi_miniature.read(kimi_miniature.as_deepseek_v3(packed, tmp_path / "twin"))
    for name in experts:
        words, scale = stored[f"{name}.weight_packed"], stored[f"{name}.weight_scale"]
        weight = tensors[f"{name}.weight"].float()
        assert (words.dtype, scale.dtype) == (torch.int32, torch.bfloat16)
        assert words.shape == (weight.shape[0], weight.shape[1] // 8)
        assert scale.shape == (weight.shape[0], weight.shape[1] // 32)
        assert stored[f"{name}.weight_shape"].tolist() == list(weight.shape)
        nibbles = torch.stack([(words >> (4 * place)) & 15 for place in range(8)], dim=-1).flatten(1) - 8
        step = scale.float().repeat_interleave(32, dim=1)
        assert ((nibbles * step - weight).abs() <= 0.55 * step).all()
        assert nibbles.min() < -5 and nibbles.max() > 5  # the range is used
        unpacked = twin[f"{name.removeprefix(kimi_miniature.PREFIX)}.weight"]
        assert torch.equal(unpacked, (nibbles * step).to(torch.bfloat16))
    assert {name: stored[name].dtype for name in stored if ".experts." not in name} == {
        name: tensor.dtype for name, tensor in tensors.items() if ".experts." not in name
    }  # attention, the shared expert, the dense layer and the head are left alone
    one, other = load_target_parts(plain), load_target_parts(packed)
    assert one.fingerprint() == other.fingerprint() and other.lm_head.dtype == torch.bfloat16
    assert torch.equal(other.embed_tokens, stored["language_model.model.embed_tokens.weight"])
    assert torch.equal(other.norm, stored["language_model.model.norm.weight"])
    assert other.eps == 1e-5
