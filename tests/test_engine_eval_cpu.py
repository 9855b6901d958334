"""What the engine mode does on a real SGLang engine that a CPU can run: plain decoding, the logit gap, re-capture.

EAGLE-3 itself needs a GPU. SmolLM2-135M answers; its replies are captured again by a second engine, which the shard
doctor starts to compare them with states of the same prompts that another engine (transformers, in vLLM's place) wrote
in speculators' format. Offline evaluation must find that every reply token is the target's own choice: alignment,
capture and head agree end to end.
"""

import json
import os
import shutil
import signal
import sys

import pytest
import torch
from datasets import Dataset

import eval_acceptance
from common import doctor_run, embedded_model
from common.capture_points import CapturePoints
from common.conversations import load_rows
from common.drafter import Drafter, DrafterConfig
from common.engine_eval import ServingSettings, Session, run_once
from common.offline_eval import Setting, evaluate, evaluation_target
from common.parity import pick_points
from common.progress import Progress
from common.recapture import TokenRow, by_engine, by_transformers
from common.shards import ShardReader
from common.target import load_target_parts
from common.tokenizing import load_tokenizer
from tests.speculators_directory import store

pytestmark = pytest.mark.engine
POINTS = CapturePoints((3, 16, 28), 30)


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    from common.engine_eval import logit_gaps

    folder = tmp_path_factory.mktemp("engine")
    model = str(embedded_model.ensure())
    (folder / "prompts.jsonl").write_text(
        json.dumps({"turns": ["Name three colours.", "Now name three more."], "category": "lists"}) + "\n"
        + json.dumps({"turns": ["What is 2 + 2?"], "category": "math"}) + "\n"
    )  # fmt: skip
    arguments = eval_acceptance.Arguments(model=model, batch_sizes=[1, 2], max_new_tokens=12, output=str(folder))
    rows, target = load_rows(str(folder / "prompts.jsonl")), load_target_parts(model)
    gaps: list[dict] = []

    def look_up(engine, results):
        for reply in results[2]["replies"]:
            gaps.append({"context": reply.prompt + reply.output[:3], "said": reply.output[3]})
        logit_gaps(engine, gaps)

    with Progress("engine", 2, quiet=True) as progress:
        session = Session(arguments, target.config, rows, load_tokenizer(model), "cpu", progress, folder)
        results = session.answer_all(None, None, "plain", after=look_up)
    return {"folder": folder, "model": model, "target": target, "results": results, "gaps": gaps}


def test_plain_decoding_and_logit_gaps(answered):
    for result in answered["results"].values():
        assert [(reply.row, reply.turn, reply.category) for reply in result["replies"]] == [
            (0, 1, "lists"), (0, 2, "lists"), (1, 1, "math")
        ]  # fmt: skip
        assert result["tokens_per_second"] > 0 and result["skipped"] == {}
        assert all(1 <= len(reply.output) <= 12 for reply in result["replies"])
        assert all("spec_verify_ct" not in reply.meta for reply in result["replies"])
    for gap in answered["gaps"]:
        assert gap["gap"] >= 0 and gap["said"] in gap["best_two"]
    assert sum(gap["best_two"][0] == gap["said"] for gap in answered["gaps"]) >= 2


def of_another_engine(folder, model, rows, points, eight_bits=False):
    """A directory of speculators' with the states that transformers computes of these rows at these points."""
    columns = {"input_ids": [], "loss_mask": [], "seq_len": []}
    for row, states in zip(rows, by_transformers(model, rows, points), strict=True):
        values = (row.input_ids.tolist(), row.loss_mask.tolist(), len(row.input_ids))
        for name, value in zip(columns, values, strict=True):
            columns[name].append(value)
        folder.mkdir(exist_ok=True)
        store(folder, row.index, row.input_ids, states, eight_bits)
    Dataset.from_dict(columns).with_format("torch").save_to_disk(str(folder.with_suffix(".rows")))
    shutil.copytree(folder.with_suffix(".rows"), folder, dirs_exist_ok=True)
    return folder


