"""Processes that load the batches of a `Feed` (common/feed.py), so that the training loop does not share Python's
interpreter lock with the threads that read: beside them it could not keep a fast GPU busy.

    with ReaderProcesses(2, threads=4) as readers:      # early: each imports torch, which takes seconds
        feed = Feed(..., readers=readers)

The feed decides which batch is loaded and where; a reader process gets the records of one batch after the other and
answers with a few numbers. The tensors stay where they are: all buffers lie in one piece of shared memory
(common/shared_memory.py), page-locked here where there is a GPU. A buffer is overwritten once its last copy to the GPU
is over; a thread, the courier, waits for that and then sends the job, so the training loop waits for nothing but the
batch that it needs. Reader processes have nothing to lose: they are killed when they are no longer needed.
"""

import copy
import io
import itertools
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from common.child_process import begin, how_it_ended, start
from common.errors import UserError, run
from common.load_batch import BatchLoader, Loaded
from common.packing import PackedBatch, room_bytes, room_in
from common.shared_memory import lock_pages, mapped, sized, unlock_pages

ADVICE = ("lower --read-ahead or --tokens-per-batch, raise `ulimit -v`, `-l` and `-f` (or the container's limits), or "
          "give --reader-processes 0")  # fmt: skip
CLOSE_SECONDS = 10  # how long `close` waits for a disk or a GPU that stands still


