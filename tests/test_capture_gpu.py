"""Capture on real GPUs: one rank against transformers, two ranks against one. Needs a GPU; the second test needs two.

Batches of 300 and of more than 2,048 tokens: below 2,048, SGLang would fuse the all-reduce of the MLP into the next
layer's norm on these GPUs, and a hook would see one rank's partial sum. Three engines a model.
"""

import os

import pytest
import torch

import engine_helpers as helpers
import tiny_models
from common.capture import CaptureFailed
from common.capture_points import CapturePoints
from common.engine import EngineSettings, start_engine, stop_engine

pytestmark = pytest.mark.gpu
KINDS = {
    "llama": CapturePoints((3, 31, 59), 61),
    "qwen3_moe": CapturePoints.default(12),
    "deepseek_v3": CapturePoints((3, 31, 59), 61),
}
GPU_ARGUMENTS = {"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none"}
SMALL, LARGE = [100, 1, 60, 139], [1500, 700, 5, 1200, 300]  # tokens; 300 and 3,705 together
ROUNDING = 2e-2  # of bf16 over 61 layers, summed in another order


def start(folder, kind, tmp_path, tp=1, **more):
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    settings = EngineSettings(
        str(folder), KINDS[kind], device="cuda", dtype="bfloat16", tp=tp, chunk_tokens=8192,
        extra={"mem_fraction_static": 0.3, **GPU_ARGUMENTS},
    )  # fmt: skip
    if more:  # what EngineSettings refuses
        arguments = settings.server_arguments() | more
        settings.server_arguments = lambda: arguments
    return start_engine(settings, tmp_path / f"engine-{tp}.log")


def captured(engine, kind, out, seed):
    """{batch: (session, reader)} of a small and of a large batch, each computed in one forward pass."""
    found = {}
    for name, lengths in (("small", SMALL), ("large", LARGE)):
        samples = helpers.samples_of([9, *lengths], seed=seed)  # the first goes alone
        found[name] = samples, *helpers.capture(engine, out / name, samples, KINDS[kind], dtype="bfloat16")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_one_gpu_equals_transformers(kind, tmp_path):
    folder = getattr(tiny_models, kind)(tmp_path / "model")
    engine = start(folder, kind, tmp_path)
    try:
        found = captured(engine, kind, tmp_path, seed=1)
    finally:
        stop_engine(engine)
    reference = helpers.Reference(folder, KINDS[kind])
    for samples, session, reader in found.values():
        assert session.self_checks()["own_token"]["checked"] == len(samples)
        assert min(share for name, share in session.proofs[0]["bit_equal"].items() if name != "last state") == 1.0
        for sample, record in zip(samples, reader.records, strict=True):
            expected = reference.states(sample.input_ids)
            for name, state, want in zip(KINDS[kind].names(), reader.load(record).states, expected, strict=True):
                assert helpers.relative_error(state, want) <= 2 * ROUNDING, (sample.index, name)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", KINDS)
def test_two_gpus_equal_one(kind, tmp_path):
    folder = getattr(tiny_models, kind)(tmp_path / "model")
    found = {}
    for tp in (1, 2):
        engine = start(folder, kind, tmp_path, tp=tp)
        try:
            found[tp] = captured(engine, kind, tmp_path / str(tp), seed=1)
        finally:
            stop_engine(engine)
    for batch in ("small", "large"):
        _, session, reader = found[2][batch]
        assert set(session.written_by) == {0, 1}, "one rank wrote nothing"
        assert {proof["rank"] for proof in session.proofs} == {0, 1}
        for one, two in zip(found[1][batch][2].records, reader.records, strict=True):
            states = zip(KINDS[kind].names(), found[1][batch][2].load(one).states, reader.load(two).states, strict=True)
            for name, want, state in states:
                assert helpers.relative_error(state, want) <= ROUNDING, (batch, one.index, name)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_fused_all_reduce_is_a_trap_and_is_seen(tmp_path):
    """With the fusion that capture always switches off switched on, the proof of the first batch stops the run."""
    folder = tiny_models.deepseek_v3(tmp_path / "model")
    fused = {"enforce_disable_flashinfer_allreduce_fusion": False, "enable_flashinfer_allreduce_fusion": True}
    engine = start(folder, "deepseek_v3", tmp_path, tp=2, **fused)
    try:
        with pytest.raises(CaptureFailed, match="partial sum|differs"):
            captured(engine, "deepseek_v3", tmp_path, seed=1)
    finally:
        stop_engine(engine)
