"""States in eight bits and last states of supervised rows only: what is stored, what is read, and who can read it."""

import json
import subprocess
import sys

import pytest
import torch

from common.errors import UserError
from common.load_batch import not_finite
from common.offline_eval import Setting, evaluate, evaluation_target
from common.packing import pack_documents
from common.shard_check import FILE_OVERHEAD_BYTES, bytes_per_token, plan_bytes, status, status_text, verify
from common.shard_run import RunDirectory
from common.shard_writing import write_sample
from common.shards import Record, ShardReader, last_state_rows, token_hash
from common.state_dtypes import (
    FP8,
    code_values,
    dequantise,
    rounded_to_fp8,
    scale_of,
    stored_dtypes,
    to_stored,
    widen,
)
from tests import training_fixtures as small
from tests.speculators_directory import ENVIRONMENT, installed


def write(folder, samples, dtype="bfloat16", layout="v1", last_state="all", **identity):
    """Store samples [(ids, mask, states)] as the tap and its writers do."""
    fields = {"model": "made/up", "capture_points": [2, 4, 6], "last_state": "pre-norm", "dtype": dtype} | identity
    fields |= {} if last_state == "all" else {"last_state_rows": last_state}
    with RunDirectory(folder, fields, rows=len(samples) + 1, layout=layout) as run:  # the last row has no sample
        for index, (ids, mask, states) in enumerate(samples):
            dtypes = stored_dtypes(dtype, len(states) - 1)
            stored = [to_stored(state, dtype) for state, dtype in zip(states, dtypes, strict=True)]
            scales = scale_of(torch.stack([largest for _, largest in stored[:-1]], 1)) if dtype == "fp8" else None
            written = write_sample(
                folder, index, ids, mask, [state for state, _ in stored], layout, run.rows_per_block, scales, last_state
            )
            run.commit([Record(index, len(ids), int(mask.sum()), *written, token_hash(ids.tolist()))])
        run.finish()
    return folder


@pytest.fixture(scope="module")
def samples():
    """Eight samples of the trainer's tests, with a second supervised span and a supervised first token in some."""
    made = [small.make_sample(20 + 9 * seed, seed) for seed in range(8)]
    for seed, (_, mask, _) in enumerate(made):
        mask[10:14] = 0
        mask[:2] = seed % 2
    return made


# ---- eight bits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_are_within_the_rounding_of_the_format(dtype):
    """Normal, tiny and zero rows, and rows with one element 1,000 times and 10^7 times the rest."""
    state = torch.randn(400, 512, generator=torch.Generator().manual_seed(0))
    state[100:200] *= 10 ** torch.linspace(-30, 30, 100)[:, None]
    state[200, :] = 0
    state[201:300, 7] = 1000 * state[201:300].abs().amax(-1)
    state[300:, 7] = 1e7
    state = state.to(dtype)
    codes, largest = to_stored(state, FP8)
    assert torch.equal(largest, state.float().abs().amax(-1))
    scales = scale_of(largest)[:, None].double()
    table = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    error = (table[codes.view(torch.uint8).long()] * scales - state.double()).abs()
    allowed = torch.maximum(state.double().abs() / 16, scales * 2**-10) * (1 + 1e-6)
    assert (error <= allowed).all()
    normal = state.double().abs() >= largest[:, None].double() / 28_672  # 448 / 2^-6, the smallest normal code
    assert (error[normal] <= state.double().abs()[normal] / 16 * (1 + 1e-6)).all()

    def away(rows):  # median distance of the rows without their outlier
        others = torch.arange(512) != 7
        return (error[rows][:, others].norm(dim=1) / state[rows].double()[:, others].norm(dim=1)).median()

    assert 0.02 < away(slice(0, 100)) < 0.03 and away(slice(201, 300)) < 0.03, "an outlier of 1,000 costs nothing"
    assert away(slice(300, 400)) > 0.9, "one of 10^7 must cost: the figure above can fail"
    read = dequantise(codes, scale_of(largest)[:, None])
    assert read.dtype == torch.bfloat16 and torch.equal(read, rounded_to_fp8(state))
    rounding = (read.double() - state.double()).abs()
    assert (rounding <= allowed + 2**-8 * state.double().abs()).all()
    assert torch.equal(read[200], torch.zeros(512, dtype=torch.bfloat16))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_seen_although_eight_bits_cannot_say_it(value):
    state = torch.randn(3, 64)
    state[1, 5] = value
    codes, largest = to_stored(state, FP8)
    assert largest.isfinite().tolist() == [True, False, True] and largest[1].isnan() == (value != value)
    assert largest[1].isinf() == (abs(value) == float("inf"))
    _, overflowed = to_stored(torch.full((1, 4), 1e6), torch.float16)
    assert overflowed.isinf().all()


