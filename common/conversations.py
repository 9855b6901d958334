"""Rows of a data set as this project sees them: whatever the file format and whoever wrote it, a `Row` in one shape.

`load_rows` reads local JSONL, JSON, Parquet and Arrow files, folders of them, folders written by `save_to_disk`, and
`datasets` ids. A row is a chat (`messages` with role/content, or ShareGPT `conversations` with from/value), a set of
prompts (`turns`: the user's side only, for --regenerate) or already tokens (`input_ids`, `loss_mask`).
extract.py calls it; common/tokenizing.py turns the rows into token ids and a loss mask.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from common.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bot": "assistant", "model": "assistant", "tool": "tool", "observation": "tool",
}  # fmt: skip
FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
EXPECTED = ("a chat row has 'messages' (role, content) or 'conversations' (from, value), a prompt row 'turns', "
            "a tokenised row 'input_ids' and 'loss_mask'")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One source row. Exactly one of `messages`, `turns`, `input_ids` is set.

    index: number of the row over all files, in reading order, from 0.  place: how an error names it ("a.jsonl:17").
    source: file name or dataset id, or the row's own `source`.  row_hash: xxh3-128 (hex) of the row's content in
    canonical JSON: the same for the same conversation whatever file, format or key order it came in.
    """

    index: int
    place: str
    source: str
    row_hash: str
    category: str | None = None
    messages: list[dict] | None = None  # role, content and whatever else the template reads (tool_calls, ...)
    tools: list[dict] | None = None
    turns: list[str] | None = None
    input_ids: list[int] | None = None
    loss_mask: list[int] | None = None


def load_rows(data, split: str = "train", limit: int | None = None) -> list[Row]:
    """All rows of `data` (one or several: file, folder, or `datasets` id, with its configuration as "id:name").

    split: which split of a `datasets` id or a saved DatasetDict.  limit: read only the first N rows.
    Raises UserError for missing or empty data, and for the first row that is malformed (by file and line).
    """
    return list(iterate_rows(data, split, limit))


def iterate_rows(data, split: str = "train", limit: int | None = None) -> Iterator[Row]:
    """`load_rows`, one row at a time, for data that should not be in memory at once."""
    sources = [data] if isinstance(data, str | Path) else list(data)
    if limit is not None and limit < 1:
        raise UserError(f"the limit of rows must be at least 1, found {limit}")
    index = 0
    for source in sources:
        for place, name, record in _read(str(source), split):
            yield parse_row(record, index, place, name)
            index += 1
            if limit is not None and index >= limit:
                return
    if index == 0:
        raise UserError(f"{', '.join(map(str, sources)) or 'no data given'}: no rows found; {EXPECTED}")


# From bytes to records: yields (place for errors, source name, record).


def _read(source: str, split: str) -> Iterator[tuple[str, str, dict]]:
    path = Path(source)
    if path.is_file():
        yield from _read_file(path)
    elif path.is_dir():
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            yield from _read_dataset(source, split, saved=True)
            return
        files = sorted(file for file in path.iterdir() if file.suffix in FILE_SUFFIXES)
        if not files:
            raise UserError(f"{path}: no data file found in this folder; expected one of {', '.join(FILE_SUFFIXES)}")
        for file in files:
            yield from _read_file(file)
    elif path.suffix in FILE_SUFFIXES or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise UserError(f"{source}: no such file; give a data file, a folder of them, or a `datasets` id")
    else:
        yield from _read_dataset(source, split, saved=False)


def _read_file(path: Path) -> Iterator[tuple[str, str, dict]]:
    if path.suffix in (".jsonl", ".ndjson", ".json"):
        yield from _read_json(path)
    elif path.suffix == ".parquet":
        yield from _read_parquet(path)
    elif path.suffix == ".arrow":
        yield from _read_arrow(path)
    else:
        raise UserError(f"{path}: unknown kind of file '{path.suffix}'; expected one of {', '.join(FILE_SUFFIXES)}")


def _read_json(path: Path) -> Iterator[tuple[str, str, dict]]:
    with _opened(path) as stream:
        head = stream.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
        stream.seek(0)
        if path.suffix == ".json" and head.startswith(b"["):
            records = _parsed(stream.read(), str(path))
            for number, record in enumerate(records):
                yield f"{path} row {number}", path.name, record
            return
        for number, line in enumerate(stream, start=1):
            if line.strip():
                place = f"{path}:{number}"
                yield place, path.name, _parsed(line, place)


def _opened(path: Path):
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _parsed(data: bytes, place: str):
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 text (byte {error.start} of the line)") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: malformed JSON: {error.msg} at column {error.pos + 1}; mend or remove it") from None
    except (RecursionError, ValueError) as error:
        raise UserError(f"{place}: JSON that cannot be used ({type(error).__name__}: {error}); remove it") from None


def _read_parquet(path: Path) -> Iterator[tuple[str, str, dict]]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=512):
            for record in batch.to_pylist():
                yield f"{path} row {number}", path.name, record
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file: {_first_line(error)}") from None


def _read_arrow(path: Path) -> Iterator[tuple[str, str, dict]]:
    import pyarrow

    with _opened(path) as stream:
        try:
            try:
                batches = pyarrow.ipc.open_stream(stream)  # what `datasets` writes
            except pyarrow.ArrowInvalid:
                stream.seek(0)
                reader = pyarrow.ipc.open_file(stream)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            number = 0
            for batch in batches:
                for record in batch.to_pylist():
                    yield f"{path} row {number}", path.name, record
                    number += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{path}: not a readable Arrow file: {_first_line(error)}") from None