class ReaderProcesses:
    """`number` processes with `threads` threads between them, at least one each.

    UserError from `result()` of a job when its process has died.
    Messages are pickled here: multiprocessing would put tensors in them into files of /dev/shm.
    """

    def __init__(self, number: int, threads: int):
        self._descriptor = os.memfd_create("feed")
        self._memory, self._pinned = None, False
        self._processes: list[ReaderProcess] = []
        self._errands: queue.SimpleQueue = queue.SimpleQueue()  # (process, message, event to wait for or None)
        self._courier = threading.Thread(target=self._carry, daemon=True, name="feed-courier")
        try:
            for place in range(number):
                share = threads // number + (place < threads % number)
                self._processes.append(ReaderProcess(place, share, self._descriptor))
        except OSError as error:
            self.close()
            raise UserError(f"cannot start {number} reader processes ({error.strerror}); lower --reader-processes, or "
                            f"raise `ulimit -n` and `ulimit -u`") from None  # fmt: skip
        self._turns = itertools.cycle(self._processes)

    def __enter__(self) -> "ReaderProcesses":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def begin(self, loader: BatchLoader, buffers: int) -> list[PackedBatch]:
        """So many buffers for `load`. Called once. UserError when the memory for them cannot be had."""
        shapes = loader.shapes()
        self._room = room_bytes(shapes)
        sized(self._descriptor, buffers * self._room, "the batches", ADVICE)
        self._memory = memory_of_batches(self._descriptor, buffers * self._room)
        if loader.pinned:
            lock_pages(self._memory, f"{buffers} batches", ADVICE)
            self._pinned = True
        theirs = copy.copy(loader)
        theirs.reader = copy.copy(loader.reader)
        theirs.reader.records = []  # each job brings its own
        message = io.BytesIO()
        torch.save((theirs, buffers * self._room), message)  # pickle alone cannot do tensors in eight bits
        for process in self._processes:
            self._errands.put((process, message.getbuffer(), None))
        self._device = torch.cuda.current_device() if loader.pinned else None
        self._courier.start()
        return [room_in(room, shapes) for room in self._memory.split(self._room)]

    def load(
        self, records: list, check: list[bool], buffer: PackedBatch, copied: "torch.cuda.Event | None" = None
    ) -> "Job":
        """`BatchLoader.load` in one of the processes, once `copied` has happened; `buffer` is one from `begin`."""
        start = buffer.embed_ids.data_ptr() - self._memory.data_ptr()
        return self._give(None, (records, check, start, start + self._room), copied, buffer)

    def submit(self, function: Callable, *arguments) -> "Job":
        """Any function of a module, in one of the processes."""
        return self._give(function, arguments)

    def _give(self, function: Callable | None, arguments: tuple, copied=None, buffer=None) -> "Job":
        process = next(self._turns)
        job = Job(process, next(process.numbers), buffer)
        self._errands.put((process, pickle.dumps((job.number, function, arguments)), copied))
        return job

    def _carry(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # or this thread would begin to use GPU 0 of all ranks
        while (errand := self._errands.get()) is not None:
            process, message, copied = errand
            try:
                if copied is not None:
                    copied.synchronize()
                process.pipe.send_bytes(message)
            except OSError:  # it is gone, as `Job.result` sees
                pass
            except Exception as error:  # of the device
                process.failure = error
                process.process.kill()  # nobody is to wait for it

    def close(self) -> None:
        """End the processes, whatever they are doing, and give the memory back as soon as no view of it is left."""
        if self._descriptor is None:
            return
        for process in self._processes:
            process.process.kill()
        if self._courier.is_alive():
            self._errands.put(None)
            self._courier.join(CLOSE_SECONDS)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.process.wait(CLOSE_SECONDS)
            process.pipe.close()
        if self._pinned and not self._courier.is_alive():  # else a copy of the device may be under way
            with suppress(RuntimeError):  # a device that has failed says so elsewhere
                unlock_pages(self._memory)
        os.close(self._descriptor)
        self._descriptor = self._memory = None


class ReaderProcess:
    """This process's side of one of them."""

    def __init__(self, place: int, threads: int, descriptor: int):
        self.place = place
        self.process, self.pipe = start("common.feed_process", threads, descriptor, keep=[descriptor])
        self.numbers = itertools.count()  # of its jobs
        self.answers: dict[int, tuple[Any, Exception | None]] = {}  # that nobody has asked for yet
        self.failure: Exception | None = None

    def answer(self, number: int) -> Any:
        """What the job returned; what it raised is raised here."""
        while number not in self.answers:
            try:
                answered, *answer = pickle.loads(self.pipe.recv_bytes())
            except (EOFError, OSError):
                status = self.process.wait()
                advice = "what it said stands above this line"
                if status < 0:  # by a signal
                    advice = "if memory ran out, lower --read-ahead, --workers or --reader-processes"
                raise self.failure or UserError(
                    f"reader process {self.place} (pid {self.process.pid}) {how_it_ended(status)}; {advice}; the same "
                    f"command goes on, from the last checkpoint if there is one"
                ) from None
            self.answers[answered] = answer
        value, error = self.answers.pop(number)
        if error is not None:
            raise error
        return value


@dataclass
class Job:
    """Work that a reader process was given."""

    process: ReaderProcess
    number: int
    buffer: PackedBatch | None  # that a batch is loaded into

    def result(self) -> Any:
        """Waits for it: the `Loaded`, or what the function returned. Raises what was raised there."""
        value = self.process.answer(self.number)
        if self.buffer is None:
            return value
        numbers, indices, set_aside = value
        return Loaded(replace(self.buffer, **numbers), indices, set_aside)


def memory_of_batches(descriptor: int, nbytes: int) -> torch.Tensor:
    return mapped(f"/proc/self/fd/{descriptor}", nbytes, "the batches", ADVICE)


# ---- in a reader process ---------------------------------------------------------------------------------------------


def main(threads: int, memory_descriptor: int, descriptor: int) -> None:
    """Do jobs, `threads` at a time, until the training process, at the other end of `descriptor`, is gone."""
    pipe, answering = begin(descriptor), threading.Lock()
    torch.set_num_threads(1)

    def load(records: list, check: list[bool], start: int, end: int):
        loaded = loader.load(records, check, room_in(memory[start:end], shapes))
        return loaded.batch.numbers(), loaded.indices, loaded.set_aside

    def work(number: int, function: Callable | None, arguments: tuple) -> None:
        try:
            answer = (number, (function or load)(*arguments), None)
        except Exception as error:
            answer = (number, None, portable(error))
        with answering:
            pipe.send_bytes(pickle.dumps(answer))

    with suppress(EOFError, ConnectionError):
        loader, nbytes = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
        memory, shapes = memory_of_batches(memory_descriptor, nbytes), loader.shapes()
        pool = ThreadPoolExecutor(threads)
        while True:
            number, function, arguments = pickle.loads(pipe.recv_bytes())
            if function is None:
                pool.submit(work, number, function, arguments)
            else:  # no batch is to wait behind a plan
                threading.Thread(target=work, args=(number, function, arguments)).start()
    os._exit(0)  # not waiting for threads that read: nobody asks for it any more


def portable(error: Exception) -> Exception:
    """The error itself where it can be pickled, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    run(lambda: main(*map(int, sys.argv[1:])))
