"""eval_acceptance.py as a person runs it, on tiny targets, shards and drafters in their real file formats."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure

import eval_acceptance
from common import errors, offline_eval
from common.errors import UserError
from common.export import export_speculators
from tests.acceptance_fixtures import (
    VOCAB,
    conversation,
    copying_drafter,
    in_hub_cache,
    permutation,
    states_of,
    target_config,
    write_drafter,
    write_shards,
    write_target,
)

ROOT = Path(__file__).resolve().parent.parent


def evaluate(*arguments, expect=0) -> SimpleNamespace:
    """The script in this process (importing torch anew for each case would take most of the time)."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["eval_acceptance.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            errors.run(eval_acceptance.main)
    assert ended.value.code == expect, out.getvalue() + err.getvalue()
    return SimpleNamespace(stdout=out.getvalue(), stderr=err.getvalue())


def program(*arguments, **variables) -> subprocess.CompletedProcess:
    """A script as a person starts it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    successor = permutation()
    wrong = successor.clone()
    wrong[torch.tensor([3, 17, 40])] = successor[torch.tensor([17, 40, 3])]
    target = write_target(folder / "target")
    samples, labels = [], []
    for seed in range(8):
        ids, mask = conversation(successor, [4, 40 + seed, 5, 30], seed)
        samples.append((ids, mask, states_of(ids, successor)))
        labels.append(("math" if seed % 2 else "chat", f"{seed % 3}.jsonl"))
    copying, partly = copying_drafter(successor), copying_drafter(wrong)
    copying.set_embedding(torch.zeros(VOCAB, VOCAB))
    export_speculators(folder / "speculators", copying, target_config(), "tiny")
    return {
        "folder": folder,
        "target": target,
        "states": write_shards(folder / "states", target, samples, labels=labels),
        "arrow": write_shards(folder / "arrow", target, samples, layout="arrow", labels=labels),
        "copying": write_drafter(folder / "copying", copying),
        "partly": write_drafter(folder / "partly", partly),
        "speculators": folder / "speculators",
    }


def test_two_drafters_side_by_side(files, tmp_path):
    done = program("eval_acceptance.py", "--drafter", files["copying"], files["partly"], "--data", files["states"],
                   "--split", "all", "--output", tmp_path)  # fmt: skip
    content = json.loads((tmp_path / "report.json").read_text())
    copying, partly = content["offline"]
    assert copying["summary"]["cumulative"] == [1, 1, 1] and copying["summary"]["tau"] == 4
    assert 1 < partly["summary"]["tau"] < 4
    low, high = partly["summary"]["tau_95"]
    assert low < partly["summary"]["tau"] < high
    assert set(partly["breakdown"]["category"]) == {"math", "chat"}
    assert set(partly["breakdown"]["source"]) == {"0.jsonl", "1.jsonl", "2.jsonl"}
    assert set(partly["breakdown"]["turn"]) == {"1", "2"}
    assert content["versions"]["torch"] == torch.__version__.split("+")[0] or content["versions"]["torch"]
    assert content["arguments"]["split"] == "all" and content["data"]["samples"] == 8
    picture = (tmp_path / "acceptance.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    text = (tmp_path / "acceptance.md").read_text()
    assert "| tokens a cycle, walked (tau) | 4.00" in text and "acceptance.png" in text
    assert "acceptance.png" in done.stdout and "4.00" in done.stdout
    assert "evaluate" in done.stdout  # a line of progress even when redirected
    measure, serve = done.stdout.splitlines()[-2:]
    assert measure.startswith("next, with a GPU: python eval_acceptance.py --drafter") and "--check-parity" in measure
    assert serve.startswith("or: python -m sglang.launch_server --model") and "--speculative-eagle-topk 1 " in serve


def test_arrow_shards_and_speculators_drafters_give_the_same_figures(files, tmp_path):
    kinds = [("states", "copying"), ("arrow", "copying"), ("states", "speculators")]
    summaries = []
    for number, (data, drafter) in enumerate(kinds):
        evaluate("--drafter", files[drafter], "--data", files[data], "--split", "all", "--num-steps", 2,
                 "--output", tmp_path / str(number))  # fmt: skip
        summaries.append(json.loads((tmp_path / str(number) / "report.json").read_text())["offline"][0]["summary"])
    assert summaries[0] == summaries[1] == summaries[2]


def test_sweep_tree_temperature_and_yaml(files, tmp_path):
    settings = tmp_path / "eval.yaml"
    settings.write_text(
        f"seed: 0\neval:\n  data: [{files['states']}]\n  drafter: [{files['partly']}]\n"
        f"  split: all\n  num_steps: [2, 3]\n"
        f"  topk: [1, 2]\n  temperature: 0.7\n  bootstrap: 50\n  output: {tmp_path / 'out'}\n"
    )
    evaluate(settings, "--data", files["states"])
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    names = [result["name"] for result in content["offline"]]
    assert names == ["partly 2/1/3", "partly 2/2/7", "partly 3/1/4", "partly 3/2/11"]
    by_name = {result["name"]: result["summary"] for result in content["offline"]}
    assert by_name["partly 3/2/11"]["tau"] >= by_name["partly 3/1/4"]["tau"]
    assert 1 < by_name["partly 3/1/4"]["expected_length_min_pq"] < 4


def test_a_hub_id_names_the_target_in_training_and_evaluation(files, tmp_path):
    """Given as --model, and by the shards, which were captured at a revision of it."""
    hub = in_hub_cache(tmp_path / "home", "tiny/target", files["target"])
    hub |= in_hub_cache(tmp_path / "home", "tiny/older", files["target"], revision="v1")
    ids, mask = conversation(permutation(), [4, 60], 0)
    samples = [(ids, mask, states_of(ids, permutation()))]
    states = write_shards(tmp_path / "states", files["target"], samples, model="tiny/older", revision="v1")
    common = ["--drafter", files["copying"], "--split", "all"]
    for name, command in {
        "flag": [*common, "--data", files["states"], "--model", "tiny/target"],
        "shards": [*common, "--data", states],
        "both": [*common, "--data", states, "--model", "tiny/older"],
    }.items():
        program("eval_acceptance.py", *command, "--output", tmp_path / name, **hub)
        content = json.loads((tmp_path / name / "report.json").read_text())
        assert content["offline"][0]["summary"]["tau"] == 4
        assert content["data"]["target"] == ("tiny/target" if name == "flag" else "tiny/older")
    program("train_drafter.py", "--data", states, "--output", tmp_path / "d", "--eval-fraction", 0, "--max-steps", 1,
            "--tokens-per-step", 64, "--ttt-steps", 2, "--draft-vocab-size", 0, "--device", "cpu", "--tensorboard",
            "False", **hub)  # fmt: skip
    assert json.loads((tmp_path / "d" / "config.json").read_text())["target_model"] == "tiny/older"


@pytest.mark.parametrize("name, message", [
    ("nobody/nothing", "nobody/nothing: neither a folder nor a hub id that can be downloaded"),
    ("/no/where", "/no/where: no checkpoint folder there; give --model a folder or a hub id such as org/name"),
    ("TheirModel", "the shards were captured from TheirModel, and there is no such folder; give it as --model"),
])  # fmt: skip
def test_a_target_that_is_nowhere(files, tmp_path, monkeypatch, name, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ids, mask = conversation(permutation(), [4, 20], 0)
    samples = [(ids, mask, states_of(ids, permutation()))]
    shards = write_shards(tmp_path / "s", files["target"], samples, model=name)
    for number, command in enumerate((["--drafter", files["copying"], "--data", shards, "--split", "all"],
                                      ["--diagnose", shards])):  # fmt: skip
        done = evaluate(*command, "--output", tmp_path / str(number), expect=2)
        assert message in done.stderr, done.stderr


def test_a_picture_that_cannot_be_written_costs_nothing_else(files, tmp_path):
    (tmp_path / "acceptance.png" / "in the way").mkdir(parents=True)
    done = evaluate("--drafter", files["copying"], "--data", files["states"], "--split", "all", "--output", tmp_path)
    assert f"warning: {tmp_path / 'acceptance.png'}: cannot be written" in done.stdout and "next, with" in done.stdout
    assert "4.00" in (tmp_path / "acceptance.md").read_text()


@pytest.mark.parametrize("steps", [(5, 3), (3, 5)])
def test_settings_of_different_depth_stand_side_by_side(files, tmp_path, monkeypatch, steps):
    ticks = []
    whole = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *more, **how: (
        ticks.extend(len(axis.get_xticks()) for axis in self.axes), whole(self, *more, **how)))  # fmt: skip
    done = evaluate("--drafter", files["copying"], "--data", files["states"], "--split", "all", "--num-steps", *steps,
                    "--output", tmp_path)  # fmt: skip
    lines = (tmp_path / "acceptance.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ")[1:] for line in lines if line.startswith("| accepted through step")]
    assert len(rows) == 4 and ticks == [5, 5]
    short = steps.index(3)
    assert all(row[1 - short].startswith("100.0%") for row in rows)
    assert [row[short] == "-" for row in rows] == [False, False, True, True]
    assert "accepted through step 4" in done.stdout


@pytest.mark.parametrize(
    "changes, message",
    [
        (["--data", "nothing/"], "nothing: expected a directory of shards, found nothing"),
        (["--drafter", "nothing/"], "nothing: no config.json"),
        (["--topk", "2", "--draft-tokens", "99"], "--tree-tokens 99 is out of range"),
        (["--eval-fraction", "0", "--split", "held-out"], "the held-out split of .* is empty"),
        (["--temperature", "-1"], "--temperature -1.0: expected 0 or more"),
        (["--bootstrap", "-1"], "--bootstrap -1: expected 0 or more"),
        (["--batch-sizes", "1", "0"], "--batch-sizes 0: expected 1 or more"),
        (["--num-steps", "3", "5", "3"], "--num-steps names 3 twice"),
        (["--data", "configs/", "configs"], "--data names configs twice"),
        (["--prompts", "p.jsonl"], "--prompts needs --model"),
        (["--capture-points", "2", "4", "5"], r"capture points \[2, 4, 5\] does not fit the shards"),
        (["--check-parity"], "--check-parity needs --prompts"),
        (["--output", "/proc/none"], "cannot be written"),
    ],
)
def test_bad_input_is_one_clear_line(files, tmp_path, changes, message):
    base = {"--drafter": [files["copying"]], "--data": [files["states"]], "--split": ["all"], "--output": [tmp_path]}
    extra, key = {}, None
    for word in changes:
        if word.startswith("--"):
            key, extra[word] = word, []
        else:
            extra[key].append(word)
    command = [part for key, values in {**base, **extra}.items() for part in (key, *values)]
    (tmp_path / "report.json").write_text("of an earlier evaluation")
    done = evaluate(*command, expect=2)
    assert (tmp_path / "report.json").read_text() == "of an earlier evaluation"
    assert len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr
    assert re.search(message, done.stderr), done.stderr


def test_shards_whose_last_state_is_post_norm_are_refused(files, tmp_path):
    ids, mask = conversation(permutation(), [4, 20], 0)
    shards = write_shards(tmp_path / "s", files["target"], [(ids, mask, states_of(ids, permutation()))],
                          last_state="post-norm")  # fmt: skip
    done = evaluate("--drafter", files["copying"], "--data", shards, "--split", "all", "--output", tmp_path, expect=2)
    assert "norm option" in done.stderr and "post-norm" in done.stderr


def test_help_names_every_argument():
    printed = evaluate("--help").stdout
    assert "--tree-tokens" in printed and "95% intervals" in printed and "--check-parity" in printed


def test_states_that_are_not_numbers_are_left_out_and_counted(files, tmp_path):
    successor, samples = permutation(), []
    for seed in range(3):
        ids, mask = conversation(successor, [4, 30], seed)
        samples.append((ids, mask, states_of(ids, successor)))
    samples[1][2][0][5, 2] = float("nan")
    shards = write_shards(tmp_path / "s", files["target"], samples)
    done = evaluate("--drafter", files["copying"], "--data", shards, "--split", "all", "--output", tmp_path / "o")
    content = json.loads((tmp_path / "o" / "report.json").read_text())
    assert content["offline"][0]["summary"]["samples"] == 2 and content["offline"][0]["summary"]["tau"] == 4
    (line,) = content["data"]["left_out"]
    assert "data_1.pt" in line and line in done.stdout.replace("; left out", "").replace("warning: ", "")


def with_nan(count: int, bad: int, silent: int | None = None) -> list:
    """Samples of the permutation, one with a NaN, one (or none) with nothing supervised."""
    successor, samples = permutation(), []
    for seed in range(count):
        ids, mask = conversation(successor, [4, 30], seed)
        samples.append((ids, mask * (seed != silent), states_of(ids, successor)))
    samples[bad][2][0][5, 2] = float("nan")
    return samples


def test_samples_of_two_directories_are_counted_by_path(files, tmp_path):
    """The same row is left out in both, another has nothing to draft: read and left out are told apart."""
    one = write_shards(tmp_path / "one", files["target"], with_nan(4, bad=1))
    two = write_shards(tmp_path / "two", files["target"], with_nan(4, bad=1, silent=2))
    done = evaluate("--drafter", files["copying"], "--data", one, two, "--split", "all", "--num-steps", 2, 3,
                    "--output", tmp_path / "o")  # fmt: skip
    content = json.loads((tmp_path / "o" / "report.json").read_text())
    data = content["data"]
    first, second = data["left_out"]
    assert first.startswith(str(one)) and second.startswith(str(two))
    assert (data["samples"], data["chosen_samples"], data["nothing_supervised"]) == (5, 8, 1)
    assert {result["summary"]["samples"] for result in content["offline"]} == {5}
    told = "5 of 8 samples (2 left out: NaN or Inf, 1 with nothing supervised to draft)"
    assert told in done.stdout and told in (tmp_path / "o" / "acceptance.md").read_text()


def test_nothing_left_to_evaluate_says_why(files, tmp_path):
    shards = write_shards(tmp_path / "s", files["target"], with_nan(1, bad=0))
    done = evaluate("--drafter", files["copying"], "--data", shards, "--split", "all", "--output", tmp_path, expect=2)
    assert "0 of 1 samples (1 left out: NaN or Inf)" in done.stderr


def test_a_part_of_the_samples_is_taken_from_every_directory(files, tmp_path):
    folders = [write_shards(tmp_path / name, files["target"], with_nan(4, bad=0)) for name in ("one", "two")]
    evaluate("--drafter", files["copying"], "--data", *folders, "--split", "all", "--max-samples", 4,
             "--output", tmp_path)  # fmt: skip
    content = json.loads((tmp_path / "report.json").read_text())
    assert len(content["data"]["left_out"]) == 2 and content["data"]["chosen_samples"] == 4


def test_drafters_of_the_same_name_are_told_apart(files, tmp_path):
    folders = [tmp_path / name / "final" for name in ("old", "new")]
    for folder in folders:
        shutil.copytree(files["copying"], folder)
    evaluate("--drafter", *folders, "--data", files["states"], "--split", "all", "--output", tmp_path / "o")
    content = json.loads((tmp_path / "o" / "report.json").read_text())
    assert [result["name"] for result in content["offline"]] == ["old/final", "new/final"]
    assert "old/final" in (tmp_path / "o" / "acceptance.md").read_text()


def test_what_was_measured_survives_a_later_drafter_that_fails(files, tmp_path, monkeypatch):
    whole, started = offline_eval.evaluate, []

    def fails_the_second_time(*arguments):
        started.append(1)
        if len(started) == 2:
            raise UserError("the second one fails")
        return whole(*arguments)

    monkeypatch.setattr(offline_eval, "evaluate", fails_the_second_time)
    done = evaluate("--drafter", files["copying"], files["partly"], "--data", files["states"], "--split", "all",
                    "--output", tmp_path, expect=2)  # fmt: skip
    content = json.loads((tmp_path / "report.json").read_text())
    assert [result["name"] for result in content["offline"]] == ["copying"]
    assert content["unfinished"] == {"part": "offline evaluation of partly", "error": "UserError: the second one fails"}
    assert "offline evaluation of partly failed" in done.stderr and str(tmp_path / "report.json") in done.stderr
    assert "the second one fails" in done.stderr and "4.00" in done.stdout
    assert "offline evaluation of partly failed" in (tmp_path / "acceptance.md").read_text()
    assert (tmp_path / "acceptance.png").exists()
    evaluate("--drafter", files["copying"], "--data", files["states"], "--split", "all", "--output", tmp_path)
    assert "unfinished" not in json.loads((tmp_path / "report.json").read_text())


def test_offline_figures_survive_an_engine_that_cannot_run(files, tmp_path):
    done = evaluate("--drafter", files["copying"], "--data", files["states"], "--split", "all", "--prompts",
                    tmp_path / "none.jsonl", "--model", files["target"], "--output", tmp_path, expect=2)  # fmt: skip
    assert "none.jsonl: no such file" in done.stderr and str(tmp_path / "report.json") in done.stderr
    assert "4.00" in done.stdout and (tmp_path / "acceptance.md").exists()
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["offline"][0]["summary"]["tau"] == 4 and "engine" in content["unfinished"]["part"]


def test_figures_equal_those_of_the_training_run_bit_for_bit(files, tmp_path):
    """The drafter that training published, evaluated here on the same held-out split, against the run's own log."""
    flags = {"data": files["states"], "output": tmp_path / "d", "max-steps": 6, "tokens-per-step": 256, "ttt-steps": 3,
             "draft-vocab-size": 48, "eval-fraction": 0.4, "eval-every": 3, "learning-rate": 0.02, "device": "cpu",
             "tensorboard": "False"}  # fmt: skip
    command = [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    program("train_drafter.py", *command)
    lines = [json.loads(line) for line in (tmp_path / "d" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line.get("kind") == "eval"]
    assert len(evaluations) == 2
    program("eval_acceptance.py", "--drafter", tmp_path / "d" / "final", "--data", files["states"],
            "--eval-fraction", 0.4, "--output", tmp_path / "o")  # fmt: skip
    summary = json.loads((tmp_path / "o" / "report.json").read_text())["offline"][0]["summary"]
    assert 0.05 < summary["step0_accuracy"] < 1  # something was learnt, and not everything: equality says something
    different = {name for name, value in summary.items() if evaluations[-1][name] != value}
    assert different == set()
    assert evaluations[0]["tau"] != summary["tau"]  # another checkpoint gives other figures
    # without --eval-fraction the drafter's own arguments.json says what was held out
    evaluate("--drafter", tmp_path / "d", "--data", files["states"], "--output", tmp_path / "p")
    assert json.loads((tmp_path / "p" / "report.json").read_text())["data"]["eval_fraction"] == 0.4
