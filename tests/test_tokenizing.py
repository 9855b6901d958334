"""From rows to samples: lengths, vocabulary, skips by reason, processes, fingerprints."""

import json

import numpy as np
import pytest
import transformers

from common import embedded_model, tokenizing
from common.conversations import load_rows, parse_row
from common.errors import UserError
from common.loss_mask import NO_CALLS
from common.tokenizing import load_tokenizer, one_row_per_turn, tokenize_row, tokenize_rows, tokenizer_fingerprint
from standin_tokenizer import build


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer(str(embedded_model.ensure()))


@pytest.fixture(scope="module")
def standin_folder(tmp_path_factory):
    return build(tmp_path_factory.mktemp("standin"))


def rows_of(*records):
    return [parse_row(record, i, f"d.jsonl:{i + 1}", "d.jsonl") for i, record in enumerate(records)]


def chat(*contents, first="user"):
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def tokens(ids, mask):
    return {"input_ids": ids, "loss_mask": mask}


def test_a_row_becomes_arrays_with_its_origin(smollm2):
    row = rows_of({**chat("Hi", "Hello!"), "category": "chat"})[0]
    sample, reason, remarks = tokenize_row(row, smollm2)
    assert reason is None and remarks == {}
    assert sample.input_ids.dtype == np.int32 and sample.loss_mask.dtype == np.uint8
    assert (sample.index, sample.source, sample.category, sample.place) == (0, "d.jsonl", "chat", "d.jsonl:1")
    assert sample.row_hash == row.row_hash
    assert sample.input_ids[21:].tolist() == [1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198, 19556, 17, 2, 198]
    assert np.flatnonzero(sample.loss_mask).tolist() == [31, 32, 33]


def test_a_long_row_is_told_by_this_project_alone(caplog):
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    try:
        load_tokenizer(str(embedded_model.ensure()))("word " * 9000)
    finally:
        logger.removeHandler(caplog.handler)
    assert "indexing errors" not in caplog.text


def test_everything_left_out_is_counted_by_reason(smollm2):
    result = tokenize_rows(
        rows_of(
            chat("Hi", "Hello!"),
            chat("Hi"),  # 1
            {"messages": []},  # 2
            {"turns": ["Hi"]},  # 3
            tokens([5, 6], [0, 0]),  # 4
            tokens([], []),  # 5
            tokens([5, 6, 7], [0, 1, 1]),
            chat("Hi", "Hello!", "a question that nobody answered"),
            chat("Welcome", "Hi", first="assistant"),  # 8: nothing before the only assistant turn
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]},
        ),
        smollm2,
    )
    assert [row.index for row in result.rows] == [0, 6, 7, 9]
    assert result.skipped_rows == [
        (1, "no assistant turn"), (2, "no assistant turn"), (3, "prompts without answers (use --regenerate)"),
        (4, "nothing supervised"), (5, "no tokens"), (8, "nothing supervised"),
    ]  # fmt: skip
    assert result.skipped["no assistant turn"] == 2 and sum(result.skipped.values()) == 6
    assert result.remarks == {"assistant turns not supervised: nothing comes before them": 1}
    assert result.rows[2].input_ids.tolist() == result.rows[0].input_ids.tolist()  # the open question is left away
    assert result.rows[3].loss_mask.sum() == 1  # an empty answer is still an end of turn


def test_no_row_left_is_an_error_with_the_reasons(smollm2):
    with pytest.raises(UserError, match="no row is left to work on: 2 x no assistant turn, 1 x nothing supervised"):
        tokenize_rows(rows_of(chat("Hi"), chat("Hi"), tokens([1], [0])), smollm2)
    with pytest.raises(UserError, match="there are no rows"):
        tokenize_rows([], smollm2)


def test_truncation_keeps_supervision_or_skips(smollm2):
    long = chat("Hi", "one two three four five six seven eight")
    rows = rows_of(long, chat("word " * 40, "Yes"), chat("Hi", "Yes"))
    whole = tokenize_rows(rows, smollm2).rows
    cut = tokenize_rows(rows, smollm2, max_length=34)
    assert [row.index for row in cut.rows] == [0, 2]
    assert cut.rows[0].input_ids.tolist() == whole[0].input_ids[:34].tolist()
    assert cut.rows[0].loss_mask.tolist() == [0] * 31 + [1] * 3
    assert cut.skipped == {"nothing supervised within the maximum length": 1}
    assert cut.remarks == {"rows truncated to the maximum length": 1}
    assert cut.rows[1].input_ids.tolist() == whole[2].input_ids.tolist() and len(whole[2].input_ids) == 34
    skip = tokenize_rows(rows, smollm2, max_length=34, over_length="skip")
    assert [row.index for row in skip.rows] == [2] and skip.skipped == {"longer than the maximum length": 2}


