"""The ring: regions never overlap, it never grows, a full one waits and counts the wait. The writer processes that map
it, and their lines: without an engine."""

import os
import queue
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from common import tap, tap_writer
from common.errors import UserError
from common.ring import ALIGNMENT, Ring
from common.state_dtypes import stored_dtypes
from common.tap_link import ENVIRONMENT, Line, Links, shut
from common.tap_rows import Piece
from common.writer_pool import WriterPool

ROOT = str(Path(__file__).resolve().parent.parent)


def test_regions_never_overlap_and_stay_within_the_bound():
    ring = Ring(64 * ALIGNMENT, pin=False)
    held, generator = {}, random.Random(0)
    for number in range(2000):
        size = generator.randrange(1, 12 * ALIGNMENT)
        free = 64 * ALIGNMENT - ring.used_bytes()
        if free >= 24 * ALIGNMENT and (ring._gap(-(-size // ALIGNMENT) * ALIGNMENT) is not None):
            start, memory = ring.allocate(size)
            memory.fill_(number % 251)
            held[start] = (memory, number % 251)
        elif held:
            start = generator.choice(list(held))
            memory, mark = held.pop(start)
            assert (memory == mark).all(), "somebody else wrote into this region"
            ring.release(start)
    assert ring.peak_bytes <= ring.capacity


def test_a_full_ring_waits_for_a_release_and_counts_it():
    ring = Ring(4 * ALIGNMENT, pin=False)
    start, _ = ring.allocate(4 * ALIGNMENT)
    threading.Timer(0.3, ring.release, args=(start,)).start()
    began = time.monotonic()
    assert ring.allocate(ALIGNMENT) is not None
    assert 0.2 < time.monotonic() - began < 5
    assert ring.stalls == 1 and ring.stalled_seconds > 0.2


def test_closing_wakes_whoever_waits():
    ring = Ring(ALIGNMENT, pin=False)
    ring.allocate(1)
    threading.Timer(0.2, ring.close).start()
    assert ring.allocate(1) is None


def test_a_region_larger_than_the_ring_is_an_error_not_a_wait():
    with pytest.raises(ValueError, match="does not fit"):
        Ring(ALIGNMENT, pin=False).allocate(2 * ALIGNMENT)


def test_samples_that_cannot_fit_beside_those_of_the_same_pass_are_an_error_not_a_wait():
    """Whole samples of a forward pass go back only after it, and a long one that begins in it wants the rest."""
    pool = WriterPool(0, 0, print)
    session = tap.Tap.__new__(tap.Tap)
    session.settings, session.dtypes, session.on_gpu = {"hidden_size": 8}, stored_dtypes("float32", 1), False
    session.writers, session.ring, session.partial, session.runs = pool, Ring(4 * ALIGNMENT, pin=False), {}, []
    session.batch = [Piece(0, 0, 64, 0, 64), Piece(1, 64, 16, 0, 160)]  # regions of two pages and of four
    said = queue.Queue()

    def take():
        try:
            session.take_regions(SimpleNamespace(input_ids=torch.zeros(80, dtype=torch.int64)))
        except UserError as error:
            said.put(str(error))

    threading.Thread(target=take, daemon=True).start()
    assert "is too small" in said.get(timeout=10)


# ---- writers and lines -----------------------------------------------------------------------------------------------

SETTINGS = {
    "session": "s", "layout": "v1", "rows_per_block": 2000, "names": ["point 1", "last state"], "hidden_size": 8,
    "dtype": "float32", "last_state": "all",
}  # fmt: skip


class Mailbox:
    """Stands in for a pipe or a Line: what was sent."""

    def __init__(self):
        self.sent = queue.Queue()

    def send(self, kind, **content):
        self.sent.put((kind, content))


def until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_what_is_written_is_told_although_the_last_samples_are_set_aside(tmp_path, monkeypatch):
    """One thread, so that the good sample is done while the others wait: nothing comes after them to tell of it."""
    monkeypatch.setattr(tap_writer, "THREADS", 1)
    ring, tokens, indices = Ring(16 * ALIGNMENT, pin=False), 4, range(3)
    line = Mailbox()
    session = tap_writer.Session(SETTINGS | {"out": str(tmp_path), "ring": ring.where}, Mailbox(), line)
    nbytes, carve = tap_writer.Region.plan(stored_dtypes("float32", 1), tokens * 3, 8)
    start, memory = ring.allocate(nbytes)
    ids, largest, states = carve(memory)
    for rows in (ids, largest, *states):
        rows.zero_()
    largest[:, tokens:] = float("nan")
    ones = np.ones(tokens, np.int64)
    session.describe([{"index": index, "input_ids": 0 * ones, "loss_mask": ones} for index in indices])
    session.take({
        "regions": [(start, tokens * 3)], "samples": [(index, start, index * tokens, tokens) for index in indices],
        "own": bytes(8 * 3 * (2 * tap_writer.CANDIDATES + 1)), "last": bytes(3 * 8 * 4), "figures": {},
    })  # fmt: skip
    told = [line.sent.get(timeout=10) for _ in indices]
    assert [kind for kind, _ in told].count("set_aside") == 2
    assert [r["index"] for kind, content in told if kind == "written" for r in content["records"]] == [0]
    session.close()


def test_a_courier_that_meets_an_error_says_so():
    class Broken:
        def synchronize(self):
            raise RuntimeError("an illegal memory access was encountered")

    pool, said = WriterPool(0, 0, print), queue.Queue()
    pool.begin(SETTINGS | {"ranks": 1}, Ring(ALIGNMENT, pin=False), said.put, torch.device("cpu"))
    for _ in range(2):  # and goes on, so that the session can end
        pool.put(Broken(), {}, [], torch.zeros(0), torch.zeros(0), [])
        assert "illegal memory access" in str(said.get(timeout=10))


def test_strangers_and_processes_that_stand_still_hold_nobody_up(monkeypatch):
    """A connection that breaks off, one that never says a word, and one whose reader stands still."""
    others = set(threading.enumerate())
    links = Links(ranks=1, writers=1)
    monkeypatch.setenv(ENVIRONMENT, links.where)
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for stranger in strangers:
        stranger.connect("\0" + links.where.split("|")[0][1:])
    strangers[0].close()
    hold, got = threading.Event(), []
    lines = []

    def connect():
        lines.append(Line(0, lambda kind, content: got.append(kind)))
        lines.append(Line(0, lambda kind, content: hold.wait(), writer=0))

    threading.Thread(target=connect, daemon=True).start()
    assert until(links.connected, 10), "a stranger keeps the processes of the engine out"

    def send():
        for _ in range(40):
            links.send("samples", 0, 0, samples=bytes(100_000))
        links.send("begin", 0)

    threading.Thread(target=send, daemon=True).start()
    assert until(lambda: got == ["begin"], 10), "one process that stands still keeps all messages back"
    assert not links.lost
    hold.set()
    lines[0].connection.close()
    links.close()
    mine = [thread for thread in threading.enumerate() if thread not in others and thread.name == "links-accept"]
    assert until(lambda: not any(thread.is_alive() for thread in mine), 10)


def test_writers_end_with_their_scheduler_and_are_ours_wherever_it_runs(tmp_path):
    """The working directory has a package `common` of somebody else's; the writers stand still when it is killed."""
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").touch()
    links = Links(ranks=1, writers=2)
    program = (
        "import time; from common.tap_link import Line; from common.writer_pool import WriterPool\n"
        "line = Line(0, print); pool = WriterPool(0, 2, print); time.sleep(600)"
    )
    environment = os.environ | {ENVIRONMENT: links.where, "PYTHONPATH": ROOT}
    scheduler = subprocess.Popen([sys.executable, "-P", "-c", program], cwd=tmp_path, env=environment)
    try:
        assert until(links.connected, 60), "no writer came"
        writers = psutil.Process(scheduler.pid).children()
        assert len(writers) == 2
        for writer in writers:
            writer.suspend()
    finally:
        scheduler.kill()
    gone, alive = psutil.wait_procs(writers, timeout=10)
    for writer in alive:
        writer.kill()
    assert not alive and until(lambda: links.lost)
    links.close()


def test_lines_over_nodes_go_by_tcp(monkeypatch):
    links = Links(ranks=1, writers=0, over_nodes=True)
    monkeypatch.setenv(ENVIRONMENT, links.where)
    got = queue.SimpleQueue()
    line = Line(0, lambda kind, content: got.put((kind, content)))
    assert until(links.connected, 10)
    links.send("begin", 0, session="s")
    assert got.get(timeout=10) == ("begin", {"session": "s"})
    shut(line.connection)
    assert until(lambda: links.lost, 10)
    links.close()
