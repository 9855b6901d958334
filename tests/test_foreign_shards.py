"""States that another engine wrote through speculators: trained on, evaluated, diagnosed; nothing left out in silence.

transformers stands for vLLM: an engine that is not SGLang. The SGLang side of the doctor is in test_engine_eval_cpu.py.
"""

import json
import os
import shutil
import sys

import numpy as np
import pytest
import torch

import eval_acceptance
from common.errors import UserError
from common.offline_eval import points_in_order
from common.recapture import TokenRow, by_transformers
from common.shards import ShardReader
from tests import speculators_directory as theirs
from tests.shard_writer import capture
from tests.training_fixtures import train_here

ROWS, POINTS = 20, [2, 4, 5]  # speculators' own default for 8 layers


@pytest.fixture(scope="module")
def directories(small_target, tmp_path_factory):
    """{"full", "eight bits": directory}: 20 rows; 4 are not generated yet, one file is cut short, and one is of other
    tokens."""
    folder = tmp_path_factory.mktemp("speculators")
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(ROWS):
        length = int(rng.integers(20, 50))
        ids = rng.integers(100, 140, length).tolist()
        rows.append({"input_ids": ids, "loss_mask": [0] * 6 + [1] * (length - 6)})
    written = theirs.prepare(folder / "full", small_target, rows)
    tokens = [TokenRow(i, row["input_ids"], row["loss_mask"], "") for i, row in enumerate(written)]
    states = by_transformers(str(small_target), tokens, POINTS)
    shutil.copytree(folder / "full", folder / "eight bits")
    for name in ("full", "eight bits"):
        for index, (row, of_row) in enumerate(zip(written, states, strict=True)):
            if index < ROWS - 4:
                theirs.store(folder / name, index, row["input_ids"], of_row, name != "full")
        os.truncate(folder / name / "hidden_states" / "hs_3.safetensors", 5000)
        theirs.store(folder / name, 5, written[5]["input_ids"].flip(0), states[5])
    return {"full": folder / "full", "eight bits": folder / "eight bits", "rows": written, "states": states}


LEFT_OUT = [
    "1 of 20 rows have an unreadable file (SafetensorError); left out: 3",
    "1 of 20 rows have states of other tokens (was the dataset prepared again since? remove these files); left out: 5",
    "4 of 20 rows have no states yet (`speculators generate-offline-data` continues); left out: 16, 17, 18, 19",
]


def evaluate(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["eval_acceptance.py", *map(str, arguments)])
    status = eval_acceptance.main()
    return status, capsys.readouterr().out


def test_what_is_read_and_what_is_left_out(directories):
    read = {}
    for name in ("full", "eight bits"):
        reader = ShardReader(directories[name], POINTS)
        assert [record.index for record in reader.records] == [i for i in range(ROWS - 4) if i not in (3, 5)]
        assert [remark.partition(": ")[2] for remark in reader.remarks] == LEFT_OUT
        assert reader.info == {"capture_points": POINTS} and reader.foreign == [directories[name]]
        read[name] = [reader.load(record) for record in reader.records]
        assert set(reader.stored_dtypes(reader.records[0])) == {"float32" if name == "full" else "fp8"}
    for full, eight in zip(read["full"], read["eight bits"], strict=True):
        row = directories["rows"][full.record.index]
        assert torch.equal(full.input_ids, row["input_ids"]) and torch.equal(full.loss_mask, row["loss_mask"])
        assert all(map(torch.equal, full.states, directories["states"][full.record.index]))
        step = torch.stack(full.states).abs().amax((0, 2))[:, None] / 448 * 2**-10  # one scale for all of a token
        for state, rounded in zip(full.states, eight.states, strict=True):
            assert rounded.dtype == torch.bfloat16
            assert ((rounded - state).abs() <= torch.maximum(state.abs() / 16, step) * 1.04).all()


def test_trained_on_and_evaluated(directories, small_target, tmp_path, capsys, monkeypatch):
    common = ["--max-steps", 3, "--tokens-per-step", 128, "--eval-fraction", 0.3]
    named = ["--model", small_target, "--data-points", *POINTS]
    for name in ("full", "eight bits"):
        printed = train_here(capsys, "--data", directories[name], "--output", tmp_path / name, *named, *common)
        assert all(line in printed for line in LEFT_OUT)
        config = json.loads((tmp_path / name / "config.json").read_text())
        # SGLang adds one to a Llama's ids
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [point - 1 for point in POINTS]
    mixed = ["--data", directories["eight bits"], directories["full"], *named, *common]  # bfloat16 and float32
    train_here(capsys, *mixed, "--output", tmp_path / "mixed")
    assert len((tmp_path / "mixed" / "metrics.jsonl").read_text().splitlines()) == 4
    both = ["--drafter", tmp_path / "full", tmp_path / "eight bits", "--data", directories["full"]]
    _, printed = evaluate(capsys, monkeypatch, *both, *named, "--output", tmp_path / "report")
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [note.partition(": ")[2] for note in report["data"]["notes"]] == LEFT_OUT and LEFT_OUT[0] in printed
    assert [result["summary"]["positions"] > 0 for result in report["offline"]] == [True, True]

    unnamed = ["--data", directories["full"], "--model", small_target, "--output", tmp_path / "x"]
    complaint = r"nothing says which layers .* --data-points; for 8 layers speculators' default is 2 4 5 \(0.5 and la"
    with pytest.raises(UserError, match=complaint):
        train_here(None, *unnamed, *common)
    with pytest.raises(UserError, match=complaint):
        evaluate(capsys, monkeypatch, "--drafter", tmp_path / "full", *unnamed)
    with pytest.raises(UserError, match="do not name their target; give --model"):
        train_here(None, "--data", directories["full"], "--output", tmp_path / "x", "--data-points", *POINTS)
    with pytest.raises(UserError, match=r"capture points \[2, 4, 5\] does not fit .* which have \[3, 5, 6\]"):
        evaluate(capsys, monkeypatch, "--drafter", tmp_path / "full", *unnamed, "--data-points", 3, 5, 6)
    with pytest.raises(UserError, match="number of capture points 2 does not fit .* 3 and the last state"):
        train_here(None, *unnamed, *common, "--data-points", 3, 5)


