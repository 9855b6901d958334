"""Capture of other models and over two tensor-parallel ranks, each with its own real engine on the CPU.

A Qwen3 with tied embeddings and a Qwen3-MoE; over two ranks a Llama and a 61-layer DeepSeek-V3 (multi-head latent
attention, mixture of experts), which tests/test_kimi.py has over one rank as part of Kimi-K2.5. Four engines.
"""

import contextlib

import pytest
import torch

import engine_helpers as helpers
import tiny_models
from common.capture import CaptureFailed
from common.capture_points import CapturePoints
from common.engine import stop_engine
from common.state_dtypes import rounded_to_fp8

pytestmark = pytest.mark.engine
TOLERANCE = 1e-5
LENGTHS = [23, 40, 1, 5, 64, 17]
THIRD_61 = CapturePoints((3, 31, 59), 61)
TARGETS = {
    "llama": THIRD_61,
    "qwen3": CapturePoints.default(8),
    "qwen3_moe": CapturePoints.default(12),
    "deepseek_v3": THIRD_61,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = {}

    def make(kind: str):
        if kind not in made:
            made[kind] = getattr(tiny_models, kind)(tmp_path_factory.mktemp(kind) / "model")
        return made[kind]

    return make


@contextlib.contextmanager
def running(folder, kind: str, tmp_path, tp: int = 1):
    engine = helpers.start(folder, TARGETS[kind], tmp_path / "engine.log", tp=tp)
    try:
        yield engine
    finally:
        stop_engine(engine)


def compare_with_transformers(folder, points, samples, exact, rounded):
    """Float32 states within 1e-5 of the reference; at least 99 % of the bf16 elements its rounding, bit by bit."""
    reference = helpers.Reference(folder, points)
    same = total = 0
    for sample, record, rounded_record in zip(samples, exact.records, rounded.records, strict=True):
        expected = reference.states(sample.input_ids)
        for name, state, want in zip(points.names(), exact.load(record).states, expected, strict=True):
            assert helpers.relative_error(state, want) <= TOLERANCE, (sample.index, name)
        for state, want in zip(rounded.load(rounded_record).states, expected, strict=True):
            same += (state == want.to(torch.bfloat16)).sum().item()
            total += want.numel()
    assert same / total >= 0.99
    shifted = helpers.Reference.__new__(helpers.Reference)
    shifted.model = reference.model
    shifted.points = CapturePoints(tuple(point + 1 for point in points.points), points.num_layers)
    ids = samples[0].input_ids
    for state, other in zip(reference.states(ids)[:-1], shifted.states(ids)[:-1], strict=True):
        assert helpers.relative_error(other, state) > 1000 * TOLERANCE, "this model could not tell a shifted point"


def eight_bits_are_those_of(exact, eight):
    """Both ranks' fp8 samples are the float32 ones, rounded."""
    for record, other in zip(exact.records, eight.records, strict=True):
        *at_points, last = exact.load(record).states
        *rounded, last_rounded = eight.load(other).states
        assert helpers.relative_error(last_rounded, last) < 0.01
        for state, found in zip(at_points, rounded, strict=True):
            assert (found == rounded_to_fp8(state)).float().mean() > 0.99


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_states_equal_those_of_transformers(checkpoint, tmp_path, kind):
    folder, points, samples = checkpoint(kind), TARGETS[kind], helpers.samples_of(LENGTHS)
    with running(folder, kind, tmp_path) as engine:
        _, exact = helpers.capture(engine, tmp_path / "float32", samples, points)
        _, rounded = helpers.capture(engine, tmp_path / "bfloat16", samples, points, dtype="bfloat16")
    compare_with_transformers(folder, points, samples, exact, rounded)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_two_ranks_equal_transformers_and_each_writes_its_share(checkpoint, tmp_path, kind):
    """As one rank does, since both equal the same reference; and a partial sum is seen (Llama)."""
    folder, points, samples = checkpoint(kind), TARGETS[kind], helpers.samples_of(LENGTHS, seed=2)
    with running(folder, kind, tmp_path, tp=2) as engine:
        session, exact = helpers.capture(engine, tmp_path / "float32", samples, points)
        assert {proof["rank"] for proof in session.proofs} == {0, 1}
        assert {record.index % 2 for record in exact.records} == {0, 1} and len(exact.records) == len(samples)
        _, rounded = helpers.capture(engine, tmp_path / "bfloat16", samples, points, dtype="bfloat16")
        if kind == "llama":
            eight_bits_are_those_of(exact, helpers.capture(engine, tmp_path / "fp8", samples, points, dtype="fp8")[1])
            engine.collective_rpc("set_fault", name="partial")
            with pytest.raises(CaptureFailed, match="point 3 is one rank's partial sum: the all-reduce is missing"):
                helpers.capture(engine, tmp_path / "partial", samples, points)
            assert not list((tmp_path / "partial").rglob("data_*.pt"))
    compare_with_transformers(folder, points, samples, exact, rounded)
