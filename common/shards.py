"""The shard directory: what lies on disk, and how it is read.

    OUT/
      dataset.json               what these states are: the identity fields, flat, and `run` (facts that may change)
      skipped.jsonl              one line a source row that was never captured: index, reason, source
      sample_lengths.json        {"0": 2103, ...}: tokens of every committed sample
      .lock, .writers.lock       held (flock) by the run that writes here, and by the processes that write its files
      rows_0-2000/               layout "v1"
        data_17.pt               input_ids, loss_mask int64 [L]; hidden_states: list of P+1 tensors [L, H]; under
                                 --state-dtype fp8 also scales [L, P], and under --last-state supervised only the
                                 `last_state_rows` of the last of them
        manifest.jsonl           one line a committed (or set aside) sample; a sample exists when its line does
        sample_lengths.json      the same global mapping
      hidden_states/             layout "arrow" (the manifests stay in rows_A-B/)
        hs_17.safetensors        hidden_states [L, P+1, H], token_ids [L], loss_mask [L]; under fp8 also
                                 hidden_states_scales [L, P+1, 1], last_state [L, H]
      data-*.arrow, state.json, dataset_info.json     layout "arrow", written by `RunDirectory.finish()`

The number in a file name is the row of the source data. The last of the P+1 states is the residual stream after all
layers, before the final norm. Training and offline evaluation read here and import nothing else of the shards:

    reader = ShardReader(path)                   # or a list of directories; UserError when nothing is committed
    reader.info                                  # dataset.json as a dict
    reader.records                               # list of Record, committed only, sorted by index
    reader.load(record, verify=False)            # Sample(input_ids, loss_mask, states, record), memory-mapped
    reader.tokens(record)                        # (input_ids, loss_mask) alone, without reading a state

The other files of the shards: `shard_pt.py` (tensors out of a v1 file), `shard_writing.py` (`write_sample`, for the
tap's writers), `shard_run.py` (`RunDirectory`, for the process that commits) and `shard_check.py` (`verify`, `status`,
`plan_bytes`, `require_disk`).
"""

import contextlib
import json
import os
import re
import shlex
import stat
from collections import namedtuple
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from common.errors import UserError

if TYPE_CHECKING:
    import torch

DATASET, SKIPPED, LENGTHS, MANIFEST = "dataset.json", "skipped.jsonl", "sample_lengths.json", "manifest.jsonl"
LAYOUTS = ("v1", "arrow")
COMMITTED, SET_ASIDE, SKIPPED_ROW = "committed", "set_aside", "skipped"
TEMPORARY = ".tmp"  # every unfinished file ends with it: speculators' v1 reader takes whatever ends with "pt"
BLOCK_NAME = re.compile(r"rows_(\d+)-(\d+)$")
SAMPLE_NAME = re.compile(r"(?:data_(\d+)\.pt|hs_(\d+)\.safetensors)$")
STATE_TENSORS = {"hidden_states", "hidden_states_scales", "last_state"}  # of a safetensors file
SAME_IN_ALL = ("model", "revision", "config_hash", "tokenizer_hash", "capture_points", "last_state", "dtype")


@dataclass(slots=True)
class Record:
    """One committed sample; `bytes` is the size of its file, `xxh3` the xxh3-128 of the whole file."""

    index: int  # row of the source data
    tokens: int
    supervised: int
    bytes: int
    xxh3: str | None  # hex; None only for directories that speculators itself wrote
    row_hash: str  # hex; identifies the source row, decides the held-out split
    path: Path | None = None  # filled by whoever knows the directory
    category: str | None = None
    source: str | None = None
    own_token: Any = None  # result of the own-token check, whatever JSON value the capture gives it
    time: float | None = None  # unix seconds of the commit


Sample = namedtuple("Sample", "input_ids loss_mask states record last_rows scales", defaults=(None, None))
Sample.__doc__ = """input_ids, loss_mask: int64 [L]; states: P+1 tensors [L, H], points in order, last state at the end.
last_rows: int64 [R], the only rows at which the last state was kept (it is zero elsewhere); None: all were.
scales: float32 [L, P] where the points are left in eight bits (`load(widen=False)`), else None."""


def last_state_rows(loss_mask: "torch.Tensor") -> "torch.Tensor":
    """int64 [R]: rows j whose last state is read in training and evaluation: as the teacher of a supervised j + 1."""
    return loss_mask[1:].nonzero().flatten()


def sample_path(out: Path, index: int, layout: str, rows_per_block: int) -> Path:
    """Where the sample of source row `index` lies."""
    folder = out / "hidden_states" if layout == "arrow" else block_directory(out, index, rows_per_block)
    return folder / sample_name(index, layout)


def sample_name(index: int, layout: str) -> str:
    return f"hs_{index}.safetensors" if layout == "arrow" else f"data_{index}.pt"


