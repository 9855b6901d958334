"""Every bad input of extract.py is one clear line and a non-zero exit, in seconds, and leaves no shard behind.

No engine is started here: `main` runs in this process, except where the exit status itself is looked at.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import extract
from common.conversations import load_rows
from common.engine import OWNED, UNSAFE
from common.errors import UserError
from common.shard_run import RunDirectory

ROOT = Path(__file__).resolve().parent.parent
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]}


@pytest.fixture
def bare(small_target, tmp_path):
    """A copy of the target's folder, to be damaged."""
    folder = tmp_path / "bare"
    shutil.copytree(small_target, folder)
    return folder


@pytest.fixture
def run(small_target, tmp_path, monkeypatch):
    """Call extract.py; returns the one line of its complaint. `rows` become the data."""
    out = tmp_path / "out"

    def call(*arguments, rows=(CHAT,), text=None, model=small_target, output=out):
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows) if text is None else text)
        flags = ["--model", model, "--data", data, "--output", output, "--ring-gb", "0.2", *arguments]
        monkeypatch.setattr(sys, "argv", ["extract.py", *map(str, flags)])
        with pytest.raises(UserError) as caught:
            extract.main()
        line = str(caught.value)
        assert "\n" not in line.strip() and len(line) < 700
        assert not list(Path(output).rglob("data_*")) and not list(Path(output).rglob("*.tmp"))
        return line

    return call


def edit_config(folder: Path, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_missing_model(run):
    assert "/nowhere/model: no checkpoint folder" in run(model="/nowhere/model")


def test_hub_id_that_cannot_be_downloaded(run, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "nobody/nothing: neither a folder nor a hub id" in run(model="nobody/nothing")


def test_folder_without_config(run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("nothing")
    assert "config.json: not found" in run(model=tmp_path / "empty")


def test_unknown_architecture(run, bare):
    edit_config(bare, architectures=["NoSuchForCausalLM"])
    assert "unknown architecture NoSuchForCausalLM" in run(model=bare)


def test_unusable_tokenizer(run, bare):
    (bare / "tokenizer.json").write_text("{}")
    assert "its tokenizer cannot be loaded" in run(model=bare)


@pytest.mark.parametrize(
    ("points", "complaint"),
    [
        (("5", "3"), "must be ascending"),
        (("3", "3"), "must be ascending and distinct"),
        (("3", "8"), "[8] are out of range: this model has 8 layers"),
        (("0", "3"), "[0] are out of range"),
    ],
)
def test_capture_points(run, points, complaint):
    assert complaint in run("--capture-points", *points)


def test_empty_data(run):
    assert "no rows found" in run(text="")


def test_missing_data(run):
    assert "no such file" in run("--data", "/nowhere/chats.jsonl")


def test_malformed_line_is_named(run):
    assert "data.jsonl:2: malformed JSON" in run(text=json.dumps(CHAT) + '\n{"messages": [\n')


def test_unknown_role(run):
    line = run(rows=[CHAT, {"messages": [{"role": "wizard", "content": "x"}]}])
    assert "data.jsonl:2" in line and "wizard" in line


def test_nothing_supervised_anywhere(run):
    assert "no row is left to work on: 1 x no assistant turn" in run(rows=[{"messages": CHAT["messages"][:1]}])


def test_token_outside_the_vocabulary(run):
    assert "token id 49152 at position 1" in run(rows=[{"input_ids": [5, 49152], "loss_mask": [0, 1]}])


def test_row_longer_than_the_context(run):
    line = run(rows=[{"input_ids": [5] * 2048, "loss_mask": [1] * 2048}])
    assert "2048 tokens, but the model takes 2047" in line and "--max-length" in line


def test_template_that_raises(run, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('system turns only') }}")
    line = run("--chat-template", template)
    assert "data.jsonl:1" in line and "system turns only" in line


@pytest.mark.parametrize("text", ["not json", "[1]"])
def test_engine_arguments_that_are_no_object(run, text):
    assert "--engine-args" in run("--engine-args", text)


UNSAFE_VALUES = {
    "dp_size": 2, "pp_size": 2, "attn_cp_size": 2, "moe_dp_size": 2, "tokenizer_worker_num": 2,
    "moe_a2a_backend": "deepep", "disable_radix_cache": False, "disable_prefill_cuda_graph": False,
    "enforce_disable_flashinfer_allreduce_fusion": False, "speculative_algorithm": "EAGLE3", "forward_hooks": [{}],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(UNSAFE))
def test_unsafe_engine_argument_is_refused_by_name(run, name):
    line = run("--engine-args", json.dumps({name: UNSAFE_VALUES.get(name, True)}), "--device", "cpu")
    assert f"engine argument {name}=" in line and "unsafe while capturing" in line


@pytest.mark.parametrize("name", sorted(OWNED))
def test_an_engine_argument_that_a_flag_sets_is_refused_and_the_flag_named(run, name):
    line = run("--engine-args", json.dumps({name: 2}), "--device", "cpu")
    assert f"engine argument {name}=2" in line and f"use {OWNED[name]}" in line


def test_ring_that_cannot_hold_a_forward_pass(run):
    assert "--ring-gb 0.0001" in run("--ring-gb", "0.0001")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (['{"chunked_prefill_size": 999999}'], "two forward passes of 999999 tokens"),
        (['{"chunked_prefill_size": -1, "max_prefill_tokens": 888888}'], "two forward passes of 888888 tokens"),
        (['{"chunked_prefill_size": 64}', "--chunk-tokens", "32"], "give --chunk-tokens alone"),
        (['{"chunked_prefill_size": "64"}'], "expected one number of tokens"),
    ],
)
def test_a_forward_pass_of_the_size_that_the_engine_arguments_say(run, flags, complaint):
    assert complaint in run("--engine-args", *flags)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--tp", "0"), ("--writers", "0"), ("--device", "tpu"), ("--dtype", "int4"), ("--state-dtype", "int8"),
     ("--last-state", "none"), ("--layout", "zarr"), ("--rows-per-block", "0"), ("--supervise", "some"),
     ("--over-length", "bend"), ("--max-length", "0"), ("--limit", "0"), ("--template-kwargs", "{")],
)  # fmt: skip
def test_impossible_values(run, flag, value):
    assert value in run(flag, value) or flag in run(flag, value)


