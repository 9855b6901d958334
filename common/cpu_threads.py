"""How many threads a PyTorch operation uses on the CPU. Small ones are fastest with one."""

import threading
from contextlib import contextmanager

import torch


@contextmanager
def one_thread():
    """Within it PyTorch computes on the CPU with this thread alone: a team of threads gains nothing for copies of a few
    kilobytes, and on busy cores its members wait for each other (30 ms instead of 1 to pack a sample)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def compute_alone(threads: int) -> None:
    """This thread runs each torch operation by itself, threads that begin later with teams of `threads` as before.

    PyTorch keeps the number a thread has set also for threads that have not computed yet, hence the third thread.
    """
    torch.get_num_threads()  # the first call takes the number of the process and would do so later
    torch.set_num_threads(1)
    restoring = threading.Thread(target=torch.set_num_threads, args=(threads,))
    restoring.start()
    restoring.join()
