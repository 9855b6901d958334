"""Capture with the real engine, one engine for the whole file: right against transformers, in any batch, and each way
of being wrong is seen and named. The target is a 61-layer Llama with random weights, points 3/31/59."""

import json
import resource
import signal

import numpy as np
import psutil
import pytest
import torch

import engine_helpers as helpers
import faults
import serving
import tiny_models
from common.capture import CaptureFailed
from common.capture_points import CapturePoints
from common.engine import EngineDied, stop_engine
from common.errors import UserError
from common.shard_check import verify
from common.shards import read_log

pytestmark = pytest.mark.engine

LENGTHS = [37, 64, 5, 1, 120, 16, 2, 33, 17, 90, 15, 48, 3, 70, 31, 10]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def points():
    return CapturePoints((3, 31, 59), 61)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def engine(folder, points, tmp_path_factory):
    engine = helpers.start(folder, points, tmp_path_factory.mktemp("logs") / "engine.log")
    yield engine
    stop_engine(engine)


@pytest.fixture(scope="module")
def reference(folder, points):
    return helpers.Reference(folder, points)


@pytest.fixture
def fault(engine):
    """Switch a fault of tests/faults.py on; it is off again after the test."""
    yield lambda name: engine.collective_rpc("set_fault", name=name)
    engine.collective_rpc("set_fault", name="none")


def test_states_equal_those_of_transformers(engine, points, reference, tmp_path):
    samples = helpers.samples_of(LENGTHS)
    _, exact = helpers.capture(engine, tmp_path / "float32", samples, points)
    _, rounded = helpers.capture(engine, tmp_path / "bfloat16", samples, points, dtype="bfloat16")
    _, eight = helpers.capture(engine, tmp_path / "fp8", samples, points, dtype="fp8")
    for record, rounded_record, sample in zip(eight.records, rounded.records, samples, strict=True):
        *at_points, last = eight.load(record).states
        assert (last == rounded.load(rounded_record).states[-1]).float().mean() > 0.9  # another run, other batches
        for state, want in zip(at_points, reference.states(sample.input_ids), strict=False):
            rounding = torch.maximum(want.abs() / 16, want.abs().amax(-1, keepdim=True) / 448 * 2**-10)
            assert ((state - want).abs() <= rounding * 1.01 + TOLERANCE * want.norm(dim=-1, keepdim=True)).all()
    same = total = 0
    for sample, record, rounded_record in zip(samples, exact.records, rounded.records, strict=True):
        expected = reference.states(sample.input_ids)
        stored = exact.load(record)
        assert stored.input_ids.tolist() == sample.input_ids.tolist()
        for name, state, want in zip(points.names(), stored.states, expected, strict=True):
            assert helpers.relative_error(state, want) <= TOLERANCE, (sample.index, name)
        for state, want in zip(rounded.load(rounded_record).states, expected, strict=True):
            assert state.dtype == torch.bfloat16
            same += (state == want.to(torch.bfloat16)).sum().item()
            total += want.numel()
    assert same / total >= 0.99


def test_a_shifted_point_would_not_pass_for_rounding(points, reference):
    """The comparison above can fail: the states one layer further are far outside its tolerance."""
    ids = helpers.samples_of([64])[0].input_ids
    right = reference.states(ids)
    shifted = helpers.Reference.__new__(helpers.Reference)
    shifted.model, shifted.points = reference.model, CapturePoints((4, 32, 60), 61)
    for state, other in zip(right[:3], shifted.states(ids)[:3], strict=True):
        assert helpers.relative_error(other, state) > 1000 * TOLERANCE


