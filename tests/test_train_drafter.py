"""train_drafter.py as a person runs it, on tiny targets and shards in their real formats."""

import importlib.util
import json
import math
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train_drafter
from common import checkpoints
from common.batches import Schedule, scan, split
from common.drafter_config import DrafterConfig
from common.errors import UserError
from common.feed import SetAside
from common.load_drafter import load_drafter
from common.offline_eval import Setting, evaluate, evaluation_target
from common.progress import Progress
from common.shards import ShardReader
from common.target import load_target_parts
from common.training_log import read_metrics
from tests.training_fixtures import (
    ROOT,
    command,
    environment,
    make_sample,
    train,
    train_here,
    write_shards,
    write_target,
)

CHANCE = 1 / 64
LEARN = ["--max-steps", "20", "--tokens-per-step", "1024", "--learning-rate", "5e-3", "--eval-fraction", "0.1",
         "--eval-every", "20"]  # fmt: skip
SHORT = ["--tokens-per-step", "512", "--learning-rate", "5e-3", "--eval-fraction", "0.15", "--eval-every", "4",
         "--save-every", "2", "--max-steps", "7"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """target/, states/: 200 samples of one length, and few/: 60 samples of very different lengths."""
    folder = tmp_path_factory.mktemp("train")
    target = write_target(folder / "target")
    write_shards(folder / "states", target, [make_sample(40, seed) for seed in range(200)])
    lengths = [200 if seed % 20 == 0 else 5 + seed % 17 for seed in range(60)]
    write_shards(folder / "few", target, [make_sample(length, seed) for seed, length in enumerate(lengths)])
    return folder


def step0(run: Path, states: Path, target: Path) -> float:
    """Step-0 accuracy of the run's drafter on all samples of `states`."""
    parts = evaluation_target(load_target_parts(target), "cpu")
    drafter, _ = load_drafter(run)
    drafter.set_embedding(parts.embed_tokens)
    reader = ShardReader(states)
    return evaluate(drafter, parts, reader.load, reader.records, Setting(2)).summary(0)["step0_accuracy"]


def losses(run: Path) -> list[tuple]:
    """Everything of metrics.jsonl that does not depend on the clock."""
    names = ("kind", "step", "loss", "loss_per_step", "gradient_norm", "learning_rate", "tokens", "tau", "cumulative")
    return [tuple(str(line.get(name)) for name in names) for line in read_metrics(run)]


# ---- must-show 3: the drafter learns what the states say, and only that ----------------------------------------------


@pytest.fixture(scope="module")
def learned(folder):
    done = train("--data", folder / "states", "--output", folder / "learned", *LEARN)
    return folder / "learned", done.stdout


def test_a_continuation_that_the_states_determine_is_learned(folder, learned):
    run, said = learned
    last = [line for line in read_metrics(run) if line["kind"] == "eval"][-1]
    assert last["step0_accuracy"] > 0.95
    assert last["cumulative"][1] < 0.1, "x[t+3] is not in the states at t: nobody can know it"
    fresh = write_shards(folder / "fresh", folder / "target", [make_sample(40, seed) for seed in range(1000, 1020)])
    assert step0(run, fresh, folder / "target") > 0.95
    assert f"step-0 accuracy {last['step0_accuracy']:.1%}" in said


def test_points_in_the_wrong_order_are_clearly_worse(folder, learned):
    samples = [make_sample(40, seed) for seed in range(2000, 2020)]
    swapped = [(ids, mask, [s[1], s[0], s[2], s[3]]) for ids, mask, s in samples]
    accuracy = step0(learned[0], write_shards(folder / "swapped", folder / "target", swapped), folder / "target")
    assert accuracy < 0.3, "8 u + v read as 8 v + u is right in one case of 8"


def test_states_of_other_samples_stay_at_chance(folder):
    samples = [make_sample(40, seed) for seed in range(200)]
    shuffled = [(ids, mask, [*samples[(i + 1) % 200][2][:3], states[3]]) for i, (ids, mask, states) in
                enumerate(samples)]  # fmt: skip
    write_shards(folder / "shuffled", folder / "target", shuffled)
    train_here(None, "--data", folder / "shuffled", "--output", folder / "run-shuffled", *LEARN)
    held_out = [line for line in read_metrics(folder / "run-shuffled") if line["kind"] == "eval"][-1]
    assert held_out["step0_accuracy"] < 5 * CHANCE


def test_labels_shifted_by_one_are_clearly_worse(folder):
    """Trained where the last state stands one position early, judged where it stands right.

    (One position late would not do: the teacher of TTT step 1 is then what the states determine, and step 0 learns it
    with the weights that both steps share.)
    """
    shifted = []
    for ids, mask, states in (make_sample(40, seed) for seed in range(200)):
        shifted.append((ids, mask, [*states[:3], states[3].roll(-1, 0)]))
    write_shards(folder / "shifted", folder / "target", shifted)
    train_here(None, "--data", folder / "shifted", "--output", folder / "run-shifted", *LEARN)
    assert step0(folder / "run-shifted", folder / "states", folder / "target") < 0.3


# ---- what a run leaves behind ----------------------------------------------------------------------------------------


def test_a_run_leaves_drafter_curves_metrics_and_arguments(folder, learned):
    run, said = learned
    assert {"config.json", "model.safetensors", "final", "checkpoints", "metrics.jsonl", "curves.png",
            "arguments.json", "heartbeat.json"} <= {path.name for path in run.iterdir()}  # fmt: skip
    assert (run / "curves.png").read_bytes()[:4] == b"\x89PNG" and (run / "curves.png").stat().st_size > 10_000
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, 21))
    for line in lines:
        assert set(line["milliseconds"]) == {"fetch", "h2d", "forward", "backward", "optimizer"}
        assert line["tokens_per_second"] > line["supervised_tokens_per_second"] > line["samples_per_second"] > 0
        assert len(line["loss_per_step"]) == len(line["accuracy_per_step"]) == 2
        expected = line["loss_per_step"][0] + 0.8 * line["loss_per_step"][1]
        assert line["loss"] == pytest.approx(expected, rel=1e-5)
    assert lines[-1]["learning_rate"] < lines[5]["learning_rate"] and lines[0]["learning_rate"] == 5e-3
    shown = [line for line in said.splitlines() if line.startswith("step ")]
    assert len(shown) == 20 and "forward" in shown[0] and "tok/s" in shown[0]
    arguments = json.loads((run / "arguments.json").read_text())
    assert arguments["learning_rate"] == 5e-3 and arguments["eval_fraction"] == 0.1 and arguments["ttt_steps"] == 2


