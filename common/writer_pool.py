"""The scheduler's side of its writer processes: starts them, hands them what a forward pass has completed, and takes
regions of the ring back.

    pool = WriterPool(rank, number, on_death)        # once, while the model loads
    pool.begin(settings, ring, on_failure, device)   # a session of the tap
    pool.put(event, figures, samples, ...)           # after each forward pass that completes some
    pool.end(session)                                # when all is written

The scheduler's own thread only puts into a queue. A courier thread waits for the device and sends one message a writer
and forward pass; a thread a writer takes its answers.
"""

import queue
import subprocess
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from common.child_process import start
from common.ring import Ring
from common.tap_link import writer_of


class WriterPool:
    """The `number` writer processes (common/tap_writer.py) of one rank, for the engine's whole life."""

    def __init__(self, rank: int, number: int, on_death: Callable[[int], None]):
        """on_death(its exit status) is called, from a thread, when a writer has died."""
        self.on_death = on_death
        self.pipes: list[Connection] = []
        self.ended = threading.Semaphore(0)
        self.passes: queue.Queue = queue.Queue()
        self.lock = threading.Lock()  # of self.users
        self.users: Counter[int] = Counter()  # start of a region -> samples in it that are not yet written
        self.ring: Ring | None = None
        self.on_failure: Callable[[Exception | None], None] = lambda error: None
        for writer in range(number):
            process, ours = start("common.tap_writer", rank, writer)
            self.pipes.append(ours)
            threading.Thread(target=self._receive, args=(ours, process), daemon=True, name=f"writer-{writer}").start()
        threading.Thread(target=self._carry, daemon=True, name="courier").start()

    def begin(self, settings: dict, ring: Ring, on_failure: Callable[[Exception | None], None],
              device: torch.device) -> None:  # fmt: skip
        """on_failure(error) is called, from a thread, when nothing can be written any more; error is None where the
        writer says so itself. device: of the states."""
        self.passes.put(device)
        self.ring, self.ranks, self.on_failure = ring, settings["ranks"], on_failure
        self.users.clear()
        self._send_all("begin", {**settings, "ring": ring.where})

    def expect(self, region_start: int, users: int) -> None:
        """This region goes back to the ring when so many samples in it are written."""
        with self.lock:
            self.users[region_start] = users

    def put(self, event, figures: dict, samples: list[tuple], own: torch.Tensor, last: torch.Tensor,
            rows: list[int]) -> None:  # fmt: skip
        """Samples that a forward pass has completed, in host memory once `event` (None on the CPU) has happened.

        samples: (index, start of its region, rows of that region, first row, tokens). own [B, 2 * CANDIDATES + 1]
        float64 and last [B, H]: rows[i] of them belongs to samples[i].
        """
        self.passes.put((event, figures, samples, own, last, rows))

    def end(self, session: str) -> None:
        """Returns when the writers have written all that was put, and have told the committing process so."""
        self.passes.put(session)
        for _ in self.pipes:
            self.ended.acquire()
        self.ring, self.on_failure = None, lambda error: None  # they hold the memory of the session

    def _carry(self):
        while True:
            passed = self.passes.get()
            if isinstance(passed, str):
                self._send_all("end", {"session": passed})
                continue
            if isinstance(passed, torch.device):
                if passed.type == "cuda":
                    torch.cuda.set_device(passed)  # of this thread, or it would begin to use GPU 0 of all ranks
                continue
            try:
                self._carry_pass(*passed)
            except Exception as error:  # of the device, say; in silence the run would wait for ever
                self.on_failure(error)

    def _carry_pass(self, event, figures, samples, own, last, rows):
        if event is not None:
            event.synchronize()
        own, last = own.numpy(), last.view(torch.uint8).numpy()
        shares = defaultdict(list)
        for sample, row in zip(samples, rows, strict=True):
            shares[writer_of(sample[0], self.ranks, len(self.pipes))[1]].append((sample, row))
        for writer, share in shares.items():
            theirs = [row for _, row in share]
            content = {
                "regions": sorted({(start, size) for (_, start, size, _, _), _ in share}),
                "samples": [(index, start, first, tokens) for (index, start, _, first, tokens), _ in share],
                "own": own[theirs].tobytes(),
                "last": last[theirs].tobytes(),
                "figures": figures,
            }
            self._send(self.pipes[writer], "pass", content)

    def _receive(self, pipe: Connection, process: subprocess.Popen):
        try:
            while True:
                kind, content = pipe.recv()
                if kind == "release":
                    self._release(*content)
                elif kind == "failed":
                    self.on_failure(None)
                elif kind == "ended":
                    self.ended.release()
        except (EOFError, OSError):
            self.ended.release()  # nobody is to wait for it
            self.on_failure(None)
            self.on_death(process.wait())

    def _release(self, start: int, count: int):
        with self.lock:
            self.users[start] -= count
            last = self.users[start] == 0
        if last and self.ring is not None:
            self.ring.release(start)

    def _send_all(self, kind: str, content: dict):
        for pipe in self.pipes:
            self._send(pipe, kind, content)

    def _send(self, pipe: Connection, kind: str, content: dict):
        try:
            pipe.send((kind, content))
        except OSError:
            self.on_failure(None)