def test_a_sample_is_the_same_alone_in_a_batch_and_in_chunks(engine, points, tmp_path):
    samples = helpers.samples_of(LENGTHS, seed=1)
    _, together = helpers.capture(engine, tmp_path / "together", samples, points)
    _, alone = helpers.capture(engine, tmp_path / "alone", samples, points, tokens_in_flight=1)
    engine.collective_rpc("set_chunk", tokens=16)
    try:
        _, chunked = helpers.capture(engine, tmp_path / "chunked", samples, points)
    finally:
        engine.collective_rpc("set_chunk", tokens=2048)
    for sample, first, second, third in zip(
        samples, together.records, alone.records, chunked.records, strict=True
    ):
        one = together.load(first)
        assert one.input_ids.tolist() == sample.input_ids.tolist()
        for other in (alone.load(second), chunked.load(third)):
            assert other.input_ids.tolist() == sample.input_ids.tolist()
            for name, state, want in zip(points.names(), other.states, one.states, strict=True):
                assert helpers.relative_error(state, want) <= TOLERANCE, (sample.index, name)


def test_layers_that_work_in_place_change_nothing(engine, points, fault, tmp_path):
    samples = helpers.samples_of([20, 1, 33], seed=4)
    _, right = helpers.capture(engine, tmp_path / "right", samples, points)
    fault("in_place")
    session, reader = helpers.capture(engine, tmp_path / "in_place", samples, points)
    assert set(session.proofs[0]["bit_equal"].values()) == {1.0}
    for one, other in zip(right.records, reader.records, strict=True):
        for want, state in zip(right.load(one).states, reader.load(other).states, strict=True):
            assert helpers.relative_error(state, want) <= TOLERANCE


def test_both_self_checks_are_recorded(engine, points, tmp_path):
    session, _ = helpers.capture(engine, tmp_path, helpers.samples_of([9, 8, 7]), points)
    checks = session.self_checks()
    assert checks["own_token"] == {"checked": 3, "ties": 0, "near_ties": 0, "mismatches": 0}
    (proof,) = checks["first_batch"]
    assert set(proof["bit_equal"].values()) == {1.0}
    assert min(proof["neighbour_error"].values()) > 0.01


def test_ties_are_counted_and_can_be_recorded(engine, points, tmp_path):
    """Equal logits, logits closer than their rounding, and a token that rounding does not explain."""
    session, _ = helpers.capture(engine, tmp_path, helpers.samples_of([9]), points)

    def both_sides(index, answer, below):
        """The stored last state gives token 5, then 6 with a logit lower by `below`; the engine says `answer`."""
        session.answers[index] = answer
        own = np.array([5, 6, 0.0, below, 0.25]).tobytes()
        session.records[index] = ("written", {"index": index, "own": own})
        session.check(index)
        return session.records[index][1]["own"]["agrees"]

    assert [both_sides(1, 5, 0.0), both_sides(2, 6, 0.0), both_sides(3, 6, 0.125)] == ["yes", "tie", "near-tie"]
    checks = json.loads(json.dumps(session.self_checks()))  # as dataset.json keeps them
    assert checks["own_token"]["ties"] == 1 and checks["own_token"]["near_ties"] == 1
    both_sides(4, 6, 0.5)
    assert "the engine answered 6" in str(session.error)


@pytest.mark.parametrize(
    ("name", "dtype", "cause"),
    [
        ("shifted", "float32", "point 3 is really point 4: shifted by +1 layer"),
        ("shifted_last", "float32", "last state is really point 60: shifted by -1 layer"),
        ("normed", "float32", "already normed"),
        ("normed_after_proof", "float32", "the stored last state gives token"),
        ("swapped", "float32", "rows of two samples were swapped"),
        ("swapped_states", "float32", "states of two samples were swapped"),
        ("hook", "float32", "size of tensor"),
        ("shifted", "fp8", "point 3 is really point 4: shifted by +1 layer"),
        ("normed_after_proof", "fp8", "the stored last state gives token"),
        ("swapped_states", "fp8", "states of two samples were swapped"),
    ],
)
def test_a_wrong_capture_stops_and_names_the_cause(engine, points, fault, tmp_path, name, cause, dtype):
    fault(name)
    samples = helpers.samples_of([12] * 12)
    with pytest.raises((CaptureFailed, RuntimeError), match=cause.replace("+", r"\+")):
        helpers.capture(engine, tmp_path, samples, points, dtype=dtype)
    fault("none")
    session, reader = helpers.capture(engine, tmp_path, samples_left(tmp_path, samples), points, dtype=dtype)
    assert session.committed and len(reader.records) == 12 and verify(tmp_path).clean