def test_the_next_command_that_it_names_runs(learned, tmp_path):
    last = learned[1].strip().splitlines()[-1]
    assert last.startswith("next: python eval_acceptance.py --drafter ")
    program, *arguments = shlex.split(last.removeprefix("next: python "))
    done = subprocess.run([sys.executable, ROOT / program, *arguments, "--device", "cpu"], cwd=tmp_path,
                          env=environment(), capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "acceptance" / "report.json").exists()


def test_the_evaluation_is_offline_eval_on_the_held_out_rows(folder, learned):
    run, _ = learned
    reader = ShardReader(folder / "states")
    _, held_out = split(reader.records, 0.1)
    parts = evaluation_target(load_target_parts(folder / "target"), "cpu")
    path, _ = checkpoints.latest(run)
    drafter, _ = load_drafter(run / "final")
    drafter.load_state_dict(load_file(path / "drafter.safetensors"))  # float32, as it was evaluated
    drafter.set_embedding(parts.embed_tokens)
    summary = evaluate(drafter, parts, reader.load, held_out, Setting(2)).summary()
    line = [line for line in read_metrics(run) if line["kind"] == "eval"][-1]
    assert {name: line[name] for name in summary} == json.loads(json.dumps(summary))


# ---- must-show 5: killed at any moment, the same command ends with the same weights ----------------------------------