def block_directory(out: Path, index: int, rows_per_block: int) -> Path:
    """`OUT/rows_A-B`, the directory of the manifest that commits source row `index`."""
    first = index // rows_per_block * rows_per_block
    return out / f"rows_{first}-{first + rows_per_block}"


def block_directories(out: Path) -> list[Path]:
    """All `rows_A-B` directories of `out`, in row order."""
    if not out.is_dir():
        return []
    found = [(int(match[1]), out / match[0]) for name in os.listdir(out) if (match := BLOCK_NAME.match(name))]
    return [directory for _, directory in sorted(found)]


def read_info(out: Path) -> dict[str, Any] | None:
    """dataset.json as a dict, None where there is none; UserError when it cannot be read."""
    path = out / DATASET
    try:
        info = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected JSON written by extract.py, found {error}; use another directory") from None
    layout, rows_per_block = (info.get("layout"), info.get("rows_per_block")) if isinstance(info, dict) else 2 * (None,)
    if layout not in LAYOUTS or not isinstance(rows_per_block, int):
        raise UserError(
            f"{path}: expected layout ({' or '.join(LAYOUTS)}) and rows_per_block as extract.py writes them, "
            f"found {layout!r} and {rows_per_block!r}; use another directory"
        )
    return info


# ---- lines that prove themselves -----------------------------------------------------------------------------------


@dataclass(slots=True)
class LogContents:
    """What `read_log` found: whole entries in file order, `half_line` bytes at the tail, and lines that are damaged."""

    entries: list[dict[str, Any]]
    half_line: int  # bytes after the last newline: an append that was cut short
    broken: list[tuple[int, str]]  # (line number from 1, what is wrong)

    def latest(self) -> dict[int, dict[str, Any]]:
        """index -> its last entry."""
        return {entry["index"]: entry for entry in self.entries}


def to_line(entry: dict[str, Any]) -> bytes:
    """One JSON line that ends with the xxh3-64 of everything before it."""
    text = json.dumps(entry, separators=(",", ":"), ensure_ascii=False)
    body = text.encode(errors="backslashreplace")  # half a surrogate pair is an escape in JSON, and no UTF-8
    return body[:-1] + b',"check":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n'


