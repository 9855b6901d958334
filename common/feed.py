"""Reads the documents that the schedule names, ahead of the training step, so that the step never waits.

train_drafter.py makes one `Feed` a rank. Threads read the samples of the rank's next batches, check each sample the
first time it is read (checksum, NaN and Inf), and pack it into one of a few page-locked buffers, which are used again
and again. They work side by side, so each computes alone: teams of threads for single operations would fight over the
cores. A step is handed over when all of its batches are there, because the loss is an average over the whole step and
its counts must be known before the first backward pass. A sample that fails its check is set aside: it is named, it is
counted, and its place in the batch stays empty.
"""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.batches import Schedule, round_up
from common.errors import UserError
from common.packing import PackedBatch, pack_documents
from common.shards import Sample, ShardReader
from common.state_dtypes import FP8

SCRATCH = 256 << 20  # bytes of files that a thread reads at once into memory of its own; more are memory-mapped


@dataclass
class Loaded:
    """One packed batch in host memory (page-locked where there is a GPU)."""

    batch: PackedBatch
    indices: list[int]  # source rows of the samples in it
    set_aside: list[dict] = field(default_factory=list)  # index, path and reason of each sample that failed its check

    @property
    def samples(self) -> int:
        return len(self.indices)

    @property
    def counts(self) -> torch.Tensor:
        """float64 [K]: predicted tokens that count at each step."""
        return self.batch.weights.sum(0, dtype=torch.float64)


@dataclass
class Step:
    """The batches of one rank in one optimizer step."""

    epoch: int
    step: int  # within the epoch
    loaded: list[Loaded]
    waited_seconds: float  # time that the caller stood still for the data


