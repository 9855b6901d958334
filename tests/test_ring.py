"""The ring: regions never overlap, it never grows, a full one waits and counts the wait."""

import random
import threading
import time

import pytest

from common.ring import ALIGNMENT, Ring


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
