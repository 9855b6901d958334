"""A capture run without an engine, for the tests: the real writer threads, commits and resume; states from a seed.

    python tests/shard_writer.py OUT --rows 200 [--layout arrow] [--delay 0.002] [--hidden 32] [--leak]

Every sample is a function of its row alone, so runs can be compared byte by byte. States are views of one arena, as in
the tap. Some rows are skipped (reason given) and some set aside, as a real run would. Each commit takes a random number
of finished samples. Prints `committed N` after each commit, at the end what opening repaired and the peak memory of the
capture. `--leak` keeps all states, so that a test sees its memory check fail.
"""

import argparse
import contextlib
import os
import queue
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from common.errors import run as run_main
from common.shard_run import Found, RunDirectory, Skipped
from common.shard_writing import join_run, write_sample
from common.shards import Record, token_hash

STATES = 4
IDENTITY = {
    "model": "made/up",
    "revision": "1",
    "tokenizer_hash": "t0",
    "capture_points": [3, 31, 59],
    "last_state": "pre-norm",
    "dtype": "bfloat16",
    "hidden_size": 32,
    "engine_arguments": {"chunked_prefill_size": 16},
}


def make_sample(row: int, hidden: int = 32) -> tuple[list[int], list[int], list[torch.Tensor]]:
    """Token ids, loss mask and states (views of one arena) of a row; lengths 1 to 90."""
    chance = random.Random(row)
    length = chance.choice([1, 2, chance.randint(3, 90)])
    ids = [chance.randrange(1000) for _ in range(length)]
    mask = [int(chance.random() < 0.5) for _ in range(length)]
    arena = torch.randn(STATES * (length + 5), hidden, generator=torch.Generator().manual_seed(row)).to(torch.bfloat16)
    states = [arena[k * (length + 5) : k * (length + 5) + length] for k in range(STATES)]
    return ids, mask, states


def is_skipped(row: int) -> bool:
    return row % 23 == 7


def is_not_finite(row: int) -> bool:
    return row % 41 == 11


def say(line: str) -> None:
    print(line, flush=True)


def capture(
    out: Path,
    rows: int,
    layout: str = "v1",
    delay: float = 0.0,  # seconds a sample and thread
    hidden: int = 32,
    keep: list | None = None,
    say: Callable[[str], None] = say,
    threads: int = 3,
) -> Found:
    """One run or resume to the end; what opening the directory repaired is returned."""
    chance = random.Random()  # commits fall differently in each run
    identity = IDENTITY | {"hidden_size": hidden}
    with RunDirectory(out, identity, rows=rows, layout=layout, rows_per_block=48) as run:
        hold = join_run(out)
        run.skip(Skipped(row, "nothing supervised", f"chats.jsonl:{row + 1}") for row in range(rows) if is_skipped(row))
        work, finished = queue.Queue(), queue.Queue()

        def write_files() -> None:
            while (row := work.get()) is not None:
                try:
                    ids, mask, states = make_sample(row, hidden)
                    if keep is not None:
                        keep.append(states)
                    if is_not_finite(row):
                        finished.put((row, None, ids))
                        continue
                    written = write_sample(out, row, ids, mask, states, run.layout, run.rows_per_block)
                    record = Record(row, len(ids), sum(mask), *written, token_hash(ids), own_token="equal")
                    finished.put((row, record, ids))
                except BaseException as error:
                    finished.put((row, error, None))
                time.sleep(delay)

        writers = [threading.Thread(target=write_files, daemon=True) for _ in range(threads)]
        for writer in writers:
            writer.start()
        try:
            for start, stop in run.blocks():
                left = run.pending(start, stop)
                for row in left:
                    work.put(row)
                waiting, group = len(left), []
                while waiting:
                    row, record, ids = finished.get()
                    waiting -= 1
                    if isinstance(record, BaseException):
                        raise record
                    if record is None:
                        run.put_aside(row, "NaN at point 31, row 0", token_hash(ids))
                    else:
                        group.append(record)
                    if len(group) >= chance.randint(1, 6) or not waiting:
                        run.commit(group)
                        group = []
                        say(f"committed {len(run.committed)}")
                if left:
                    run.refresh_lengths()
        finally:
            with contextlib.suppress(queue.Empty):
                while True:
                    work.get_nowait()
            for _ in writers:
                work.put(None)
            for writer in writers:
                writer.join()
            os.close(hold)
        run.finish(self_checks="none: states are made up")
        return run.found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--layout", default="v1")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--leak", action="store_true")
    arguments = parser.parse_args()
    keep = [] if arguments.leak else None
    found = capture(arguments.out, arguments.rows, arguments.layout, arguments.delay, arguments.hidden, keep)
    for line in found.lines():
        print(f"repaired: {line}")
    # Not ru_maxrss: a child inherits that from the process that started it.
    peak_kib = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]
    print(f"peak_mb {int(peak_kib) / 1024:.1f}")


if __name__ == "__main__":
    run_main(main)
