"""progress.py as a person meets it: in a redirected log, on a terminal, through the heartbeat file."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.progress import Progress, duration, figure

ROOT = Path(__file__).resolve().parents[1]

BUSY = """
import sys, time
from common.progress import Progress
progress = Progress("extract", 40, heartbeat=sys.argv[1], every_seconds=0.5)
progress.stage("loading the engine")
time.sleep(1.6)                                    # no call at all: the thread must keep the log going
for done in range(0, 41, 4):
    progress.update(done, tokens_per_second=1512.3, ring_stalls=2, disk_left="1.2 TB")
    time.sleep(0.1)
    if done == 20: progress.note("sample 17 set aside")
if len(sys.argv) > 2: time.sleep(60)
progress.close("40 samples, done")
"""


def start(*args, **kwargs):
    environment = {**os.environ, **kwargs.pop("env", {})}
    environment.pop("PYTHONUNBUFFERED", None)  # or every stream flushes itself, and these tests could not fail
    kwargs["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # `nohup make test &` has it ignored
    return subprocess.Popen([sys.executable, "-c", BUSY, *map(str, args)], cwd=ROOT, env=environment, **kwargs)


def test_a_redirected_run_writes_flushed_lines_from_the_first_second(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as stream:
        process = start(tmp_path / "beat.json", stdout=stream)
        started = time.monotonic()
        while not log.stat().st_size and time.monotonic() - started < 30:
            time.sleep(0.02)
        assert log.stat().st_size and process.poll() is None, "the log stayed empty while the run went on"
        while "loading the engine: 1 s" not in log.read_text() and process.poll() is None:
            time.sleep(0.02)
        assert "40 samples, done" not in log.read_text(), "no line while the caller was busy"
        assert process.wait(60) == 0
    text = log.read_text()
    lines = text.splitlines()
    assert lines[0].startswith("[extract] 0 s  0/40 samples (0%)")
    assert "sample 17 set aside" in lines
    assert lines[-1] == "40 samples, done"
    assert "40/40 samples (100%)  1,512 tokens/s  ring stalls 2  disk left 1.2 TB" in lines[-2]
    assert any("ETA" in line for line in lines)
    assert "\x1b" not in text, "escape sequences in a log file"


def test_a_terminal_gets_a_bar(tmp_path):
    master, slave = pty.openpty()
    env = {"TERM": "xterm-256color", "COLUMNS": "100"}
    process = start(tmp_path / "beat.json", stdout=slave, env=env)
    os.close(slave)
    output = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # the other side of the pty is closed
            break
        if not chunk:
            break
        output += chunk
    assert process.wait(60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.decode())
    assert "━" in text and "40/40 samples (100%)" in text and "1,512 tokens/s" in text
    assert "loading the engine: 1 s" in text
    assert "sample 17 set aside" in text and "40 samples, done" in text
    assert output.count(b"\x1b[?25h") >= 1, "the cursor was not given back"


def test_another_count_has_its_own_figures_and_its_own_eta():
    progress = Progress("extract", 1000, unit="conversations", quiet=True)
    for done in (0, 1, 2):
        progress.update(done, new_tokens_per_second=30.0)
        time.sleep(0.3)
    assert progress.eta_seconds() > 100 and "new tokens/s" in progress.line()
    progress.begin(10, "samples", 4)
    assert progress.eta_seconds() is None
    assert "4/10 samples (40%)" in progress.line() and "new tokens/s" not in progress.line()
    for done in (5, 6):
        time.sleep(0.1)
        progress.update(done)
    assert progress.eta_seconds() < 2
    progress.close()


def test_the_heartbeat_is_whole_at_any_moment(tmp_path):
    beat_file = tmp_path / "beat.json"
    progress = Progress("train", 10**6, unit="steps", heartbeat=beat_file, quiet=True)
    reads, stages = 0, set()
    until = time.monotonic() + 1.0
    step = 0
    while reads <= 100 or time.monotonic() < until:
        step += 1
        progress.update(step, loss=float("nan"), figures_text="x" * 5000)
        progress._beat("running")
        beat = json.loads(beat_file.read_text())
        assert beat["pid"] == os.getpid() and beat["done"] == step and beat["total"] == 10**6
        stages.add(beat["stage"])
        reads += 1
    assert beat["figures"]["loss"] == "nan"
    progress.close()
    assert json.loads(beat_file.read_text())["state"] == "closed"
    assert os.listdir(tmp_path) == ["beat.json"], "a temporary file was left behind"


def test_a_reader_in_another_process_never_sees_half_a_heartbeat(tmp_path):
    """Replaces the file as fast as it can while another process parses it; a plain write_text fails the same race."""
    beat_file = tmp_path / "beat.json"
    reader = f"""
import json, time
from pathlib import Path
until, reads = time.monotonic() + 1.5, 0
while time.monotonic() < until:
    try: text = Path({str(beat_file)!r}).read_text()
    except FileNotFoundError: continue
    json.loads(text); reads += 1
print(reads)
"""

    def race(write):
        write()
        process = subprocess.Popen([sys.executable, "-c", reader], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            write()
        return process.returncode, process.communicate()[0]

    with Progress("train", 10, heartbeat=beat_file, quiet=True) as progress:
        progress.update(1, padding="x" * 20000)
        status, reads = race(lambda: progress._beat("running"))
        assert status == 0 and int(reads) > 100
    plain = lambda: beat_file.write_text(json.dumps({"padding": "x" * 20000}))  # noqa: E731
    assert any(race(plain)[0] for _ in range(5)), "this test cannot tell an atomic write from a plain one"


def test_ctrl_c_leaves_a_readable_log_and_heartbeat(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as stream:
        process = start(tmp_path / "beat.json", "sleep", stdout=stream, stderr=subprocess.DEVNULL)
        while "40/40" not in log.read_text():
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT
    assert log.read_text().endswith("\n")
    assert json.loads((tmp_path / "beat.json").read_text())["state"] == "closed"


def test_the_eta_leaves_warm_up_and_earlier_runs_out(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    progress = Progress("extract", 1000, quiet=True)
    progress.update(500)  # done by an earlier run
    clock[0] += 300  # a long load
    progress.update(510)
    assert progress.eta_seconds() is None  # one gain says nothing about speed
    clock[0] += 10
    progress.update(520)
    assert progress.eta_seconds() == pytest.approx(480.0)
    clock[0] += 30
    assert progress.eta_seconds() == pytest.approx(450.0)
    assert "nothing new for 30 s" in progress.line()
    progress.update(1000)
    assert progress.eta_seconds() == 0.0
    progress.close()


def test_an_unwritable_heartbeat_is_said_once_and_ends_nothing(tmp_path, capsys):
    beat_file = tmp_path / "there" / "beat.json"
    progress = Progress("extract", 10, heartbeat=beat_file)
    beat_file.unlink()
    beat_file.mkdir()  # os.replace onto a directory fails
    for _ in range(3):
        progress._beat("running")
    progress.close("end")
    out = capsys.readouterr().out
    assert out.count("cannot be written") == 1 and out.endswith("end\n")


def test_words():
    assert [duration(s) for s in (0.4, 59.9, 200, 18123, 183600)] == ["0 s", "59 s", "3 m 20 s", "5 h 02 m", "2 d 03 h"]
    assert figure("tokens_per_second", 151.24) == "151 tokens/s"
    assert figure("GB_per_second", 0.51234) == "0.5123 GB/s"
    assert figure("ring_stalls", 12345) == "ring stalls 12,345"
    assert figure("loss", 2.34567) == "loss 2.346"
    assert figure("disk_left", "1.2 TB") == "disk left 1.2 TB"
