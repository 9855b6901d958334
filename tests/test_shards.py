"""Shards written, killed, damaged, resumed and read: real files, real processes, real SIGKILL; no engine.

`tests/shard_writer.py` is the run: it drives the same writer and commit code as extract.py with made-up states. The
tests compare with an undisturbed run of it.
"""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common import shard_run
from common.errors import UserError
from common.shard_check import REMEDY, plan_bytes, require_disk, status, status_text, verify
from common.shard_run import RunDirectory, Skipped
from common.shard_writing import DiskFull, append_lines, join_run, write_sample
from common.shards import MANIFEST, Record, ShardReader, block_directories, read_log, to_line, token_hash
from tests.shard_writer import IDENTITY, capture, is_not_finite, is_skipped, make_sample
from tests.speculators_directory import installed

ROWS = 200
WRITER = [sys.executable, str(Path(__file__).parent / "shard_writer.py")]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def manifests(out: Path) -> list[dict]:
    """All manifest lines but their times, sorted by index; raises when a line is damaged or an index has two lines."""
    entries = []
    for directory in block_directories(out):
        log = read_log(directory / MANIFEST)
        assert not log.half_line and not log.broken
        entries += [{key: value for key, value in entry.items() if key != "time"} for entry in log.entries]
    entries.sort(key=lambda entry: entry["index"])
    assert len({entry["index"] for entry in entries}) == len(entries), "an index has two lines"
    return entries


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, Path]:
    """layout -> a complete run that nobody disturbed. Tests copy what they damage."""
    outs = {layout: tmp_path_factory.mktemp(layout) / "states" for layout in ("v1", "arrow")}
    for layout, out in outs.items():
        capture(out, ROWS, layout)
    return outs


@pytest.fixture
def copied(undisturbed, tmp_path) -> Path:
    """A v1 run to damage."""
    return Path(shutil.copytree(undisturbed["v1"], tmp_path / "states"))


def is_complete(out: Path, reference: Path) -> None:
    """Nothing lost, nothing twice, nothing else lying about, every row accounted for."""
    assert manifests(out) == manifests(reference)
    assert verify(out).clean, verify(out).lines()
    report = status(out)
    assert report["committed"] + report["set_aside"] + report["skipped"] == report["rows"] == ROWS
    assert report["missing"] == report["damaged"] == 0
    lengths = json.loads((out / "sample_lengths.json").read_text())
    assert lengths == {str(record.index): record.tokens for record in ShardReader(out).records}
    for directory in block_directories(out):
        assert json.loads((directory / "sample_lengths.json").read_text()) == lengths


# ---- one sample ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["v1", "arrow"])
def test_what_is_read_is_what_was_written(undisturbed, layout):
    reader = ShardReader(undisturbed[layout])
    assert [r.index for r in reader.records] == [i for i in range(ROWS) if not is_skipped(i) and not is_not_finite(i)]
    assert reader.info["capture_points"] == [3, 31, 59] and reader.info["layout"] == layout
    for record in reader.records:
        ids, mask, states = make_sample(record.index)
        sample = reader.load(record, verify=True)
        assert sample.input_ids.dtype == sample.loss_mask.dtype == torch.int64
        assert sample.input_ids.tolist() == ids and sample.loss_mask.tolist() == mask
        assert (record.tokens, record.supervised, record.row_hash) == (len(ids), sum(mask), token_hash(ids))
        assert record.own_token == "equal" and record.path.stat().st_size == record.bytes
        assert len(sample.states) == 4
        for found, expected in zip(sample.states, states, strict=True):
            assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


def test_a_view_of_an_arena_does_not_store_the_arena(tmp_path):
    arena = torch.randn(1000, 64).to(torch.bfloat16)
    states = [arena[10 * k : 10 * k + 7] for k in range(4)]
    own_bytes = 4 * 7 * 64 * 2
    for layout in ("v1", "arrow"):
        written = write_sample(tmp_path, 5, list(range(7)), [1] * 7, states, layout)
        assert own_bytes < written.bytes < own_bytes + 8192
    torch.save(states, tmp_path / "naive.pt")  # the mistake this guards against, so that the bound above can fail
    assert (tmp_path / "naive.pt").stat().st_size > arena.nbytes


