"""The shard doctor on real hidden states: a tiny random Llama run by transformers, stored rightly and wrongly."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import eval_acceptance
from common import doctor, doctor_run
from common.errors import UserError
from common.losses import rms_norm
from common.recapture import TokenRow, by_transformers
from common.shard_run import RunDirectory
from common.shard_writing import write_sample
from common.shards import Record, token_hash
from common.state_dtypes import FP8, scale_of, to_stored
from tests.acceptance_fixtures import in_hub_cache

ROOT = Path(__file__).resolve().parent.parent
LAYERS, WIDTH, VOCAB = 8, 48, 97
CLAIM = [3, 5, 6]


def make_model(folder: Path, seed: int, **changes) -> Path:
    torch.manual_seed(seed)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": VOCAB, "initializer_range": 0.15, **changes}  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():
        model.model.norm.weight.normal_(1.0, 0.3)  # a norm of ones would hide half of what norming does
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {"own": make_model(folder / "own", 0), "other": make_model(folder / "other", 1),
            "wide": make_model(folder / "wide", 0, hidden_size=64)}  # fmt: skip


def tokens(seed: int, length: int = 50) -> TokenRow:
    ids = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    return TokenRow(seed, ids, torch.ones(length, dtype=torch.int64), f"{seed:016x}")


@pytest.fixture(scope="module")
def states(models):
    """{point: [N, H]} of every layer, and the last state, of the own model over three samples."""
    rows = [tokens(seed) for seed in range(3)]
    points = list(range(LAYERS))
    fresh = by_transformers(str(models["own"]), rows, points)
    named = [*(doctor.point_name(point) for point in points), doctor.LAST]
    return {name: torch.cat([sample[i] for sample in fresh]) for i, name in enumerate(named)}


@pytest.fixture(scope="module")
def norm(models):
    from common.target import load_target_parts

    parts = load_target_parts(models["own"])
    return parts.norm, parts.eps


def verdict(states, norm, stored, claim=tuple(CLAIM), dtype="bfloat16"):
    names = [doctor.point_name(point) for point in claim] + [doctor.LAST]
    wanted = [doctor.point_name(k) for k in doctor.neighbours(list(claim), LAYERS)] + [doctor.LAST]
    references = doctor.with_normed({name: states[name] for name in wanted}, *norm)
    findings = doctor.examine(names, stored, references)
    return findings, doctor.conclusions(findings, stored[0].shape[1], WIDTH, dtype)


def rightly(states, points=tuple(CLAIM)):
    return [states[doctor.point_name(point)] for point in points] + [states[doctor.LAST]]


def test_right_states_are_right(states, norm):
    findings, wrong = verdict(states, norm, rightly(states))
    assert wrong == []
    assert all(f.right and f.certain and f.error == 0 for f in findings)


def test_rounding_of_another_engine_is_not_an_error(states, norm):
    generator = torch.Generator().manual_seed(0)
    noisy = [(x * (1 + 0.02 * torch.randn(x.shape, generator=generator))).bfloat16() for x in rightly(states)]
    findings, wrong = verdict(states, norm, noisy)
    assert wrong == [] and all(0.005 < f.error < 0.05 for f in findings)


@pytest.mark.parametrize("shift", [-1, 1])
def test_states_shifted_by_one_layer(states, norm, shift):
    stored = rightly(states, [point + shift for point in CLAIM])
    findings, wrong = verdict(states, norm, stored)
    really = [point + shift for point in CLAIM]
    assert wrong == [
        f"all points are shifted by {shift:+d}: they claim {CLAIM} and are {really}; a drafter trained on them must be "
        f"served with {really}"
    ]
    assert [f.found for f in findings] == [*map(doctor.point_name, really), doctor.LAST]
    assert all(f.claimed_error > 0.1 for f in findings[:3])


def test_one_wrong_point(states, norm):
    _, wrong = verdict(states, norm, rightly(states, [3, 4, 6]))
    assert wrong == ["point 5 is really point 4"]


def test_post_norm_last_state(states, norm):
    stored = rightly(states)
    stored[-1] = rms_norm(stored[-1], *norm)
    findings, wrong = verdict(states, norm, stored)
    assert len(wrong) == 1 and wrong[0].startswith("the last state is post-norm")
    assert findings[-1].found == "last state, final norm applied"


def test_swapped_points(states, norm):
    _, wrong = verdict(states, norm, rightly(states, [6, 5, 3]))
    assert wrong == ["points are swapped: stored in the order [6, 5, 3], not [3, 5, 6]"]


def test_fp16_instead_of_bf16(states, norm):
    computed = [(x.float() * (1 + 2**-9)).half() for x in rightly(states)]  # values that bfloat16 cannot hold
    findings, wrong = verdict(states, norm, computed)
    assert all(f.right for f in findings)
    assert len(wrong) == 1
    assert "stored as float16 with float16 values, this model computes in bfloat16" in wrong[0]
    cast = [x.half() for x in rightly(states)]
    _, wrong = verdict(states, norm, cast)
    assert "stored as float16 with" in wrong[0]


def test_states_of_another_model(states, norm, models):
    fresh = by_transformers(str(models["other"]), [tokens(seed) for seed in range(3)], CLAIM)
    stored = [torch.cat([sample[i] for sample in fresh]) for i in range(4)]
    _, wrong = verdict(states, norm, stored)
    assert len(wrong) == 1 and wrong[0].startswith("states of another model (or other weights")
    _, wrong = verdict(states, norm, [torch.zeros(150, 64)] * 4)
    assert wrong == ["states of another model: 64 numbers a token, this model has 48"]


def test_not_a_number_is_reported(states, norm):
    stored = [x.clone() for x in rightly(states)]
    stored[1][7, 3] = float("nan")
    findings, wrong = verdict(states, norm, stored)
    assert wrong == ["point 5 holds 1 values that are NaN or infinite"] and findings[1].found == "point 5"


def test_one_attention_sink_does_not_decide(states, norm):
    stored = [x.clone() for x in rightly(states)]
    references = {name: x.clone() for name, x in states.items()}
    for name in references:
        references[name][0] *= 1000  # the first token dwarfs all others in the references, and not in what is stored
    findings, wrong = verdict(references, norm, stored)
    assert wrong == []
    # summed over tokens, as a plain norm of the difference would be, the same data looks unrelated
    difference = (stored[0].float() - references["point 3"].float()).norm() / references["point 3"].float().norm()
    assert difference > 0.9


def test_head_agreement_tells_the_norm_state(models):
    from common.target import load_target_parts

    parts = load_target_parts(models["own"])
    (sample,) = by_transformers(str(models["own"]), [tokens(0)], [1])
    last = sample[-1]
    following = (rms_norm(last, parts.norm, parts.eps, torch.float32) @ parts.lm_head.float().T).argmax(-1)
    shares = doctor.head_agreement(last, parts.lm_head, parts.norm, parts.eps, following)
    assert shares["pre-norm"] == 1.0 and shares["post-norm"] < 0.9


# ---- as a person runs it -----------------------------------------------------------------------------------------


def write(folder: Path, model: Path, samples: list, claim=tuple(CLAIM), dtype="bfloat16", last_state="all") -> Path:
    identity = {"model": str(model), "capture_points": list(claim), "last_state": "pre-norm", "dtype": dtype}
    with RunDirectory(folder, identity, rows=len(samples)) as run:
        for row, states in samples:
            scales, states = None, [s.contiguous() for s in states]
            if dtype == "fp8":
                codes = [to_stored(state, FP8) for state in states[:-1]]
                scales = scale_of(torch.stack([largest for _, largest in codes], 1))
                states = [*(code for code, _ in codes), states[-1]]
            written = write_sample(
                folder, row.index, row.input_ids, row.loss_mask, states, scales=scales, last_state=last_state
            )
            run.commit([Record(row.index, len(row.input_ids), len(row.input_ids), written.bytes, written.xxh3,
                               token_hash(row.input_ids.tolist()))])  # fmt: skip
        run.finish()
    return folder


def command(shards, model, output, *more) -> list[str]:
    return ["eval_acceptance.py", "--diagnose", str(shards), "--model", str(model), "--reference", "transformers",
            "--output", str(output), *more]  # fmt: skip


def test_command_line(models, tmp_path, monkeypatch, capsys):
    def diagnose(*arguments, expect):
        monkeypatch.setattr(sys, "argv", command(*arguments))
        assert eval_acceptance.main() == expect
        return capsys.readouterr().out

    rows = [tokens(seed) for seed in range(2)]
    right = by_transformers(str(models["own"]), rows, CLAIM)
    shifted = by_transformers(str(models["own"]), rows, [2, 4, 5])
    for states in shifted:
        states[-1] = rms_norm(states[-1], torch.ones(WIDTH), 1e-6)
    good = write(tmp_path / "good", models["own"], list(zip(rows, right, strict=True)))
    bad = write(tmp_path / "bad", models["own"], list(zip(rows, shifted, strict=True)))
    assert "every tensor is what it claims to be" in diagnose(good, models["own"], tmp_path / "a", expect=0)
    printed = diagnose(bad, models["own"], tmp_path / "b", expect=1)
    assert "wrong: all points are shifted by -1: they claim [3, 5, 6] and are [2, 4, 5]" in printed
    content = json.loads((tmp_path / "b" / "report.json").read_text())
    assert [finding["found"] for finding in content["findings"][:3]] == ["point 2", "point 4", "point 5"]
    # the claim on the command line replaces that of dataset.json
    printed = diagnose(bad, models["own"], tmp_path / "c", "--capture-points", "2", "4", "5", expect=1)
    assert "shifted" not in printed and "last state" in printed
    printed = diagnose(good, models["wide"], tmp_path / "d", expect=1)
    assert "states of another model: 48 numbers a token, this model has 64" in printed
    with pytest.raises(UserError, match="4 tensors a sample, but 2 points"):
        diagnose(good, models["own"], tmp_path / "e", "--capture-points", "3", "5", expect=2)


def test_a_hub_id_names_the_model(models, tmp_path, monkeypatch, capsys):
    in_hub_cache(tmp_path / "home", "tiny/own", models["own"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    row = tokens(0)
    good = write(tmp_path / "good", models["own"], [(row, by_transformers(str(models["own"]), [row], CLAIM)[0])])
    monkeypatch.setattr(sys, "argv", command(good, "tiny/own", tmp_path / "o"))
    assert eval_acceptance.main() == 0, capsys.readouterr().out
    assert json.loads((tmp_path / "o" / "report.json").read_text())["model"] == "tiny/own"


def test_an_output_that_cannot_be_written_is_found_before_the_work(models, tmp_path, monkeypatch):
    row = tokens(0)
    good = write(tmp_path / "good", models["own"], [(row, by_transformers(str(models["own"]), [row], CLAIM)[0])])
    monkeypatch.setattr(doctor_run, "by_transformers", lambda *_: pytest.fail("captured for nothing"))
    monkeypatch.setattr(sys, "argv", command(good, models["own"], "/proc/none"))
    with pytest.raises(UserError, match="/proc/none/report.json: cannot be written"):
        eval_acceptance.main()


def test_samples_are_spread_over_the_directory(models, tmp_path):
    rows = [tokens(seed, 10) for seed in range(7)]
    states = by_transformers(str(models["own"]), rows, CLAIM)
    stored, *_ = doctor_run.read_stored(write(tmp_path / "s", models["own"], list(zip(rows, states, strict=True))), 4)
    assert [int(each.input_ids[0]) for each in stored] == [int(rows[place].input_ids[0]) for place in (0, 1, 3, 5)]


def test_eight_bits_and_last_states_of_supervised_rows(models, tmp_path, monkeypatch, capsys):
    """Named, and compared as what they are: the rounding does not make a point doubtful, a dropped row is not read."""

    def diagnose(shards, expect):
        monkeypatch.setattr(sys, "argv", command(shards, models["own"], tmp_path / "report"))
        printed = (eval_acceptance.main(), capsys.readouterr().out)
        assert printed[0] == expect, printed[1]
        return printed[1], json.loads((tmp_path / "report" / "report.json").read_text())["findings"]

    rows = [tokens(seed) for seed in range(2)]
    for row in rows:
        row.loss_mask[:40] = 0
    for name, points in (("right", CLAIM), ("shifted", [4, 6, 7])):
        states = by_transformers(str(models["own"]), rows, points)
        samples = list(zip(rows, states, strict=True))
        write(tmp_path / name, models["own"], samples, dtype="fp8", last_state="supervised")
    printed, findings = diagnose(tmp_path / "right", 0)
    assert "the last state is stored at 20 of 100 rows and compared there" in printed
    assert [finding["stored_dtype"] for finding in findings] == ["fp8", "fp8", "fp8", "bfloat16"]
    assert all(0.02 < f["error"] == f["rounding"] < 0.03 for f in findings[:3]) and findings[3]["error"] == 0
    assert "fp8, rounds by 2." in printed and "every tensor is what it claims to be" in printed
    printed, _ = diagnose(tmp_path / "shifted", 1)
    assert "wrong: all points are shifted by +1: they claim [3, 5, 6] and are [4, 6, 7]" in printed


def test_rounding_to_eight_bits_leaves_the_verdict_certain(states, norm):
    """Two layers only 2 % apart: told apart in eight bits, which alone are 2.6 % away; two that are equal are not."""
    near = {name: states["point 3"] for name in ("point 3", "point 4")}
    noise = torch.randn(states["point 3"].shape, generator=torch.Generator().manual_seed(0))
    near["point 4"] = (states["point 3"] * (1 + 0.02 * noise)).bfloat16()
    stored = doctor.rounded_to_fp8(states["point 3"])
    (in_eight,) = doctor.examine(["point 3"], [stored], near, ["fp8"])
    assert in_eight.right and in_eight.certain and in_eight.error > 0.02
    (unsaid,) = doctor.examine(["point 3"], [stored], near)
    assert unsaid.right and not unsaid.certain
    near["point 4"] = near["point 3"]
    assert not doctor.examine(["point 3"], [stored], near, ["fp8"])[0].certain


def test_specforge_files(models, tmp_path):
    row = tokens(0)
    (states,) = by_transformers(str(models["own"]), [row], CLAIM)
    (tmp_path / "s" / "rows_0-5000").mkdir(parents=True)
    torch.save(
        {"input_ids": row.input_ids, "loss_mask": row.loss_mask, "hidden_state": states[-1][None],
         "aux_hidden_state": torch.cat(states[:-1], dim=-1)[None]},
        tmp_path / "s" / "rows_0-5000" / "data_0.ckpt",
    )  # fmt: skip
    arguments = command(tmp_path / "s", models["own"], tmp_path / "o", "--capture-points", *map(str, CLAIM))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every tensor is what it claims to be" in done.stdout
