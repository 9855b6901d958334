"""What the engine mode does on a real SGLang engine that a CPU can run: plain decoding, the logit gap, re-capture.

EAGLE-3 itself needs a GPU. SmolLM2-135M answers; its replies are captured again by a second engine, and offline
evaluation must find that every reply token is the target's own choice: alignment, capture and head agree end to end.
"""

import json
import sys

import pytest
import torch

import eval_acceptance
from common import embedded_model
from common.capture_points import CapturePoints
from common.conversations import load_rows
from common.drafter import Drafter, DrafterConfig
from common.engine_eval import Session
from common.offline_eval import Setting, evaluate, evaluation_target
from common.progress import Progress
from common.recapture import TokenRow, by_engine
from common.target import load_target_parts
from common.tokenizing import load_tokenizer

pytestmark = pytest.mark.engine


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


def test_replies_captured_again_are_the_targets_own_tokens_offline(answered, monkeypatch, capsys):
    target, replies = answered["target"], answered["results"][1]["replies"]
    layers = target.config["num_hidden_layers"]
    points = CapturePoints.default(layers)
    rows = []
    for index, reply in enumerate(replies):
        ids = torch.tensor(reply.prompt + reply.output)
        mask = (torch.arange(len(ids)) >= len(reply.prompt)).long()
        rows.append(TokenRow(index, ids, mask, f"{index:016x}", category=reply.category))
    reader = by_engine(answered["model"], target.config, rows, points, answered["folder"] / "again")
    config = DrafterConfig.from_target(target.config, capture_points=points.points, draft_vocab_size=0)
    drafter = Drafter(config)
    every = torch.ones(config.vocab_size, dtype=torch.bool)
    drafter.set_vocab(torch.zeros(config.vocab_size, dtype=torch.int64), every)
    drafter.init_weights(seed=0, lm_head=target.lm_head)
    wide = evaluation_target(target, "cpu")
    drafter.set_embedding(wide.embed_tokens)
    summary = evaluate(drafter, wide, reader.load, reader.records, Setting(num_steps=2)).summary(0)
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

    # and the doctor, with transformers as the second engine, finds nothing wrong with them
    monkeypatch.setattr(sys, "argv", ["eval_acceptance.py", "--diagnose", str(answered["folder"] / "again" / "states"),
                                      "--reference", "transformers", "--output", str(answered["folder"] / "doctor")])
    assert eval_acceptance.main() == 0, capsys.readouterr().out
    assert "every tensor is what it claims to be" in capsys.readouterr().out
