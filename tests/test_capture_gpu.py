"""Capture on real GPUs, over one rank and over two, against transformers. Needs a GPU; some of the tests need two.

Batches of 300 and of more than 2,048 tokens: below 2,048, SGLang would fuse the all-reduce of the MLP into the next
layer's norm on these GPUs, and a hook would see one rank's partial sum. Random models of many layers turn the rounding
of bfloat16 into other states (with routing, into other experts), so both sides of a layer are captured, and the layer
itself is compared: what transformers makes of the state before it. One engine a test.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import _SymmetricMemory

import engine_helpers as helpers
import tiny_models
from benchmarks.extraction import GPU_ARGUMENTS
from common.capture import CaptureFailed
from common.capture_points import CapturePoints
from common.engine import EngineSettings, start_engine, stop_engine
from common.shards import ShardReader

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parent.parent
# The layers i that are compared: points i and i + 1 are captured, or i and the last state.
LAYERS = {"llama": (3, 31, 59, 60), "qwen3_moe": (3, 7, 10, 11), "deepseek_v3": (3, 31, 59, 60)}
SIZES = {"llama": {}, "qwen3_moe": tiny_models.QWEN3_ON_GPU, "deepseek_v3": tiny_models.DEEPSEEK_ON_GPU}
SMALL, LARGE = [100, 1, 60, 139], [1500, 700, 5, 1200, 300]  # tokens; 300 and 3,705 together


def points_of(kind: str) -> CapturePoints:
    layers = LAYERS[kind][-1] + 1
    return CapturePoints(tuple(sorted({p for i in LAYERS[kind] for p in (i, i + 1) if p < layers})), layers)


def start(folder, kind, tmp_path, tp=1, **more):
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    settings = EngineSettings(
        str(folder), points_of(kind), device="cuda", dtype="bfloat16", tp=tp, chunk_tokens=8192,
        extra={"max_total_tokens": 65536, **GPU_ARGUMENTS},  # leaves the GPU's memory to others
    )  # fmt: skip
    if more:  # what EngineSettings refuses
        arguments = settings.server_arguments() | more
        settings.server_arguments = lambda: arguments
    return start_engine(settings, tmp_path / "engine.log")


def captured(engine, kind, out):
    """Of a small and of a large batch, each computed in one forward pass: (samples, session, reader)."""
    for name, lengths in (("small", SMALL), ("large", LARGE)):
        samples = helpers.samples_of([9, *lengths], seed=1)  # the first goes alone
        yield samples, *helpers.capture(engine, out / name, samples, points_of(kind), dtype="bfloat16")


def compare(folder, kind, samples, reader):
    """Each layer is as near to float32 as transformers in bfloat16 is, given the same input."""
    points, last = points_of(kind), LAYERS[kind][-1]
    exact, rounded = (helpers.Reference(folder, points, dtype).model for dtype in (torch.float32, torch.bfloat16))
    seen = []
    for sample, record in zip(samples, reader.records, strict=True):
        at = dict(zip([*points.points, last + 1], reader.load(record).states, strict=True))
        into, out = {i: at[i] for i in LAYERS[kind]}, {i: at[i + 1] for i in LAYERS[kind]}
        expected = helpers.single_layers(exact, sample.input_ids, into)
        usual = helpers.layer_errors(helpers.single_layers(rounded, sample.input_ids, into), expected, into)
        seen.append((helpers.layer_errors(out, expected, into), usual))
    for i in LAYERS[kind]:
        found, usual = (statistics.median(pair[k][i] for pair in seen) for k in range(2))
        assert found <= 2 * usual + 0.002, (i, found, usual)


def capture_and_compare(kind, tp, tmp_path):
    folder = getattr(tiny_models, kind)(tmp_path / "model", **SIZES[kind])
    engine = start(folder, kind, tmp_path, tp=tp)
    try:
        for samples, session, reader in captured(engine, kind, tmp_path):
            assert session.self_checks()["own_token"]["checked"] == len(samples) == len(reader.records)
            assert {record.index % tp for record in reader.records} == set(range(tp))
            assert {proof["rank"] for proof in session.proofs} == set(range(tp))
            for proof in session.proofs:
                assert all(share == 1.0 for name, share in proof["bit_equal"].items() if name != "last state")
            compare(folder, kind, samples, reader)
    finally:
        stop_engine(engine)


@pytest.mark.parametrize("kind", LAYERS)
def test_one_gpu_equals_transformers(kind, tmp_path):
    capture_and_compare(kind, 1, tmp_path)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", LAYERS)
def test_two_gpus_equal_transformers_and_both_write(kind, tmp_path):
    """As one GPU does, since both equal the same reference."""
    capture_and_compare(kind, 2, tmp_path)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_fused_all_reduce_is_a_trap_and_is_seen(tmp_path):
    """With the fusion that capture always switches off switched on, the proof of the first batch stops the run.

    flashinfer allocates its buffers through torch's symmetric memory, which would make NVLink multicast objects; on a
    shared host they can put GPUs out of service, so the test wants them switched off for certain.
    """
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, 0):
        pytest.skip("torch would use NVLink multicast in spite of TORCH_SYMM_MEM_DISABLE_MULTICAST=1")
    folder = tiny_models.deepseek_v3(tmp_path / "model", **SIZES["deepseek_v3"])
    fused = {"enforce_disable_flashinfer_allreduce_fusion": False, "flashinfer_allreduce_fusion_backend": "trtllm"}
    engine = start(folder, "deepseek_v3", tmp_path, tp=2, **fused)
    try:
        with pytest.raises(CaptureFailed, match="partial sum|differs"):
            list(captured(engine, "deepseek_v3", tmp_path))
    finally:
        stop_engine(engine)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_replicas_under_torchrun_have_a_gpu_each_and_share_the_rows(small_target, tmp_path):
    """Two engines at once."""
    samples = helpers.samples_of([50] * 60)
    rows = [{"input_ids": one.input_ids.tolist(), "loss_mask": [1] * len(one.input_ids)} for one in samples]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "extract.py",
               "--model", small_target, "--data", tmp_path / "rows.jsonl", "--output", out,
               "--engine-args", json.dumps({"max_total_tokens": 65536, **GPU_ARGUMENTS})]  # fmt: skip
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    checks = json.loads((out / "dataset.json").read_text())["run"]["self_checks"]
    checked = [check["own_token"]["checked"] for check in checks]
    assert sum(checked) == len(ShardReader(out).records) == 60 and min(checked) >= 20
    logs = [(out / "logs" / f"engine-{replica}-0.log").read_text() for replica in (0, 1)]
    assert [f"base_gpu_id={gpu}" in log for gpu, log in enumerate(logs)] == [True, True]