def test_longer_than_the_context(smollm2):
    rows = rows_of(chat("Hi", "Yes"), chat("Hi", "word " * 50))
    with pytest.raises(UserError, match=r"^d\.jsonl:2: \d+ tokens, but the model takes 40; set --max-length"):
        tokenize_rows(rows, smollm2, context_length=40)
    assert len(tokenize_rows(rows, smollm2, context_length=40, max_length=40).rows) == 2
    assert len(tokenize_rows(rows, smollm2, context_length=40, max_length=40, over_length="skip").rows) == 1
    with pytest.raises(UserError, match="maximum length, 50 tokens, exceeds the 40"):
        tokenize_rows(rows, smollm2, context_length=40, max_length=50)


def test_ids_outside_the_vocabulary(smollm2):
    rows = rows_of(tokens([5, 6], [0, 1]), tokens([5, 49152], [0, 1]))
    with pytest.raises(UserError, match=r"^d\.jsonl:2: token id 49152 at position 1 is outside .* vocabulary of 49152"):
        tokenize_rows(rows, smollm2, vocab_size=49152)
    with pytest.raises(UserError, match=r"^d\.jsonl:1: token id -1"):
        tokenize_rows(rows_of(tokens([5, -1], [0, 1])), smollm2, vocab_size=49152)
    assert len(tokenize_rows(rows, smollm2, vocab_size=49153).rows) == 2


def test_bad_settings(smollm2):
    for settings, message in (
        ({"supervise": "some"}, "--supervise some: expected one of all, last, each"),
        ({"over_length": "cry"}, "--over-length cry: expected one of truncate, skip"),
        ({"max_length": 0}, "at least 1 token"),
    ):
        with pytest.raises(UserError, match=message):
            tokenize_rows(rows_of(chat("Hi", "Yes")), smollm2, **settings)


def test_tool_calls_that_the_template_leaves_out_are_counted(smollm2, standin_folder):
    calls = {"messages": [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]},
        {"role": "tool", "content": "dry"}, {"role": "assistant", "content": "no"},
    ]}  # fmt: skip
    rows = rows_of(calls, chat("Hi", "Yes"))
    (remark,) = tokenize_rows(rows, smollm2).remarks.items()
    assert remark == (NO_CALLS, 1) and "weather" not in smollm2.decode(tokenize_rows(rows, smollm2).rows[0].input_ids)
    shown = tokenize_rows(rows, load_tokenizer(str(standin_folder), trust_remote_code=True))
    assert not shown.remarks


def test_supervise_last(smollm2):
    rows = rows_of(chat("Hi", "Yes", "So?", "No"), tokens([1, 2, 3, 4, 5], [1, 1, 0, 1, 0]))
    both = tokenize_rows(rows, smollm2, supervise="last").rows
    on = [int(token) for token, m in zip(both[0].input_ids, both[0].loss_mask, strict=True) if m]
    assert smollm2.decode(on) == "No<|im_end|>"
    assert both[1].loss_mask.tolist() == [0, 0, 0, 1, 0]


def test_supervise_each_makes_one_sample_a_turn(standin_folder):
    """A template that hides earlier reasoning: "each" trains every turn against the prompt the model really saw."""
    tokenizer = load_tokenizer(str(standin_folder), trust_remote_code=True)
    record = chat("Hi", "yes", "So?", "no")
    record["messages"][1]["reasoning_content"], record["messages"][3]["reasoning_content"] = "hm", "so"
    rows = rows_of(record, chat("Hi"), chat("rain", "plain"))
    joint = tokenize_rows(rows, tokenizer)
    assert sum(joint.remarks.values()) == 1  # one turn lost
    each = tokenize_rows(rows, tokenizer, supervise="each")
    assert [row.index for row in each.rows] == [0, 1, 3] and each.skipped_rows == [(2, "no assistant turn")]
    assert not each.remarks
    shown = [tokenizer.decode(row.input_ids[row.loss_mask == 1].tolist()) for row in each.rows]
    assert shown == ["hm</think>yes<|im_end|>", "so</think>no<|im_end|>", "</think>plain<|im_end|>"]
    assert each.rows[0].row_hash == each.rows[1].row_hash == rows[0].row_hash
    assert each.rows[1].place == "d.jsonl:1 (message 3)"
    assert [row.index for row in one_row_per_turn(rows_of(tokens([1], [1]), {"turns": ["x"]}))] == [0, 1]


