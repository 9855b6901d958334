"""Two tensor-parallel ranks of which one cannot keep its samples any more: the other stays right, and the run ends at
once with the cause. One real engine on the CPU."""

import resource
import time

import psutil
import pytest

import engine_helpers as helpers
import tiny_models
from common.capture import CaptureFailed
from common.capture_points import CapturePoints
from common.engine import stop_engine
from common.shard_check import verify
from common.shards import ShardReader

pytestmark = pytest.mark.engine
TOLERANCE = 1e-5
POINTS = CapturePoints((2, 4, 6), 8)
LONG = 41  # a sample of rank 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.llama(tmp_path_factory.mktemp("llama") / "model", layers=8)


@pytest.fixture(scope="module")
def engine(folder, tmp_path_factory):
    engine = helpers.start(folder, POINTS, tmp_path_factory.mktemp("logs") / "engine.log", tp=2, chunk_tokens=64)
    yield engine
    stop_engine(engine)


def writers_of_rank(engine, rank: int) -> list[psutil.Process]:
    """The writer processes of one rank: children of its scheduler, each called with the number of its rank."""
    family = psutil.Process().children(recursive=True)
    writers = [process for process in family if "common.tap_writer" in process.cmdline()]
    mine = [writer for writer in writers if f"common.tap_writer {rank} " in " ".join(writer.cmdline())]
    assert len(mine) == engine.links.writers
    return mine


def limit_files(writers, nbytes: int):
    """A disk that takes no more than so much of a file: what these processes write beyond it fails."""
    for writer in writers:
        writer.rlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def failure_of(engine, out, samples, **settings) -> tuple[str, float]:
    """(what the capture says, how many seconds it took)."""
    began = time.monotonic()
    with pytest.raises(CaptureFailed) as caught:
        helpers.capture(engine, out, samples, POINTS, **settings)
    return str(caught.value), time.monotonic() - began


def committed_is_right(folder, out, samples) -> int:
    reference, reader = helpers.Reference(folder, POINTS), ShardReader(out)
    assert verify(out).clean
    for record in reader.records:
        expected = reference.states(samples[record.index].input_ids)
        for name, state, want in zip(POINTS.names(), reader.load(record).states, expected, strict=True):
            assert helpers.relative_error(state, want) <= TOLERANCE, (record.index, name)
    return len(reader.records)


def test_a_disk_that_fails_on_one_rank(engine, folder, tmp_path):
    samples = helpers.samples_of([20 + index % 30 for index in range(LONG)] + [200] + [20 + i % 30 for i in range(150)])
    writers = writers_of_rank(engine, rank=1)
    limit_files(writers, 120_000)
    try:
        said, seconds = failure_of(engine, tmp_path / "failed", samples)
    finally:
        limit_files(writers, resource.RLIM_INFINITY)
    assert f"data_{LONG}.pt" in said and "File too large" in said, said
    assert seconds < 20, "the ranks were out of step"
    assert LONG // 2 < committed_is_right(folder, tmp_path / "failed", samples) < len(samples)
    helpers.capture(engine, tmp_path / "again", samples[:30], POINTS)
    assert committed_is_right(folder, tmp_path / "again", samples) == 30


def test_a_ring_too_small_on_one_rank(engine, folder, tmp_path):
    """Only rank 1 has the long sample: it fails in a hook, between the first layer and the last."""
    samples = helpers.samples_of([20 + index % 30 for index in range(LONG)] + [600] + [20 + i % 30 for i in range(150)])
    said, seconds = failure_of(engine, tmp_path / "failed", samples, ring_bytes=400_000)
    assert "is too small" in said and "raise it" in said, said
    assert seconds < 20, "the ranks were out of step"
    committed_is_right(folder, tmp_path / "failed", samples)
    helpers.capture(engine, tmp_path / "again", samples[:30], POINTS)
    assert committed_is_right(folder, tmp_path / "again", samples) == 30


def test_the_first_batch_is_proven_by_both_ranks_although_one_has_failed(engine, folder, tmp_path):
    said, seconds = failure_of(engine, tmp_path / "failed", helpers.samples_of([600], first=1), ring_bytes=400_000)
    assert "is too small" in said and seconds < 20, said
    session, _ = helpers.capture(engine, tmp_path / "again", helpers.samples_of([10] * 4), POINTS)
    assert {proof["rank"] for proof in session.proofs} == {0, 1}