class Feed:
    """Iterate to get one `Step` after the other, from `start` = (epoch, step in the epoch), without end.

    num_steps: TTT steps to lay out.  buffers: batches read ahead beyond those of the current step.
    check: verify checksum and finiteness of each sample when this run reads it first.
    After use, give every `Loaded` back with `release` (`Mover` does).
    """

    def __init__(self, reader: ShardReader, schedule: Schedule, num_steps: int, start: tuple[int, int] = (0, 0),
                 rank: int = 0, ranks: int = 1, pinned: bool = False, workers: int = 4, buffers: int = 3,
                 check: bool = True):
        self.reader, self.schedule, self.num_steps, self.check = reader, schedule, num_steps, check
        self.pinned = pinned
        # Codes of eight bits are packed as they are where all samples have them; other engines' directories may not.
        self.widen = bool(reader.foreign) or reader.info.get("dtype") != "fp8"
        self._checked: set[str] = set()
        self._pool = ThreadPoolExecutor(workers, "feed", compute_alone, (torch.get_num_threads(),))
        self._own = threading.local()  # scratch: uint8, where a thread reads the files of a batch
        self._coming = self._walk(start, rank, ranks)
        self._running: deque[tuple[int, int, int, Future]] = deque()
        per_step = schedule.batches_per_step // ranks
        self._free: deque = deque([(None, None)] * (per_step + buffers))  # (buffer, event of its last copy)
        self._blank = self._empty_document()
        self._dtypes = [state.dtype for state in self._blank.states]  # other directories may have other ones

    def _walk(self, start: tuple[int, int], rank: int, ranks: int) -> Iterator[tuple[int, int, int, list]]:
        """(epoch, step, batches still to come in the step, records) of every batch of this rank, for ever."""
        epoch, step = start
        while True:
            if step >= self.schedule.steps(epoch):
                epoch, step = epoch + 1, 0
            if step == 0:
                self._pool.submit(self.schedule.steps, epoch + 1)  # planned by the time it begins
            batches = self.schedule.batches(epoch, step, rank, ranks)
            for number, records in enumerate(batches):
                yield epoch, step, len(batches) - 1 - number, records
            step += 1

    def _empty_document(self) -> Sample:
        """One unsupervised token: what an empty batch holds."""
        sample = self.reader.load(self.schedule.records[0], widen=self.widen)
        scales = None if sample.scales is None else torch.zeros_like(sample.scales[:1])
        return Sample(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64),
                      [torch.zeros_like(state[:1]) for state in sample.states], None, scales=scales)

    def __iter__(self):
        return self

    def __next__(self) -> Step:
        started = time.perf_counter()
        loaded = []
        while True:
            self._submit()
            if not self._running:
                raise RuntimeError("every buffer is in use: release the batches of the step before")
            epoch, step, to_come, future = self._running.popleft()
            loaded.append(future.result())
            if to_come == 0:
                return Step(epoch, step, loaded, time.perf_counter() - started)

    def _submit(self) -> None:
        while self._free:
            epoch, step, to_come, records = next(self._coming)
            buffer, copied = self._free.popleft()
            self._running.append((epoch, step, to_come, self._pool.submit(self._load, records, buffer, copied)))

    def release(self, loaded: Loaded, copied: "torch.cuda.Event | None" = None) -> None:
        """Give the buffer back; it is overwritten once the copy to the GPU, whose event is `copied`, is over."""
        self._free.append((loaded.batch, copied))
        self._submit()

    def close(self) -> None:
        """Stop reading; batches under way are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    # In the reading threads.

    def _load(self, records: list, buffer: PackedBatch | None, copied) -> Loaded:
        for record in records:
            read_ahead(record.path)
        if copied is not None:
            copied.synchronize()
        documents, set_aside = [], []
        for record, room in zip(records, self._rooms(records), strict=True):
            sample, problem = self._read(record, room)
            if problem:
                set_aside.append({"index": record.index, "path": str(record.path), "reason": problem})
            else:
                documents.append(sample)
        room = self.schedule.budget
        batch = pack_documents(documents or [self._blank], self.num_steps, tokens=room.tokens, queries=room.queries,
                               predicted=room.predicted, into=buffer)  # fmt: skip
        if self.pinned and buffer is None:
            batch = batch.pin()
        if not documents:
            batch.num_documents = batch.num_tokens = batch.num_pairs = 0
        return Loaded(batch, [sample.record.index for sample in documents], set_aside)

    def _rooms(self, records: list) -> list[torch.Tensor | None]:
        """Memory of this thread to read each file into, or None where that is much; the thread's next batch uses it
        again, because memory that is always fresh costs as much time as the reading."""
        sizes = [round_up(record.bytes, 64) for record in records]
        if sum(sizes) > SCRATCH:
            return [None] * len(records)
        if getattr(self._own, "scratch", None) is None or len(self._own.scratch) < sum(sizes):
            self._own.scratch = torch.empty(sum(sizes), dtype=torch.uint8)
        return list(self._own.scratch[: sum(sizes)].split(sizes))

    def _read(self, record, room: torch.Tensor | None) -> tuple[Sample | None, str | None]:
        """The sample, cut to the length that fits a batch, or what is wrong with it."""
        first_time = self.check and record.path not in self._checked
        sample, problem = read_sample(self.reader, record, first_time, room, self.widen)
        if problem:
            return None, problem
        self._checked.add(record.path)
        length = self.schedule.budget.tokens
        states = [state[:length].to(dtype) for state, dtype in zip(sample.states, self._dtypes, strict=True)]
        rows = None if sample.last_rows is None else sample.last_rows[sample.last_rows < length]
        scales = None if sample.scales is None else sample.scales[:length]
        return Sample(sample.input_ids[:length], sample.loss_mask[:length], states, record, rows, scales), None


def compute_alone(threads: int) -> None:
    """This thread runs each torch operation by itself, threads that begin later with teams of `threads` as before.

    PyTorch keeps the number a thread has set also for threads that have not computed yet, hence the third thread.
    """
    torch.get_num_threads()  # the first call takes the number of the process and would do so later
    torch.set_num_threads(1)
    restoring = threading.Thread(target=torch.set_num_threads, args=(threads,))
    restoring.start()
    restoring.join()


def read_ahead(path: Path) -> None:
    """Let the disk read the whole file while this thread is busy with others. It is advice: whatever is wrong with the
    file, or with advice on its file system, shows when it is read."""
    with suppress(OSError, AttributeError), open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def read_sample(
    reader: ShardReader, record, check: bool, buffer: torch.Tensor | None = None, widen: bool = True
) -> tuple[Sample | None, str | None]:
    """(sample, None), or (None, what is wrong with it): unreadable, or with `check` also its checksum, NaN and Inf.

    buffer, widen: as in `ShardReader.load`.
    """
    try:
        sample = reader.load(record, verify=check, buffer=buffer, widen=widen)
    except UserError as error:
        return None, str(error)
    problem = not_finite(sample.states, sample.scales) if check else None
    return (None, problem) if problem else (sample, None)


class SetAside:
    """Samples that failed their check: named in a file and to the person, once, and counted."""

    def __init__(self, path: Path, note, check: bool = True):
        self.path, self.note, self.check, self.count = path, note, check, 0
        lines = path.read_text().splitlines() if path.exists() else []
        self.named = {json.loads(line).get("path") for line in lines if line.endswith("}")}

    def add(self, problems: list[dict]) -> None:
        for problem in problems:
            self.count += 1
            if problem["path"] not in self.named:
                self.named.add(problem["path"])
                with open(self.path, "a") as file:
                    file.write(json.dumps(problem) + "\n")
                self.note(f"sample {problem['index']} set aside: {problem['reason']}")

    def suspect(self, step: int, indices: list[int]) -> None:
        """Name the samples of a step whose gradient was not finite."""
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step, "indices": indices, "reason": "non-finite gradient"}) + "\n")
        self.note(f"step {step:,} skipped, its gradient is not finite; samples of this rank in it: {indices}")

    def without_bad(self, reader: ShardReader, records: list) -> list:
        """The records whose samples can be read and are finite; the others are set aside."""
        sound = []
        for record in records:
            _, problem = read_sample(reader, record, self.check)
            if problem:
                self.add([{"index": record.index, "path": str(record.path), "reason": problem}])
            else:
                sound.append(record)
        return sound


class Mover:
    """Copies batches to the GPU on a queue of its own, while earlier batches are computed; on the CPU it hands them on.

    At most two batches are on the device ahead of the arithmetic: call `computed` after each backward pass.
    """

    def __init__(self, feed: Feed, device: torch.device):
        self.feed, self.device = feed, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._computed: deque = deque()

    def __call__(self, loaded: Loaded) -> PackedBatch:
        if self.stream is None:
            return loaded.batch
        while len(self._computed) >= 2:
            self._computed.popleft().synchronize()
        with torch.cuda.stream(self.stream):
            batch = loaded.batch.to(self.device)
            copied = torch.cuda.Event()
            copied.record(self.stream)
        self.feed.release(loaded, copied)
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(copied)
        for tensor in batch.tensors().values():
            tensor.record_stream(compute)
        return batch

    def computed(self, loaded: Loaded) -> None:
        """The arithmetic on this batch is in the queue (GPU) or done (CPU)."""
        if self.stream is None:
            self.feed.release(loaded)
        else:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self._computed.append(event)


def not_finite(states: list[torch.Tensor], scales: torch.Tensor | None = None) -> str | None:
    """Names the first NaN or Inf in the states ("state 2 of 4, row 17"), or None.

    A row sum in float32 is NaN or Inf when the row holds one; only then is the row itself looked at, because large
    finite values could overflow the sum. scales: those of points in eight bits, which have one code for NaN and its
    negative, and no Inf.
    """
    for number, state in enumerate(states, 1):
        if state.dtype == FP8:
            scale = scales[:, number - 1]
            rows = torch.nonzero(((state.view(torch.uint8) & 0x7F) == 0x7F).any(-1) | ~scale.isfinite()).flatten()
            if len(rows):
                kind = "Inf" if scale[rows[0]].isinf() else "NaN"
                return f"{kind} in state {number} of {len(states)}, row {int(rows[0])}"
            continue
        sums = state.sum(-1, dtype=torch.float32)  # [L]
        for row in torch.nonzero(~torch.isfinite(sums)).flatten().tolist():
            if not torch.isfinite(state[row]).all():
                kind = "NaN" if state[row].isnan().any() else "Inf"
                return f"{kind} in state {number} of {len(states)}, row {row}"
    return None
