"""Looking at a shard directory: verify, status, and the arithmetic of a plan. Called by extract.py.

    verification = verify(out, repair=False, threads=8, progress=None)   # every byte; .clean, .lines(), .as_dict()
    report = status(out)                                                 # dict for --json; reads names and sizes only
    print(status_text(report))                                           # for people
    plan_bytes(lengths, num_points, hidden_size, dtype, layout, kept)    # bytes on disk of these samples
    require_disk(out, need_bytes, force=False)                           # UserError when they do not fit
"""

import fcntl
import os
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.progress import duration
from common.shard_run import LEADER_LOCK
from common.shard_writing import cannot_write, mend_log, take_lock
from common.shards import (
    COMMITTED,
    DATASET,
    MANIFEST,
    SAMPLE_NAME,
    SKIPPED,
    TEMPORARY,
    Record,
    block_directories,
    file_problem,
    is_placeholder,
    read_info,
    read_log,
    record_of,
    sample_path,
)

BYTES_PER_ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4}  # fp8: see point_bytes, last_state_bytes
FILE_OVERHEAD_BYTES = 8192  # zip directory or JSON header, pickle, and the last half-filled disk block
REMEDY = "next: python extract.py --verify {} --repair drops what is damaged; the extraction's own command redoes it"
IDLE_SECONDS = 60.0  # a gap between commits counts at most this much: the pause between two runs is not slow capture


@dataclass
class Verification:
    """What `verify` found. Names are relative to the directory."""

    files: int = 0  # committed files read
    bytes: int = 0
    set_aside: int = 0
    damaged: list[str] = field(default_factory=list)  # "rows_0-2000/data_3.pt: truncated: expected ..."
    broken_lines: list[str] = field(default_factory=list)
    half_lines: list[str] = field(default_factory=list)
    uncommitted: list[str] = field(default_factory=list)  # whole files without a line: in flight, or of a dead run
    stale_temporaries: list[str] = field(default_factory=list)
    directory: str = ""
    repaired: bool = False  # what can be mended has been: the manifests tell of nothing that is not whole
    dropped: int = 0  # committed lines removed by repair: a resume redoes these rows

    @property
    def clean(self) -> bool:
        return not any(problems for _, problems in self.problems())

    def problems(self) -> list[tuple[str, list[str]]]:
        return [
            ("damaged file", self.damaged),
            ("damaged line", self.broken_lines),
            ("half line", self.half_lines),
            ("uncommitted file", self.uncommitted),
            ("stale temporary file", self.stale_temporaries),
        ]

    def lines(self) -> list[str]:
        """For the person: each problem by name, then one summary line."""
        lines = [f"{kind}: {each}" for kind, problems in self.problems() for each in problems]
        counts = ", ".join(f"{len(problems)} {kind}{'s' * (len(problems) != 1)}" for kind, problems in self.problems()
                           if problems)  # fmt: skip
        verdict = "clean" if self.clean else counts
        dropped = f"; {self.dropped} dropped from the manifests, resume redoes them" if self.dropped else ""
        lines.append(f"{self.files:,} committed files, {self.bytes / 1e9:.3f} GB read: {verdict}{dropped}")
        if (self.damaged or self.broken_lines) and not self.repaired:
            lines.append(REMEDY.format(shlex.quote(self.directory)))
        return lines

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"clean": self.clean}


