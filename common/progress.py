"""What a person (or a monitor) sees of a long run: a live bar on a terminal, plain flushed lines when redirected,
and a heartbeat file. The three scripts use it, and nothing else prints while they work.

    with Progress("extract", total=2000, heartbeat="states/heartbeat.json") as progress:
        progress.stage("loading the engine")                  # its own clock runs: "loading the engine: 40 s"
        progress.update(16, tokens_per_second=151.0, disk_left="1.2 TB")
        progress.note("sample 17 set aside: NaN at point 31")
        progress.close("2,000 samples in 1 h 02 m")

A background thread keeps clock, lines and heartbeat going while the caller is busy for minutes, so an empty log means
a dead process and nothing else.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import threading
import time
from pathlib import Path

TICK_SECONDS = 0.25
HEARTBEAT_SECONDS = 2.0
QUIET_SPELL_SECONDS = 20.0  # after this long without a new sample, the line says so


class Progress:
    """Shows `done` of `total` units, the figures the caller passes (in the order it passes them) and the ETA.

    title: what runs, the first word of every line.  total: units to do, or None where it is not known.
    unit: plural name of what is counted.  heartbeat: path of a JSON file, replaced atomically every 2 s, or None.
    every_seconds: time between two lines when the stream is not a terminal.  stream: default sys.stdout.
    quiet: print nothing (ranks other than 0); a heartbeat, if given, is still written.

    The ETA leaves warm-up out: it starts counting at the first unit that gets done in this run, and units that were
    done before (a resumed run passes them to its first `update`) do not count as speed.
    All methods may be called from any thread and from a signal handler.
    """

    def __init__(self, title: str, total: int | None, unit: str = "samples", heartbeat: str | os.PathLike | None = None,
                 every_seconds: float = 5.0, stream=None, quiet: bool = False):
        self.title, self.total, self.unit = title, total, unit
        self.heartbeat = Path(heartbeat) if heartbeat is not None else None
        self.every_seconds = every_seconds
        self.stream = stream if stream is not None else sys.stdout
        quiet = quiet or self.stream is None  # standard output was closed before we were started
        self.quiet = quiet
        self.done: int | None = None  # None until the first update
        self.figures: dict[str, object] = {}

        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._started = time.monotonic()
        self._stage, self._stage_started = "starting", self._started
        self._first_gain: tuple[float, int] | None = None  # (time, done) when this run's first unit was done
        self._last_gain: float | None = None
        self._next_line = self._next_beat = self._started
        self._heartbeat_complaint: str | None = None

        if self.heartbeat is not None:
            self.heartbeat.parent.mkdir(parents=True, exist_ok=True)
        self._live = None
        if not quiet and _is_terminal(self.stream):
            from rich.console import Console
            from rich.live import Live

            self._console = Console(file=self.stream)
            self._live = Live(get_renderable=self._bar, console=self._console, refresh_per_second=4)
            self._live.start()
        self._tick()  # the first line and the first heartbeat are there before the constructor returns
        atexit.register(self.close)  # gives the cursor back, whatever happens
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    # What the caller says.

    def stage(self, text: str) -> None:
        """What is going on while no unit gets done ("loading the engine"); the next gain in `update` ends it."""
        with self._lock:
            self._stage, self._stage_started = text, time.monotonic()
            self._next_beat = 0.0
            if self._live is None and text:
                self._next_line = 0.0
                self._tick()

    def update(self, done: int, **figures) -> None:
        """`done` units are finished in all (not: since the last call). Figures replace earlier ones of the same name.

        A figure is a number or a ready string. `tokens_per_second=151.2` is shown as "151 tokens/s",
        `ring_stalls=3` as "ring stalls 3". A resumed run calls `update(already_done)` once before its first `stage`.
        """
        with self._lock:
            now = time.monotonic()
            self.figures.update(figures)
            if self.done is not None and done > self.done:
                self._last_gain = now
                if self._first_gain is None:
                    self._first_gain = (now, done)
            if self._stage and (self._stage == "starting" or done > (self.done or 0)):
                self._stage, self._stage_started = "", now
            self.done = done

    def begin(self, total: int, unit: str, done: int | None = None) -> None:
        """Another count begins: of `total` units `done` are finished already. Figures and the ETA start afresh."""
        with self._lock:
            self.total, self.unit, self.done = total, unit, done
            self.figures.clear()
            self._first_gain = self._last_gain = None

    def note(self, line: str) -> None:
        """Prints one line that stays (above the bar on a terminal)."""
        with self._lock:
            self._print(line)

    def close(self, summary_line: str | None = None) -> None:
        """Ends the bar, prints the last state and the summary, writes the last heartbeat. May be called twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        atexit.unregister(self.close)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
        with self._lock:
            self._beat("closed")
            if self._live is not None:
                self._live.refresh()
                self._live.stop()
                self._live = None
            else:
                self._print(self.line())
            if summary_line:
                self._print(summary_line)

    # What is shown.

    def eta_seconds(self) -> float | None:
        """Seconds to go at the average speed since this run's first finished unit; None while that is not known."""
        if self.total is None or self._first_gain is None or self.done is None:
            return None
        if self.done >= self.total:
            return 0.0
        since, already = self._first_gain
        if self.done <= already or self._last_gain <= since:
            return None
        seconds_per_unit = (self._last_gain - since) / (self.done - already)
        return max(0.0, (self.total - self.done) * seconds_per_unit - (time.monotonic() - self._last_gain))

    def line(self) -> str:
        """The state as one line of plain text, as it goes to a log."""
        return "  ".join([f"[{self.title}] {duration(time.monotonic() - self._started)}", *self._parts()])

    def _parts(self) -> list[str]:
        now = time.monotonic()
        done = self.done or 0
        if self.total is None:
            parts = [f"{done:,} {self.unit}"]
        else:
            percent = f" ({100 * done / self.total:.0f}%)" if self.total else ""
            parts = [f"{done:,}/{self.total:,} {self.unit}{percent}"]
        parts += [figure(name, value) for name, value in self.figures.items()]
        eta = self.eta_seconds()
        if eta is not None and not self._closed.is_set():
            parts.append(f"ETA {duration(eta)}")
        if self._stage:
            parts.append(f"{self._stage}: {duration(now - self._stage_started)}")
        elif self._last_gain is not None and now - self._last_gain > QUIET_SPELL_SECONDS:
            parts.append(f"nothing new for {duration(now - self._last_gain)}")
        return parts

    def _bar(self):
        """The rich renderable: a bar with the count on the first row, figures, ETA and stage on the second."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        with self._lock:
            count, *rest = self._parts()
            row = Table.grid(padding=(0, 1))
            bar = ProgressBar(total=self.total or None, completed=self.done or 0, width=30, pulse=not self.total)
            row.add_row(Text(self.title, style="bold"), bar, Text(count),
                        Text(duration(time.monotonic() - self._started), style="dim"))
            return Group(row, Text("  " + "  ".join(rest), style="cyan", overflow="fold"))

    def _print(self, line: str) -> None:
        if self.quiet:
            return
        try:
            if self._live is not None:
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            else:
                self.stream.write(line + "\n")
                self.stream.flush()
        except (OSError, ValueError):
            self.quiet = True  # the reader has gone (`| head`) or the stream was closed: there is nobody left to tell

    # The clock.

    def _run(self) -> None:
        while not self._closed.wait(TICK_SECONDS):
            with self._lock:
                if not self._closed.is_set():
                    self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        if self._live is None and now >= self._next_line:
            self._next_line = now + self.every_seconds
            self._print(self.line())
        if now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_SECONDS
            self._beat("running")

    def _beat(self, state: str) -> None:
        if self.heartbeat is None:
            return
        now = time.monotonic()
        beat = {
            "time": time.time(), "pid": os.getpid(), "title": self.title, "state": state,
            "stage": self._stage, "stage_seconds": round(now - self._stage_started, 3) if self._stage else 0.0,
            "done": self.done or 0, "total": self.total, "unit": self.unit,
            "elapsed_seconds": round(now - self._started, 3), "eta_seconds": self.eta_seconds(),
            "figures": {name: _plain(value) for name, value in self.figures.items()},
        }  # fmt: skip
        temporary = self.heartbeat.with_name(f".{self.heartbeat.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(beat) + "\n")
            os.replace(temporary, self.heartbeat)
            self._heartbeat_complaint = None
        except OSError as error:  # a full disk must not end the run through its own monitor, but is said once
            complaint = f"heartbeat {self.heartbeat} cannot be written: {error.strerror}"
            if complaint != self._heartbeat_complaint:
                self._heartbeat_complaint = complaint
                self._print(complaint)


def duration(seconds: float) -> str:
    """Seconds as a person says them: "7 s", "3 m 20 s", "5 h 02 m", "2 d 03 h"."""
    seconds = int(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} m {seconds % 60:02d} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} m"
    return f"{seconds // 86400} d {seconds % 86400 // 3600:02d} h"


def figure(name: str, value) -> str:
    """One figure as shown: ("tokens_per_second", 151.2) -> "151 tokens/s", ("ring_stalls", 3) -> "ring stalls 3"."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, int):
        text = f"{value:,}"
    else:
        value = float(value)
        text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
    if name.endswith("_per_second"):
        return f"{text} {name.removesuffix('_per_second').replace('_', ' ')}/s"
    return f"{name.replace('_', ' ')} {text}"


def _plain(value):
    """A figure as JSON can hold it; NaN and infinities become strings, since strict readers refuse them as numbers."""
    if isinstance(value, str | int) or value is None:
        return value
    value = float(value)
    return value if math.isfinite(value) else str(value)


def _is_terminal(stream) -> bool:
    return bool(getattr(stream, "isatty", lambda: False)()) and os.environ.get("TERM") != "dumb"