KILL = """
import os, signal, sys
sys.argv = ["train_drafter.py", *sys.argv[3:]]
sys.path.insert(0, os.getcwd())
import train_drafter
from common import checkpoints
where, countdown = os.environ["KILL_AT"], [int(os.environ["KILL_COUNT"])]
def deadly(function, before):
    def wrapped(*arguments, **options):
        countdown[0] -= 1
        if countdown[0] == 0 and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **options)
        if countdown[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return wrapped
module, name = {"file": (checkpoints, "save_tensors"), "rename": (checkpoints.os, "rename"),
                "prune": (checkpoints, "prune"), "publish": (train_drafter, "export_sglang")}[where]
setattr(module, name, deadly(getattr(module, name), before=os.environ["KILL_BEFORE"] == "1"))
train_drafter.run(train_drafter.main)
"""


def killed(where: str, count: int, before: bool, *arguments) -> None:
    """Run train_drafter.py until it kills itself with SIGKILL before or after the count-th call of a function."""
    program = [sys.executable, "-c", KILL, "-", *command(*arguments)[1:]]
    more = {"KILL_AT": where, "KILL_COUNT": str(count), "KILL_BEFORE": str(int(before))}
    done = subprocess.run(program, capture_output=True, text=True, env=environment(**more), cwd=ROOT, timeout=240)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr


@pytest.fixture(scope="module")
def undisturbed(folder):
    train_here(None, "--data", folder / "few", "--output", folder / "undisturbed", *SHORT)
    return folder / "undisturbed"


def test_killed_inside_checkpoints_it_ends_with_the_same_weights(folder, undisturbed):
    run = folder / "killed"
    arguments = ["--data", folder / "few", "--output", run, *SHORT]
    killed("file", 2, False, *arguments)  # both files of step 2 written, no state.json
    assert checkpoints.steps_saved(run) == [] and len(list((run / "checkpoints").iterdir())) == 1
    killed("rename", 1, True, *arguments)  # step 2 complete but for its name
    assert checkpoints.steps_saved(run) == []
    killed("rename", 1, False, *arguments)  # step 2 is there, nothing after it happened
    assert checkpoints.steps_saved(run) == [2]
    killed("publish", 1, True, *arguments)  # step 4: evaluated, neither exported nor saved
    assert checkpoints.steps_saved(run) == [2]
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')  # a line cut short
    done = train(*arguments)
    assert "continuing from" in done.stdout and "step 2" in done.stdout
    assert losses(run) == losses(undisturbed)
    for name in ("model.safetensors", "final/model.safetensors", "checkpoints/step-00000007/drafter.safetensors",
                 "checkpoints/step-00000007/optimizer.safetensors"):  # fmt: skip
        assert (run / name).read_bytes() == (undisturbed / name).read_bytes(), name
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        path.name for path in (undisturbed / "checkpoints").iterdir()
    }