def read_log(path: Path) -> LogContents:
    """Read manifest.jsonl or skipped.jsonl. A missing file is empty; damage is reported, never raised."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return LogContents([], 0, [])
    lines = data.split(b"\n")
    half_line = len(lines.pop())
    entries, broken = [], []
    for number, line in enumerate(lines, 1):
        body, mark, check = line.rpartition(b',"check":"')
        body += b"}"
        if not mark or check != xxhash.xxh3_64_hexdigest(body).encode() + b'"}':
            broken.append((number, f"line checksum does not match: {line[:60].decode(errors='replace')!r}"))
            continue
        entries.append(json.loads(body))
    return LogContents(entries, half_line, broken)


def entry_of(record: Record) -> dict[str, Any]:
    """The manifest entry of a committed sample."""
    entry = {"index": record.index, "status": COMMITTED}
    for name in Record.__slots__:  # not asdict: its deep copies take longer than the sample's commit
        if name != "path" and (value := getattr(record, name)) is not None:
            entry[name] = value
    return entry


def record_of(entry: dict[str, Any], path: Path) -> Record:
    """The other way round."""
    return Record(path=path, **{key: value for key, value in entry.items() if key != "status"})


# ---- reading -------------------------------------------------------------------------------------------------------


class ShardReader:
    """Committed samples of one directory or several (then in the order given, by index within each).

    Reads what extract.py wrote (v1 and arrow) and, where there is neither dataset.json nor a manifest, what speculators
    wrote: v1 `data_*.pt` files or an Arrow dataset with `hidden_states/`. Such records have no xxh3, and their row hash
    is made from the token ids; `points` says which capture points they are. UserError: nothing committed, unreadable
    dataset.json, or directories of several models.
    """

    def __init__(self, path: str | os.PathLike | Sequence[str | os.PathLike], points: Sequence[int] | None = None):
        paths = [Path(path)] if isinstance(path, str | os.PathLike) else [Path(each) for each in path]
        self.info: dict[str, Any] = {}
        self.records: list[Record] = []
        self.named_points = points
        self._shape: tuple | None = None  # (states of a sample, their width) and the file that said so
        self.foreign: list[Path] = []  # directories that speculators wrote
        self.remarks: list[str] = []  # lines for the person: rows of those that cannot be used, and why
        self._foreign_rows: dict[Path, Any] = {}  # directory -> its Arrow dataset; the files hold no loss mask
        for out in paths:
            if not out.is_dir():
                found = "a file" if out.exists() else "nothing"
                raise UserError(f"{out}: expected a directory of shards, found {found}")
            info = read_info(out)
            if info is None:
                records, info = self._foreign_records(out, points)
            else:
                records, others = committed_records(out, info)
                missing = info.get("rows", 0) - len(records) - others
                if missing > 0 and records:
                    self.remarks.append(f"{out}: {missing:,} of {info['rows']:,} rows are not captured yet; "
                                        f"the {len(records):,} samples there are used")  # fmt: skip
                said = info.get("capture_points")
                if points is not None and said is not None and list(points) != list(said):
                    raise UserError(f"{out}: its states are of points {said}, not {list(points)}; leave them unnamed")
            if not records:
                raise UserError(f"{out}: no committed sample; extract.py --output makes them, --status counts them")
            self._must_agree(out, info)
            self.records += records

    def load(
        self, record: Record, verify: bool = False, buffer: "torch.Tensor | None" = None, widen: bool = True
    ) -> Sample:
        """The sample of `record`, memory-mapped; tensors outlive the reader; arrow states are strided.

        Points stored in eight bits are widened to bfloat16, unless `widen` is False: then they are left as they are,
        float8_e4m3fn, with their scales beside them. `verify` compares size and xxh3-128 of the whole file first.
        buffer: uint8, of `record.bytes` or more; a v1 file is read into it, and the sample lies there. UserError names
        a file that is missing, damaged or of another shape than its manifest line says.
        """
        from common.state_dtypes import widened

        with readable(record.path):
            input_ids, loss_mask, states, scales = self._read(record, True, buffer, verify)
            states, scales = widened(states, scales, points=widen)
            self._must_be_alike(record, states)
        last_rows = None
        if len(states[-1]) != len(input_ids):
            last_rows = last_state_rows(loss_mask)
            if len(states[-1]) == len(last_rows):
                states[-1] = (
                    states[-1].new_zeros(len(input_ids), states[-1].shape[1]).index_copy_(0, last_rows, states[-1])
                )
        lengths = [len(input_ids), len(loss_mask), *(len(state) for state in states)]
        if set(lengths) != {record.tokens}:
            raise UserError(
                f"{record.path}: expected {record.tokens} tokens, found rows {lengths} in ids, mask and states"
            )
        return Sample(input_ids, loss_mask, states, record, last_rows, scales)

    def _must_be_alike(self, record: Record, states: "list[torch.Tensor]") -> None:
        """UserError unless a sample has as many states, and as wide, as the first that was read."""
        found = len(states), *{state.shape[1] if state.ndim == 2 else tuple(state.shape) for state in states}
        self._shape = self._shape or (found, record.path)
        if found != self._shape[0]:
            raise UserError(
                f"{record.path}: expected {self._shape[0][0]} states of width {self._shape[0][1]} as in "
                f"{self._shape[1]}, found {found[0]} of width {' and '.join(map(str, found[1:]))}"
            )

    def tokens(self, record: Record) -> "tuple[torch.Tensor, torch.Tensor]":
        """(input_ids, loss_mask) of `record`, int64 [L], without reading its states. UserError as `load`."""
        with readable(record.path):
            ids, mask = self._read(record, with_states=False)[:2]
            if not len(ids) == len(mask) == record.tokens:
                raise UserError(f"{record.path}: expected {record.tokens} tokens, found {len(ids)} ids and {len(mask)} "
                                f"in the loss mask")  # fmt: skip
            return ids, mask

    def stored_dtypes(self, record: Record) -> list[str]:
        """What each of the P+1 states is stored in: "fp8", "bfloat16", ... (`load` widens fp8 to bfloat16)."""
        with readable(record.path):
            _, _, states, _ = self._read(record, with_states=True)
            names = [str(state.dtype).removeprefix("torch.") for state in states]
        return ["fp8" if name.startswith("float8") else name for name in names]

    def _read(
        self, record: Record, with_states: bool, buffer: "torch.Tensor | None" = None, verify: bool = False
    ) -> tuple:
        """(input_ids, loss_mask, states as stored or None, their scales or None) from the file."""
        import torch

        content = checked_content(record, buffer, verify)
        if record.path.suffix == ".pt":
            from common.shard_pt import read_saved

            saved = read_saved(record.path, record.tokens, with_states, content)
            input_ids, mask, scales = saved["input_ids"], saved["loss_mask"], saved.get("scales")
            states = list(saved["hidden_states"]) if with_states else None
        else:
            from safetensors import safe_open

            with safe_open(record.path, "pt") as file:
                wanted = {"token_ids", "loss_mask"} | (STATE_TENSORS if with_states else set())
                read = {name: file.get_tensor(name) for name in wanted & set(file.keys())}
            input_ids, scales, states = read["token_ids"], read.get("hidden_states_scales"), None
            if with_states:
                states = list(read["hidden_states"].unbind(1))  # of [L, P+1, H]
                states[-1] = read.get("last_state", states[-1])
            if (mask := read.get("loss_mask")) is None:
                mask = self._foreign_mask(record)
        return input_ids.to(torch.int64), mask.to(torch.int64), states, scales

    def _must_agree(self, out: Path, info: dict[str, Any]) -> None:
        for field in SAME_IN_ALL:
            if field in info and field in self.info and info[field] != self.info[field]:
                raise UserError(
                    f"{out}: {field} is {info[field]!r}, but {self.info[field]!r} in the directories before it; "
                    "directories read together must agree"
                )
        self.info = info | self.info

    def _foreign_records(self, out: Path, points: Sequence[int] | None) -> tuple[list[Record], dict[str, Any]]:
        """Records of a directory that speculators wrote, and what the caller tells of its states."""
        from common.foreign_shards import foreign_records

        records, rows, remarks = foreign_records(out)
        self.foreign.append(out)
        self.remarks += remarks
        self._foreign_rows[out] = rows
        return records, {} if points is None else {"capture_points": list(points)}

    def _foreign_mask(self, record: Record) -> "torch.Tensor":
        import torch

        return torch.as_tensor(self._foreign_rows[record.path.parent.parent][record.index]["loss_mask"])


def committed_records(out: Path, info: dict[str, Any]) -> tuple[list[Record], int]:
    """Committed samples of one directory, sorted by index, and the number of rows that were skipped or set aside."""
    records, others = [], {index for index, entry in read_log(out / SKIPPED).latest().items()}
    for directory in block_directories(out):
        for index, entry in read_log(directory / MANIFEST).latest().items():
            if entry["status"] == COMMITTED:
                records.append(record_of(entry, sample_path(out, index, info["layout"], info["rows_per_block"])))
            else:
                others.add(index)
    return sorted(records, key=lambda record: record.index), len(others - {record.index for record in records})


@contextlib.contextmanager
def readable(path: Path):
    """Whatever goes wrong while a sample is read becomes one UserError that names its file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a damaged file raises whatever its zip, pickle or header reader raises
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise UserError(f"{path}: not a readable sample ({what}); {redo(path)}") from None