def test_states_of_wrong_shape_are_refused(tmp_path):
    good = torch.zeros(3, 8, dtype=torch.bfloat16)
    for ids, mask, states in [
        ([1, 2, 3], [1, 1, 1], [good, good[:2]]),
        ([1, 2, 3], [1, 1, 1], [good, torch.zeros(8, 3, dtype=torch.bfloat16).T]),
        ([1, 2, 3], [1, 1], [good, good]),
        ([], [], [good[:0]]),
    ]:
        with pytest.raises(ValueError, match="row 9"):
            write_sample(tmp_path, 9, ids, mask, states)
    assert not list(tmp_path.rglob("*9*"))


# ---- killed --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes():
    """Fresh processes in milliseconds: forked from a server that has imported torch and nothing of this test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.shard_writer"])
    return context


def report_to(pipe, *arguments) -> None:
    """The body of a process that is going to be killed."""
    torch.set_num_threads(1)
    capture(*arguments, say=pipe.send)


def kill_at_a_random_moment(processes, out: Path, layout: str, chance: random.Random) -> bool:
    """Start or resume a run and SIGKILL it after a few commits or before the first; False when it had ended."""
    here, there = processes.Pipe(duplex=False)
    process = processes.Process(target=report_to, args=(there, out, ROWS, layout, 0.05))
    process.start()
    there.close()
    commits = chance.randint(0, 3)
    if not commits:
        while process.is_alive() and not (out / ".lock").exists():
            time.sleep(0.001)  # then it is opening the directory
    for _ in range(commits):
        here.recv()
    time.sleep(chance.uniform(0.0, 0.05))
    ended = not process.is_alive()
    process.kill()
    process.join()
    assert ended or process.exitcode == -signal.SIGKILL
    return not ended


@pytest.mark.parametrize("layout, kills", [("v1", 20), ("arrow", 4)])
def test_killed_at_random_moments_and_resumed(undisturbed, processes, tmp_path, layout, kills):
    chance = random.Random(f"kill {layout}")
    out = tmp_path / "states"
    leftovers, done = 0, 0
    while done < kills or leftovers < kills // 4:  # a kill may fall between two files: then one more is needed
        done += 1
        assert done <= 3 * kills, "the kills do not hit work in flight"
        assert kill_at_a_random_moment(processes, out, layout, chance), "the run ended before all kills: make it slower"
        if (out / "dataset.json").exists():  # the first kill may come before it
            left = verify(out)
            assert not left.damaged and not left.broken_lines, "a committed sample was not durable"
            leftovers += len(left.stale_temporaries) + len(left.uncommitted) + len(left.half_lines)
    before = status(out)
    assert 0 < before["committed"] < ROWS and before["missing"] > 0
    found = capture(out, ROWS, layout)  # the last resume runs to its end, and says what the last kill left
    assert found.stale_temporaries == len(left.stale_temporaries)
    assert found.uncommitted_files == len(left.uncommitted)
    assert not found.damaged and not found.broken_lines
    is_complete(out, undisturbed[layout])


def test_a_dead_process_does_not_keep_the_lock_a_living_one_does(tmp_path, monkeypatch):
    out = tmp_path / "states"
    command = [*WRITER, str(out), "--delay", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    process.stdout.readline()
    assert status(out)["running"]
    with pytest.raises(UserError, match="another run is writing here"):
        RunDirectory(out, IDENTITY, rows=ROWS)
    with pytest.raises(UserError, match="a run is writing here"):
        verify(out, repair=True)
    process.kill()
    process.communicate()
    assert not status(out)["running"]
    RunDirectory(out, IDENTITY, rows=ROWS).close()

    # A writer that outlived its run: the next run waits for it, and says so when it stays.
    monkeypatch.setattr(shard_run, "ORPHANS_WAIT_SECONDS", 0.3)
    orphan = join_run(out)
    with pytest.raises(UserError, match="processes of an earlier run still write here"):
        RunDirectory(out, IDENTITY, rows=ROWS)
    os.close(orphan)
    RunDirectory(out, IDENTITY, rows=ROWS).close()


# ---- damaged -------------------------------------------------------------------------------------------------------


def truncate(out: Path) -> str:
    os.truncate(out / "rows_0-48" / "data_3.pt", 1000)
    return r"rows_0-48/data_3\.pt: truncated: expected \d+ bytes, found 1000"


def delete(out: Path) -> str:
    (out / "rows_48-96" / "data_50.pt").unlink()
    return r"rows_48-96/data_50\.pt: missing"


def flip_byte(out: Path) -> str:
    path = out / "rows_0-48" / "data_4.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return r"rows_0-48/data_4\.pt: contents changed: expected xxh3-128 \w{32}, found \w{32}"


def cut_last_line(out: Path) -> str:
    path = out / "rows_96-144" / MANIFEST
    os.truncate(path, path.stat().st_size - 40)
    return r"rows_96-144/manifest\.jsonl: \d+ bytes after the last whole line"


def flip_in_a_line(out: Path) -> str:
    path = out / "rows_96-144" / MANIFEST
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b'"tokens":', b'"tokens":1', 1)
    path.write_bytes(b"\n".join(lines))
    return r"rows_96-144/manifest\.jsonl:3: line checksum does not match"


def leave_temporary(out: Path) -> str:
    (out / "rows_0-48" / ".data_5.pt.node-1-2.tmp").write_bytes(b"half")
    return r"rows_0-48/\.data_5\.pt\.node-1-2\.tmp"


def lose_line(out: Path) -> str:
    path = out / "rows_144-192" / MANIFEST
    entry = next(entry for entry in read_log(path).entries if entry["status"] == "committed")
    lines = [line for line in path.read_bytes().splitlines(True) if f'"index":{entry["index"]},'.encode() not in line]
    path.write_bytes(b"".join(lines))
    return rf"rows_144-192/data_{entry['index']}\.pt"


@pytest.mark.parametrize(
    "damage, kind, repaired",
    [
        (truncate, "damaged", "damaged"),
        (delete, "damaged", "damaged"),
        (flip_byte, "damaged", None),  # only reading every byte finds it: verify(repair=True), then resume
        (cut_last_line, "half_lines", "half_lines"),
        (flip_in_a_line, "broken_lines", "broken_lines"),
        (leave_temporary, "stale_temporaries", "stale_temporaries"),
        (lose_line, "uncommitted", "uncommitted_files"),
    ],
)
def test_damage_is_found_by_name_redone_and_counted(undisturbed, copied, damage, kind, repaired):
    expected = damage(copied)
    found = verify(copied)
    assert not found.clean
    assert len(getattr(found, kind)) == 1 and re.match(expected, getattr(found, kind)[0])
    assert any(re.search(expected, line) for line in found.lines()) and "clean" not in " ".join(found.lines()[-2:])
    assert bool(found.damaged or found.broken_lines) == (found.lines()[-1] == REMEDY.format(copied))
    if repaired is None:
        assert capture(copied, ROWS).lines() == [], "a resume does not read the contents of committed files"
        assert verify(copied, repair=True).dropped == 1
        assert capture(copied, ROWS).uncommitted_files == 1
    else:
        count = getattr(capture(copied, ROWS), repaired)
        assert (len(count) if isinstance(count, list) else count) == 1
    is_complete(copied, undisturbed["v1"])


def test_files_without_a_line_and_temporaries_are_removed_on_opening(copied):
    """speculators' v1 reader takes every file that ends with "pt", committed or not."""
    lose_line(copied), leave_temporary(copied)
    before = len(list(copied.rglob("data_*.pt")))
    with RunDirectory(copied, IDENTITY, rows=ROWS) as run:
        assert len(run.pending()) == 1
        assert len(list(copied.rglob("data_*.pt"))) == before - 1
        assert not list(copied.rglob("*.tmp"))
        assert [line.split()[0] for line in run.found.lines()] == ["1", "1"]
    assert verify(copied).clean