@pytest.mark.gpu
def test_a_gpu_makes_the_same_codes():
    state = torch.randn(5000, 7168, generator=torch.Generator().manual_seed(0)) * 10
    state[:, 3] *= 300
    state[7] = 0
    for dtype in (torch.bfloat16, torch.float32):
        here, there = to_stored(state.to(dtype), FP8), to_stored(state.to(dtype).cuda(), FP8)
        assert torch.equal(here[0].view(torch.uint8), there[0].cpu().view(torch.uint8))
        assert torch.equal(here[1], there[1].cpu())
        assert torch.equal(scale_of(there[1]).cpu(), scale_of(here[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [["--cuda-graphs", "True"], ["--compile", "False"]])
def test_a_gpu_learns_from_codes_as_the_cpu_does(samples, tmp_path, options):
    target = small.write_target(tmp_path / "target")
    shards, losses = write(tmp_path / "states", samples, "fp8", model=str(target)), []
    for device in ("cpu", "cuda"):
        small.train_here(
            None, "--data", shards, "--output", tmp_path / device, "--max-steps", 4, "--tokens-per-step", 192,
            "--eval-fraction", 0, after=["--device", device, *(options if device == "cuda" else [])],
        )  # fmt: skip
        lines = map(json.loads, (tmp_path / device / "metrics.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("layout", ["v1", "arrow"])
def test_what_is_read_of_eight_bits(samples, tmp_path, layout):
    out = write(tmp_path / "states", samples, "fp8", layout)
    reader = ShardReader(out)
    for record, (ids, mask, states) in zip(reader.records, samples, strict=True):
        sample = reader.load(record, verify=True)
        assert all(map(torch.equal, reader.tokens(record), (ids, mask)))
        assert torch.equal(sample.input_ids, ids) and torch.equal(sample.loss_mask, mask) and sample.last_rows is None
        assert all(map(torch.equal, sample.states, [*map(rounded_to_fp8, states[:-1]), states[-1]]))
        assert reader.stored_dtypes(record) == ["fp8", "fp8", "fp8", "bfloat16"]
        payload = len(ids) * (bytes_per_token(3, 64, "fp8", layout) + 16)
        assert payload < record.bytes < payload + FILE_OVERHEAD_BYTES
    assert verify(out).clean and "fp8 states, layout" in status_text(status(out))
    assert sum(r.bytes for r in reader.records) < plan_bytes([r.tokens for r in reader.records], 3, 64, "fp8", layout)
    if layout == "v1":
        saved = torch.load(reader.records[0].path, weights_only=True)
        assert saved["scales"].dtype == torch.float32 and saved["scales"].shape == (20, 3)
        assert [state.dtype for state in saved["hidden_states"]] == [FP8, FP8, FP8, torch.bfloat16]
    with pytest.raises(UserError, match=r"dtype of the states .--state-dtype. was 'fp8', is now 'bfloat16'"):
        write(out, samples, "bfloat16", layout)


@pytest.mark.parametrize("layout", ["v1", "arrow"])
def test_training_widens_codes_to_the_same_bits(samples, tmp_path, layout):
    """Left in eight bits until the layer reads them, in a batch with padding, a cut document, and compiled."""
    reader = ShardReader(write(tmp_path / "states", samples, "fp8", layout))
    read = [reader.load(record) for record in reader.records]
    kept = [reader.load(record, widen=False) for record in reader.records]
    assert [state.dtype for state in kept[0].states] == [FP8] * 3 + [torch.bfloat16]
    room = dict(tokens=700, queries=600)
    wide, codes = pack_documents(read, 3, **room), pack_documents(kept, 3, **room)
    codes = pack_documents(kept, 3, **room, into=codes)
    assert codes.aux_states.dtype == torch.uint8 and codes.aux_scales.shape == (700, 3) and wide.aux_scales is None
    values = torch.tensor(code_values())
    for run in (widen, torch.compile(widen, fullgraph=True)):
        assert torch.equal(run(codes.aux_states, codes.aux_scales, values), wide.aux_states)
    for name, tensor in wide.tensors().items():
        assert name == "aux_states" or torch.equal(codes.tensors()[name], tensor), name
    with pytest.raises(UserError, match="document 1: its points are codes of eight bits or document 0's are"):
        pack_documents([kept[0], read[1]], 3)


def test_a_drafter_learns_the_same_from_codes_as_from_what_they_stand_for(samples, tmp_path):
    """Losses and held-out figures of train_drafter.py, to the bit."""
    target, runs = small.write_target(tmp_path / "target"), {}
    rounded = [(ids, mask, [*map(rounded_to_fp8, states[:-1]), states[-1]]) for ids, mask, states in samples]
    for dtype, some in (("fp8", samples), ("bfloat16", rounded)):
        shards = write(tmp_path / dtype, some, dtype, model=str(target))
        small.train_here(
            None, "--data", shards, "--output", tmp_path / f"drafter-{dtype}", "--max-steps", 3,
            "--tokens-per-step", 192, "--eval-fraction", 0.4,
        )  # fmt: skip
        lines = map(json.loads, (tmp_path / f"drafter-{dtype}" / "metrics.jsonl").read_text().splitlines())
        runs[dtype] = [(line.get("loss"), line.get("tau"), line.get("step0_accuracy")) for line in lines]
    assert runs["fp8"] == runs["bfloat16"] and len(runs["fp8"]) == 4


def test_codes_and_scales_that_are_not_finite_are_named():
    states = [torch.randn(4, 8).to(FP8), torch.randn(4, 8).to(FP8), torch.randn(4, 8)]
    states[1][0, 0] = 448.0  # the largest code
    scales = torch.ones(4, 2)
    assert not_finite(states, scales) is None
    scales[3, 1] = float("inf")
    assert not_finite(states, scales) == "Inf in state 2 of 3, row 3"
    states[1].view(torch.uint8)[2, 5] = 0xFF
    assert not_finite(states, scales) == "NaN in state 2 of 3, row 2"
    states[2][1, 1] = float("nan")
    states[1], scales = states[0], torch.ones(4, 2)
    assert not_finite(states, scales) == "NaN in state 3 of 3, row 1"


READ_FP8 = """
import sys, torch
from pathlib import Path
from hs_connectors.transfer import FP8Transfer
from speculators.train.data import ArrowDataset
data = ArrowDataset(128, sys.argv[1], FP8Transfer(Path(sys.argv[1]) / "hidden_states"), on_missing="raise")
torch.save([data[i] for i in range(len(data))], sys.argv[2])
"""


def test_fp8_is_read_by_speculators_itself(samples, tmp_path):
    """Their dataset over the fp8 reader of hs_connectors: fillers where a row has no sample."""
    out = write(tmp_path / "states", samples, "fp8", "arrow")
    place = installed("0.9.0", "hs-connectors==0.9.0")
    command = [sys.executable, "-c", READ_FP8, str(out), str(tmp_path / "read.pt")]
    environment = ENVIRONMENT | {"PYTHONPATH": str(place)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    read = torch.load(tmp_path / "read.pt", weights_only=True)
    assert len(read) == len(samples) + 1 and read[-1]["input_ids"].tolist() == [0]
    for item, (ids, mask, states) in zip(read, samples, strict=False):
        assert torch.equal(item["input_ids"], ids) and torch.equal(item["loss_mask"], mask)
        theirs = [*item["hidden_states"].split(64, dim=1), item["verifier_last_hidden_states"]]
        for found, state in zip(theirs, states, strict=True):
            ours = rounded_to_fp8(state)  # they round the scales to bfloat16, too
            assert found.dtype == torch.bfloat16 and ((found - ours).abs() <= 2**-6 * ours.abs()).all()


# ---- the last state of supervised rows -------------------------------------------------------------------------------


def test_rows_that_were_not_kept_are_known(samples, tmp_path):
    out = write(tmp_path / "states", samples, "fp8", last_state="supervised")
    reader = ShardReader(out)
    kept = []
    for record, (ids, mask, states) in zip(reader.records, samples, strict=True):
        sample = reader.load(record, verify=True)
        rows = last_state_rows(mask)
        assert torch.equal(sample.last_rows, rows) and (mask[rows + 1] == 1).all() and len(rows) == mask[1:].sum()
        assert sample.states[-1].shape == states[-1].shape and torch.equal(sample.states[-1][rows], states[-1][rows])
        dropped = torch.ones(len(ids), dtype=torch.bool)
        dropped[rows] = False
        assert not sample.states[-1][dropped].any()
        kept.append(len(rows))
    lengths = [record.tokens for record in reader.records]
    planned = plan_bytes(lengths, 3, 64, "fp8", "v1", kept)
    assert planned - len(lengths) * FILE_OVERHEAD_BYTES < sum(r.bytes for r in reader.records) < planned
    assert verify(out).clean and "the last at supervised rows" in status_text(status(out))
    with pytest.raises(UserError, match="last_state_rows was 'supervised', is now None"):
        write(out, samples, "fp8")
    with pytest.raises(ValueError, match="layout arrow has the last state of every row"):
        write(tmp_path / "arrow", samples, layout="arrow", last_state="supervised")


def test_training_and_evaluation_are_the_same_to_the_bit(tmp_path, samples):
    """Losses and held-out figures of train_drafter.py, and offline evaluation, on all last states and on those kept."""
    from common.load_drafter import load_drafter
    from common.target import load_target_parts

    target = small.write_target(tmp_path / "target")
    figures, counts = {}, {}
    for kind in ("all", "supervised"):
        shards = write(tmp_path / kind, samples, last_state=kind, model=str(target))
        small.train_here(
            None, "--data", shards, "--output", tmp_path / f"drafter-{kind}", "--max-steps", 3,
            "--tokens-per-step", 192, "--eval-fraction", 0.4, "--eval-every", 2,
        )  # fmt: skip
        lines = (tmp_path / f"drafter-{kind}" / "metrics.jsonl").read_text().splitlines()
        timed = ("seconds", "per_second", "time", "_ms", "mfu", "memory")
        figures[kind] = [
            {key: value for key, value in json.loads(line).items() if not any(word in key for word in timed)}
            for line in lines
        ]
        reader = ShardReader(shards)
        drafter, _ = load_drafter(tmp_path / "drafter-all")
        wide = evaluation_target(load_target_parts(target), "cpu")
        drafter.set_embedding(wide.embed_tokens)
        setting = Setting(num_steps=3, topk=2, tree_tokens=6, temperature=0.7)
        counts[kind] = evaluate(drafter, wide, reader.load, reader.records, setting).summary(50)
    assert figures["all"] == figures["supervised"] and any("tau" in line for line in figures["all"])
    assert any("loss" in line for line in figures["all"]), figures["all"]
    assert counts["all"] == counts["supervised"]

    # one row fewer would not go unseen: the teacher of a supervised token would be a row of zeros
    reader = ShardReader(tmp_path / "supervised")
    sample = reader.load(reader.records[0])
    ids, mask, states = samples[0]
    whole = pack_documents([sample._replace(states=states)], 3)
    assert torch.equal(pack_documents([sample], 3).last_states, whole.last_states)
    assert whole.last_states.abs().amax(-1).min() > 0
    more = mask.clone()
    more[10] = 1  # its teacher, row 9, was not kept
    with pytest.raises(UserError, match=r"data_0\.pt: .* row 9 .* was not kept"):
        pack_documents([sample._replace(loss_mask=more)], 3)
    fewer = sample.states[-1].clone()
    fewer[sample.last_rows[-1]] = 0
    short = pack_documents([sample._replace(states=[*states[:-1], fewer])], 3)
    assert not torch.equal(short.last_states, whole.last_states)
