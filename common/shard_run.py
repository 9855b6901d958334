"""One run in a shard directory: open it exclusively, clean what a dead run left, commit, account for every row.

Called by extract.py only. `RunDirectory` is the only committer of the rows it is given; with several replicas each
replica's parent process has its own and whole blocks of rows (`run.blocks()`) belong to one of them at a time.

    run = RunDirectory(out, identity, rows=len(data))     # the leader (rank 0) first, then the others: leader=False
    run.found                                             # what opening repaired, by kind: see `Found`
    for index in run.pending(start, stop): ...            # not committed, not set aside, not skipped
    run.check_row(index, row_hash)                        # UserError when the source row is not the captured one
    run.commit([Record(index, tokens, supervised, written.bytes, written.xxh3, row_hash), ...])     # many a call
    run.put_aside(index, "NaN at point 31, row 17", row_hash)
    run.skip([Skipped(index, "nothing supervised", source), ...])                                   # leader only
    run.note(self_checks={...})                           # into dataset.json under "run"; leader only
    run.read_logs()                                       # see what the other replicas committed
    run.refresh_lengths()                                 # sample_lengths.json; opening and `finish` do it
    run.finish(); run.close()                             # finish: leader, after the others; close: all

`identity` is flat JSON that must be equal at resume, and is what readers find in `reader.info`: model, revision,
config_hash, tokenizer_hash, chat_template_hash, capture_points, num_layers, hidden_size, vocab_size, last_state
("pre-norm"), dtype, engine_version, engine_arguments, seed ...
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from collections import Counter, defaultdict, namedtuple
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.shard_arrow import write_arrow_dataset
from common.shard_writing import (
    WRITERS_LOCK,
    append_lines,
    cannot_write,
    mend_log,
    take_lock,
    temporary_name,
    write_atomically,
)
from common.shards import (
    COMMITTED,
    DATASET,
    LAYOUTS,
    LENGTHS,
    MANIFEST,
    SAMPLE_NAME,
    SET_ASIDE,
    SKIPPED,
    SKIPPED_ROW,
    TEMPORARY,
    LogContents,
    Record,
    block_directories,
    block_directory,
    entry_of,
    file_problem,
    is_placeholder,
    read_info,
    read_log,
    record_of,
    sample_name,
    sample_path,
)

Skipped = namedtuple("Skipped", "index reason source", defaults=(None,))  # a source row that is never captured
LEADER_LOCK = ".lock"
OWN_FIELDS = ("layout", "rows_per_block", "rows", "run")  # of dataset.json; the other fields are the identity
ARROW_FILES = re.compile(r"(state\.json|dataset_info\.json|data-\d+-of-\d+\.arrow)$")
ORPHANS_WAIT_SECONDS = 30


@dataclass(slots=True)
class Found:
    """What opening a directory repaired; every name in it is redone (or was never wanted)."""

    stale_temporaries: int = 0  # unfinished files of dead runs, removed
    uncommitted_files: int = 0  # whole files without a manifest line, removed
    half_lines: int = 0  # log lines cut in half at the tail, cut off
    broken_lines: int = 0  # log lines that fail their own checksum, dropped
    damaged: list[str] = field(default_factory=list)  # committed files missing or of another size: "name: problem"
    beyond: int = 0  # committed samples of rows that the data does not have, or no longer

    def lines(self) -> list[str]:
        """One line a kind, for the person; empty when the directory was clean."""
        kinds = [
            (self.stale_temporaries, "unfinished temporary file(s) of an earlier run removed"),
            (self.uncommitted_files, "file(s) without a manifest line removed; their rows are redone"),
            (self.half_lines, "log line(s) cut in half removed; their rows are redone"),
            (self.broken_lines, "damaged log line(s) dropped; their rows are redone"),
            (len(self.damaged), "committed sample(s) redone because of their file: " + "; ".join(self.damaged[:8])),
            (self.beyond, "committed sample(s) of rows that the data has no longer: they stay, and are trained on"),
        ]
        return [f"{count} {text}" for count, text in kinds if count]


class RunDirectory:
    """See the top of this file. UserError on opening: another run has the directory, another identity (the line names
    the field, the old and the new value), a directory that cannot be written, or one with somebody else's files."""

    def __init__(
        self,
        out: str | os.PathLike,
        identity: dict[str, Any],
        *,
        rows: int,
        layout: str | None = None,  # "v1" (default) or "arrow"; at resume None means what the directory has
        rows_per_block: int | None = None,  # default 2000, fixed at creation
        leader: bool = True,
    ):
        self.out, self.rows, self.leader = Path(out), rows, leader
        self.found = Found()
        self._locks: list[int] = []
        self._begun: set[Path] = set()  # manifests that this process has appended to
        self._lengths: dict[Path, tuple] = {}  # manifest -> (its inode, size and time, its rows' tokens)
        try:
            self._lock()
            self._open_info(json.loads(json.dumps(identity)), layout, rows_per_block)
            self.layout, self.rows_per_block = self.info["layout"], self.info["rows_per_block"]
            self.read_logs(mend=leader)
            self.found.beyond = sum(index >= rows for index in self.committed)
            if leader:
                self._clean()
                os.close(self._locks.pop())  # the writers of this run may join now
                if self.committed:
                    self.refresh_lengths()
        except OSError as error:
            self.close()
            raise cannot_write(self.out, error) from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # ---- opening ---------------------------------------------------------------------------------------------------

    def _lock(self) -> None:
        if not self.leader:
            lock = take_lock(self.out / WRITERS_LOCK, fcntl.LOCK_SH, ORPHANS_WAIT_SECONDS)
            self._locks = [] if lock is None else [lock]
            if lock is None:
                raise UserError(f"{self.out}: another run is starting in this directory; end one of the two")
            return
        self.out.mkdir(parents=True, exist_ok=True)
        lock = take_lock(self.out / LEADER_LOCK, fcntl.LOCK_EX, wait_seconds=0.5)  # status() may look at it just now
        if lock is None:
            raise UserError(f"{self.out}: another run is writing here; wait for it, or use another --output")
        self._locks.append(lock)
        writers = take_lock(self.out / WRITERS_LOCK, fcntl.LOCK_EX, ORPHANS_WAIT_SECONDS)
        if writers is None:
            raise UserError(
                f"{self.out}: processes of an earlier run still write here after {ORPHANS_WAIT_SECONDS} s; end them"
            )
        self._locks.append(writers)

    def _open_info(self, identity: dict[str, Any], layout: str | None, rows_per_block: int | None) -> None:
        if clash := set(identity) & set(OWN_FIELDS):
            raise ValueError(f"identity fields {sorted(clash)} belong to dataset.json itself")
        info = read_info(self.out)
        if info is None:
            if not self.leader:
                raise UserError(f"{self.out}: no {DATASET} yet; the leader opens the directory first")
            for name in os.listdir(self.out):
                if SAMPLE_NAME.match(name) or name.startswith("rows_") or name == "hidden_states":
                    raise UserError(f"{self.out}: holds {name} but no {DATASET}: not ours; use another --output")
            if layout not in (None, *LAYOUTS) or (rows_per_block or 2000) < 1:
                expected = f"layout {' or '.join(LAYOUTS)} and rows per block >= 1"
                raise UserError(f"expected {expected}, found layout {layout} and {rows_per_block} rows per block")
            self.info = identity | {"layout": layout or "v1", "rows_per_block": rows_per_block or 2000}
            self.info |= {"rows": self.rows, "run": {"created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}}
            self._write_info()
            return
        wanted = dict(identity)
        wanted |= {"layout": layout} if layout else {}
        wanted |= {"rows_per_block": rows_per_block} if rows_per_block else {}
        old = {key: value for key, value in info.items() if key in wanted or key not in OWN_FIELDS}
        if different := differences(in_flags(old), in_flags(wanted)):
            changes = "; ".join(different)
            raise UserError(f"{self.out / DATASET}: {changes}. Resume with the old settings, or use another --output")
        self.info = info
        if self.leader and info.get("rows") != self.rows:
            self.info["rows"] = self.rows
            self._write_info()

    def _write_info(self) -> None:
        write_atomically(self.out / DATASET, json.dumps(self.info, indent=1, ensure_ascii=False).encode() + b"\n")

    def read_logs(self, mend: bool = False) -> None:
        """Fill committed, set_aside and skipped from the disk (again, to see what other replicas committed).

        `mend` also drops half and broken lines and samples whose file is missing or of another size; only the leader
        may, and only while nobody appends.
        """
        self.committed: dict[int, Record] = {}
        self.set_aside: dict[int, dict[str, Any]] = {}
        for directory in block_directories(self.out):
            log = read_log(directory / MANIFEST)
            dropped = []
            for index, entry in log.latest().items():
                if entry["status"] != COMMITTED:
                    self.set_aside[index] = entry
                    continue
                record = record_of(entry, sample_path(self.out, index, self.layout, self.rows_per_block))
                if mend and (problem := file_problem(record, contents=False)):
                    dropped.append(index)
                    self.found.damaged.append(f"{record.path.name}: {problem}")
                else:
                    self.committed[index] = record
            if mend:
                self._mend(directory / MANIFEST, log, dropped)
        log = read_log(self.out / SKIPPED)
        self.skipped = {index: Skipped(index, e["reason"], e.get("source")) for index, e in log.latest().items()}
        if mend:
            self._mend(self.out / SKIPPED, log, [])

    def _mend(self, path: Path, log: LogContents, dropped: list[int]) -> None:
        if dropped or log.half_line or log.broken:
            self.found.half_lines += log.half_line > 0
            self.found.broken_lines += len(log.broken)
            mend_log(path, dropped)

    def _clean(self) -> None:
        """Remove temporaries, files without a line, and what `finish` derived."""
        damaged = {line.partition(": ")[0] for line in self.found.damaged}
        for directory in [self.out, self.out / "hidden_states", *block_directories(self.out)]:
            for name in os.listdir(directory) if directory.is_dir() else ():
                path, match = directory / name, SAMPLE_NAME.match(name)
                if name.endswith(TEMPORARY):
                    self.found.stale_temporaries += 1
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                elif match and directory != self.out:
                    index = int(match[1] or match[2])
                    if index not in self.committed:
                        self.found.uncommitted_files += name not in damaged and not is_placeholder(path)
                        path.unlink()
                elif directory == self.out and self.layout == "arrow" and ARROW_FILES.match(name):
                    path.unlink()

    # ---- rows ------------------------------------------------------------------------------------------------------

    def blocks(self) -> list[tuple[int, int]]:
        """[start, stop) of every block of rows; the last may be short."""
        starts = range(0, self.rows, self.rows_per_block)
        return [(start, min(start + self.rows_per_block, self.rows)) for start in starts]

    def pending(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Source rows of [start, stop) that are neither committed nor set aside nor skipped."""
        done = (self.committed, self.set_aside, self.skipped)
        wanted = range(start, self.rows if stop is None else min(stop, self.rows))
        return [index for index in wanted if not any(index in each for each in done)]

    def check_row(self, index: int, row_hash: str) -> None:
        """UserError when row `index` of the data is not the row whose states the directory has."""
        entry = self.committed.get(index)
        old = entry.row_hash if entry else self.set_aside.get(index, {}).get("row_hash")
        if old is not None and old != row_hash:
            raise UserError(
                f"{self.out}: row {index} of the data has hash {row_hash}, but was captured with {old}: the data "
                "changed; resume with the old data (rows may be added at the end), or use another --output"
            )

    def commit(self, records: Iterable[Record]) -> None:
        """Make samples exist whose files `write_sample` has finished: one durable append a block. After `DiskFull` the
        blocks not yet appended are uncommitted, and redone by a resume."""
        by_block = defaultdict(list)
        for record in records:
            by_block[record.index // self.rows_per_block].append(record)
        for group in by_block.values():
            manifest, now = self._manifest(group[0].index), round(time.time(), 3)
            if manifest in self._begun and not manifest.exists():
                raise UserError(f"{manifest} is gone: files were removed while this run writes; start it again")
            first = sample_path(self.out, group[0].index, self.layout, self.rows_per_block)
            names = [sample_name(record.index, self.layout) for record in group]
            paths = [first.parent / name for name in names]
            group = [replace(record, path=path, time=now) for record, path in zip(group, paths, strict=True)]
            append_lines(manifest, [entry_of(record) for record in group], first.parent)
            self._begun.add(manifest)
            for record in group:
                self.committed[record.index] = record
                self.set_aside.pop(record.index, None)

    def put_aside(self, index: int, reason: str, row_hash: str, source: str | None = None) -> None:
        """Record that row `index` has no sample and why ("NaN at point 31, row 17"); a resume does not redo it."""
        path = sample_path(self.out, index, self.layout, self.rows_per_block)
        entry = {"index": index, "status": SET_ASIDE, "reason": reason, "row_hash": row_hash}
        entry |= {"source": source} if source is not None else {}
        path.unlink(missing_ok=True)
        manifest = self._manifest(index)
        append_lines(manifest, [entry | {"time": round(time.time(), 3)}], manifest.parent)
        self.set_aside[index] = entry
        self.committed.pop(index, None)

    def skip(self, rows: Iterable[Skipped]) -> None:
        """Record rows that are never captured, with the reason; those recorded before are not repeated."""
        new = [row for row in rows if self.skipped.get(row.index) != row]
        lines = [{"index": row.index, "status": SKIPPED_ROW, "reason": row.reason, "source": row.source} for row in new]
        if lines:
            append_lines(self.out / SKIPPED, lines, self.out)
            self.skipped |= {row.index: row for row in new}

    def unskip(self, indices: Iterable[int]) -> None:
        """Forget that these rows were skipped: the data or the settings changed, and they are samples now."""
        again = [index for index in indices if index in self.skipped]
        if again:
            mend_log(self.out / SKIPPED, again)
            for index in again:
                del self.skipped[index]

    def skips_by_reason(self) -> dict[str, int]:
        """reason -> rows, most frequent first; set-aside samples are not in it."""
        return dict(Counter(row.reason for row in self.skipped.values()).most_common())

    def _manifest(self, index: int) -> Path:
        if not 0 <= index < self.rows:
            raise ValueError(f"row {index} of a data set of {self.rows} rows")
        directory = block_directory(self.out, index, self.rows_per_block)
        try:
            directory.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot_write(directory, error) from None
        return directory / MANIFEST

    # ---- derived files ---------------------------------------------------------------------------------------------

    def note(self, **facts: Any) -> None:
        """Keep facts about the run (self-checks, counts; JSON values) under "run" in dataset.json. Leader only."""
        self.info["run"] = self.info.get("run", {}) | facts
        self._write_info()

    def refresh_lengths(self) -> None:
        """Write sample_lengths.json at OUT and in every block; opening and `finish` call it.

        It reads the manifests of all replicas, so the last writer is right about everything committed before it
        started; `finish` writes it once more when all are done. One file, hard-linked into the blocks (copied where
        links are not possible): 100,000 rows cost one 1.7 MB file a call and not one a block.
        """
        lengths = {}
        for directory in block_directories(self.out):
            lengths |= self._lengths_of(directory / MANIFEST)
        data = json.dumps(dict(sorted(lengths.items(), key=lambda item: int(item[0])))).encode()
        write_atomically(self.out / LENGTHS, data)
        for directory in block_directories(self.out):
            link = temporary_name(directory / LENGTHS)
            try:
                os.link(self.out / LENGTHS, link)
                os.replace(link, directory / LENGTHS)
            except OSError:
                write_atomically(directory / LENGTHS, data)
            with contextlib.suppress(OSError):
                os.unlink(link)  # rename leaves it when both names already are one file

    def _lengths_of(self, manifest: Path) -> dict[str, int]:
        """row -> tokens of one block; read again only when the manifest has changed."""
        try:
            state = os.stat(manifest)
        except FileNotFoundError:
            return {}
        version = (state.st_ino, state.st_size, state.st_mtime_ns)
        if self._lengths.get(manifest, (None,))[0] != version:
            entries = read_log(manifest).latest().values()
            tokens = {str(entry["index"]): entry["tokens"] for entry in entries if entry["status"] == COMMITTED}
            self._lengths[manifest] = (version, tokens)
        return self._lengths[manifest][1]

    def finish(self, **facts: Any) -> None:
        """After the last commit of all replicas, leader only: lengths, Arrow dataset of layout arrow, `note(facts)`."""
        self.read_logs(mend=True)
        self.refresh_lengths()
        if self.layout == "arrow" and self.committed:
            try:
                write_arrow_dataset(self.out, self.committed, self.rows, self.rows_per_block)
            except OSError as error:
                raise cannot_write(self.out, error) from None
        if facts:
            self.note(**facts)

    def close(self) -> None:
        """Let others write here. The kernel does the same when the process dies."""
        while self._locks:
            os.close(self._locks.pop())


def in_flags(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields under names that tell a person what to give."""
    told = {"dtype": "dtype of the states (--state-dtype)"}
    return {told.get(name, name): value for name, value in fields.items()}


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """`field was X, is now Y` for each field that differs; nested dicts are compared field by field."""
    lines = []
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after or (key in old) != (key in new):
            lines.append(f"{prefix}{key} was {before!r}, is now {after!r}")
    return lines