def test_repair_drops_damage_of_every_kind_at_once(undisturbed, copied):
    for damage in (truncate, delete, flip_byte, cut_last_line, leave_temporary):
        damage(copied)
    seen = []
    found = verify(copied, repair=True, progress=lambda files, size: seen.append((files, size)))
    assert found.dropped == 3 and len(found.half_lines) == 1
    assert seen[-1] == (found.files, found.bytes) and len(seen) == found.files
    assert not verify(copied).damaged and not verify(copied).half_lines
    capture(copied, ROWS)
    is_complete(copied, undisturbed["v1"])


def test_loading_names_the_damaged_file(copied):
    reader = ShardReader(copied)
    by_index = {record.index: record for record in reader.records}
    flip_byte(copied), truncate(copied), delete(copied)
    with pytest.raises(UserError, match=r"data_4\.pt: contents changed"):
        reader.load(by_index[4], verify=True)
    with pytest.raises(UserError, match=r"data_3\.pt: truncated: expected 11605 bytes, found 1000"):
        reader.load(by_index[3])
    with pytest.raises(UserError, match=r"data_50\.pt: missing; python extract.py --verify .*states --repair drops it"):
        reader.load(by_index[50])
    shutil.copy(by_index[8].path, by_index[9].path)
    other = replace(by_index[9], bytes=by_index[8].bytes)
    with pytest.raises(UserError, match=rf"data_9\.pt: expected {other.tokens} tokens, found rows"):
        reader.load(other)