def _read_dataset(source: str, split: str, saved: bool) -> Iterator[tuple[str, str, dict]]:
    import datasets

    try:
        if saved:
            dataset = datasets.load_from_disk(source)
            if isinstance(dataset, dict):
                if split not in dataset:
                    raise UserError(f"{source}: has no split '{split}'; it has {sorted(dataset)}")
                dataset = dataset[split]
        else:
            name, _, configuration = source.partition(":")
            dataset = datasets.load_dataset(name, configuration or None, split=split)
    except UserError:
        raise
    except Exception as error:  # the library raises many kinds: no such set, no network, a damaged file, a bad split
        raise UserError(f"{source}: is no file here, and `datasets` cannot load it: {_first_line(error)}") from None
    for number, record in enumerate(dataset):
        yield f"{source} row {number}", source, record


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# From records to rows.


def parse_row(record, index: int, place: str, source: str) -> Row:
    """A `Row` from one record as read. Raises UserError naming `place` for anything it cannot understand."""
    if not isinstance(record, dict):
        raise UserError(f"{place}: expected an object, found {type(record).__name__}; {EXPECTED}")
    record = without_nones(record)  # columnar formats fill absent keys with None
    own_source = record.get("source")
    row = Row(
        index=index, place=place, source=own_source if isinstance(own_source, str) and own_source else source,
        row_hash="", category=str(record["category"]) if "category" in record else None,
    )  # fmt: skip
    if "input_ids" in record:
        content = _tokens(record, place)
    elif "messages" in record:
        content = _chat(record["messages"], place, record.get("tools"))
    elif "conversations" in record or "conversation" in record:
        content = _chat(record.get("conversations", record.get("conversation")), place, record.get("tools"))
    elif "turns" in record:
        content = {"turns": _turns(record["turns"], place)}
    else:
        raise UserError(f"{place}: found only the keys {sorted(record)}; {EXPECTED}")
    return replace(row, row_hash=hash_of(content), **content)


def hash_of(content) -> str:
    """xxh3-128 (hex) of `content` in canonical JSON (sorted keys, no spaces, UTF-8)."""
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return xxhash.xxh3_128_hexdigest(canonical.encode("utf-8", "surrogatepass"))


def without_nones(value):
    """The same value without keys that hold None, at any depth."""
    if isinstance(value, dict):
        return {key: without_nones(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nones(item) for item in value]
    return value


def _chat(messages, place: str, tools) -> dict:
    if not isinstance(messages, list):
        raise UserError(f"{place}: expected a list of messages, found {type(messages).__name__}")
    if isinstance(tools, str):
        tools = _parsed(tools.encode(), f"{place}, key 'tools'")
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{place}: expected a list in 'tools', found {type(tools).__name__}")
    content = {"messages": [_message(message, f"{place}, message {i}") for i, message in enumerate(messages)]}
    return {**content, "tools": tools} if tools else content


def _message(message, place: str) -> dict:
    if not isinstance(message, dict):
        raise UserError(f"{place}: expected an object with role and content, found {type(message).__name__}")
    if "from" in message and "role" not in message:
        known, role = SHAREGPT_ROLES, SHAREGPT_ROLES.get(message["from"])
        said = message["from"]
        message = {"role": role, "content": message.get("value"),
                   **{key: value for key, value in message.items() if key not in ("from", "value")}}  # fmt: skip
    else:
        known, said = ROLES, message.get("role")
        role = said if said in ROLES else None
    if role is None:
        raise UserError(f"{place}: unknown role {said!r}; expected one of {', '.join(known)}")
    if message.get("content") is None:
        if role != "assistant" or not (message.get("tool_calls") or message.get("reasoning_content")):
            raise UserError(f"{place}: the {role} message has no content")
        message = {**message, "content": ""}
    content = message["content"]
    if isinstance(content, list):
        content = _joined(content, place)
    if not isinstance(content, str):
        raise UserError(f"{place}: expected text as content, found {type(content).__name__}")
    return {**message, "content": content}


def _joined(parts: list, place: str) -> str:
    texts = []
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UserError(f"{place}: content part of type {kind!r}; only text can be captured")
        texts.append(part["text"])
    return "".join(texts)


def _turns(turns, place: str) -> list[str]:
    if isinstance(turns, str):
        turns = [turns]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise UserError(f"{place}: expected 'turns' to be a list of at least one non-empty text")
    return turns


def _tokens(record: dict, place: str) -> dict:
    ids, mask = record["input_ids"], record.get("loss_mask")
    if mask is None:
        raise UserError(f"{place}: has 'input_ids' but no 'loss_mask' (1 where the token is supervised)")
    for key, values in (("input_ids", ids), ("loss_mask", mask)):
        if not isinstance(values, list) or not all(type(value) in (int, bool) for value in values):
            raise UserError(f"{place}: expected a list of whole numbers in '{key}'")
    if len(ids) != len(mask):
        raise UserError(f"{place}: {len(ids)} input_ids but {len(mask)} values in loss_mask; they must be as many")
    if not set(mask) <= {0, 1}:
        raise UserError(f"{place}: loss_mask holds {sorted(set(mask) - {0, 1})[0]}; expected 0 and 1 only")
    return {"input_ids": ids, "loss_mask": [int(value) for value in mask]}
