"""Files of torch.save, read without torch.load: the same tensors, or None and torch.load decides."""

import os
import pickle
import zipfile

import pytest
import torch

from common.errors import UserError
from common.shard_pt import mapped, read, tensors_in
from common.shards import ShardReader
from tests.training_fixtures import make_sample, write_shards, write_target


def sample(length=50, width=32, dtype=torch.bfloat16):
    states = [torch.randn(length, width).to(dtype) for _ in range(4)]
    return {"input_ids": torch.arange(length), "loss_mask": torch.ones(length).long(), "hidden_states": states}


def last_first(content):
    """The same, with the states first in the file."""
    return dict(reversed(content.items()))


arena = torch.randn(6, 50, 32)
PLAIN = {
    "bfloat16": sample(),
    "float16": sample(dtype=torch.float16),
    "float32": sample(dtype=torch.float32),
    "fp8": sample(dtype=torch.float8_e4m3fn) | {"scales": torch.rand(50, 3)},
    "one token": sample(1, 8),
    "long": sample(70_000, 1),
    "states first": last_first(sample()),
    "views of one storage": sample() | {"hidden_states": [arena[i, :, ::2] for i in range(6)]},
    "twenty storages": sample() | {"hidden_states": [torch.randn(50, 3) for _ in range(18)]},
    "other integers": sample() | {"input_ids": torch.arange(50, dtype=torch.int32), "loss_mask": torch.arange(50) > 9},
    "one storage twice": sample() | {"loss_mask": arena[0, 0], "scales": arena[0, 0]},
}


def same(found, expected):
    assert list(found) == list(expected)
    for name in expected:
        found_here, expected_here = (x[name] if name == "hidden_states" else [x[name]] for x in (found, expected))
        for one, other in zip(found_here, expected_here, strict=True):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            assert torch.equal(one.float(), other.float())


@pytest.mark.parametrize("kind", PLAIN)
def test_the_tensors_are_those_of_torch_load(kind, tmp_path):
    path = tmp_path / "data_0.pt"
    torch.save(PLAIN[kind], path)
    expected = torch.load(path, weights_only=True)
    buffer = torch.full((path.stat().st_size + 100,), 77, dtype=torch.uint8)
    for content in mapped(path), read(path), read(path, buffer):
        same(tensors_in(content), expected)
    tensors_in(mapped(path))["input_ids"].zero_()
    same(torch.load(path, weights_only=True), expected)
    for head in (0, 300, 3000, 10_000, 200_000, 10**7):  # the bytes between are another file's
        buffer.random_(256)
        found = tensors_in(read(path, buffer, head), head)
        for name in ("input_ids", "loss_mask"):
            assert found is None or found[name] is None or torch.equal(found[name], expected[name])
        assert found is not None or head < 3000
    assert found["input_ids"] is not None


def test_ids_and_mask_lie_in_the_front_of_a_file(tmp_path):
    torch.save(sample(300), tmp_path / "data_0.pt")
    head = 16 * 300 + 4096
    found = tensors_in(read(tmp_path / "data_0.pt", head=head), head)
    assert len(found["input_ids"]) == len(found["loss_mask"]) == 300 and found["hidden_states"][1:] == [None] * 3


def test_a_directory_longer_than_what_is_read_of_it_is_not_guessed(tmp_path):
    many = sample() | {"hidden_states": [torch.randn(50, 3) for _ in range(100)]}
    torch.save(many, tmp_path / "data_0.pt")
    same(tensors_in(read(tmp_path / "data_0.pt")), many)
    assert tensors_in(read(tmp_path / "data_0.pt", head=9000), 9000) is None
    buffer = read(tmp_path / "data_0.pt").clone()
    assert tensors_in(read(tmp_path / "data_0.pt", buffer, 9000), 9000) is None, "though the rest was there by chance"


class Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