def test_a_line_is_counted_once_and_the_last_wins(tmp_path):
    with RunDirectory(tmp_path / "s", IDENTITY, rows=10) as run:
        for length in (3, 5):
            states = [torch.zeros(length, 8, dtype=torch.bfloat16)] * 4
            written = write_sample(run.out, 1, [1] * length, [1] * length, states, run.layout, run.rows_per_block)
            run.commit([Record(1, length, length, *written, "aa")])
        run.put_aside(2, "Inf at point 3, row 0", "bb")
        run.put_aside(1, "NaN at point 31, row 1", "aa")
        assert run.pending() == [0, 3, 4, 5, 6, 7, 8, 9]
    report = status(tmp_path / "s")
    assert (report["committed"], report["set_aside"], report["missing"]) == (0, 2, 8)
    assert report["set_aside_by_reason"] == {"Inf at point 3, row 0": 1, "NaN at point 31, row 1": 1}
    assert verify(tmp_path / "s").clean  # the file of the row set aside is gone, too
    with RunDirectory(tmp_path / "s", IDENTITY, rows=12) as run:  # rows may be added
        assert run.pending() == [0, 3, 4, 5, 6, 7, 8, 9, 10, 11]
        run.check_row(1, "aa")
        with pytest.raises(UserError, match="row 2 of the data has hash cc, but was captured with bb"):
            run.check_row(2, "cc")
        with pytest.raises(ValueError, match="row 12 of a data set of 12 rows"):
            run.put_aside(12, "x", "y")


# ---- where it cannot write -----------------------------------------------------------------------------------------


@pytest.fixture
def tmpfs(tmp_path):
    """A function that mounts a tmpfs of so many KiB, or changes it (size, read-only)."""
    mounted = []

    def mount(kib: int, options: str = "") -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"{'remount,' if mounted else ''}size={kib}k{options}", "tmpfs"]
        done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
        if done.returncode and not mounted:
            pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        mounted.append(tmp_path)
        return tmp_path / "states"

    yield mount
    if mounted:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("layout", ["v1", "arrow"])
def test_a_full_disk_stops_cleanly_and_the_run_can_be_resumed(undisturbed, tmpfs, layout):
    out = tmpfs(500)
    with pytest.raises(DiskFull, match=r"states/.*: the disk is full .* free some space"):
        capture(out, ROWS, layout)
    left = verify(out)
    assert not left.damaged and not left.half_lines and not left.broken_lines and not left.stale_temporaries
    assert 10 < left.files < ROWS
    tmpfs(20000)
    capture(out, ROWS, layout)
    is_complete(out, undisturbed[layout])