def test_terminated_it_saves_and_continues(folder, undisturbed):
    """SIGTERM: the step is finished and saved, the exit status says so, and the same command ends as if nothing was."""
    run = folder / "terminated"
    arguments = ["--data", folder / "few", "--output", run, *SHORT]
    process = subprocess.Popen(command(*arguments), env=environment(), stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 1/"):
            process.send_signal(signal.SIGTERM)
            break
    said = process.stdout.read()
    assert process.wait(timeout=120) == 130 and "the same command continues from there" in said
    assert 1 <= checkpoints.steps_saved(run)[-1] < 7
    train_here(None, *arguments)
    assert losses(run) == losses(undisturbed)


@pytest.mark.parametrize(
    "changes, named",
    [(["--seed", "5"], "--seed was 0, is 5"), (["--ttt-steps", "3"], "--ttt-steps was 2, is 3"),
     (["--data", "OTHER"], "data was"), (["--tokens-per-step", "1024"], "--tokens-per-step was 512, is 1024"),
     (["--tokens-per-step", "500"], "have batches of 512 tokens")],
)  # fmt: skip
def test_a_run_whose_data_or_options_changed_is_not_continued(folder, undisturbed, changes, named):
    changes = [folder / "states" if each == "OTHER" else each for each in changes]
    before = (undisturbed / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match=named):
        train_here(None, "--data", folder / "few", "--output", undisturbed, *SHORT, after=changes)
    assert (undisturbed / "model.safetensors").read_bytes() == before


# ---- must-show 6: ranks ----------------------------------------------------------------------------------------------


def launch(*arguments) -> None:
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               *command(*arguments)[1:]]  # fmt: skip
    done = subprocess.run(program, capture_output=True, text=True, env=environment(), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_ranks_give_the_losses_of_one_with_skewed_lengths_and_empty_batches(folder):
    """Documents of 5 to 200 tokens in batches of 208. Two ranks under DDP; and two under FSDP2 that continue a run of
    one rank that was killed after its first checkpoint."""
    shared = ["--data", folder / "few", *SHORT, "--max-steps", "5", "--tokens-per-step", "832",
              "--tokens-per-batch", "208"]  # fmt: skip
    reader = ShardReader(folder / "few")
    training, _ = split(reader.records, 0.15)
    sizes, _ = scan(reader, training, 2, 208, 64)
    schedule = Schedule(training, sizes, 208, 4, 0)
    held = [[len(batch) for batch in schedule.batches(0, step)] for step in range(schedule.steps(0))]
    assert min(held[-1]) == 0 and max(map(max, held)) > 10 and 1 in sum(held, []), f"this case must be skewed: {held}"

    train_here(None, "--output", folder / "one", *shared)
    launch("--output", folder / "two", *shared)
    killed("rename", 1, False, "--output", folder / "sharded", *shared)
    launch("--output", folder / "sharded", *shared, "--shard")
    one = read_metrics(folder / "one")
    final = load_file(checkpoints.directory_of(folder / "one", 5) / "drafter.safetensors")
    for name, tolerance in (("two", 1e-6), ("sharded", 1e-5)):
        for mine, theirs in zip(one, read_metrics(folder / name), strict=True):
            assert mine["step"] == theirs["step"]
            for key in ("loss", "gradient_norm", "tokens", "supervised_tokens", "samples", "tau", "step0_accuracy"):
                if key in mine:
                    assert mine[key] == pytest.approx(theirs[key], rel=tolerance), (name, mine["step"], key)
        weights = load_file(checkpoints.directory_of(folder / name, 5) / "drafter.safetensors")
        for key, tensor in final.items():
            assert torch.allclose(tensor, weights[key], atol=2e-3), (name, key)


# ---- trouble ---------------------------------------------------------------------------------------------------------


def test_samples_with_nan_are_set_aside_and_named_and_too_many_stop_the_run(folder, capsys):
    samples = [make_sample(30, seed) for seed in range(30)]
    for bad in (3, 11):
        samples[bad][2][0][5, 1] = math.nan
    states = write_shards(folder / "nan", folder / "target", samples)
    arguments = ["--data", states, "--tokens-per-step", "256", "--eval-fraction", "0", "--epochs", "1"]
    said = train_here(capsys, "--output", folder / "run-nan", *arguments)
    named = [json.loads(line) for line in (folder / "run-nan" / "set_aside.jsonl").read_text().splitlines()]
    assert {each["index"] for each in named} == {3, 11} and "NaN in state 1 of 4, row 5" in named[0]["reason"]
    assert "sample 3 set aside" in said and "nothing was held out" in said
    last = read_metrics(folder / "run-nan")[-1]
    assert last["set_aside"] == 2 and math.isfinite(last["loss"])
    with pytest.raises(UserError, match="2 samples failed their check"):
        train_here(None, "--output", folder / "run-nan-2", *arguments, "--max-set-aside", "1")


def test_a_sample_counts_once_however_often_two_ranks_read_it_and_one_rank_goes_on(folder, capsys):
    samples = [make_sample(30, seed) for seed in range(30)]
    for bad in (3, 11):
        samples[bad][2][0][5, 1] = math.nan
    states = write_shards(folder / "nan-ranks", folder / "target", samples)
    arguments = ["--data", states, "--output", folder / "run-nan-ranks", "--tokens-per-step", "256", "--eval-fraction",
                 "0", "--max-set-aside", "2"]  # fmt: skip
    launch(*arguments, "--epochs", "4")
    assert [line["set_aside"] for line in read_metrics(folder / "run-nan-ranks")][-1] == 2
    first = ShardReader(states).records[0].path  # of which a resumed run knows the size already
    first.write_bytes(first.read_bytes()[:9000])
    said = train_here(capsys, *arguments[:-1], "3", "--epochs", "5")
    assert "continuing from" in said and "room for 128 tokens" in said, "the size of batch that two ranks had"
    assert "sample 0 set aside" in said and "; 3 samples set aside, see " in said


def test_a_non_finite_gradient_skips_the_step_and_too_many_stop_the_run(folder, capsys):
    """Unchecked NaN samples make whole steps NaN: these change nothing and are counted."""
    samples = [make_sample(30, seed) for seed in range(30)]
    samples[3][2][0][5, 1] = math.nan
    states = write_shards(folder / "nan-unchecked", folder / "target", samples)
    arguments = ["--data", states, "--tokens-per-step", "256", "--eval-fraction", "0", "--check-samples", "False"]
    said = train_here(capsys, "--output", folder / "run-skip", *arguments, "--epochs", "2")
    assert "2 skipped for a non-finite gradient" in said.splitlines()[-2]
    lines = read_metrics(folder / "run-skip")
    skipped = [line["skipped_steps"] for line in lines]
    assert skipped[-1] == 2 and [line["loss"] for line in lines].count(None) == 2
    suspects = [json.loads(line) for line in (folder / "run-skip" / "set_aside.jsonl").read_text().splitlines()]
    assert len(suspects) == 2 and all(3 in each["indices"] for each in suspects), "the bad sample is named each time"
    weights = load_file(folder / "run-skip" / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in weights.values() if tensor.is_floating_point())
    with pytest.raises(UserError, match="2 steps had a non-finite gradient"):
        train_here(None, "--output", folder / "run-skip-2", *arguments, "--epochs", "2", "--max-skipped-steps", "1")


def test_two_sharded_ranks_skip_a_step_with_a_non_finite_gradient(folder):
    samples = [make_sample(30, seed) for seed in range(30)]
    samples[3][2][0][5, 1] = math.nan
    states = write_shards(folder / "nan-sharded", folder / "target", samples)
    launch("--data", states, "--output", folder / "run-nan-sharded", "--tokens-per-step", "256", "--eval-fraction", "0",
           "--check-samples", "False", "--epochs", "2", "--shard")  # fmt: skip
    lines = read_metrics(folder / "run-nan-sharded")
    assert lines[-1]["skipped_steps"] == 2 and [line["loss"] for line in lines].count(None) == 2
    assert all(math.isfinite(line["loss"]) for line in lines if line["loss"] is not None)
    weights = load_file(folder / "run-nan-sharded" / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in weights.values() if tensor.is_floating_point())


@pytest.mark.parametrize("fraction", ["0", "0.2"])
def test_a_run_that_changed_no_weight_is_an_error_and_publishes_nothing(folder, tmp_path, fraction):
    samples = [make_sample(30, seed) for seed in range(30)]
    for _, _, states in samples:
        states[0][5, 1] = math.nan
    states = write_shards(tmp_path / "states", folder / "target", samples)
    arguments = ["--data", states, "--output", tmp_path / "run", "--tokens-per-step", "256", "--eval-fraction",
                 fraction, "--check-samples", "False", "--max-steps", "2"]  # fmt: skip
    for _ in range(2):  # the second time from the checkpoint of its end
        with pytest.raises(UserError, match="each of 2 steps was skipped for a non-finite gradient"):
            train_here(None, *arguments)
    assert not [path for path in (tmp_path / "run").rglob("model.safetensors")]


def test_a_run_beyond_the_steps_asked_for_is_refused_and_an_unfinished_capture_told(folder, tmp_path, capsys):
    samples = [make_sample(30, seed) for seed in range(20)]
    half = write_shards(tmp_path / "half", folder / "target", samples, unfinished=5)
    arguments = ["--data", half, "--output", tmp_path / "run", *SHORT]
    said = train_here(capsys, *arguments)
    assert f"warning: {half}: 4 of 25 rows are not captured yet; the 20 samples there are used" in said
    assert "held-out samples say little about a drafter" in said
    with pytest.raises(UserError, match="this run is at step 7, beyond the 3 asked for; raise --max-steps"):
        train_here(None, *arguments, "--max-steps", "3")


def test_held_out_samples_that_cannot_be_read_cost_no_training(folder, tmp_path, capsys):
    samples = [make_sample(30, seed) for seed in range(40)]
    states = write_shards(tmp_path / "states", folder / "target", samples)
    arguments = ["--data", states, "--model", folder / "target", *SHORT, "--max-steps", "4"]
    reader = ShardReader(states)
    held_out = split(reader.records, 0.15)[1]
    held_out[0].path.write_bytes(held_out[0].path.read_bytes()[:5000])
    said = train_here(capsys, "--output", tmp_path / "one", *arguments)
    assert f"sample {held_out[0].index} set aside" in said and "; 1 samples set aside, see " in said
    assert f"next: python eval_acceptance.py --drafter {tmp_path / 'one'} --data {states} --model" in said
    for record in held_out:
        record.path.unlink()
    said = train_here(capsys, "--output", tmp_path / "none", *arguments)
    assert "not evaluated: no held-out sample can be read" in said and "not evaluated yet; drafter in" in said
    assert checkpoints.steps_saved(tmp_path / "none")[-1] == 4 and (tmp_path / "none" / "model.safetensors").exists()

    set_aside, progress = SetAside(tmp_path / "gone.jsonl", print), Progress("train", None, quiet=True)
    drafter, _ = load_drafter(tmp_path / "one")
    parts = evaluation_target(load_target_parts(folder / "target"), "cpu")
    drafter.set_embedding(parts.embed_tokens)
    found = train_drafter.evaluate_held_out(drafter, parts, reader, held_out, 2, set_aside, progress)
    progress.close()
    assert found is None and len(set_aside.paths) == len(held_out), "files that went since they were checked"


def test_a_picture_that_cannot_be_written_does_not_end_the_run(folder, tmp_path, capsys):
    (tmp_path / "run" / "curves.png" / "in the way").mkdir(parents=True)
    said = train_here(capsys, "--data", folder / "few", "--output", tmp_path / "run", *SHORT, "--max-steps", "1")
    assert "curves.png: cannot write there" in said and not list((tmp_path / "run").glob(".curves*"))


@pytest.mark.parametrize(
    "name, value",
    [("max_steps", -1), ("epochs", 0.0), ("epochs", math.nan), ("epochs", math.inf), ("workers", 0), ("read_ahead", -1),
     ("reader_processes", -1), ("reader_processes", 5), ("read_ahead", 10**20), ("learning_rate", math.nan),
     ("learning_rate", 0.0), ("tokens_per_batch", -1), ("clip_norm", 0.0), ("step_decay", math.inf), ("beta2", 1.0),
     ("weight_decay", -0.1), ("warmup_ratio", 1.1), ("min_lr_ratio", math.nan),
     ("eval_fraction", 1.0), ("eval_fraction", -0.1), ("eval_fraction", math.nan)],
)  # fmt: skip
def test_a_number_that_cannot_be_is_refused_at_once(name, value):
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} {value}: expected"):
        train_drafter.TrainArguments(data=["states"], output="run", **{name: value})