def test_output_of_another_run(run, small_target, bare, tmp_path):
    """A directory made with other points, another model or another tokenizer is refused, by field."""
    out = tmp_path / "out"
    arguments = extract.ExtractArguments(model=str(small_target), data=["x"], output=str(out), ring_gb=0.2)
    target = extract.read_target(arguments)
    RunDirectory(out, extract.identity(arguments, target), rows=1).close()
    assert "capture_points" in run("--capture-points", "2", "4")
    assert "seed" in run("--seed", "1")
    assert "dtype of the states (--state-dtype) was 'bfloat16', is now 'fp8'" in run("--state-dtype", "fp8")
    assert "last_state_rows was None, is now 'supervised'" in run("--last-state", "supervised")
    assert "speculators expects the last state of every row" in run("--last-state", "supervised", "--layout", "arrow")
    other = tmp_path / "other"
    shutil.copytree(small_target, other)
    edit_config(other, rms_norm_eps=1e-6)
    assert "config_hash" in run(model=other)
    (bare / "chat_template.jinja").write_text((bare / "chat_template.jinja").read_text() + "\n")
    assert "chat_template_hash" in run(model=bare)


def test_directory_of_somebody_else(run, tmp_path):
    (tmp_path / "theirs" / "rows_0-2000").mkdir(parents=True)
    assert "not ours" in run(output=tmp_path / "theirs")


def test_read_only_directory(run, tmpfs):
    assert "cannot write there" in run(output=tmpfs("ro") / "out")


def test_answers_that_are_all_there_need_no_engine(run, tmp_path):
    """The complaint about the ring, which comes after them, is there in seconds."""
    data, answers = tmp_path / "data.jsonl", tmp_path / "out" / "answers"
    data.write_text(json.dumps(CHAT) + "\n")
    (row,) = load_rows(str(data))
    answers.mkdir(parents=True)
    (answers / "answers-0.jsonl").write_text(json.dumps({"index": 0, **CHAT, "asked": row.row_hash}) + "\n")
    assert "--ring-gb 0.0001" in run("--regenerate", "--ring-gb", "0.0001")
    assert not (tmp_path / "out" / "logs").exists(), "an engine was started"


def test_exit_status_and_single_line(tmp_path):
    """What a shell sees."""
    for arguments in (["--model", "/nowhere/model", "--data", "x", "--output", tmp_path / "o"], ["--status", tmp_path]):
        done = subprocess.run(
            [sys.executable, "extract.py", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 2
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_missing_arguments():
    done = subprocess.run([sys.executable, "extract.py"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "--model, --data, --output missing" in done.stderr


def test_plan_needs_no_engine(small_target, tmp_path, monkeypatch, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"input_ids": [5] * 100, "loss_mask": [0] * 60 + [1] * 40}) + "\n")
    command = ["extract.py", "--plan", "--model", str(small_target), "--data", str(data)]

    def plan(*more):
        monkeypatch.setattr(sys, "argv", [*command, "--json", *more])
        assert extract.main() == 0
        return json.loads(capsys.readouterr().out)

    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "512 bytes a token, the last state at 100% of them" in done.stdout
    full = plan()
    assert full["samples"] == 1 and full["tokens"] == 100 and full["capture_points"] == [3, 5, 6]
    overhead = 100 * 16 + 8192
    assert (full["bytes_per_token"], full["bytes"]) == (4 * 64 * 2, 100 * 4 * 64 * 2 + overhead)
    eight = 3 * (64 + 4)
    for flags, per_token in [
        (["--state-dtype", "fp8"], eight + 128),
        (["--state-dtype", "fp8", "--layout", "arrow"], eight + 68 + 128),
        (["--last-state", "supervised"], 3 * 128 + 0.4 * 128),
        (["--last-state", "supervised", "--state-dtype", "fp8"], eight + 0.4 * 128),
    ]:
        made = plan(*flags)
        assert made["bytes_per_token"] == round(per_token), flags
        assert made["bytes"] == pytest.approx(100 * per_token + overhead), flags
    assert made["last_state_share"] == 0.4