def test_a_full_disk_leaves_no_half_line(tmpfs):
    out = tmpfs(64)
    out.mkdir()
    entry = {"index": 0, "status": "set_aside", "reason": "x" * 1000, "row_hash": "aa"}
    append_lines(out / MANIFEST, [entry], out)
    with pytest.raises(DiskFull):
        append_lines(out / MANIFEST, [entry | {"index": index} for index in range(1, 100)], out)
    log = read_log(out / MANIFEST)
    assert log.entries == [entry] and not log.half_line and not log.broken


def test_a_read_only_directory_is_one_clear_line(tmpfs):
    out = tmpfs(2000)
    capture(out, 30)
    tmpfs(2000, ",ro")
    with pytest.raises(UserError, match="cannot write there .*Read-only file system.* expected a writable directory"):
        RunDirectory(out, IDENTITY, rows=30)
    with pytest.raises(UserError, match="Read-only"):
        RunDirectory(out.parent / "new", IDENTITY, rows=30)
    with pytest.raises(UserError, match=r"data_1\.pt: cannot write there"):
        write_sample(out, 1, [1], [1], [torch.zeros(1, 8)])
    with pytest.raises(UserError, match="Read-only"):
        verify(out, repair=True)
    assert verify(out).clean and status(out)["committed"] == len(ShardReader(out).records) > 20
    assert subprocess.run([*WRITER, str(out)], capture_output=True, env=ENVIRONMENT).returncode == 2


def test_a_directory_that_is_removed_meanwhile_ends_the_run_and_is_not_made_again(tmp_path):
    """Or the disk under a mount point that went away would fill up, and the loss be told at the end of the night."""
    states = [torch.zeros(1, 8)] * 2
    with RunDirectory(tmp_path / "out", IDENTITY, rows=9, rows_per_block=4) as run:

        def commit(row):
            written = write_sample(run.out, row, [1], [1], states, run.layout, run.rows_per_block)
            run.commit([Record(row, 1, 1, written.bytes, written.xxh3, "hash")])

        commit(0)
        commit(4)
        shutil.rmtree(run.out / "rows_0-4")
        with pytest.raises(UserError, match="manifest.jsonl is gone: files were removed while this run writes"):
            commit(1)
        commit(5)
        shutil.rmtree(run.out)
        with pytest.raises(UserError, match=r"data_6\.pt: cannot write there \(No such file"):
            commit(6)
        assert not run.out.exists()


@pytest.mark.parametrize(
    "change, line",
    [
        ({"model": "made/down"}, "model was 'made/up', is now 'made/down'"),
        ({"tokenizer_hash": "t1"}, "tokenizer_hash was 't0', is now 't1'"),
        ({"capture_points": (2, 30, 58)}, r"capture_points was \[3, 31, 59\], is now \[2, 30, 58\]"),
        ({"engine_arguments": {"chunked_prefill_size": 64}}, "engine_arguments.chunked_prefill_size was 16, is now 64"),
        ({"seed": 1}, "seed was None, is now 1"),
    ],
)
def test_another_identity_is_refused_by_field(copied, change, line):
    before = sorted((path, path.stat().st_mtime_ns) for path in copied.rglob("*.pt"))
    with pytest.raises(UserError, match=rf"dataset\.json: {line}"):
        RunDirectory(copied, IDENTITY | change, rows=ROWS)
    assert sorted((path, path.stat().st_mtime_ns) for path in copied.rglob("*.pt")) == before
    RunDirectory(copied, IDENTITY, rows=ROWS).close()  # the lock is free again and the old identity fits


def test_fewer_rows_than_before_are_said(copied):
    RunDirectory(copied, IDENTITY, rows=ROWS).close()
    with RunDirectory(copied, IDENTITY, rows=20) as run:
        beyond = [index for index in run.committed if index >= 20]
        (line,) = run.found.lines()
        assert beyond and f"{len(beyond)} committed sample(s) of rows that the data has no longer" in line


