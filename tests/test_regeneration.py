"""--regenerate without an engine: which prompts are asked, in which order, and that the saved chat reads back."""

import asyncio
import json
from pathlib import Path

import pytest

from common import answering, embedded_model
from common.conversations import load_rows, parse_row
from common.engine import EngineDied
from common.errors import UserError
from common.regeneration import HOLE, fill, next_prompt, regenerated_row, script_of
from common.tokenizing import load_tokenizer, tokenize_row


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer(str(embedded_model.ensure()))


def row_of(record):
    return parse_row(record, 5, "p.jsonl:6", "p.jsonl")


def test_turn_by_turn_and_back_from_disk(smollm2, tmp_path):
    row = row_of({"turns": ["Hi", "So?"], "category": "chat"})
    script = script_of(row)
    assert script == [{"role": "user", "content": "Hi"}, HOLE, {"role": "user", "content": "So?"}, HOLE]
    answers, prompts = ["Hello!<|im_end|>", "Good.\n"], []
    while (prompt := next_prompt(script, row, smollm2)) is not None:
        prompts.append(prompt)
        assert fill(script, row, smollm2, answers[len(prompts) - 1])
    assert smollm2.decode(prompts[0]).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.decode(prompts[1]).endswith(
        "assistant\nHello!<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    )
    saved = tmp_path / "chats.jsonl"
    saved.write_text(json.dumps(regenerated_row(row, script)) + "\n")
    (back,) = load_rows(saved)
    assert back.messages == script and back.category == "chat" and back.source == "p.jsonl"
    sample, _, _ = tokenize_row(back, smollm2)
    assert sample.input_ids[: len(prompts[1])].tolist() == prompts[1]  # what is captured is what was asked
    first = slice(len(prompts[0]), len(prompts[0]) + 4)
    assert smollm2.decode(sample.input_ids[first].tolist()) == "Hello!<|im_end|>\n"
    assert sample.loss_mask[first].tolist() == [1, 1, 1, 0]


def test_scripts_of_chats():
    def roles(*messages):
        row = row_of({"messages": [{"role": r, "content": "x", **more} for r, more in messages]})
        return ["HOLE" if m is HOLE else m["role"] for m in script_of(row)]

    s, u, a, t = ("system", {}), ("user", {}), ("assistant", {}), ("tool", {})
    call = ("assistant", {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]})
    assert roles(s, u, a, u) == ["system", "user", "HOLE", "user", "HOLE"]
    assert roles(u, call, t, a) == ["user", "assistant", "tool", "HOLE"]
    assert roles(u, call, t) == ["user", "assistant", "tool", "HOLE"]
    assert roles(a, u, a, a) == ["user", "HOLE"]
    for messages in ([s], [a], []):
        with pytest.raises(UserError, match=r"^p\.jsonl:6: nothing to regenerate"):
            roles(*messages)
    with pytest.raises(UserError, match="tokenised row cannot be regenerated"):
        script_of(row_of({"input_ids": [1], "loss_mask": [1]}))


def test_reasoning_goes_where_the_template_shows_it_again(standin):
    """The prompt already holds <think>, so the answer is "reasoning</think>content"."""
    row = row_of({"turns": ["rain?"]})
    script = script_of(row)
    prompt = next_prompt(script, row, standin)
    assert prompt[-1] == 163606
    assert fill(script, row, standin, "the plain</think>no rain<|im_end|>")
    assert script[1] == {"role": "assistant", "content": "no rain", "reasoning_content": "the plain"}
    sample, _, _ = tokenize_row(row_of(regenerated_row(row, script)), standin)
    on = standin.decode(sample.input_ids[sample.loss_mask == 1].tolist())
    assert on == "the plain</think>no rain<|im_end|>" and 163607 in sample.input_ids

    script = script_of(row)  # and with the think block closed in the prompt
    assert fill(script, row, standin, "no rain", template_kwargs={"thinking": False})
    assert script[1] == {"role": "assistant", "content": "no rain"}


def test_special_tokens_inside_an_answer_stay(standin):
    row = row_of({"turns": ["rain?"]})
    for answer in ("x</think><|tool_calls_begin|>f({})<|tool_calls_end|><|im_end|>", "x</think>y<|tool_calls_end|>"):
        script = script_of(row)
        assert fill(script, row, standin, answer)
        assert script[1]["content"].endswith("<|tool_calls_end|>")


def test_an_answer_that_the_template_changes_is_reported(smollm2):
    row = row_of({"turns": ["Hi"]})
    before = smollm2.chat_template
    smollm2.chat_template = before.replace("message['content'] +", "message['content'] | trim +")
    try:
        assert smollm2.chat_template != before
        script = script_of(row)
        assert not fill(script, row, smollm2, " Hello<|im_end|>")
        assert script[1] == {"role": "assistant", "content": " Hello"}
        script = script_of(row)
        assert fill(script, row, smollm2, "Hello<|im_end|>")
    finally:
        smollm2.chat_template = before


def test_an_engine_that_never_answers_ends_the_run(smollm2, tmp_path, monkeypatch):
    class Hung:
        async def async_generate(self, **_):
            await asyncio.Event().wait()

        def get_all_child_pids(self):
            return []

    monkeypatch.setattr(answering, "SILENCE_SECONDS", 0.3)
    work = answering.answer(
        Hung(), [row_of({"turns": ["Hi"]})], smollm2, tmp_path / "answers.jsonl", temperature=0.0, max_new_tokens=4,
        context_length=100, template_kwargs=None, on_done=print, given_up=answering.GivenUp(),
    )  # fmt: skip
    with pytest.raises(EngineDied, match="has been silent for 0 s; its stacks are in its log"):
        asyncio.run(asyncio.wait_for(work, 60))


def test_a_full_disk_is_said_in_one_line(smollm2):
    class Quick:
        async def async_generate(self, **_):
            return {"output_ids": [5, 6], "meta_info": {"finish_reason": {"type": "stop"}}}

    work = answering.answer(
        Quick(), [row_of({"turns": ["Hi"]})], smollm2, Path("/dev/full"), temperature=0.0, max_new_tokens=4,
        context_length=100, template_kwargs=None, on_done=print, given_up=answering.GivenUp(),
    )  # fmt: skip
    with pytest.raises(UserError, match="/dev/full: the disk is full .* run the same command again"):
        asyncio.run(asyncio.wait_for(work, 60))


def test_a_prompt_without_room_is_named(smollm2):
    row = row_of({"turns": ["word " * 100]})
    with pytest.raises(UserError, match=r"^p\.jsonl:6: the prompt for message 1 has \d+ tokens, but .* takes 64"):
        next_prompt(script_of(row), row, smollm2, context_length=64)
    assert next_prompt(script_of(row), row, smollm2, context_length=640)