@pytest.fixture
def diagnosed(answered, monkeypatch, capsys):
    """diagnosed(name, points, eight_bits): (status, what is printed, findings, errors) of the doctor on states that
    another engine made of the replies; the reference is SGLang's capture, made once."""
    folder = answered["folder"]

    def capture_once(model, config, rows, points, _, *more):
        if not (folder / "again").exists():
            by_engine(model, config, rows, points, folder / "again", *more)
        return ShardReader(folder / "again" / "states")

    def diagnose(name, at, eight_bits=False):
        rows = []
        for index, reply in enumerate(answered["results"][1]["replies"]):
            ids = torch.tensor(reply.prompt + reply.output)
            mask = (torch.arange(len(ids)) >= len(reply.prompt)).long()
            rows.append(TokenRow(index, ids, mask, f"{index:016x}", category=reply.category))
        states = of_another_engine(folder / name, answered["model"], rows, list(at), eight_bits)
        command = ["--diagnose", states, "--model", answered["model"], "--output", folder / f"doctor {name}"]
        command += ["--data-points", *POINTS.points]
        monkeypatch.setattr(doctor_run, "by_engine", capture_once)
        monkeypatch.setattr(sys, "argv", ["eval_acceptance.py", *map(str, command)])
        status = eval_acceptance.main()
        said = capsys.readouterr().out
        findings = json.loads((folder / f"doctor {name}" / "report.json").read_text())["findings"]
        assert findings[-1]["found"] == "last state" and all(finding["certain"] for finding in findings), said
        return status, said, [finding["error"] for finding in findings]

    return diagnose


def test_the_doctor_on_eight_bits_of_another_engine(diagnosed):
    status, said, away = diagnosed("eight bits", POINTS.points, eight_bits=True)
    assert status == 0 and "fp8, rounds by 2." in said and max(away) < 0.06, said


def test_replies_captured_again_are_the_targets_own_tokens_offline(answered, diagnosed, monkeypatch, capsys):
    target, replies, points = answered["target"], answered["results"][1]["replies"], POINTS
    status, said, away = diagnosed("right", points.points)
    assert status == 0 and 0 < max(away) < 0.04, said  # bfloat16 in two engines
    assert "every tensor is what it claims to be" in said and "against sglang" in said
    status, said, _ = diagnosed("shifted", [point + 1 for point in points.points])
    assert status == 1 and "wrong: all points are shifted by +1: they claim [3, 16, 28] and are [4, 17, 29]" in said

    reader = ShardReader(answered["folder"] / "again" / "states")  # the points and their neighbours
    captured = reader.info["capture_points"]

    def load(record):
        return pick_points(reader.load(record), captured, list(points.points))

    config = DrafterConfig.from_target(target.config, capture_points=points.points, draft_vocab_size=0)
    drafter = Drafter(config)
    every = torch.ones(config.vocab_size, dtype=torch.bool)
    drafter.set_vocab(torch.zeros(config.vocab_size, dtype=torch.int64), every)
    drafter.init_weights(seed=0, lm_head=target.lm_head)
    wide = evaluation_target(target, "cpu")
    drafter.set_embedding(wide.embed_tokens)
    summary = evaluate(drafter, wide, load, reader.records, Setting(num_steps=2)).summary(0)
    assert summary["positions"] == sum(len(reply.output) for reply in replies)
    assert summary["off_row_share"] < 0.2
    for record in reader.records:  # where offline would choose otherwise, the two logits nearly tie
        sample = reader.load(record)
        s = torch.nonzero(sample.loss_mask).flatten()
        (logits,) = wide.logit_chunks(sample.states[-1][s - 1])
        short = logits.max(-1).values - logits.gather(1, sample.input_ids[s, None]).squeeze(1)
        assert float(short.max()) < 0.5, short  # bfloat16 logits of this size are 0.125 apart
        shifted = logits.max(-1).values - logits.gather(1, sample.input_ids[s - 1, None]).squeeze(1)
        assert float(shifted.median()) > 2  # a row off by one token would not pass
    assert summary["cycles"] >= sum(len(reply.output) - 1 for reply in replies) / 3

    # and the doctor, with transformers as the second engine, finds nothing wrong with SGLang's
    monkeypatch.setattr(sys, "argv", ["eval_acceptance.py", "--diagnose", str(answered["folder"] / "again" / "states"),
                                      "--reference", "transformers", "--output", str(answered["folder"] / "doctor")])
    assert eval_acceptance.main() == 0, capsys.readouterr().out
    assert "every tensor is what it claims to be" in capsys.readouterr().out


def test_an_engine_that_dies_while_it_answers_ends_the_run(tmp_path):
    from common.engine import EngineDied, start_engine, stop_engine

    model = str(embedded_model.ensure())
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"turns": ["Name three colours.", "Now name three more."]}))
    engine = start_engine(ServingSettings(model, None, None, None, device="cpu"), tmp_path / "dies.log")

    def die(tokens):
        """After the first answer, as the kernel ends a process when memory is short: nothing is said."""
        for pid in engine.get_all_child_pids():
            os.kill(pid, signal.SIGKILL)

    rows = load_rows(str(tmp_path / "prompts.jsonl"))
    try:
        with pytest.raises(EngineDied, match="a process of the engine died"):
            run_once(engine, load_tokenizer(model), rows, 1, {"temperature": 0.0, "max_new_tokens": 8}, die)
    finally:
        stop_engine(engine)