def test_layout_and_block_size_are_fixed_at_creation(copied, tmp_path):
    with pytest.raises(UserError, match="layout was 'v1', is now 'arrow'"):
        RunDirectory(copied, IDENTITY, rows=ROWS, layout="arrow")
    with pytest.raises(UserError, match="rows_per_block was 48, is now 50"):
        RunDirectory(copied, IDENTITY, rows=ROWS, rows_per_block=50)
    with RunDirectory(copied, IDENTITY, rows=ROWS) as run:
        assert (run.layout, run.rows_per_block) == ("v1", 48) and run.blocks()[-1] == (192, 200)
    with pytest.raises(UserError, match="found layout v2"):
        RunDirectory(tmp_path / "new", IDENTITY, rows=1, layout="v2")
    (copied / "dataset.json").write_text("{")
    with pytest.raises(UserError, match=r"dataset\.json: expected JSON written by extract\.py"):
        ShardReader(copied)
    (copied / "dataset.json").unlink()
    with pytest.raises(UserError, match="holds .* but no dataset.json: not ours"):
        RunDirectory(copied, IDENTITY, rows=ROWS)


# ---- several replicas, memory, figures -----------------------------------------------------------------------------


def test_replicas_share_the_blocks(tmp_path):
    out = tmp_path / "states"
    with pytest.raises(UserError, match="the leader opens the directory first"):
        out.mkdir()
        RunDirectory(out, IDENTITY, rows=40, leader=False)
    with RunDirectory(out, IDENTITY, rows=40, rows_per_block=10) as leader:
        with RunDirectory(out, IDENTITY, rows=40, leader=False) as other:
            leader.skip([Skipped(3, "too long"), Skipped(4, "too long")])
            leader.skip([Skipped(3, "too long")])
            for number, (start, stop) in enumerate(leader.blocks()):
                run = (leader, other)[number % 2]
                for row in run.pending(start, stop):
                    ids, mask, states = make_sample(row)
                    written = write_sample(out, row, ids, mask, states, run.layout, run.rows_per_block)
                    run.commit([Record(row, len(ids), sum(mask), *written, token_hash(ids), source=f"s{row}")])
                run.refresh_lengths()
        assert len(leader.committed) == 18
        leader.finish(self_checks={"own_token": "equal"})
        assert len(leader.committed) == 38 and leader.pending() == []
    reader = ShardReader(out)
    assert [record.source for record in reader.records] == [f"s{row}" for row in range(40) if row not in (3, 4)]
    assert reader.info["run"]["self_checks"] == {"own_token": "equal"}
    assert status(out)["skips_by_reason"] == {"too long": 2} and len(read_log(out / "skipped.jsonl").entries) == 2
    assert len(json.loads((out / "rows_20-30" / "sample_lengths.json").read_text())) == 38
    assert verify(out).clean


def test_memory_does_not_grow_with_samples(tmp_path):
    def peak_mb(name: str, rows: int, *more: str) -> float:
        command = [*WRITER, str(tmp_path / name), "--rows", str(rows), "--hidden", "1024", *more]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True)
        return float(done.stdout.split()[-1])

    few, many, leaking = peak_mb("few", 100), peak_mb("many", 1000), peak_mb("leaking", 1000, "--leak")
    assert many < few + 40, "peak memory grows with samples"
    assert leaking > few + 80, "the check above would not notice a leak"