def redo(path: Path) -> str:
    """What to do about a sample whose file is missing or damaged."""
    out = path.parent.parent  # of rows_A-B/data_i.pt, hidden_states/hs_i.safetensors
    if not (out / DATASET).exists():
        return "write it again with the program that made it, or remove it"
    repair = f"python extract.py --verify {shlex.quote(str(out))} --repair"
    return f"{repair} drops it, and the extraction's own command does it again"


def token_hash(ids: Iterable[int]) -> str:
    """xxh3-128 of the token ids as int64, little-endian: the row hash of a row known only by its tokens."""
    import numpy as np

    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(ids, dtype="<i8").tobytes())


def is_placeholder(path: Path) -> bool:
    """Whether a file is the filler that `RunDirectory.finish` gives rows without a sample in layout arrow."""
    with open(path, "rb") as file:
        return path.suffix == ".safetensors" and b'"placeholder"' in file.read(400)


def checked_content(record: Record, buffer: "torch.Tensor | None", verify: bool) -> "torch.Tensor | None":
    """The bytes of a v1 file in `buffer`; None without one. UserError unless the size, and with `verify` the xxh3-128,
    are those of the manifest line."""
    in_buffer, verify = buffer is not None and record.path.suffix == ".pt", verify and record.xxh3 is not None
    content, problem = None, file_problem(record, contents=verify and not in_buffer)
    if in_buffer and not problem:
        from common.shard_pt import read

        content = read(record.path, buffer)
        problem = wrong_contents(record, xxhash.xxh3_128_hexdigest(content.numpy())) if verify else None
    if problem:
        raise UserError(f"{record.path}: {problem}; {redo(record.path)}")
    return content


def file_problem(record: Record, contents: bool = True) -> str | None:
    """What is wrong with a committed file: missing, another size or (`contents`) another xxh3-128; None if sound."""
    try:
        entry = os.stat(record.path)
        size = entry.st_size
        if not stat.S_ISREG(entry.st_mode):
            return "no regular file"
        if size != record.bytes:
            return f"{'truncated' if size < record.bytes else 'too long'}: expected {record.bytes} bytes, found {size}"
        if contents:
            return wrong_contents(record, hash_file(record.path))
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return None


def wrong_contents(record: Record, found: str) -> str | None:
    return None if found == record.xxh3 else f"contents changed: expected xxh3-128 {record.xxh3}, found {found}"


def hash_file(path: Path, chunk_bytes: int = 4 << 20) -> str:
    """xxh3-128 of a file, in constant memory; other threads run meanwhile."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(chunk_bytes, os.fstat(file.fileno()).st_size + 1)))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
