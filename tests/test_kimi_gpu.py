"""Kimi-K2.5 in small on one GPU: INT4 experts captured, and drafters in the engine's own EAGLE-3 decoding.

    python -m pytest -m gpu tests/test_kimi_gpu.py        # about ten minutes, most of it engines starting

The miniature (tests/kimi_miniature.py) has the real class, layer count, vocabulary and head sizes. It answers with a
dozen words only, so that a drafter can learn its replies by heart in a few hundred steps. Without NVIDIA's packages for
other backends: Triton attention, which every GPU machine with PyTorch has. INT4 experts need `nvcc` (marlin is compiled
on first use).
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import engine_helpers as helpers
import kimi_miniature
import serving
import standin_tokenizer
from common.capture_points import CapturePoints
from common.shards import ShardReader
from common.tokenizing import load_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parent.parent
POINTS = CapturePoints((3, 31, 59), 61)
ENGINE = {"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none",
          "max_total_tokens": 65536}  # fmt: skip
NO_GRAPHS = {"disable_cuda_graph": True}
TEMPLATE = (
    "{%- for m in messages -%}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)
WORDS = ["the", "rain", "in", "stays", "mainly", "plain", "are", "a", "helpful", "assistant"]
TOKENS_A_REPLY = 48


def run(script: str, *arguments, expect: int = 0) -> str:
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL, env=os.environ)
    assert done.returncode == expect, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


# ---- INT4 experts ----------------------------------------------------------------------------------------------------

LAYERS = (3, 31, 59, 60)  # both sides of these are captured
AROUND = [3, 4, 31, 32, 59, 60]


def compare(folder: Path, samples) -> None:
    """samples: (input_ids, states at AROUND and the last one) as captured from the INT4 checkpoint in `folder`.

    Each layer must be as near to float32 as transformers in bfloat16 is with the same, unpacked weights; and the
    routed experts must matter to the comparison.
    """
    twin = kimi_miniature.as_deepseek_v3(folder, folder.parent / "twin")
    exact, rounded = (kimi_miniature.reference(twin, POINTS, kind).model for kind in (torch.float32, torch.bfloat16))
    seen = []
    for input_ids, states in samples:
        at = dict(zip([*AROUND, 61], states, strict=True))
        into, out = {i: at[i] for i in LAYERS}, {i: at[i + 1] for i in LAYERS}
        expected = helpers.single_layers(exact, input_ids, into)
        usual = helpers.layer_errors(helpers.single_layers(rounded, input_ids, into), expected, into)
        seen.append((helpers.layer_errors(out, expected, into), usual))
    found, usual = ({i: statistics.median(pair[k][i] for pair in seen) for i in LAYERS} for k in range(2))
    assert all(found[i] <= 2 * usual[i] + 0.002 for i in LAYERS), (found, usual)
    for i in LAYERS:
        exact.model.layers[i].mlp.experts.down_proj.data.mul_(0.8)
    spoilt = helpers.layer_errors(out, helpers.single_layers(exact, input_ids, into), into)
    assert all(spoilt[i] > 2 * found[i] for i in LAYERS), (found, spoilt)


def test_int4_experts_give_the_states_of_the_dequantised_model(tmp_path):
    """One engine."""
    folder = kimi_miniature.kimi_k25(tmp_path / "kimi", int4=True, **kimi_miniature.ON_GPU)
    kimi_miniature.add_remote_code(folder, tmp_path / "ran")
    samples = helpers.samples_of([40, 200, 90, 17, 64, 128], vocab=kimi_miniature.VOCAB)
    rows = [{"input_ids": one.input_ids.tolist(), "loss_mask": [1] * len(one.input_ids)} for one in samples]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "states"
    run("extract.py", "--model", folder, "--data", tmp_path / "rows.jsonl", "--output", out, "--trust-remote-code",
        "--capture-points", *AROUND, "--engine-args", json.dumps(ENGINE))  # fmt: skip
    (checks,) = json.loads((out / "dataset.json").read_text())["run"]["self_checks"]
    (proof,) = checks["first_batch"]
    assert min(proof["bit_equal"][f"point {point}"] for point in AROUND) == 1.0
    assert checks["own_token"]["checked"] == 6 and checks["own_token"]["mismatches"] == 0
    reader = ShardReader(out)
    stored = [reader.load(record) for record in reader.records]
    compare(folder, [(sample.input_ids, sample.states) for sample in stored])


# ---- drafters in the engine ------------------------------------------------------------------------------------------


def write_target(folder: Path, **sizes) -> Path:
    """A miniature that says WORDS, with a tokenizer and a plain chat template."""
    standin_tokenizer.build(folder, TEMPLATE)
    tokenizer = load_tokenizer(str(folder), trust_remote_code=True)
    says = [token for word in WORDS for token in tokenizer(f" {word}")["input_ids"]]
    assert len(says) == len(WORDS)
    return kimi_miniature.kimi_k25(folder, says=says, **sizes)


def write_prompts(path: Path, count: int = 24) -> Path:
    turns = [f"{WORDS[i % 10]} {WORDS[i // 10]} {WORDS[-i % 7]} what is {i}?" for i in range(count)]
    path.write_text("".join(json.dumps({"turns": [turn], "category": "words"}) + "\n" for turn in turns))
    return path


def answered_states(target: Path, prompts: Path, folder: Path, *engine) -> Path:
    """States of what the target answers to these prompts, by extract.py."""
    run("extract.py", "--model", target, "--data", prompts, "--output", folder / "states", "--regenerate",
        "--max-new-tokens", TOKENS_A_REPLY, "--trust-remote-code", *engine)  # fmt: skip
    return folder / "states"


def learn_by_heart(states: Path, folder: Path, *more, steps: int = 300, device: str = "cuda") -> Path:
    """A drafter trained on all of them, by train_drafter.py."""
    run("train_drafter.py", "--data", states, "--output", folder / "drafter", "--device", device,
        "--intermediate-size", 256, "--draft-vocab-size", 512, "--ttt-steps", 4, "--tokens-per-step", 1024,
        "--learning-rate", 2e-3, "--eval-fraction", 0, "--max-steps", steps, "--tensorboard", "False",
        *more)  # fmt: skip
    return folder / "drafter"


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("kimi") / "Kimi-miniature", **kimi_miniature.ON_GPU)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="module")
def states(target, prompts, tmp_path_factory) -> Path:
    return answered_states(target, prompts, tmp_path_factory.mktemp("answered"), "--engine-args", json.dumps(ENGINE))


def evaluate(target, prompts, output: Path, *drafters, expect: int = 0, graphs: bool = False) -> tuple[dict, str]:
    """(report.json, what was printed) of eval_acceptance.py in the engine, parity checked."""
    engine = json.dumps(ENGINE if graphs else ENGINE | NO_GRAPHS)
    told = run("eval_acceptance.py", "--drafter", *drafters, "--model", target, "--prompts", prompts, "--check-parity",
               "--batch-sizes", 8, "--max-new-tokens", TOKENS_A_REPLY, "--output", output, "--trust-remote-code",
               "--engine-args", engine, expect=expect)  # fmt: skip
    return json.loads((output / "report.json").read_text()), told


def test_a_random_drafter_runs_in_the_engine_and_agrees_offline(target, prompts, tmp_path):
    """Layers read back from the running model; tau of engine and offline within 3 %. Three engines."""
    drafter = serving.random_drafter(target, tmp_path / "random", POINTS.points)
    report, _ = evaluate(target, prompts, tmp_path / "report", drafter)
    (run_,), (parity,) = report["engine"], report["parity"]["runs"]
    assert run_["layers_to_capture"] == [3, 31, 59]
    assert run_["speculative"]["cycles"] > 0 and 1.0 <= run_["speculative"]["tau"] < 1.5
    assert report["parity"]["agrees"] and abs(parity["gap"]) <= 0.03


@pytest.mark.parametrize("drafter_type", ["llama", "mla"])
def test_a_drafter_that_knows_the_replies_is_accepted_as_often_as_offline(
    target, prompts, states, tmp_path, drafter_type
):
    """With CUDA graphs, as served. Four engines.

    61 random layers turn rounding into other words, so what the engine says here is not quite what it said when it was
    captured, and much of the drafter's knowledge is of the ten words alone.
    """
    drafter = learn_by_heart(states, tmp_path, "--drafter-type", drafter_type)
    report, told = evaluate(target, prompts, tmp_path / "report", drafter, graphs=True)
    (run_,) = report["engine"]
    assert run_["layers_to_capture"] == [3, 31, 59]
    assert run_["speculative"]["tau"] > 1.25, told
    assert report["parity"]["agrees"], told


def test_a_drafter_with_the_layer_ids_of_another_family_is_refused(target, prompts, tmp_path):
    """No figure comes of it. One engine."""
    drafter = serving.random_drafter(target, tmp_path / "wrong", POINTS.points, serving_ids=[2, 30, 58])
    _, told = evaluate(target, prompts, tmp_path / "report", drafter, expect=2)
    assert "trained on the states at [3, 31, 59], but the engine feeds it those at [2, 30, 58]" in told