def test_processes_give_the_same_in_the_same_order(standin_folder, monkeypatch):
    monkeypatch.setattr(tokenizing, "WORKERS_FROM_ROWS", 10)
    monkeypatch.setattr(tokenizing, "CHUNK_ROWS", 8)
    loading = {"model": str(standin_folder), "trust_remote_code": True}
    tokenizer = load_tokenizer(**loading)
    rows = rows_of(*[chat(f"rain {i}", f"plain {i * i}" if i % 7 else "") for i in range(60)], chat("Hi"))
    alone = tokenize_rows(rows, tokenizer)
    many = tokenize_rows(rows, tokenizer, workers=2, worker_tokenizer=loading)
    assert [row.index for row in many.rows] == [row.index for row in alone.rows] == list(range(60))
    for one, other in zip(many.rows, alone.rows, strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist() and one.loss_mask.tolist() == other.loss_mask.tolist()
    assert many.skipped == alone.skipped
    bad = [*rows[:30], *rows_of(tokens([999999], [1])), *rows[30:]]
    with pytest.raises(UserError, match=r"^d\.jsonl:1: token id 999999 at position 0"):  # raised in another process
        tokenize_rows(bad, tokenizer, workers=2, worker_tokenizer=loading, vocab_size=163840)


def test_tokenizers_that_cannot_be_had(tmp_path, standin_folder):
    with pytest.raises(UserError, match="its tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path / "none"))
    with pytest.raises(UserError, match="brings its own code; .*--trust-remote-code"):
        load_tokenizer(str(standin_folder))
    with pytest.raises(UserError, match=r"none\.jinja: the chat template cannot be read"):
        load_tokenizer(str(embedded_model.ensure()), chat_template=tmp_path / "none.jinja")


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3", "kimi_k25"])
def test_a_tokenizer_that_is_code_is_never_replaced_by_another(tmp_path, model_type):
    """transformers makes a tokenizer of its own out of tiktoken.model where it knows the model type: without a word,
    with other ids, and without <think>."""
    folder = build(tmp_path / "target", marker=tmp_path / "ran")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 163840}))
    for trusted in {"deepseek_v3": (False, True), "qwen3": (False,)}.get(model_type, ()):
        wrong = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
        assert 163606 not in wrong("the rain <think>")["input_ids"]
    with pytest.raises(UserError, match="brings its own code; .*--trust-remote-code"):
        load_tokenizer(str(folder))
    assert not (tmp_path / "ran").exists()
    tokenizer = load_tokenizer(str(folder), trust_remote_code=True)
    assert tokenizer("the rain <think>")["input_ids"][-1] == 163606 and (tmp_path / "ran").exists()


def test_fingerprints(smollm2, standin_folder, tmp_path):
    first = tokenizer_fingerprint(smollm2)
    smollm2("a call with its own settings", truncation=True, max_length=4)
    assert tokenizer_fingerprint(smollm2) == first
    smollm2.save_pretrained(tmp_path / "copy")
    copy = load_tokenizer(str(tmp_path / "copy"))
    assert tokenizer_fingerprint(copy) == first
    (tmp_path / "other.jinja").write_text("{{ messages[0].content }}")
    templated = tokenizer_fingerprint(load_tokenizer(str(tmp_path / "copy"), chat_template=tmp_path / "other.jinja"))
    assert templated["tokenizer"] == first["tokenizer"] and templated["chat_template"] != first["chat_template"]
    copy.add_tokens(["<new>"])
    assert tokenizer_fingerprint(copy)["tokenizer"] != first["tokenizer"]
    copy.eos_token = "<|endoftext|>"
    standin = load_tokenizer(str(standin_folder), trust_remote_code=True)
    again = load_tokenizer(str(standin_folder), trust_remote_code=True)
    assert tokenizer_fingerprint(standin) == tokenizer_fingerprint(again) != first


def test_read_and_tokenized_in_one_go(tmp_path, smollm2):
    path = tmp_path / "share.jsonl"
    path.write_text('{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}\n')
    share = tokenize_rows(load_rows(path), smollm2).rows[0]
    assert np.flatnonzero(share.loss_mask).tolist() == [31, 32, 33]
