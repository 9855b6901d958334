"""The writing half of the tap: complete samples from the ring to the disk, records to the committing process.

    ring (common/ring.py) -> writer threads, here -> shards (shard_writing.py)
                                     |
                     records of a few hundred bytes to common/capture.py, which commits them

Runs in each scheduler process, made by common/tap.py. A sample is written only when the token ids that the engine
computed are its own, all its states are finite (otherwise it is set aside), and its last state is bit by bit the one
that its own token was computed from.
"""

import math
import os
import queue
import threading
import traceback
from dataclasses import dataclass

import torch

from common.errors import UserError
from common.proof import ProofFailed
from common.ring import Ring
from common.shard_writing import join_run, write_sample
from common.state_dtypes import FP8, scale_of
from common.tap_link import Line

CANDIDATES = 4  # best tokens of the own-token check
DESCRIPTION_SECONDS = 600  # how long a writer waits for the description of a sample before it gives up


@dataclass
class Region:
    """A piece of the ring that holds `rows` rows of all stored tensors, their token ids and their largest values."""

    start: int
    ids: torch.Tensor  # [rows] int64, the ids that the engine computed at these rows
    largest: torch.Tensor  # [P + 1, rows] float32, largest magnitude of the row: finite exactly when the row is
    states: list[torch.Tensor]  # P + 1 times [rows, H], each in the dtype that it is stored in
    users: int  # samples not yet written

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
    """A sample whose rows are all in host memory once `event` has happened."""

    index: int
    region: Region
    start: int
    tokens: int
    own: torch.Tensor  # [2 * CANDIDATES + 1] float64, from tap.own_tokens
    last: torch.Tensor  # [H], the last state that this token was computed from
    event: "torch.cuda.Event | None"


class Writers:
    """Writer threads of one rank in one session.

    settings: session (its name, in every message); out, layout, rows_per_block, last_state (all or supervised); names
    of the stored tensors; writers (threads). `failed` is set by the first error; from then on samples are dropped, so
    that nothing waits for ever.
    """

    def __init__(self, settings: dict, ring: Ring, line: Line):
        self.settings, self.ring, self.line, self.rank = settings, ring, line, line.rank
        self.names = settings["names"]
        self.samples: dict[int, dict] = {}  # index -> what the committing process says of it
        self.samples_changed = threading.Condition()
        self.jobs: queue.Queue[Finished | None] = queue.Queue()
        self.failed: str | None = None
        self.check_seconds = 0.0  # that the scheduler's thread spent on both self-checks
        self.run_lock = join_run(settings["out"])
        self.lock = threading.Lock()  # of the regions' users
        for number in range(settings["writers"]):
            threading.Thread(target=self.write, daemon=True, name=f"tap-write-{number}").start()

    def write(self):
        while (job := self.jobs.get()) is not None:
            try:
                if self.failed is None:
                    self.write_one(job)
            except BaseException as error:  # noqa: B036 (a writer must never die in silence)
                self.fail(error)
            finally:
                self.release(job.region)
                self.jobs.task_done()
        self.jobs.task_done()

    def write_one(self, job: Finished):
        sample = self.sample(job.index)
        if job.event is not None:
            job.event.synchronize()
        rows = slice(job.start, job.start + job.tokens)
        ids = job.region.ids[rows]  # [L]
        if not torch.equal(ids, torch.from_numpy(sample["input_ids"])):
            raise ProofFailed(
                f"sample {job.index}: the engine computed these rows for other token ids than the sample's own; "
                f"likely cause: rows of two samples were swapped"
            )
        largest = job.region.largest[:, rows]  # [P + 1, L]
        if problem := not_finite(largest, self.names):
            self.send("set_aside", index=job.index, reason=problem, **self.figures())
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
        *numbers, rounding = job.own.tolist()
        tokens, below = [int(token) for token in numbers[:CANDIDATES]], numbers[CANDIDATES:]
        own = {"tokens": tokens, "below": below, "rounding": rounding}
        self.send("written", index=job.index, bytes=written.bytes, xxh3=written.xxh3, own=own, **self.figures())

    def release(self, region: Region):
        with self.lock:
            region.users -= 1
            last = region.users == 0
        if last:
            self.ring.release(region.start)

    def figures(self) -> dict:
        return {
            "stalls": self.ring.stalls,
            "stalled_seconds": self.ring.stalled_seconds,
            "ring_peak_bytes": self.ring.peak_bytes,
            "check_seconds": self.check_seconds,
        }

    # -- the committing process --

    def describe(self, sample: dict):
        """Take the description of a sample: {index, input_ids [L] int64, loss_mask [L] int64}."""
        with self.samples_changed:
            self.samples[sample["index"]] = sample
            self.samples_changed.notify_all()

    def sample(self, index: int) -> dict:
        with self.samples_changed:
            if not self.samples_changed.wait_for(lambda: index in self.samples, DESCRIPTION_SECONDS):
                raise RuntimeError(f"sample {index} was computed but never described to rank {self.rank}")
            return self.samples.pop(index)

    def send(self, kind: str, **content):
        self.line.send(kind, session=self.settings["session"], **content)

    def fail(self, error: BaseException):
        """Stop capturing and tell the committing process; the engine itself goes on, so that it can be shut down."""
        if self.failed is not None:
            return
        self.failed = f"{type(error).__name__}: {error}"
        traceback.print_exception(error)
        known = isinstance(error, ProofFailed | UserError)
        self.ring.close()
        try:
            self.send("failed", reason=str(error) if known else self.failed, known=known)
        except OSError:
            pass

    def close(self):
        """Write what is complete, then let go of the threads and the directory."""
        self.jobs.join()
        for _ in range(self.settings["writers"]):
            self.jobs.put(None)
        self.ring.close()
        os.close(self.run_lock)


def not_finite(largest: torch.Tensor, names: list[str]) -> str | None:
    """Where a sample has NaN or Inf, in words. `largest` [P + 1, L]: of each row before it was rounded to eight bits,
    NaN or Inf where the row holds one."""
    bad = ~largest.isfinite()
    if not bad.any():
        return None
    slot, row = bad.nonzero()[0].tolist()
    kind = "NaN" if largest[slot, row].isnan() else "Inf"
    return f"{kind} at {names[slot]}, row {row}"