def samples_left(out, samples):
    done = {e["index"] for log in out.glob("rows_*/manifest.jsonl") for e in read_log(log).entries}
    return [sample for sample in samples if sample.index not in done]


@pytest.mark.parametrize("dtype", ["float32", "fp8"])
@pytest.mark.parametrize(("name", "kind"), [("nan", "NaN"), ("inf", "Inf")])
def test_a_state_that_is_not_finite_is_set_aside_and_the_run_goes_on(
    engine, points, fault, tmp_path, name, kind, dtype
):
    samples = helpers.samples_of([20, 21, 22, 23, 24])
    samples[2].input_ids[13] = faults.NAN_TOKEN
    fault(name)
    session, reader = helpers.capture(engine, tmp_path, samples, points, dtype=dtype)
    assert [record.index for record in reader.records] == [0, 1, 3, 4]
    entries = read_log(tmp_path / "rows_0-2000" / "manifest.jsonl").latest()
    assert entries[2]["status"] == "set_aside"
    assert entries[2]["reason"] == f"{kind} at point 31, row 13"
    assert session.set_aside == 1
    assert not list(tmp_path.rglob("data_2.pt"))


def test_a_full_ring_holds_the_engine_back_and_memory_does_not_grow(engine, points, tmp_path):
    """The disk hangs for eight seconds: the ring stays within its bound and is reported as stalled; and ten times the
    samples take the same memory."""
    ring = 560 << 10  # bytes: two forward passes of 256 tokens, each of four samples, 268 kB
    scheduler = psutil.Process(engine.get_all_child_pids()[0])
    engine.collective_rpc("set_chunk", tokens=256)
    try:
        with helpers.writers_stopped(engine, tmp_path / "few", seconds=8.0):
            few, _ = helpers.capture(engine, tmp_path / "few", helpers.samples_of([64] * 96), points, ring_bytes=ring)
        assert few.rank_figures[0]["stalls"] > 0 and few.stalled_seconds() > 0.5
        assert few.rank_figures[0]["ring_peak_bytes"] <= ring
        peaks = []
        for count in (15, 150):
            helpers.capture(engine, tmp_path / str(count), helpers.samples_of([64] * count), points, ring_bytes=ring)
            peaks.append(scheduler.memory_info().rss)
    finally:
        engine.collective_rpc("set_chunk", tokens=2048)
    captured = 150 * 64 * 4 * 64 * 4  # bytes of states
    assert peaks[1] - peaks[0] < captured / 4, "the scheduler grew by a quarter of what it has captured"


def test_an_engine_that_falls_silent_ends_the_run_with_its_stacks(engine, points, tmp_path, monkeypatch):
    """Writers that stand still are whatever may hang; the log then says where, and what hung may go on."""
    from common import capture

    with helpers.writers_stopped(engine, tmp_path), monkeypatch.context() as patch:
        patch.setattr(capture, "SILENCE_SECONDS", 3.0)
        with pytest.raises(EngineDied, match="silent for 3 s; its stacks are in its log"):
            helpers.capture(engine, tmp_path, helpers.samples_of([8] * 40), points)
    log = next(tmp_path.parent.glob("logs*/engine.log")).read_text()
    assert "run_scheduler" in log and "most recent call first" in log
    assert engine.links.connected()
    helpers.capture(engine, tmp_path / "again", helpers.samples_of([8] * 4), points)


