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

from common.errors import UserError
from common.progress import Progress
from common.shard_check import status
from common.shard_run import RunDirectory
from common.shard_writing import cannot_write

LOOK_SECONDS, WINDOW = 0.25, 40  # how often the figures are made anew, and over how many looks speeds are taken
STALE_SECONDS = 20.0  # a replica whose heartbeat is older does nothing any more
FEW_SAMPLES = 500  # with fewer, the trainer's defaults may hold nothing out and take a handful of steps
FEW_OPTIONS = "--eval-fraction 0.2 --tokens-per-step 2048 --max-steps 200 --eval-every 25 --learning-rate 1e-3"


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

        stop() takes no more samples; fail(error) gives up; in_flight() says what is still to finish.
        """
        from common.engine import ChildSignals

        def interrupt():
            if self.seen:
                return fail(KeyboardInterrupt())
            self.seen = True
            progress.note(f"stopping: {in_flight()} in flight are finished first (again: give them up)")
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
        self.began = self.ended = None  # time.time() of this replica's first prompt and last commit
        self.recent: deque = deque(maxlen=WINDOW)  # (time, tokens, bytes) of each look
        self.session = None
        progress.update(self.done())
        if replicas > 1 and not progress.quiet:
            threading.Thread(target=self.follow, daemon=True, name="follow-replicas").start()

    def begin(self, session) -> None:
        """The first prompt of this session goes to the engine now."""
        self.session, self.began = session, time.time()
        self.recent = deque(maxlen=WINDOW)  # what was seen while the engine loaded is no speed

    def follow(self):
        """Show what the other replicas do also while this one commits nothing."""
        while True:
            time.sleep(2.0)
            with contextlib.suppress(UserError):  # of a disk that is gone: the main thread meets it as well
                self.look()

    def committed(self, record) -> None:
        """A sample became durable (or was set aside: None). At hundreds a second, a look at disk and replicas for each
        would cost much."""
        self.samples += 1
        self.ended = time.time()
        if record is not None:
            self.tokens += record.tokens
            self.bytes += record.bytes
        if not self.recent or time.monotonic() - self.recent[-1][0] >= LOOK_SECONDS:
            self.look()
        else:
            self.progress.update(self.done_before + self.samples + self.others)

    def look(self) -> None:
        recent = self.recent
        recent.append((time.monotonic(), self.tokens, self.bytes))
        seconds, tokens, written = (x - y for x, y in zip(recent[-1], recent[0], strict=True))
        beats = self.beats_of_others()
        busy = [beat for beat in beats if not beat["stage"] and beat["time"] > time.time() - STALE_SECONDS]
        speeds = {}
        if seconds and (self.began or busy):  # from the second look on
            rate = tokens / seconds + sum(number(beat, "tokens_per_second") for beat in busy)
            gb_per_second = written / seconds / 1e9 + sum(number(beat, "written") for beat in busy)
            speeds = {"tokens_per_second": rate, "written": f"{gb_per_second:.3f} GB/s"}
        stalled = self.session.stalled_seconds() if self.session else 0
        try:
            disk = os.statvfs(self.out)
        except OSError as error:
            raise cannot_write(self.out, error) from None
        self.progress.update(
            self.done(beats),
            **speeds,
            disk_left=f"{disk.f_bavail * disk.f_frsize / 1e9:,.0f} GB",
            ring_stalled=f"{stalled + sum(number(beat, 'ring_stalled') for beat in beats):.0f} s",
        )

    def done(self, beats: list[dict] | None = None) -> int:
        beats = self.beats_of_others() if beats is None else beats
        self.others = sum(max(beat["done"] - self.done_before, 0) for beat in beats)
        return self.done_before + self.samples + self.others

    def beats_of_others(self) -> list[dict]:
        return [] if self.progress.quiet else beats_of_others(self.out, self.started_at, "samples")

    def share(self) -> dict:
        """What this replica did, for `speed_of`."""
        return {"tokens": self.tokens, "began": self.began, "ended": self.ended}


class AnswerFigures:
    """Counts answered conversations of this process and shows them, on rank 0 with those of the other replicas."""

    def __init__(self, progress: Progress, out: Path, done_before: int):
        self.progress, self.out, self.done_before = progress, out, done_before
        self.started_at, self.started = time.time(), time.monotonic()
        self.rows = self.tokens = 0
        self.looked = 0.0  # when the heartbeats of the others were read
        self.beats: list[dict] = []

    def answered(self, tokens: int) -> None:
        self.rows += 1
        self.tokens += tokens
        now = time.monotonic()
        if not self.progress.quiet and now - self.looked > LOOK_SECONDS:
            self.looked, self.beats = now, beats_of_others(self.out, self.started_at, "conversations")
        others = sum(max(beat["done"] - self.done_before, 0) for beat in self.beats)
        speed = self.tokens / (now - self.started)
        speed += sum(number(beat, "new_tokens_per_second") for beat in self.beats if not beat["stage"])
        self.progress.update(self.done_before + self.rows + others, new_tokens_per_second=speed)


def beats_of_others(out: Path, since: float, unit: str) -> list[dict]:
    """The heartbeats that the other replicas have written since then (time.time()), if they count in this unit."""
    beats = []
    for path in out.glob("heartbeat-*.json"):
        try:
            beat = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        beats += [beat] if beat["time"] > since and beat["unit"] == unit else []
    return beats


def number(beat: dict, name: str) -> float:
    """A figure of a heartbeat without its unit; 0 where it has none."""
    return float(str(beat["figures"].get(name, 0)).split()[0])


def speed_of(shares: list[dict]) -> str:
    """What all replicas did in this run, in words; empty when nothing was captured. Loading engines is not counted."""
    worked = [share for share in shares if share["tokens"]]
    if not worked:
        return ""
    tokens = sum(share["tokens"] for share in worked)
    seconds = max(share["ended"] for share in worked) - min(share["began"] for share in worked)
    who = f" of {len(worked)} replicas" if len(worked) > 1 else ""
    return (
        f"; this run: {tokens:,} tokens{who}, {tokens / max(seconds, 1e-3):,.0f} tokens/s from the first prompt to the "
        f"last commit"
    )


def summary(run_directory: RunDirectory, out: Path, shares: list[dict]) -> str:
    """shares: `Figures.share` of all replicas."""
    report = status(out)
    lines = [
        f"{report['committed']:,} samples, {report['tokens']:,} tokens ({report['supervised_tokens']:,} supervised), "
        f"{report['bytes'] / 1e9:.3f} GB in {out}{speed_of(shares)}"
    ]
    for reasons in (report["skips_by_reason"], report["set_aside_by_reason"]):
        lines += [f"{count:,} rows left out: {reason}" for reason, count in reasons.items()]
    if checks := run_directory.info.get("run", {}).get("self_checks"):
        lines.append(proven(checks))
    config = [each for each in sys.argv[1:2] if each.endswith((".yaml", ".yml"))]  # it says how to train, too
    few = FEW_OPTIONS.split() if report["committed"] < FEW_SAMPLES and not config else []
    train = [*config, "--data", str(out), "--output", str(out.parent / "drafter"), *few]
    lines.append(f"next: python train_drafter.py {shlex.join(train)}")
    return "\n".join(lines)


def proven(checks: list[dict]) -> str:
    """What the self-checks of all replicas, and of the runs before this one, have shown."""
    proofs = [proof for check in checks for proof in check["first_batch"]]
    if not proofs:
        return "not proven: no forward pass was free of NaN and Inf, so nothing was captured"
    equal = min(share for proof in proofs for name, share in proof["bit_equal"].items() if name != "last state")
    norm_error = max(proof["relative_error"]["last state"] for proof in proofs)
    own = [check["own_token"] for check in checks]
    right, ties, near = (sum(one.get(name, 0) for one in own) for name in ("checked", "ties", "near_ties"))
    each = f" (each of {len(checks)})" if len(checks) > 1 else ""
    return (
        f"proven: capture points of the first batch{each} {equal:.0%} bit-equal to SGLang's own capture, the last "
        f"state, normed, within {norm_error:.1%} of what its head reads; own token right for {right:,} samples "
        f"({ties} by a logit equal to the best, {near} within rounding of it)"
    )


def resume_line(run_directory: RunDirectory, total: int, word: str) -> str:
    if run_directory is None:
        return f"{word}; nothing was captured yet"
    run_directory.read_logs()  # the other replicas' commits count, too
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
