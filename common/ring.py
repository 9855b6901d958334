"""Bounded host memory between the engine and the disk: regions of one arena that the writer processes map, too.

The tap (common/tap.py) takes a region for the rows of a forward pass, the device copies into it, a writer process
(common/tap_writer.py) writes it and gives it back. The arena never grows: when it is full, `allocate` waits, which
holds the engine's next forward pass back until the disk has caught up. The time spent waiting is counted, because it
tells the person that the disk is the limit.
"""

import os
import threading
import time
from collections.abc import Container

import torch

from common.shared_memory import PAGE, lock_pages, mapped, sized, unlock_pages

ALIGNMENT = PAGE  # regions never share one
ADVICE = "lower --ring-gb or raise `ulimit -v`, and let processes of one user open each other's /proc/PID/fd"


class Ring:
    """First-fit regions in one host buffer of `capacity` bytes, page-locked for the device if `pin`. Thread-safe.

    The buffer is an anonymous file: no name in any file system, gone with its last process. `where` is what `attach`
    takes in another process of the same user.
    """

    def __init__(self, capacity: int, pin: bool):
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self.descriptor = os.memfd_create("ring")
        sized(self.descriptor, self.capacity, "a ring", ADVICE)
        self.where = (f"/proc/{os.getpid()}/fd/{self.descriptor}", self.capacity)
        self.buffer = attach(self.where)
        self.pinned = pin
        if pin:
            lock_pages(self.buffer, "a ring", ADVICE)
        self.taken: dict[int, int] = {}  # start -> end, in bytes
        self.changed = threading.Condition()
        self.closed = False
        self.stalled_seconds = 0.0
        self.stalls = 0
        self.peak_bytes = 0

    def allocate(self, nbytes: int, never_freed: Container[int] = ()) -> tuple[int, torch.Tensor] | None:
        """A region of at least `nbytes` as (its start, a uint8 view of exactly `nbytes`); waits while none is free.

        never_freed: starts of regions that nobody gives back before this call returns. Returns None once the ring is
        closed. Raises ValueError for a region that does not fit, now or after all others have been given back.
        """
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if size > self.capacity:
            raise ValueError(f"a region of {nbytes} bytes does not fit a ring of {self.capacity} bytes")
        with self.changed:
            start = self._gap(size)
            if start is None:
                waiting_since = time.monotonic()
                self.stalls += 1
                while start is None and not self.closed:
                    if all(taken in never_freed for taken in self.taken):
                        raise ValueError(f"{nbytes} bytes do not fit beside samples that are not complete yet")
                    self.changed.wait()
                    start = self._gap(size)
                self.stalled_seconds += time.monotonic() - waiting_since
            if self.closed:
                return None
            self.taken[start] = start + size
            self.peak_bytes = max(self.peak_bytes, self.used_bytes())
        return start, self.buffer[start : start + nbytes]

    def release(self, start: int) -> None:
        with self.changed:
            del self.taken[start]
            self.changed.notify_all()

    def close(self) -> None:
        """Wake whoever waits; nothing can be allocated any more."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def free(self) -> None:
        """Close, and give the memory back as soon as no view of it is left. No copy of the device may be under way."""
        self.close()
        if self.descriptor is not None:
            if self.pinned:
                unlock_pages(self.buffer)
            os.close(self.descriptor)
            self.descriptor = self.buffer = None

    def used_bytes(self) -> int:
        return sum(end - start for start, end in self.taken.items())

    def _gap(self, size: int) -> int | None:
        previous_end = 0
        for start in sorted(self.taken):
            if start - previous_end >= size:
                return previous_end
            previous_end = self.taken[start]
        return previous_end if self.capacity - previous_end >= size else None


def attach(where: tuple[str, int]) -> torch.Tensor:
    """uint8 [capacity]: the memory of the ring that is at `where`, shared with its process."""
    return mapped(*where, "a ring", ADVICE)
