"""What extract.py says of several replicas together: counts, speeds and what is safe are those of all of them."""

import io
import time
from types import SimpleNamespace

import pytest

from common.extraction_view import AnswerFigures, Figures, resume_line, summary
from common.progress import Progress
from common.shard_run import RunDirectory
from common.shard_writing import write_sample
from common.shards import Record
from shard_writer import IDENTITY, make_sample


def commit(run: RunDirectory, row: int) -> Record:
    ids, mask, states = make_sample(row)
    written = write_sample(run.out, row, ids, mask, states, "v1", run.rows_per_block)
    record = Record(row, len(ids), sum(mask), written.bytes, written.xxh3, "hash")
    run.commit([record])
    return record


@pytest.fixture
def replicas(tmp_path):
    """The directories of two replicas of four rows each, one and three of them committed."""
    with RunDirectory(tmp_path / "s", IDENTITY, rows=8, rows_per_block=4) as first:
        with RunDirectory(tmp_path / "s", IDENTITY, rows=8, leader=False) as second:
            commit(first, 0)
            for row in (4, 5, 6):
                commit(second, row)
            yield first, second


@pytest.mark.parametrize("replica", [0, 1])
def test_the_stop_line_counts_what_all_replicas_have_committed(replicas, replica):
    assert resume_line(replicas[replica], 8, "stopped").startswith("stopped: 4 of 8 samples are safe")


def test_the_summary_tells_the_speed_of_all_replicas_without_the_time_to_load(replicas, tmp_path):
    shares = [
        {"tokens": 6000, "began": 1000.0, "ended": 1008.0},
        {"tokens": 3000, "began": 1002.0, "ended": 1010.0},
        {"tokens": 0, "began": None, "ended": None},  # one that had nothing left to do
    ]
    line = summary(replicas[0], tmp_path / "s", shares).splitlines()[0]
    assert "this run: 9,000 tokens of 2 replicas, 900 tokens/s from the first prompt to the last commit" in line
    assert "tokens/s" not in summary(replicas[0], tmp_path / "s", shares[2:])
    alone = summary(replicas[0], tmp_path / "s", shares[:1])
    assert "this run: 6,000 tokens, 750 tokens/s" in alone


def test_the_self_checks_of_all_replicas_are_one_line(replicas, tmp_path):
    own = {"checked": 1000, "ties": 2, "near_ties": 1, "mismatches": 0}
    proofs = [
        {"bit_equal": {"point 3": share, "last state": 0.5}, "relative_error": {"last state": 1e-6}}
        for share in (1.0, 0.98)
    ]
    checks = [{"first_batch": [proof], "own_token": own} for proof in proofs]
    replicas[0].note(self_checks=checks)
    (line,) = [line for line in summary(replicas[0], tmp_path / "s", []).splitlines() if line.startswith("proven")]
    assert "first batch (each of 2) 98% bit-equal" in line
    assert "own token right for 2,000 samples (4 by a logit equal to the best, 2 within" in line


def test_a_run_in_which_nothing_was_finite_ends_with_its_summary(replicas, tmp_path):
    own = {"checked": 0, "ties": 0, "near_ties": 0, "mismatches": 0}
    replicas[0].note(self_checks=[{"first_batch": [], "own_token": own}])
    assert "not proven: " in summary(replicas[0], tmp_path / "s", [])


def test_the_clock_starts_with_the_first_prompt(tmp_path):
    with Progress("extract", total=4, stream=io.StringIO()) as progress:
        figures = Figures(progress, tmp_path, done_before=0, replicas=1)
        time.sleep(0.5)  # the engine loads
        figures.look()
        figures.look()
        assert "tokens_per_second" not in progress.figures
        figures.begin(SimpleNamespace(stalled_seconds=lambda: 0.0))
        figures.committed(SimpleNamespace(tokens=100, bytes=10))
        share = figures.share()
        assert len(figures.recent) == 1
    assert share["tokens"] == 100 and 0 <= share["ended"] - share["began"] < 0.4


def test_the_bar_adds_the_speeds_of_replicas_that_work(tmp_path):
    with Progress("extract", total=40, stream=io.StringIO()) as progress:
        figures = Figures(progress, tmp_path, done_before=10, replicas=1)
        for rank, stage in enumerate(["", "waiting for the other replicas"], start=1):
            other = Progress("extract", total=40, heartbeat=tmp_path / f"heartbeat-{rank}.json", quiet=True)
            other.update(15, tokens_per_second=500.0, written="0.250 GB/s", ring_stalled="2 s")
            other.stage(stage)
            other._beat("running")
            other.heartbeat = None  # and so it stays
        figures.look()
        figures.look()
        assert progress.done == 20
        assert progress.figures["tokens_per_second"] == pytest.approx(500.0)
        assert progress.figures["written"] == "0.250 GB/s" and progress.figures["ring_stalled"] == "4 s"
        other.close()


def test_conversations_that_other_replicas_answer_are_counted(tmp_path):
    with Progress("extract", total=40, unit="conversations", stream=io.StringIO()) as progress:
        figures = AnswerFigures(progress, tmp_path, done_before=10)
        with Progress("x", 40, "conversations", tmp_path / "heartbeat-1.json", quiet=True) as other:
            other.update(15, new_tokens_per_second=5000.0)
            other._beat("running")
            figures.answered(7)
    assert progress.done == 16 and progress.figures["new_tokens_per_second"] > 5000
