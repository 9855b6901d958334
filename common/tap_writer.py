"""A writer process of the tap: complete samples from the ring to the disk, records to the committing process.

    ring (common/ring.py) -> writer threads, here -> shards (shard_writing.py)
                                     |
                     records of a few hundred bytes to common/capture.py, which commits them

Started by each scheduler process (common/writer_pool.py), for the engine's whole life: writing takes Python's
interpreter lock, and the scheduler's thread needs its own to keep the device busy. A sample is written only when the
token ids that the engine computed are its own, all its states are finite (otherwise it is set aside), and its last
state is bit by bit the one that its own token was computed from.
"""

import math
import os
import queue
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from common.child_process import begin
from common.errors import UserError
from common.proof import ProofFailed
from common.ring import attach
from common.shard_writing import join_run, write_sample
from common.state_dtypes import FP8, scale_of, stored_dtypes
from common.tap_link import Line

CANDIDATES = 32  # best tokens of the own-token check: flat logits have many within rounding of the best
THREADS = 4  # of a writer process
DESCRIPTION_SECONDS = 600  # how long a writer waits for the description of a sample before it gives up
RECORDS_AT_ONCE = 16  # of one message; fewer when there is nothing left to write


@dataclass
class Region:
    """A piece of the ring that holds `rows` rows of all stored tensors, their token ids and their largest values."""

    start: int
    ids: torch.Tensor  # [rows] int64, the ids that the engine computed at these rows
    largest: torch.Tensor  # [P + 1, rows] float32, largest magnitude of the row: finite exactly when the row is
    states: list[torch.Tensor]  # P + 1 times [rows, H], each in the dtype that it is stored in
    samples: int  # that have rows in it; in a writer, of those that it writes
    written: int = 0

    @staticmethod
    def plan(dtypes: list[torch.dtype], rows: int, hidden: int):
        """(bytes that a region needs, function from so many bytes to its ids, largest and states)."""
        wanted = [(torch.int64, (rows,)), (torch.float32, (len(dtypes), rows))]
        wanted += [(dtype, (rows, hidden)) for dtype in dtypes]
        ends, nbytes = [], 0
        for dtype, shape in wanted:
            start = -(-nbytes // 8) * 8
            nbytes = start + dtype.itemsize * math.prod(shape)
            ends.append((start, nbytes))

        def carve(memory: torch.Tensor):
            made = [memory[slice(*end)].view(d).view(s) for end, (d, s) in zip(ends, wanted, strict=True)]
            return made[0], made[1], made[2:]

        return nbytes, carve


@dataclass
class Finished:
    """A sample whose rows are all in host memory."""

    index: int
    region: Region
    first: int  # row of the region
    tokens: int
    own: bytes  # 2 * CANDIDATES + 1 float64, from tap.own_tokens
    last: torch.Tensor  # [H], the last state that these were computed from


class Session:
    """What one writer does between `begin` and `end`.

    settings: session (its name, in every message); out, layout, rows_per_block, last_state (all or supervised); dtype,
    hidden_size and names of the stored tensors; ring (where `attach` finds it). scheduler: the pipe to the scheduler
    process, which gets the regions back. The first error stops everything: from then on samples are dropped, so that
    nothing waits for ever.
    """

    def __init__(self, settings: dict, scheduler: Connection, line: Line):
        self.settings, self.scheduler, self.line = settings, scheduler, line
        self.names, self.hidden = settings["names"], settings["hidden_size"]
        self.dtypes = stored_dtypes(settings["dtype"], len(self.names) - 1)
        self.memory = attach(settings["ring"])
        self.samples: dict[int, dict] = {}  # index -> what the committing process says of it
        self.samples_changed = threading.Condition()
        self.jobs: queue.Queue[Finished | None] = queue.Queue()
        self.failed = False
        self.records: list[dict] = []  # of written samples, not yet sent
        self.figures: dict = {}  # of the scheduler, as last heard
        self.lock = threading.Lock()  # of the pipe, the regions' counts and the records
        self.run_lock = join_run(settings["out"])
        self.threads = [threading.Thread(target=self.write, daemon=True, name=f"write-{n}") for n in range(THREADS)]
        for thread in self.threads:
            thread.start()

    def take(self, passed: dict):
        """The samples that one forward pass has completed.

        passed: regions [(start, rows)]; samples [(index, start of its region, first row, tokens)]; own float64
        [B, 2 * CANDIDATES + 1] and last [B, H], both as bytes, a row a sample; figures.
        """
        self.figures = passed["figures"]
        regions = {}
        for start, rows in passed["regions"]:
            nbytes, carve = Region.plan(self.dtypes, rows, self.hidden)
            samples = sum(sample[1] == start for sample in passed["samples"])
            regions[start] = Region(start, *carve(self.memory[start : start + nbytes]), samples)
        last = torch.frombuffer(bytearray(passed["last"]), dtype=self.dtypes[-1]).view(-1, self.hidden)
        size = 8 * (2 * CANDIDATES + 1)
        for row, (index, start, first, tokens) in enumerate(passed["samples"]):
            own = passed["own"][row * size : (row + 1) * size]
            self.jobs.put(Finished(index, regions[start], first, tokens, own, last[row]))

    def write(self):
        while (job := self.jobs.get()) is not None:
            try:
                if not self.failed:
                    self.write_one(job)
                self.tell()
            except BaseException as error:  # noqa: B036 (a writer must never die in silence)
                self.fail(error)
            finally:
                self.release(job.region)

    def write_one(self, job: Finished):
        sample = self.sample(job.index)
        rows = slice(job.first, job.first + job.tokens)
        ids = job.region.ids[rows]  # [L]
        if not torch.equal(ids, torch.from_numpy(sample["input_ids"])):
            raise ProofFailed(
                f"sample {job.index}: the engine computed these rows for other token ids than the sample's own; "
                f"likely cause: rows of two samples were swapped"
            )
        largest = job.region.largest[:, rows]  # [P + 1, L]
        if problem := not_finite(largest, self.names):
            self.send("set_aside", index=job.index, reason=problem, **self.figures)
            return
        states = [state[rows] for state in job.region.states]  # P + 1 times [L, H]
        if not torch.equal(states[-1][-1], job.last):
            raise ProofFailed(
                f"sample {job.index}: the last state in host memory is not the one that its own token was computed "
                f"from; likely cause: states of two samples were swapped on their way"
            )
        settings = self.settings
        scales = scale_of(largest[:-1]).T if states[0].dtype == FP8 else None  # [L, P]
        written = write_sample(
            settings["out"], job.index, ids, sample["loss_mask"], states, settings["layout"],
            settings["rows_per_block"], scales, settings["last_state"],
        )  # fmt: skip
        with self.lock:
            self.records.append({"index": job.index, "bytes": written.bytes, "xxh3": written.xxh3, "own": job.own})

    def tell(self):
        """Tell the committing process what is written, of several samples at once while more are waiting. Called after
        every job, whatever became of it: the last one finds nothing waiting."""
        with self.lock:
            if not self.records or (len(self.records) < RECORDS_AT_ONCE and not self.jobs.empty()):
                return
            records, self.records = self.records, []
        self.send("written", records=records, **self.figures)

    def release(self, region: Region):
        with self.lock:
            region.written += 1
            if region.written == region.samples:
                self.scheduler.send(("release", (region.start, region.samples)))

    def describe(self, samples: list[dict]):
        """Take descriptions of samples: {index, input_ids [L] int64, loss_mask [L] int64}."""
        with self.samples_changed:
            self.samples |= {sample["index"]: sample for sample in samples}
            self.samples_changed.notify_all()

    def sample(self, index: int) -> dict:
        with self.samples_changed:
            if not self.samples_changed.wait_for(lambda: index in self.samples, DESCRIPTION_SECONDS):
                raise RuntimeError(f"sample {index} was computed but never described to its writer")
            return self.samples.pop(index)

    def send(self, kind: str, **content):
        self.line.send(kind, session=self.settings["session"], **content)

    def fail(self, error: BaseException):
        """Tell the committing process why and the scheduler that; the engine goes on, so that it can be shut down."""
        with self.lock:
            if self.failed:
                return
            self.failed = True
            self.scheduler.send(("failed", None))
        self.send("failed", **failure(error))

    def close(self):
        """Write what is complete, then let go of the threads, the ring and the directory."""
        for _ in self.threads:
            self.jobs.put(None)
        for thread in self.threads:
            thread.join()
        if self.records:  # the last sample failed
            self.send("written", records=self.records, **self.figures)
        self.memory = None
        os.close(self.run_lock)


def failure(error: BaseException) -> dict:
    """What the committing process is told of an error; the log gets all of it."""
    traceback.print_exception(error)
    known = isinstance(error, ProofFailed | UserError)
    return {"reason": str(error) if known else f"{type(error).__name__}: {error}", "known": known}


def not_finite(largest: torch.Tensor, names: list[str]) -> str | None:
    """Where a sample has NaN or Inf, in words. `largest` [P + 1, L]: of each row before it was rounded to eight bits,
    NaN or Inf where the row holds one."""
    bad = ~largest.isfinite()
    if not bad.any():
        return None
    slot, row = bad.nonzero()[0].tolist()
    kind = "NaN" if largest[slot, row].isnan() else "Inf"
    return f"{kind} at {names[slot]}, row {row}"


def main(rank: int, number: int, descriptor: int) -> None:
    """Serve one session after the other until the scheduler process, at the other end of `descriptor`, is gone."""
    scheduler, session = begin(descriptor), None
    torch.set_num_threads(1)

    def message(kind: str, content: dict):
        if kind == "samples" and session is not None:
            session.describe(content["samples"])

    line = Line(rank, message, number)
    try:
        while True:
            kind, content = scheduler.recv()
            if kind == "begin":
                try:
                    session = Session(content, scheduler, line)
                except Exception as error:
                    scheduler.send(("failed", None))
                    line.send("failed", **failure(error), session=content["session"])
                line.send("begun", session=content["session"])
            elif kind == "pass" and session is not None:
                session.take(content)
            elif kind == "end":
                if session is not None:
                    session.close()
                session = None
                line.send("ended", session=content["session"])
                scheduler.send(("ended", None))
    except (EOFError, OSError):  # not waiting for threads that write: what they write no longer counts
        os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