@pytest.mark.parametrize(
    "architecture, given, expected, said",
    [
        ("LlamaForCausalLM", None, [1, 3, 5], None),
        ("LlamaForCausalLM", [1, 3, 5], [1, 3, 5], None),
        ("LlamaForCausalLM", [2, 4, 6], [2, 4, 6], "--serving-ids [2, 4, 6] are used.*with [1, 3, 5]"),
        ("Unheard", [2, 4, 6], [2, 4, 6], None),
        ("LlamaForCausalLM", [2, 4], UserError, "2 ids for 3 capture points [2, 4, 6]"),
        ("Unheard", None, UserError, "Unheard: it is not known"),
    ],
)
def test_serving_ids_are_one_a_point_and_told_where_they_differ_from_the_rule(architecture, given, expected, said):
    target = dict(
        architectures=[architecture], hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=99,
        max_position_embeddings=512, num_hidden_layers=8,
    )  # fmt: skip
    config, notes = DrafterConfig.from_target(target, capture_points=(2, 4, 6), draft_vocab_size=0), []
    pattern = said and re.escape(said).replace(r"\.\*", ".*")
    if expected is UserError:
        with pytest.raises(UserError, match=pattern):
            train_drafter.choose_serving_ids(given, config, target, notes.append)
        return
    assert train_drafter.choose_serving_ids(given, config, target, notes.append) == expected
    assert len(notes) == (said is not None) and all(re.search(pattern, note) for note in notes)