def test_status_and_plan(copied):
    report = status(copied)
    reader = ShardReader(copied)
    assert report["tokens"] == sum(len(make_sample(record.index)[0]) for record in reader.records)
    assert report["bytes"] == sum(path.stat().st_size for path in copied.rglob("data_*.pt"))
    assert report["skips_by_reason"] == {"nothing supervised": sum(map(is_skipped, range(ROWS)))}
    assert report["samples_per_second"] > 1 and report["eta_seconds"] == 0 and json.dumps(report)
    delete(copied)
    for row in (100, 101, 102):
        path = copied / "rows_96-144" / MANIFEST
        lines = path.read_bytes().splitlines(True)
        path.write_bytes(b"".join(line for line in lines if f'"index":{row},'.encode() not in line))
    report = status(copied)
    assert (report["damaged"], report["missing"]) == (1, 3)
    assert report["eta_seconds"] == pytest.approx(4 / report["samples_per_second"])
    text = status_text(report)
    assert "3 missing, 1 damaged" in text and "data_50.pt: missing" in text and "x nothing supervised" in text

    assert plan_bytes([1000], 3, 7168) == 1000 * (57_344 + 16) + 8192  # Kimi-K2.5: 57,344 bytes of states a token
    assert plan_bytes([1000], 3, 7168, "fp8") == 1000 * (3 * (7168 + 4) + 2 * 7168 + 16) + 8192  # 35,852 of states
    assert plan_bytes([1000], 3, 7168, "fp8", kept=[450]) == 1000 * (3 * 7172 + 16) + 450 * 14_336 + 8192
    lengths = [record.tokens for record in reader.records]
    assert report["bytes"] <= plan_bytes(lengths, 3, 32)
    free = shutil.disk_usage(copied).free
    assert require_disk(copied / "not" / "yet", free // 2) > 0
    with pytest.raises(UserError, match="the states need .* GB"):
        require_disk(copied, 2 * free)
    assert require_disk(copied, 2 * free, force=True) > 0


# ---- other readers and writers -------------------------------------------------------------------------------------


def test_paths_without_samples_are_one_clear_line(tmp_path, copied):
    bare, empty = tmp_path / "bare", tmp_path / "empty"
    bare.mkdir()
    for path, line in [
        (tmp_path / "none", "expected a directory of shards, found nothing"),
        (copied / "dataset.json", "expected a directory of shards, found a file"),
        (bare, "bare: no committed sample"),
    ]:
        with pytest.raises(UserError, match=line):
            ShardReader(path)
    RunDirectory(empty, IDENTITY, rows=3).close()
    with pytest.raises(UserError, match="empty: no committed sample"):
        ShardReader([copied, empty])
    with pytest.raises(UserError, match="no dataset.json there"):
        status(tmp_path)


def test_directories_read_together_must_agree(undisturbed, copied):
    both = ShardReader([copied, undisturbed["arrow"]])
    one = ShardReader(copied)
    assert len(both.records) == 2 * len(one.records)
    first, second = both.records[5], both.records[5 + len(one.records)]
    assert first.index == second.index and first.path.suffix != second.path.suffix
    assert all(map(torch.equal, both.load(first).states, both.load(second).states))
    info = json.loads((copied / "dataset.json").read_text())
    (copied / "dataset.json").write_text(json.dumps(info | {"capture_points": [2, 30, 58]}))
    with pytest.raises(UserError, match=r"capture_points is \[3, 31, 59\], but \[2, 30, 58\]"):
        ShardReader([copied, undisturbed["arrow"]])


def test_directories_that_speculators_wrote_are_read(tmp_path):
    """Its v1 files (loss mask of any integer type, no manifest) and its Arrow dataset (no loss mask in the states)."""
    from datasets import Dataset
    from safetensors.torch import save_file

    v1, arrow = tmp_path / "v1", tmp_path / "arrow"
    (v1 / "part").mkdir(parents=True)
    (arrow / "hidden_states").mkdir(parents=True)
    rows = []
    for row in (0, 2, 10):
        ids, mask, states = make_sample(row)
        content = {"input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask, dtype=torch.bool)}
        torch.save(content | {"hidden_states": [state.clone() for state in states]}, v1 / "part" / f"data_{row}.pt")
    for row in range(4):
        ids, mask, states = make_sample(row)
        rows.append({"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)})
        if row != 1:
            tensors = {"hidden_states": torch.stack(states, 1), "token_ids": torch.tensor(ids)}
            save_file(tensors, arrow / "hidden_states" / f"hs_{row}.safetensors")
    Dataset.from_list(rows).with_format("torch").save_to_disk(str(tmp_path / "saved"))
    shutil.copytree(tmp_path / "saved", arrow, dirs_exist_ok=True)
    for path, expected in ((v1, [0, 2, 10]), (arrow, [0, 2, 3])):
        reader = ShardReader(path)
        assert [record.index for record in reader.records] == expected
        for record in reader.records:
            ids, mask, states = make_sample(record.index)
            sample = reader.load(record, verify=True)
            assert sample.input_ids.tolist() == ids and sample.loss_mask.tolist() == mask
            assert record.supervised == sum(mask) and record.row_hash == token_hash(ids) and record.xxh3 is None
            assert all(map(torch.equal, sample.states, states))


READ_V1 = """
import json, sys, torch
from speculators.train.data import CollateFn, SampleFileDataset
from speculators.models.eagle3.data import shift_batch
data = SampleFileDataset(128, datapath=sys.argv[1])
items = {data.data[i].stem.split("_")[-1]: data[i] for i in range(len(data))}
batch = CollateFn(8192, 32, 3, torch.bfloat16, preprocess=shift_batch)(list(items.values()))
torch.save((items, dict(zip(items, data.approx_lengths)), int((batch["document_ids"] >= 0).sum())), sys.argv[2])
"""
READ_ARROW = """
import json, sys, torch
from speculators.train.data import ArrowDataset, CollateFn
from speculators.models.eagle3.data import shift_batch
data = ArrowDataset(128, datapath=sys.argv[1], on_missing="raise")
items = {str(i): data[i] for i in range(len(data))}
batch = CollateFn(8192, 32, 3, torch.bfloat16, preprocess=shift_batch)(list(items.values()))
assert batch["error_records"] == 0
torch.save((items, dict(zip(items, data.approx_lengths)), int((batch["document_ids"] >= 0).sum())), sys.argv[2])
"""


@pytest.mark.parametrize(
    "layout, version, packages, program",
    [("v1", "0.7.0", (), READ_V1), ("arrow", "0.9.0", ("hs-connectors==0.9.0",), READ_ARROW)],
)
def test_read_by_speculators_itself(undisturbed, tmp_path, layout, version, packages, program):
    """Their own dataset class, shift and collate (imported, not replayed) read every sample with nothing missing.

    v1 takes whatever file ends with "pt", lengths from sample_lengths.json beside the first file. The Arrow one takes
    dataset row i with hs_i.safetensors, so rows without a sample come as one token without supervision.
    """
    environment = ENVIRONMENT | {"PYTHONPATH": str(installed(version, *packages))}
    result = tmp_path / "read.pt"
    command = [sys.executable, "-c", program, str(undisturbed[layout]), str(result)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    items, lengths, packed = torch.load(result, weights_only=True)
    records = {str(record.index): record for record in ShardReader(undisturbed[layout]).records}
    assert set(items) == (set(records) if layout == "v1" else {str(row) for row in range(ROWS)})
    for row, item in items.items():
        if row not in records:
            assert item["input_ids"].tolist() == [0] and item["loss_mask"].tolist() == [0] and lengths[row] == 1
            continue
        ids, mask, states = make_sample(int(row))
        assert item["input_ids"].tolist() == ids and item["loss_mask"].tolist() == mask and lengths[row] == len(ids)
        assert torch.equal(item["hidden_states"], torch.cat(states[:3], dim=1))
        assert torch.equal(item["verifier_last_hidden_states"], states[3])
    assert packed == sum(record.tokens - 1 for record in records.values())  # the shift takes one


def test_half_a_surrogate_pair_in_a_line_comes_back():
    """An emoji that was cut in half is no UTF-8, but a source or a category may hold one."""
    line = to_line({"index": 3, "source": "a\ud83d"})
    body, mark, check = line.rpartition(b',"check":"')
    assert mark and json.loads(body + b"}") == {"index": 3, "source": "a\ud83d"}