def verify(
    out: str | os.PathLike,
    repair: bool = False,
    threads: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Read every committed file and compare size and xxh3-128; find what should not be there.

    `progress(files_done, bytes_done)` is called after each file. `repair` rewrites the manifests without the damaged
    samples and lines (under the lock of a run), so that a resume redoes them; it deletes nothing. UserError: no
    dataset.json, or `repair` while a run is writing.
    """
    out = Path(out)
    info = need_info(out)
    lock = lock_for_repair(out) if repair else None
    try:
        found = Verification(directory=str(out), repaired=repair)
        records: list[Record] = []
        to_mend: set[Path] = set()
        logs = {directory / MANIFEST: read_log(directory / MANIFEST) for directory in block_directories(out)}
        logs[out / SKIPPED] = read_log(out / SKIPPED)
        for path, log in logs.items():
            name = path.relative_to(out)
            found.broken_lines += [f"{name}:{number}: {problem}" for number, problem in log.broken]
            found.half_lines += [f"{name}: {log.half_line} bytes after the last whole line"] if log.half_line else []
            to_mend |= {path} if log.broken or log.half_line else set()
            if path.name != MANIFEST:
                continue
            for index, entry in log.latest().items():
                if entry["status"] == COMMITTED:
                    records.append(record_of(entry, sample_path(out, index, info["layout"], info["rows_per_block"])))
                else:
                    found.set_aside += 1
        list_strays(out, {record.path for record in records}, found)

        damaged: set[int] = set()
        with ThreadPoolExecutor(threads) as pool:
            for first in range(0, len(records), 1024):
                batch = records[first : first + 1024]
                for record, problem in zip(batch, pool.map(file_problem, batch), strict=True):
                    found.files += 1
                    found.bytes += record.bytes
                    if problem:
                        damaged.add(record.index)
                        found.damaged.append(f"{record.path.relative_to(out)}: {problem}")
                    if progress:
                        progress(found.files, found.bytes)
        if repair:
            for path, log in logs.items():
                drop = damaged & log.latest().keys() if path.name == MANIFEST else set()
                if drop or path in to_mend:
                    mend_log(path, drop)
                    found.dropped += len(drop)
        return found
    finally:
        if lock is not None:
            os.close(lock)


def need_info(out: Path) -> dict[str, Any]:
    """dataset.json, or the line that says there is none."""
    info = read_info(out)
    if info is None:
        raise UserError(f"{out}: no {DATASET} there; expected a directory that extract.py wrote")
    return info


def lock_for_repair(out: Path) -> int:
    try:
        lock = take_lock(out / LEADER_LOCK, fcntl.LOCK_EX)
    except OSError as error:
        raise cannot_write(out, error) from None
    if lock is None:
        raise UserError(f"{out}: a run is writing here; repair when it has ended")
    return lock


def list_strays(out: Path, committed: set[Path], found: Verification) -> None:
    """Fill `uncommitted` and `stale_temporaries`: names in the directory that no manifest line explains."""
    for directory in [out, out / "hidden_states", *block_directories(out)]:
        for name in sorted(os.listdir(directory)) if directory.is_dir() else ():
            path = directory / name
            if name.endswith(TEMPORARY):
                found.stale_temporaries.append(str(path.relative_to(out)))
            elif SAMPLE_NAME.match(name) and path not in committed and not is_placeholder(path):
                found.uncommitted.append(str(path.relative_to(out)))


def status(out: str | os.PathLike) -> dict[str, Any]:
    """Where a directory stands, cheaply: one stat a file. Keys and units:

    rows, committed, set_aside, skipped, missing (none of the three), damaged (file missing or of another size; these
    are not in committed); tokens, supervised_tokens, bytes of the committed; samples_per_second and tokens_per_second
    over the time between commits (pauses count at most a minute), eta_seconds for the missing and damaged; running;
    skips_by_reason, set_aside_by_reason; damaged_files (first 20); disk_free_bytes; model, layout, dtype,
    last_state_rows.
    """
    out = Path(out)
    info = need_info(out)
    committed: list[Record] = []
    damaged_files: list[str] = []
    set_aside: dict[int, str] = {}
    half_or_broken_lines = 0
    for directory in block_directories(out):
        log = read_log(directory / MANIFEST)
        half_or_broken_lines += len(log.broken) + (log.half_line > 0)
        for index, entry in log.latest().items():
            if entry["status"] != COMMITTED:
                set_aside[index] = entry["reason"]
                continue
            record = record_of(entry, sample_path(out, index, info["layout"], info["rows_per_block"]))
            if problem := file_problem(record, contents=False):
                damaged_files.append(f"{record.path.relative_to(out)}: {problem}")
            else:
                committed.append(record)
    captured = {record.index for record in committed} | set_aside.keys()
    skipped = read_log(out / SKIPPED).latest()
    skips = {index: entry["reason"] for index, entry in skipped.items() if index not in captured}
    rows = info.get("rows", 0)
    to_do = max(rows - len(captured) - len(skips), 0)

    times = sorted(record.time for record in committed if record.time)
    gaps = [min(later - earlier, IDLE_SECONDS) for earlier, later in zip(times, times[1:], strict=False)]
    rate = len(gaps) / sum(gaps) if sum(gaps) > 0 else None
    tokens = sum(record.tokens for record in committed)
    return {
        "directory": str(out),
        "model": info.get("model"),
        "layout": info["layout"],
        "dtype": info.get("dtype"),
        "last_state_rows": info.get("last_state_rows", "all"),
        "rows": rows,
        "committed": len(committed),
        "set_aside": len(set_aside),
        "skipped": len(skips),
        "missing": max(to_do - len(damaged_files), 0),
        "damaged": len(damaged_files),
        "damaged_files": damaged_files[:20],
        "half_or_broken_lines": half_or_broken_lines,
        "tokens": tokens,
        "supervised_tokens": sum(record.supervised for record in committed),
        "bytes": sum(record.bytes for record in committed),
        "samples_per_second": rate,
        "tokens_per_second": rate * tokens / len(committed) if rate else None,
        "eta_seconds": to_do / rate if rate else None,
        "running": is_running(out),
        "skips_by_reason": dict(Counter(skips.values()).most_common()),
        "set_aside_by_reason": dict(Counter(set_aside.values()).most_common()),
        "disk_free_bytes": shutil.disk_usage(out).free,
    }


def is_running(out: Path) -> bool:
    """Whether a run holds the lock of the directory (on this file system, from any node)."""
    try:
        descriptor = os.open(out / LEADER_LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def status_text(report: dict[str, Any]) -> str:
    """The report of `status` for people."""
    rate, eta = report["samples_per_second"], report["eta_seconds"]
    running = "running" if report["running"] else "not running"
    kept = "" if report["last_state_rows"] == "all" else f", the last at {report['last_state_rows']} rows"
    speed = f"{rate:.2f} samples/s, {report['tokens_per_second']:,.0f} tokens/s" if rate else "not known yet"
    lines = [
        f"{report['directory']}: {report['model']}, {report['dtype']} states{kept}, layout {report['layout']}, "
        f"{running}",
        f"rows       {report['rows']:,}: {report['committed']:,} committed, {report['missing']:,} missing, "
        f"{report['damaged']:,} damaged, {report['set_aside']:,} set aside, {report['skipped']:,} skipped",
        f"tokens     {report['tokens']:,}, of them {report['supervised_tokens']:,} supervised",
        f"disk       {report['bytes'] / 1e9:.3f} GB used, {report['disk_free_bytes'] / 1e9:.1f} GB free",
        f"rate       {speed}",
    ]
    lines += [f"remaining  {duration(eta)} at that rate"] if eta else []
    lines += [f"skipped    {count:,} x {reason}" for reason, count in report["skips_by_reason"].items()]
    aside = list(report["set_aside_by_reason"].items())
    lines += [f"set aside  {count:,} x {reason}" for reason, count in aside[:10]]
    lines += [f"set aside  and {len(aside) - 10:,} more reasons (--json lists them)"] if len(aside) > 10 else []
    lines += [f"damaged    {each}" for each in report["damaged_files"]]
    if report["damaged_files"]:
        lines.append("           the extraction's own command does these again; only --verify reads what is in a file")
    if report["half_or_broken_lines"]:
        lines.append(f"manifest   {report['half_or_broken_lines']} half or damaged line(s); a resume redoes their rows")
    return "\n".join(lines)


def point_bytes(num_points: int, hidden_size: int, dtype: str) -> int:
    """Bytes of the states at the capture points a token. fp8: a byte an element and a float32 scale a point."""
    return num_points * (hidden_size + 4 if dtype == "fp8" else hidden_size * BYTES_PER_ELEMENT[dtype])


def last_state_bytes(hidden_size: int, dtype: str, layout: str = "v1") -> int:
    """Bytes of the last state at one row. fp8: bfloat16, which layout arrow has beside the codes its reader wants."""
    if dtype != "fp8":
        return hidden_size * BYTES_PER_ELEMENT[dtype]
    return 2 * hidden_size + (point_bytes(1, hidden_size, dtype) if layout == "arrow" else 0)


def bytes_per_token(num_points: int, hidden_size: int, dtype: str = "bfloat16", layout: str = "v1") -> int:
    """Bytes of states a token: the capture points and the last state. Kimi-K2.5, 3 points: 4 x 7168 x 2 = 57,344; in
    fp8 3 x (7168 + 4) + 2 x 7168 = 35,852."""
    return point_bytes(num_points, hidden_size, dtype) + last_state_bytes(hidden_size, dtype, layout)


def plan_bytes(
    lengths: Iterable[int],
    num_points: int,
    hidden_size: int,
    dtype: str = "bfloat16",
    layout: str = "v1",
    kept: Iterable[int] | None = None,
) -> int:
    """Bytes on disk of samples of these lengths (tokens): states, 16 bytes a token of ids and mask, overhead a file.

    kept: rows of each sample at which the last state is stored; default: all.
    """
    lengths = list(lengths)
    per_token, per_row = point_bytes(num_points, hidden_size, dtype) + 16, last_state_bytes(hidden_size, dtype, layout)
    rows = sum(lengths if kept is None else kept)
    return sum(lengths) * per_token + rows * per_row + len(lengths) * FILE_OVERHEAD_BYTES


def require_disk(out: str | os.PathLike, need_bytes: int, force: bool = False, margin: float = 0.02) -> int:
    """Free bytes of the file system of `out`; UserError when `need_bytes` and a margin do not fit, unless `force`.

    A quota is not visible here: a run that meets one stops with `DiskFull` and can be resumed.
    """
    directory = Path(out).absolute()
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if need_bytes * (1 + margin) > free and not force:
        raise UserError(
            f"{out}: the states need {need_bytes / 1e9:.3f} GB and {margin:.0%} margin, the disk has "
            f"{free / 1e9:.3f} GB free; free some space, capture fewer rows, or pass --force"
        )
    return free