def test_a_warm_start_keeps_vocabulary_and_sizes(folder, learned, tmp_path):
    run = folder / "warm"
    arguments = ["--data", folder / "states", "--output", run, *LEARN, "--init-from", learned[0], "--max-steps", "2",
                 "--learning-rate", "1e-6", "--eval-every", "2"]  # fmt: skip
    train_here(None, *arguments)
    assert [line for line in read_metrics(run) if line["kind"] == "eval"][-1]["step0_accuracy"] > 0.95
    old, new = (load_file(each / "model.safetensors") for each in (learned[0], run))
    assert torch.equal(old["d2t"], new["d2t"])
    for asked, found in ((["--intermediate-size", "64"], 128), (["--norm-output"], False), (["--head-dim", "8"], 16),
                         (["--draft-vocab-size", "32"], 64)):  # fmt: skip
        with pytest.raises(UserError, match=f"{asked[0]} .*: the drafter of --init-from has {found}"):
            train_here(None, *arguments, "--output", tmp_path / "other", after=asked)


def test_a_warm_start_is_served_with_contexts_as_long_as_the_targets_or_as_asked(folder, learned, tmp_path, capsys):
    config = json.loads((learned[0] / "config.json").read_text())
    shutil.copytree(learned[0], tmp_path / "short", ignore=shutil.ignore_patterns("checkpoints"))
    (tmp_path / "short" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    for asked, expected in (([], 2048), (["--max-position-embeddings", "4096"], 4096)):
        run = tmp_path / str(expected)
        said = train_here(capsys, "--data", folder / "few", "--output", run, *SHORT, "--max-steps", "1", "--init-from",
                          tmp_path / "short", *asked)  # fmt: skip
        assert json.loads((run / "config.json").read_text())["max_position_embeddings"] == expected
        assert f"contexts of {expected:,} tokens (--max-position-embeddings), not 512" in said


def test_a_full_disk_while_the_drafter_is_written_is_one_line(folder, tmp_path):
    """The folder of the last weights is a small disk of its own: publishing fails, and says where."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    arguments = ["--data", folder / "few", "--output", tmp_path / "run", *SHORT, "--max-steps", "1"]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))  # more than any file before it, less than the drafter
        with pytest.raises(UserError, match=r"run: cannot write there \(File too large\)"):
            train_here(None, *arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "run").glob(".model*"))
    train_here(None, *arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--data", "nowhere"], "nowhere: expected a directory of shards, found nothing"),
        (["--data", "STATES", "--model", "nowhere"], "nowhere: no checkpoint folder there"),
        (["--data", "STATES", "--tokens-per-step", "100", "--tokens-per-batch", "64"], "must be a multiple"),
        (["--data", "STATES", "--long-documents", "refuse", "--tokens-per-step", "32"], "do not fit into a batch"),
        (["--data", "STATES", "--device", "tpu"], "--device tpu: expected auto, cuda, cpu"),
        (["--data", "STATES", "--shard"], "start it with torchrun"),
        (["--data", "STATES", "--export", "gguf"], "--export gguf"),
        (["--data", "STATES", "--long-documents", "keep"], "--long-documents keep"),
        (["--data", "STATES", "--ttt-steps", "0"], "--ttt-steps 0"),
    ],
)
def test_bad_input_is_refused_in_one_line(folder, tmp_path, arguments, message):
    arguments = [folder / "states" if each == "STATES" else each for each in arguments]
    with pytest.raises(UserError, match=message) as refused:
        train_here(None, "--output", tmp_path / "run", after=arguments)
    assert "\n" not in str(refused.value) and not (tmp_path / "run" / "model.safetensors").exists()


def test_two_runs_do_not_train_into_one_directory(folder, tmp_path):
    with checkpoints.own_directory(tmp_path / "run"), pytest.raises(UserError, match="another run is training"):
        train_here(None, "--output", tmp_path / "run", "--data", folder / "few", *SHORT)
    train_here(None, "--output", tmp_path / "run", "--data", folder / "few", *SHORT, "--max-steps", "1")


def test_tensorboard_holds_every_figure_once_and_wandb_is_refused_where_it_is_not_installed(folder, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    arguments = ["--output", tmp_path / "run", "--data", folder / "few", *SHORT]
    train_here(None, *arguments, "--max-steps", "4", after=["--tensorboard", "True"])
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    metrics = read_metrics(tmp_path / "run")
    logged = [(event.step, event.value) for event in events.Scalars("train/loss_per_step/1")]
    assert logged == [(line["step"], pytest.approx(line["loss_per_step"][1])) for line in metrics
                      if line["kind"] == "train"]  # fmt: skip
    assert [event.value for event in events.Scalars("eval/tau")] == [pytest.approx(metrics[-1]["tau"])]
    if importlib.util.find_spec("wandb") is None:
        with pytest.raises(UserError, match="pip install wandb"):
            train_here(None, "--output", tmp_path / "other", *arguments[2:], after=["--wandb-project", "drafters"])


def test_a_yaml_file_gives_the_arguments_and_flags_win(folder, tmp_path, capsys):
    path = tmp_path / "tiny.yaml"
    path.write_text(f"""
model: {folder / 'target'}
extract: {{data: elsewhere.jsonl}}
train:
  data: {folder / 'few'}
  output: {tmp_path / 'run'}
  tokens_per_step: 512
  learning_rate: 1e-3
  eval_fraction: 0
  max_steps: 9
""")
    assert "nothing was held out" in train_here(capsys, path, "--max-steps", "2")
    saved = json.loads((tmp_path / "run" / "arguments.json").read_text())
    assert (saved["max_steps"], saved["learning_rate"], saved["data"]) == (2, 1e-3, [str(folder / "few")])
    assert len(read_metrics(tmp_path / "run")) == 2


def test_a_refusal_has_exit_status_2_and_no_traceback(tmp_path):
    done = train("--output", tmp_path / "run", "--data", tmp_path / "nowhere", expect=2)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_sglang_is_not_needed():
    check = "import sys, train_drafter; assert not [name for name in sys.modules if name.split('.')[0] == 'sglang']"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, env=environment()).returncode == 0


@pytest.mark.gpu
@pytest.mark.parametrize("options", [["--cuda-graphs", "False"], ["--cuda-graphs", "True"], ["--compile", "False"]])
def test_a_gpu_learns_as_the_cpu_does(folder, learned, options):
    run = folder / f"gpu{'-'.join(options)}"
    train_here(None, "--data", folder / "states", "--output", run, *LEARN, after=["--device", "cuda", *options])
    on_cpu, on_gpu = (read_metrics(each) for each in (learned[0], run))
    for mine, theirs in zip(on_cpu[:5], on_gpu[:5], strict=True):
        assert theirs["tokens"] == mine["tokens"] and theirs["loss"] == pytest.approx(mine["loss"], rel=0.05)
    assert on_gpu[0]["peak_memory_gb"] > 0 and sum(on_gpu[3]["milliseconds"].values()) > 0
    assert on_gpu[-1]["kind"] == "eval" and on_gpu[-1]["step0_accuracy"] > 0.95
