"""A capture run without an engine, for the tests: the real writer threads, commits and resume; states from a seed.

    python tests/shard_writer.py OUT --rows 200 [--layout arrow] [--delay 0.002]

Every sample is a function of its row alone, so runs can be compared byte by byte. States are views of one arena, as in
the tap. Some rows are skipped (reason given) and some set aside, as a real run would. Each commit takes a random number
of finished samples. Prints `committed N` after each commit, and at the end the counts of what opening repaired.
"""

import argparse
import queue
import random
import sys
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from common.errors import run as run_main
from common.shard_run import RunDirectory, Skipped
from common.shard_writing import join_run, write_sample
from common.shards import Record, token_hash

HIDDEN, STATES = 32, 4
IDENTITY = {
    "model": "made/up",
    "revision": "1",
    "tokenizer_hash": "t0",
    "capture_points": [3, 31, 59],
    "last_state": "pre-norm",
    "dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "engine_arguments": {"chunked_prefill_size": 16},
}


def make_sample(row: int) -> tuple[list[int], list[int], list[torch.Tensor]]:
    """Token ids, loss mask and states (views of one arena) of a row; lengths 1 to 90."""
    chance = random.Random(row)
    length = chance.choice([1, 2, chance.randint(3, 90)])
    ids = [chance.randrange(1000) for _ in range(length)]
    mask = [int(chance.random() < 0.5) for _ in range(length)]
    arena = torch.randn(STATES * (length + 5), HIDDEN, generator=torch.Generator().manual_seed(row)).to(torch.bfloat16)
    states = [arena[k * (length + 5) : k * (length + 5) + length] for k in range(STATES)]
    return ids, mask, states


def is_skipped(row: int) -> bool:
    return row % 23 == 7


def is_not_finite(row: int) -> bool:
    return row % 41 == 11


def capture(out: Path, rows: int, layout: str = "v1", rows_per_block: int = 48, delay: float = 0.0, threads: int = 3):
    """One run or resume to the end; the opened RunDirectory's `Found` is returned."""
    chance = random.Random()  # commits fall differently in each run
    with RunDirectory(out, IDENTITY, rows=rows, layout=layout, rows_per_block=rows_per_block) as run:
        join_run(out)
        run.skip(Skipped(row, "nothing supervised", f"chats.jsonl:{row + 1}") for row in range(rows) if is_skipped(row))
        work, finished = queue.Queue(), queue.Queue()

        def write_files() -> None:
            while (row := work.get()) is not None:
                try:
                    ids, mask, states = make_sample(row)
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
                    print(f"committed {len(run.committed)}", flush=True)
            if left:
                run.refresh_lengths()
        for _ in writers:
            work.put(None)
        run.finish(self_checks="none: states are made up")
        return run.found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--layout", default="v1")
    parser.add_argument("--delay", type=float, default=0.0)
    arguments = parser.parse_args()
    found = capture(arguments.out, arguments.rows, arguments.layout, delay=arguments.delay)
    for line in found.lines():
        print(f"repaired: {line}")


if __name__ == "__main__":
    run_main(main)
