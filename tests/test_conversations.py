"""Reading rows: every format gives the same rows, every bad row is named."""

import json
import os
import subprocess
import sys

import pytest

from common.conversations import load_rows, parse_row
from common.errors import UserError

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello é 日本"}]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather", "arguments": "{}"}}]},
        {"role": "tool", "content": "dry"},
        {"role": "assistant", "content": "No.", "reasoning_content": "The tool says dry."},
    ],
    "tools": TOOLS,
    "category": "weather",
}


def jsonl(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_rows_of_all_formats_are_the_same(tmp_path):
    import datasets
    import pyarrow
    import pyarrow.parquet

    records = [CALL, CHAT]
    rows = load_rows(jsonl(tmp_path / "a.jsonl", *records))
    assert [row.index for row in rows] == [0, 1]
    assert [row.category for row in rows] == ["weather", None]
    assert rows[0].tools == TOOLS and rows[0].messages[2]["content"] == "" and rows[0].source == "a.jsonl"

    (tmp_path / "b.json").write_text(json.dumps(records, indent=1))
    table = pyarrow.Table.from_pylist(records)
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    with pyarrow.ipc.new_file(tmp_path / "d.arrow", table.schema) as writer:
        writer.write_table(table)
    dataset = datasets.Dataset(table)
    dataset.save_to_disk(tmp_path / "e")
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "f")
    streamed = next((tmp_path / "e").glob("*.arrow"))
    for data in ("b.json", "c.parquet", "d.arrow", "e", "f", streamed):
        others = load_rows(tmp_path / data)
        assert [row.row_hash for row in others] == [row.row_hash for row in rows], data
        assert [row.messages[-1] for row in others] == [row.messages[-1] for row in rows], data
        assert others[0].tools == TOOLS and others[0].category == "weather"
    with pytest.raises(UserError, match="has no split 'dev'; it has .*test.*train"):
        load_rows(tmp_path / "f", split="dev")


def test_several_files_are_numbered_through_and_limited(tmp_path):
    a = jsonl(tmp_path / "a.jsonl", CHAT, CHAT)
    b = jsonl(tmp_path / "b.jsonl", {"turns": ["One?", "Two?"], "category": 7, "source": "mine"})
    b.write_text("\n" + b.read_text())  # an empty line is no row, but counts as a line
    rows = load_rows([a, b])
    assert [(row.index, row.source) for row in rows] == [(0, "a.jsonl"), (1, "a.jsonl"), (2, "mine")]
    assert rows[2].place == f"{b}:2" and rows[2].turns == ["One?", "Two?"] and rows[2].category == "7"
    assert [row.index for row in load_rows(tmp_path)] == [0, 1, 2]
    assert len(load_rows([a, b], limit=2)) == 2
    with pytest.raises(UserError, match="limit"):
        load_rows([a, b], limit=0)


def test_sharegpt_is_the_same_chat():
    chat = parse_row(CHAT, 0, "x", "x")
    share = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello é 日本"}], "id": "7"}
    assert parse_row(share, 3, "y", "y").messages == chat.messages
    assert parse_row(share, 3, "y", "y").row_hash == chat.row_hash


def test_the_hash_is_of_the_content_and_stable():
    shuffled = {"source": "else", "messages": [dict(reversed(m.items())) for m in CHAT["messages"]], "x": None}
    row = parse_row(shuffled, 9, "z", "z")
    canonical = '{"messages":[{"content":"Hi","role":"user"},{"content":"Hello é 日本","role":"assistant"}]}'
    import xxhash

    assert row.row_hash == xxhash.xxh3_128_hexdigest(canonical.encode()) == parse_row(CHAT, 0, "x", "x").row_hash
    other = json.loads(json.dumps(CHAT).replace("Hi", "hi"))
    assert parse_row(other, 0, "x", "x").row_hash != row.row_hash


def test_content_parts_are_joined():
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    record = {"messages": [{"role": "user", "content": parts}]}
    assert parse_row(record, 0, "x", "x").messages[0]["content"] == "Hello there"


def user(**more):
    return {"messages": [{"role": "user", "content": "Hi", **more}]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, r"a\.jsonl:2: found only the keys \['text'\]; a chat row has"),
        ([1], r"a\.jsonl:2: expected an object, found list"),
        (user(role="narrator"), r"a\.jsonl:2, message 0: unknown role 'narrator'; expected one of system, developer"),
        ({"messages": [{"content": "x"}]}, r"message 0: unknown role None"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, r"message 0: unknown role 'alien'; .*human"),
        (user(content=None), r"message 0: the user message has no content"),
        (user(content=3), r"message 0: expected text as content, found int"),
        (user(content=[{"type": "image", "url": "x"}]), r"content part of type 'image'"),
        ({"messages": "x"}, r"expected a list of messages, found str"),
        ({"messages": ["x"]}, r"message 0: expected an object"),
        ({**CHAT, "tools": "{"}, r"key 'tools': malformed JSON"),
        ({**CHAT, "tools": {"a": 1}}, r"expected a list in 'tools'"),
        ({"turns": []}, r"at least one non-empty text"),
        ({"turns": ["  "]}, r"at least one non-empty text"),
        ({"input_ids": [1, 2]}, r"no 'loss_mask'"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, r"2 input_ids but 1 values"),
        ({"input_ids": [1, 2], "loss_mask": [1, -100]}, r"loss_mask holds -100"),
        ({"input_ids": [1, 2.5], "loss_mask": [1, 1]}, r"whole numbers in 'input_ids'"),
    ],
)
def test_a_bad_row_is_named(tmp_path, record, message):
    path = jsonl(tmp_path / "a.jsonl", CHAT, record)
    with pytest.raises(UserError, match=message):
        load_rows(path)
    assert load_rows(path, limit=1)[0].messages == CHAT["messages"]  # the row before it is fine


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"messages": []}\n{"messages": [}\n', r"a\.jsonl:2: malformed JSON: Expecting value at column 15"),  # noqa: E501
        ("a.jsonl", b'{"turns": ["\xff"]}\n', r"a\.jsonl:1: not UTF-8"),
        ("a.json", b"[{]", r"a\.json: malformed JSON"),
        ("a.jsonl", b"\n\n", r"a\.jsonl: no rows found; a chat row"),
        ("a.json", b"[]", r"a\.json: no rows found"),
        ("a.parquet", b"PAR1 not really", r"a\.parquet: not a readable Parquet file"),
        ("a.arrow", b"nonsense, at length", r"a\.arrow: not a readable Arrow file"),
        ("a.csv", b"a,b\n", r"a\.csv: unknown kind of file '\.csv'"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        load_rows(tmp_path / name)


def test_missing_data_is_named(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        load_rows(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="no data file found in this folder"):
        load_rows(tmp_path)
    with pytest.raises(UserError, match="no data given"):
        load_rows([])


def test_an_id_that_cannot_be_loaded_is_one_line():
    """In a process of its own: the hub's offline switch is read once, at import."""
    code = "from common import conversations, errors; errors.run(lambda: conversations.load_rows('no/such'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "error: no/such: is no file here, and `datasets` cannot load it: " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_demo_prompts_are_rows():
    rows = load_rows("configs/demo_prompts.jsonl")
    assert len(rows) == 48 and len({row.row_hash for row in rows}) == 48
    assert {len(row.turns) for row in rows} == {1, 2} and len({row.category for row in rows}) >= 5
