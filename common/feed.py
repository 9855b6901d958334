"""Reads the documents that the schedule names, ahead of the training step, so that the step never waits.

train_drafter.py makes one `Feed` a rank. Threads, of this process or of processes of their own
(common/feed_process.py), load the rank's next batches (common/load_batch.py) into a few page-locked buffers, which are
used again and again. They work side by side, so each computes alone: teams of threads for single operations would fight
over the cores. A step is handed over when all of its batches are there, because the loss is an average over the whole
step and its counts must be known before the first backward pass. A sample that fails its check is set aside: it is
named, it is counted, and its place in the batch stays empty.
"""

import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from common.batches import Schedule
from common.cpu_threads import compute_alone
from common.errors import UserError
from common.feed_process import Job, ReaderProcesses
from common.load_batch import BatchLoader, Loaded, read_sample
from common.packing import PackedBatch
from common.ranks import gathered
from common.shard_writing import cannot_write
from common.shards import Record, Sample, ShardReader


@dataclass
class Step:
    """The batches of one rank in one optimizer step."""

    epoch: int
    step: int  # within the epoch
    loaded: list[Loaded]


class Feed:
    """Iterate to get one `Step` after the other, from `start` = (epoch, step in the epoch), without end.

    num_steps: TTT steps to lay out.  buffers: batches read ahead beyond those of the current step.
    check: verify checksum and finiteness of each sample when it is first read.
    readers: processes that read, with the threads they were given, instead of `workers` threads of this process.
    After use, give every `Loaded` back with `release` (`Mover` does).
    """

    def __init__(self, reader: ShardReader, schedule: Schedule, num_steps: int, start: tuple[int, int] = (0, 0),
                 rank: int = 0, ranks: int = 1, pinned: bool = False, workers: int = 4, buffers: int = 3,
                 check: bool = True, readers: ReaderProcesses | None = None):
        self.schedule = schedule
        self._loader = BatchLoader(reader, schedule.records, schedule.budget, num_steps, pinned)
        self._check, self._sound = check, set()  # paths of samples that passed
        self._readers = readers
        buffers += schedule.batches_per_step // ranks
        if readers is None:
            device = torch.cuda.current_device() if pinned else None
            self._pool = ThreadPoolExecutor(workers, "feed", begin_thread, (torch.get_num_threads(), device))
            rooms = [None] * buffers
        else:
            rooms = readers.begin(self._loader, buffers)
        self._free = deque((room, None) for room in rooms)  # (buffer, event of its last copy)
        self._coming = self._walk(start, rank, ranks)
        self._running: deque[tuple[int, int, int, list, Future | Job]] = deque()

    def _walk(self, start: tuple[int, int], rank: int, ranks: int) -> Iterator[tuple[int, int, int, list]]:
        """(epoch, step, batches still to come in the step, records) of every batch of this rank, for ever."""
        (epoch, step), take_next_plan = start, None
        submit = self._readers.submit if self._readers else self._pool.submit
        while True:
            if step >= self.schedule.steps(epoch):
                if take_next_plan:
                    take_next_plan()
                epoch, step, take_next_plan = epoch + 1, 0, None
            if take_next_plan is None:
                take_next_plan = self.schedule.plan_ahead(epoch + 1, submit)
            batches = self.schedule.batches(epoch, step, rank, ranks)
            for number, records in enumerate(batches):
                yield epoch, step, len(batches) - 1 - number, records
            step += 1

    def __iter__(self):
        return self

    def __next__(self) -> Step:
        loaded = []
        while True:
            self._submit()
            if not self._running:
                raise RuntimeError("every buffer is in use: release the batches of the step before")
            epoch, step, to_come, records, future = self._running.popleft()
            loaded.append(future.result())
            bad = {problem["path"] for problem in loaded[-1].set_aside}
            self._sound.update(record.path for record in records if str(record.path) not in bad)
            if to_come == 0:
                return Step(epoch, step, loaded)

    def _submit(self) -> None:
        while self._free:
            epoch, step, to_come, records = next(self._coming)
            buffer, copied = self._free.popleft()
            self._running.append((epoch, step, to_come, records, self._load(records, buffer, copied)))

    def _load(self, records: list, buffer: PackedBatch | None, copied) -> Future | Job:
        check = [self._check and record.path not in self._sound for record in records]
        if self._readers:
            return self._readers.load(records, check, buffer, copied)
        return self._pool.submit(self._loader.load, records, check, buffer, copied)

    def release(self, loaded: Loaded, copied: "torch.cuda.Event | None" = None) -> None:
        """Give the buffer back; it is overwritten once the copy to the GPU, whose event is `copied`, is over."""
        self._free.append((loaded.batch, copied))
        self._submit()

    def close(self) -> None:
        """Stop reading; batches under way are dropped."""
        if self._readers:
            self._readers.close()
        else:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._running.clear()
        self._free.clear()


def begin_thread(threads: int, device: int | None) -> None:
    """A thread begins with GPU 0, whichever its rank has, and page-locking a batch would take memory there."""
    compute_alone(threads)
    if device is not None:
        torch.cuda.set_device(device)


class SetAside:
    """Samples that failed their check: named in a file and to the person, once. `paths`: of those that this run met."""

    def __init__(self, path: Path, note, check: bool = True):
        self.path, self.note, self.check, self.paths = path, note, check, set()
        try:
            lines = path.read_text().splitlines() if path.exists() else []
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); remove it") from None
        self.named = {json.loads(line).get("path") for line in lines if line.endswith("}")}

    def add(self, problems: list[dict]) -> None:
        for problem in problems:
            self.paths.add(problem["path"])
            if problem["path"] not in self.named:
                self.named.add(problem["path"])
                self._write(problem)
                self.note(f"sample {problem['index']} set aside: {problem['reason']}")

    def suspect(self, step: int, indices: list[int]) -> None:
        """Name the samples of a step whose gradient was not finite."""
        self._write({"step": step, "indices": indices, "reason": "non-finite gradient"})
        self.note(f"step {step:,} skipped, its gradient is not finite; samples of this rank in it: {indices}")

    def _write(self, problem: dict) -> None:
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps(problem) + "\n")
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def read(self, reader: ShardReader, record: Record, check: bool = False) -> Sample | None:
        """The sample; None where it cannot be read or, with `check`, has failed it: then it is set aside."""
        sample, problem = read_sample(reader, record, check)
        if problem:
            self.add([{"index": record.index, "path": str(record.path), "reason": problem}])
        return sample

    def without_bad(self, reader: ShardReader, records: list) -> list:
        """The records whose samples can be read and are finite; the others are set aside."""
        return [record for record in records if self.read(reader, record, self.check) is not None]

    def of_all_ranks(self) -> int:
        """How many samples the ranks have met: each once, though several may have read it in different epochs."""
        return len(set().union(*gathered(self.paths)))


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
            copied = torch.cuda.Event(blocking=True)  # whoever waits for it leaves the processor to others
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