UNUSUAL = {
    "a parameter": sample() | {"scales": torch.nn.Parameter(torch.ones(3))},
    "a gradient": sample() | {"scales": torch.ones(3, requires_grad=True)},
    "a sparse tensor": sample() | {"scales": torch.eye(3).to_sparse()},
    "code": sample() | {"scales": Runs()},
    "a module": sample() | {"scales": torch.nn.Linear(2, 2)},
    "complex numbers": sample() | {"scales": torch.ones(3, dtype=torch.complex64)},
    "nothing in it": sample() | {"scales": torch.ones(0)},
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_what_is_unusual_is_left_to_torch_load(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(UNUSUAL[kind], "data_0.pt")
    assert tensors_in(read(tmp_path / "data_0.pt")) is None and not (tmp_path / "ran").exists()


def rewritten(path, change=lambda name, data: data, compression=zipfile.ZIP_STORED):
    """The file with its records written anew by another zip library, not aligned."""
    with zipfile.ZipFile(path) as old:
        records = [(name, old.read(name)) for name in old.namelist()]
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, data in records:
            new.writestr(name, change(name, data))


def test_other_formats_and_damage_are_left_to_torch_load(tmp_path):
    path = tmp_path / "data_0.pt"

    def fresh():
        torch.save(PLAIN["bfloat16"], path)

    fresh()
    whole = path.read_bytes()
    for size in (0, 10, 500, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert tensors_in(read(path)) is None
    path.write_bytes(whole + b"0" * 64)
    assert tensors_in(read(path)) is None
    fresh(), rewritten(path)
    same(tensors_in(read(path)), PLAIN["bfloat16"])
    fresh(), rewritten(path, compression=zipfile.ZIP_DEFLATED)
    assert tensors_in(read(path)) is None
    fresh(), rewritten(path, lambda name, data: b"big" if name.endswith("byteorder") else data)
    assert tensors_in(read(path)) is None
    fresh(), rewritten(path, lambda name, data: data[2:] if name.endswith("data/3") else data)
    assert tensors_in(read(path)) is None
    fresh(), rewritten(path, lambda name, data: pickle.dumps(Runs()) if name.endswith("data.pkl") else data)
    assert tensors_in(read(path)) is None
    torch.save(PLAIN["bfloat16"], path, _use_new_zipfile_serialization=False)
    assert tensors_in(read(path)) is None


def test_a_sample_lies_in_the_buffer_that_it_is_given(tmp_path):
    write_shards(tmp_path / "states", write_target(tmp_path / "target"), [make_sample(30, seed=i) for i in range(3)])
    reader = ShardReader(tmp_path / "states")
    record = reader.records[1]
    buffer = torch.zeros(record.bytes, dtype=torch.uint8)
    for verify in (False, True):
        kept, read_now = reader.load(record, verify), reader.load(record, verify, buffer)
        assert all(map(torch.equal, kept.states, read_now.states)) and torch.equal(kept.input_ids, read_now.input_ids)
        start = buffer.data_ptr()
        assert all(start < state.data_ptr() < start + record.bytes for state in read_now.states)
    reader.load(reader.records[2], buffer=torch.zeros(record.bytes * 2, dtype=torch.uint8))
    content = record.path.read_bytes()
    record.path.write_bytes(content[:-4000] + bytes([content[-4000] ^ 1]) + content[-3999:])
    for room in (None, buffer):
        with pytest.raises(UserError, match="data_1.pt: contents changed: expected xxh3-128"):
            reader.load(record, True, room)
    for changed in (content[:-300], content + b"0" * 300, content[: len(content) // 3]):
        record.path.write_bytes(changed)
        for read_it in (lambda: reader.load(record, buffer=buffer), lambda: reader.tokens(record)):
            with pytest.raises(UserError, match=f"data_1.pt: (truncated|too long): expected {len(content)} bytes"):
                read_it()
    record.path.write_bytes(content[:-300] + bytes(300))
    with pytest.raises(UserError, match="data_1.pt: not a readable sample"):
        reader.load(record, buffer=buffer)
