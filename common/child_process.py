"""Processes that work for this one: the writers of the capture (common/tap_writer.py) and the readers of the training
(common/feed_process.py). Here is how they begin and how they end.

    process, pipe = start("common.feed_process", 0)     # python -P -m common.feed_process 0 DESCRIPTOR
    pipe = begin(descriptor)                            # there, first of all

They see no GPU, leave Ctrl-C and SIGTERM to the process that started them, and end with it, however it ends.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from common.tap_link import leave_signals_to_the_main_process

ROOT = str(Path(__file__).resolve().parent.parent)
PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when the one that started it has ended


def start(module: str, *arguments: int, keep: Sequence[int] = ()) -> tuple[subprocess.Popen, Connection]:
    """Start `module` with these arguments and, as the last one, the descriptor of its end of a pipe; returns our end.

    keep: descriptors that stay open in it.
    """
    ours, theirs = Pipe()
    # -P: a package of that name in the working directory is somebody else's; PYTHONPATH begins with ours.
    command = [sys.executable, "-P", "-m", module, *map(str, arguments), str(theirs.fileno())]
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    # Blocked signals stay so in the new process: a Ctrl-C while it imports is not for it, either.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno(), *keep], stdin=subprocess.DEVNULL, env=environment
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # the process sees the end of ours when this one dies
    return process, ours


def begin(descriptor: int) -> Connection:
    """The child's end of the pipe. From here on it ends with its parent, even while it stands still."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    leave_signals_to_the_main_process()
    return Connection(descriptor)


def how_it_ended(status: int) -> str:
    """The exit status of a process in words: "was killed by SIGKILL", "ended with exit status 1"."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