def test_signals_to_the_whole_group_are_for_the_main_process_alone(engine, points, tmp_path):
    """Ctrl-C, and SIGTERM as a job scheduler sends it: samples in flight are to be finished."""
    for process in psutil.Process().children(recursive=True):
        if "resource_tracker" not in " ".join(process.cmdline()):
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
    helpers.capture(engine, tmp_path, helpers.samples_of([8] * 4), points)


def test_writers_that_cannot_map_the_ring_say_so_and_no_session_leaves_its_memory_behind(engine, points, tmp_path):
    scheduler = psutil.Process(engine.get_all_child_pids()[0])
    writers = [child for child in scheduler.children() if "common.tap_writer" in child.cmdline()]
    for writer in writers:
        writer.rlimit(resource.RLIMIT_AS, (writer.memory_info().vms + (16 << 20), resource.RLIM_INFINITY))
    with pytest.raises(CaptureFailed, match="cannot map a ring of .* lower --ring-gb"):
        helpers.capture(engine, tmp_path / "failed", helpers.samples_of([8] * 4), points, ring_bytes=256 << 20)
    for writer in writers:
        writer.rlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    helpers.capture(engine, tmp_path / "good", helpers.samples_of([8] * 4), points)
    for process in (scheduler, *writers):
        assert not [memory.path for memory in process.memory_maps() if "memfd:ring" in memory.path]


def test_an_exported_drafter_makes_the_engine_capture_its_points(engine, points, folder, tmp_path):
    """SGLang adds one to the ids of this family; with those of the DeepSeek family the evaluation refuses to report."""
    drafter = serving.random_drafter(folder, tmp_path / "drafter", points.points)
    written = json.loads((drafter / "config.json").read_text())["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert written == [2, 30, 58]
    layers = serving.layers_read_back(engine, drafter, list(points.points), tmp_path / "layers.json")
    assert layers == [3, 31, 59]
    wrong = serving.random_drafter(folder, tmp_path / "wrong", points.points, serving_ids=[3, 31, 59])
    with pytest.raises(UserError, match=r"at \[3, 31, 59\], but the engine feeds it those at \[4, 32, 60\]"):
        serving.layers_read_back(engine, wrong, list(points.points), tmp_path / "wrong.json")


def test_arrow_layout_holds_the_same_states(engine, points, tmp_path):
    """In full and in eight bits; and eight bits need less of the ring, of the copies and of the disk."""
    samples = helpers.samples_of([30, 12, 50], seed=3)
    _, v1 = helpers.capture(engine, tmp_path / "v1", samples, points)
    _, arrow = helpers.capture(engine, tmp_path / "arrow", samples, points, layout="arrow")
    for first, second in zip(v1.records, arrow.records, strict=True):
        for one, other in zip(v1.load(first).states, arrow.load(second).states, strict=True):
            assert helpers.relative_error(other, one) <= TOLERANCE
    assert json.loads((tmp_path / "arrow" / "dataset.json").read_text())["layout"] == "arrow"

    one = helpers.samples_of([400], seed=4)
    peaks, read = {}, {}
    for name, dtype, layout in [("bf16", "bfloat16", "v1"), ("fp8", "fp8", "v1"), ("fp8 arrow", "fp8", "arrow")]:
        session, reader = helpers.capture(engine, tmp_path / name, one, points, dtype=dtype, layout=layout)
        peaks[name] = session.rank_figures[0]["ring_peak_bytes"]
        read[name] = reader.load(reader.records[0], verify=True).states
    assert all(map(torch.equal, read["fp8"], read["fp8 arrow"]))
    per_token = {"bf16": 4 * 64 * 2, "fp8": 3 * 64 + 64 * 2, "fp8 arrow": 3 * 64 + 64 * 2}
    for name, peak in peaks.items():
        assert 400 * per_token[name] < peak <= 400 * (per_token[name] + 8 + 4 * 4) + 8192, peaks