def test_our_points_say_nothing_of_theirs(directories, tmp_path):
    """Beside a directory of ours, whose dataset.json names its points, the other one's must still be named."""
    capture(tmp_path / "ours", 10)
    for both in ([tmp_path / "ours", directories["full"]], [directories["full"], tmp_path / "ours"]):
        with pytest.raises(UserError, match="full: nothing says which layers these states are"):
            points_in_order(ShardReader(both), 61)
        with pytest.raises(UserError, match=r"ours: its states are of points \[3, 31, 59\], not \[2, 4, 5\]"):
            ShardReader(both, POINTS)
        assert points_in_order(ShardReader(both, [3, 31, 59]), 61).points == (3, 31, 59)


def test_a_damaged_v1_file_is_left_out_and_named(tmp_path):
    sample = {"input_ids": torch.arange(5), "loss_mask": torch.ones(5, dtype=torch.int64)}
    for index in range(3):
        torch.save(sample | {"hidden_states": [torch.zeros(5, 4)] * 4}, tmp_path / f"data_{index}.pt")
    os.truncate(tmp_path / "data_1.pt", 300)
    reader = ShardReader(tmp_path, POINTS)
    assert [record.index for record in reader.records] == [0, 2]
    assert reader.remarks == [f"{tmp_path}: 1 of 3 files are no readable samples; left out: data_1.pt"]


def test_files_of_another_shape_and_eight_bits_without_scales(tmp_path):
    sample = {"input_ids": torch.arange(5), "loss_mask": torch.ones(5, dtype=torch.int64)}
    shapes = [(4, 8), (4, 8), (3, 8), (4, 6), (4, 8)]  # states, width
    for index, (number, width) in enumerate(shapes):
        states = [torch.zeros(5, width, dtype=torch.bfloat16)] * number
        torch.save(sample | {"hidden_states": states}, tmp_path / f"data_{index}.pt")
    reader = ShardReader(tmp_path, POINTS)
    assert [record.index for record in reader.records] == [0, 1, 4]
    assert "2 files have another number or width of states; left out: data_2.pt, data_3.pt" in reader.remarks[0]
    reader.load(reader.records[0])
    eight = [torch.zeros(5, 8).to(torch.float8_e4m3fn)] * 4
    torch.save(sample | {"hidden_states": eight}, tmp_path / "data_1.pt")
    with pytest.raises(UserError, match="states in eight bits, but no scales beside them"):
        reader.load(reader.records[1])
    strange = [torch.zeros(5, 8).to(torch.float8_e5m2)] * 4
    torch.save(sample | {"hidden_states": strange, "scales": torch.ones(5, 3)}, tmp_path / "data_1.pt")
    reader = ShardReader(tmp_path, POINTS)  # sizes are those that it found
    with pytest.raises(UserError, match="states in torch.float8_e5m2; of eight bits only torch.float8_e4m3fn"):
        reader.load(reader.records[1])
    torch.save(sample | {"hidden_states": states, "scales": torch.ones(5, 3)}, tmp_path / "data_1.pt")
    reader = ShardReader(tmp_path, POINTS)
    assert reader.load(reader.records[1], widen=False).scales is None, "scales of states that are no codes"
    torch.save(sample | {"hidden_states": [torch.zeros(5, 6)] * 4}, tmp_path / "data_4.pt")
    with pytest.raises(UserError, match=r"data_4.pt: expected 4 states of width 8 as in .*data_1.pt, found 4 of w"):
        reader.load(reader.records[2])


def test_what_is_missing_is_one_clear_line(directories, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(directories["full"], copy, ignore=shutil.ignore_patterns("hidden_states"))
    with pytest.raises(UserError, match="a dataset of 20 rows, but no .*hidden_states; .*generate-offline-data"):
        ShardReader(copy)
    (copy / "hidden_states").mkdir()
    with pytest.raises(UserError, match="20 of 20 rows have no states yet"):
        ShardReader(copy)
    from datasets import load_from_disk

    load_from_disk(str(directories["full"])).remove_columns("loss_mask").save_to_disk(str(tmp_path / "bare"))
    with pytest.raises(UserError, match=r"has no loss_mask \(it has input_ids, seq_len\)"):
        ShardReader(tmp_path / "bare")


@pytest.mark.parametrize("name", ["full", "eight bits"])
def test_the_doctor(directories, small_target, tmp_path, capsys, monkeypatch, name):
    asked = ["--diagnose", directories[name], "--model", small_target, "--reference", "transformers",
             "--output", tmp_path]  # fmt: skip
    status, printed = evaluate(capsys, monkeypatch, *asked)
    last = json.loads((tmp_path / "report.json").read_text())["findings"][-1]
    assert status == 0 and "taking the usual [2, 4, 5]" in printed and LEFT_OUT[2] in printed, printed
    assert last["found"] == "last state" and last["certain"]  # before the norm
    assert ("fp8, rounds by 2." in printed) == (name == "eight bits")
    status, printed = evaluate(capsys, monkeypatch, *asked, "--capture-points", 3, 5, 6)
    assert status == 1 and "all points are shifted by -1: they claim [3, 5, 6] and are [2, 4, 5]" in printed
