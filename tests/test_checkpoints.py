"""Checkpoint files: whole or absent, exact, and pruned without touching anything else."""

import os
import resource

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from common import checkpoints, export
from common.errors import UserError
from common.shard_writing import DiskFull


class Net(nn.Module):
    """Two weights and a buffer, as a drafter has them."""

    def __init__(self, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.matrix = nn.Parameter(torch.randn(4, 3, generator=generator))
        self.vector = nn.Parameter(torch.randn(3, generator=generator))
        self.register_buffer("d2t", torch.arange(5))


def make(seed: int = 0, fused: bool = True):
    net = Net(seed)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1, fused=fused)


def step(net, optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def save(out, net, optimizer, number: int, **state):
    return checkpoints.save(out, number, *checkpoints.collect(net, optimizer), {"identity": {}, **state})


@pytest.mark.parametrize("fused", [True, False])
def test_a_restored_run_continues_bit_for_bit(tmp_path, fused):
    net, optimizer = make(0, fused)
    for number in range(3):
        step(net, optimizer, number)
    path = save(tmp_path, net, optimizer, 3, position=[0, 3])
    after_random = torch.rand(4)
    for number in range(3, 6):
        step(net, optimizer, number)

    other, other_optimizer = make(1, fused)
    found, state = checkpoints.latest(tmp_path)
    assert (found, state["step"], state["position"]) == (path, 3, [0, 3])
    checkpoints.restore(found, other, other_optimizer)
    assert torch.equal(torch.rand(4), after_random), "random numbers continue, too"
    for number in range(3, 6):
        step(other, other_optimizer, number)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[mine].items():
            assert torch.equal(value, other_optimizer.state[theirs][key]), key


def test_without_the_moments_a_run_would_not_continue_exactly(tmp_path):
    net, optimizer = make()
    step(net, optimizer, 0)
    save(tmp_path, net, optimizer, 1)
    other, other_optimizer = make(1)
    checkpoints.restore(checkpoints.directory_of(tmp_path, 1), other, other_optimizer)
    other_optimizer.state.clear()
    step(net, optimizer, 1)
    step(other, other_optimizer, 1)
    assert not torch.equal(net.matrix, other.matrix)


def test_optimizer_and_weights_are_stored_in_full_precision(tmp_path):
    net, optimizer = make()
    step(net, optimizer, 0)
    weights, moments = checkpoints.collect(net, optimizer)
    assert all(tensor.dtype == torch.float32 for tensor in (weights["matrix"], moments["exp_avg.matrix"]))
    assert weights["d2t"].dtype == torch.int64
    weights["matrix"].zero_()
    assert net.matrix.abs().sum() > 0, "what is collected is a copy"


def test_a_rank_that_does_not_write_copies_nothing():
    net, optimizer = make()
    step(net, optimizer, 0)
    assert checkpoints.collect(net, optimizer, keep=False) == ({}, {})


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path):
    net, optimizer = make()
    step(net, optimizer, 0)
    for number in (1, 2, 3):
        save(tmp_path, net, optimizer, number)
    truncated = checkpoints.directory_of(tmp_path, 3) / "optimizer.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-10])
    flipped = checkpoints.directory_of(tmp_path, 2) / "drafter.safetensors"
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    said = []
    path, state = checkpoints.latest(tmp_path, said.append)
    assert state["step"] == 1 and path.name == "step-00000001"
    assert "step-00000003" in said[0] and "bytes, expected" in said[0]
    assert "step-00000002" in said[1] and "checksum" in said[1]
    (checkpoints.directory_of(tmp_path, 1) / "state.json").write_text("{")
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        checkpoints.latest(tmp_path, said.append)


def test_no_checkpoint_is_no_error(tmp_path):
    assert checkpoints.latest(tmp_path) is None


def test_half_written_checkpoints_are_never_chosen_and_are_removed(tmp_path):
    net, optimizer = make()
    step(net, optimizer, 0)
    path = save(tmp_path, net, optimizer, 1)
    half = path.with_name(".step-00000009.4711")
    os.rename(save(tmp_path, net, optimizer, 9), half)
    other = path.parent / "notes"
    other.mkdir()
    assert checkpoints.latest(tmp_path)[1]["step"] == 1
    assert checkpoints.remove_unfinished(tmp_path) == 1
    assert not half.exists() and other.exists()


def test_pruning_keeps_the_newest_and_the_best_and_touches_nothing_else(tmp_path):
    net, optimizer = make()
    step(net, optimizer, 0)
    for number in range(1, 7):
        save(tmp_path, net, optimizer, number)
    foreign = tmp_path / "checkpoints" / "step-3"
    foreign.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    os.symlink(elsewhere, tmp_path / "checkpoints" / "step-00000000")
    assert checkpoints.prune(tmp_path, 2, best_step=3) == [1, 2, 4]
    assert checkpoints.steps_saved(tmp_path) == [3, 5, 6]
    assert foreign.exists() and (elsewhere / "precious").exists()


def test_a_full_disk_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    net, optimizer = make()
    step(net, optimizer, 0)
    save(tmp_path, net, optimizer, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "fsync_file", full)
    with pytest.raises(UserError, match="disk is full"):
        save(tmp_path, net, optimizer, 2)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


def test_what_safetensors_cannot_write_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    net, optimizer = make()
    step(net, optimizer, 0)
    save(tmp_path, net, optimizer, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))  # its writer fails with "File too large (os error 27)"
        with pytest.raises(UserError, match="step-00000002: cannot write there .File too large"):
            save(tmp_path, net, optimizer, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def full(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(DiskFull, match="step-00000002: the disk is full"):
        save(tmp_path, net, optimizer, 2)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o007, 0o660)])
def test_files_have_the_mode_of_the_umask(tmp_path, umask, mode):
    net, optimizer = make()
    before = os.umask(umask)
    try:
        path = save(tmp_path, net, optimizer, 1)
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert {name: os.stat(path / name).st_mode & 0o777 for name in (*checkpoints.FILES, "state.json")} == {
        name: mode for name in (*checkpoints.FILES, "state.json")
    }


def test_what_changed_is_named(tmp_path):
    saved = {"data": "10 samples", "drafter": {"hidden_size": 64, "capture_points": [2, 4]}, "--seed": 0}
    checkpoints.require_same(saved, {**saved, "drafter": {"hidden_size": 64, "capture_points": (2, 4)}}, tmp_path)
    with pytest.raises(UserError, match="--seed was 0, is 1; data was \"10 samples\", is \"11 samples\""):
        checkpoints.require_same(saved, {**saved, "data": "11 samples", "--seed": 1}, tmp_path)
