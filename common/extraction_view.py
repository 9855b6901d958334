"""What a person sees of extract.py: the figures on the bar, Ctrl-C, the summary, the word on how to resume."""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path

from common.progress import Progress
from common.shard_check import status
from common.shard_run import RunDirectory
from common.shard_writing import cannot_write

LOOK_SECONDS, WINDOW = 0.25, 40  # how often the figures are made anew, and over how many looks speeds are taken
FEW_SAMPLES = 500  # with fewer, the trainer's defaults may hold nothing out and take a handful of steps
FEW_OPTIONS = "--eval-fraction 0.2 --tokens-per-step 2048 --max-steps 200 --learning-rate 1e-3"  # instead


def interrupted(number, frame):
    raise KeyboardInterrupt


class Interrupts:
    """Ctrl-C or SIGTERM: once lets the samples in flight finish, twice gives them up."""

    def __init__(self):
        self.seen = False
        signal.signal(signal.SIGTERM, interrupted)  # while no event loop runs: loading, tokenizing, the end

    @contextlib.contextmanager
    def watched(self, stop, fail, in_flight, progress: Progress):
        """Inside a running event loop, once the engine has installed its own handlers. Afterwards the usual ones hold.

        stop() takes no more samples; fail(error) gives up; in_flight() counts what is still to finish.
        """
        from common.engine import ChildSignals

        def interrupt():
            if self.seen:
                return fail(KeyboardInterrupt())
            self.seen = True
            progress.note(f"stopping: {in_flight()} samples in flight are finished first (again: give them up)")
            stop()

        loop = asyncio.get_running_loop()
        ChildSignals.on_terminate = interrupt
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            signal.signal(signal.SIGTERM, interrupted)


class Figures:
    """Counts durable samples of this process and shows them, on rank 0 together with those of the other replicas."""

    def __init__(self, progress: Progress, out: Path, done_before: int, replicas: int):
        self.progress, self.out, self.done_before = progress, out, done_before
        self.started_at = time.time()
        self.samples = self.tokens = self.bytes = self.others = 0
        self.started = time.monotonic()
        self.recent: deque = deque(maxlen=WINDOW)  # (time, tokens, bytes) of each look
        self.session = None
        progress.update(self.done())
        if replicas > 1 and not progress.quiet:
            threading.Thread(target=self.follow, daemon=True, name="follow-replicas").start()

    def follow(self):
        """Show what the other replicas do also while this one commits nothing."""
        while True:
            time.sleep(2.0)
            self.progress.update(self.done())

    def committed(self, record) -> None:
        """A sample became durable (or was set aside: None). At hundreds a second, a look at disk and replicas for each
        would cost much."""
        self.samples += 1
        if record is not None:
            self.tokens += record.tokens
            self.bytes += record.bytes
        if not self.recent or time.monotonic() - self.recent[-1][0] >= LOOK_SECONDS:
            self.look()
        else:
            self.progress.update(self.done_before + self.samples + self.others)

    def look(self) -> None:
        self.recent.append((time.monotonic(), self.tokens, self.bytes))
        seconds, tokens, written = (x - y for x, y in zip(self.recent[-1], self.recent[0], strict=True))
        speeds = {}
        if seconds:  # from the second look on
            speeds = {"tokens_per_second": tokens / seconds, "written": f"{written / seconds / 1e9:.3f} GB/s"}
        try:
            disk = os.statvfs(self.out)
        except OSError as error:
            raise cannot_write(self.out, error) from None
        self.progress.update(
            self.done(),
            **speeds,
            disk_left=f"{disk.f_bavail * disk.f_frsize / 1e9:,.0f} GB",
            ring_stalled=f"{self.session.stalled_seconds() if self.session else 0:.0f} s",
        )

    def done(self) -> int:
        self.others = sum(self.of_others())
        return self.done_before + self.samples + self.others

    def of_others(self):
        """Samples that the other replicas have done, from their heartbeats."""
        if self.progress.quiet:
            return
        for path in self.out.glob("heartbeat-*.json"):
            try:
                beat = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if beat["time"] > self.started_at:
                yield max(beat["done"] - self.done_before, 0)


def summary(run_directory: RunDirectory, samples: list, out: Path, figures: Figures) -> str:
    report = status(out)
    seconds = time.monotonic() - figures.started
    speed = f"; {figures.tokens / seconds:,.0f} tokens/s" if figures.tokens else ""
    lines = [
        f"{report['committed']:,} samples, {report['tokens']:,} tokens ({report['supervised_tokens']:,} supervised), "
        f"{report['bytes'] / 1e9:.3f} GB in {out}{speed}"
    ]
    for reasons in (report["skips_by_reason"], report["set_aside_by_reason"]):
        lines += [f"{count:,} rows left out: {reason}" for reason, count in reasons.items()]
    for check in run_directory.info.get("run", {}).get("self_checks") or []:
        proofs, own = check["first_batch"], check["own_token"]
        equal = min(share for proof in proofs for name, share in proof["bit_equal"].items() if name != "last state")
        norm_error = max(proof["relative_error"]["last state"] for proof in proofs)
        lines.append(
            f"proven: capture points of the first batch {equal:.0%} bit-equal to SGLang's own capture, norm of the "
            f"last state within {norm_error:.1g}; own token right for {own['checked']:,} samples "
            f"({own.get('ties', 0)} by a logit equal to the best, {own['near_ties']} within rounding of it)"
        )
    few = f" {FEW_OPTIONS}" if report["committed"] < FEW_SAMPLES else ""
    lines.append(f"next: python train_drafter.py --data {shlex.quote(str(out))} --output drafter/{few}")
    return "\n".join(lines)


def resume_line(run_directory: RunDirectory, total: int, word: str) -> str:
    if run_directory is None:
        return f"{word}; nothing was captured yet"
    safe = len(run_directory.committed)
    return f"{word}: {safe:,} of {total:,} samples are safe. The same command goes on{own_command()}"


def own_command() -> str:
    """": python extract.py ...", to be pasted; nothing under torchrun, whose own command is not known here."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return ""
    python = Path(sys.executable)
    with contextlib.suppress(ValueError):
        python = python.relative_to(Path.cwd())
    return ": " + shlex.join([str(python), *sys.argv])
