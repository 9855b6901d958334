"""Reads the files that torch.save wrote without torch.load, whose restricted unpickler is Python: it holds the
interpreter lock for most of a millisecond a file, and the threads that feed a training step stand in line for it.

Called by common/shards.py. Such a file is a zip whose records are stored as they are: data.pkl names the tensors and
the storages that they lie in, data/0, data/1, ... are the storages. `tensors_in` lays tensors over the bytes of a file.
It knows the files of plain tensors that shards are; of everything else, damage too, it says None, and torch.load must
decide. No file can make it run code: a pickle may name nothing but the few things in `known_names`.
"""

import functools
import io
import mmap
import os
import pickle
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

END = struct.Struct("<4s4x2H2IH")  # mark, records here and in all, bytes and place of the directory, bytes of comment
ENTRY = struct.Struct("<4s4x2H8x2I3H8xI")  # mark, flags, method, bytes stored and plain, lengths of names, place
LOCAL = struct.Struct("<4s22x2H")  # mark, lengths of two names
TAIL = 4096  # bytes at the end of a file in which the directory of a shard's few records lies


def read_saved(path: Path, tokens: int, with_states: bool, content: "torch.Tensor | None") -> dict[str, Any]:
    """What torch.save put into the file of a sample, over `content` (its bytes, as `read` gives them), else
    memory-mapped; without the states a copy."""
    import torch

    if not with_states:  # they come after ids and mask, of which one token takes 16 bytes
        head = 16 * tokens + 4096
        saved = tensors_in(read(path, head=head), head)
        if saved and saved["input_ids"] is not None and saved["loss_mask"] is not None:
            return saved | {name: saved[name].clone() for name in ("input_ids", "loss_mask")}
    saved = tensors_in(mapped(path) if content is None else content)
    return saved or torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def mapped(path: Path) -> "torch.Tensor":
    """The bytes of a file, uint8: what is not looked at is not read. Writing to them leaves the file alone."""
    import torch

    with open(path, "rb", buffering=0) as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def read(path: Path, buffer: "torch.Tensor | None" = None, head: int | None = None) -> "torch.Tensor":
    """The bytes of a file, uint8, in the front of `buffer` or in fresh memory; other threads run meanwhile.

    head: of the bytes between the first `head` and the last `TAIL` none is read.
    """
    import torch

    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        content = torch.empty(size, dtype=torch.uint8) if buffer is None else buffer[:size]
        if len(content) < size:
            raise ValueError(f"expected {len(content)} bytes, found {size}")
        whole = head is None or head + TAIL >= size
        for first, last in [(0, size)] if whole else [(0, head), (size - TAIL, size)]:
            while first < last and (count := os.preadv(file.fileno(), [content[first:last].numpy()], first)):
                first += count
            if first < last:
                raise ValueError(f"expected {size} bytes, found {first}: cut short meanwhile")
    return content


def tensors_in(content: "torch.Tensor", head: int | None = None) -> Any | None:
    """What torch.save put into a file of these bytes (uint8), as views of them; None: torch.load must decide.

    head: as in `read`; a tensor that was not read is None.
    """
    try:
        archive = Archive(content, head)
        little = archive.view[archive.place("byteorder")] == b"little"
        return TensorUnpickler(archive).load() if little else None
    except Exception:  # whatever damage or another format leads to
        return None


class Archive:
    """Where in a zip its records lie; ValueError unless they are stored as they are.

    It works on memoryviews: every operation of PyTorch's hands the interpreter lock to another thread.
    """

    def __init__(self, content: "torch.Tensor", head: int | None = None):
        self.view = memoryview(content.numpy())
        self.known = len(self.view) if head is None else head
        self.entries: dict[str, tuple[int, int]] = {}  # name -> place of its header, bytes
        end = len(self.view) - END.size
        mark, here, records, size, at, comment = END.unpack_from(self.view, end)
        tail = 0 if head is None else len(self.view) - TAIL
        if mark != b"PK\5\6" or here != records or comment or not tail <= at <= end - size:
            raise ValueError("no directory in its place")
        for _ in range(records):
            mark, flags, method, stored, plain, *lengths, place = ENTRY.unpack_from(self.view, at)
            if mark != b"PK\1\2" or flags & 1 or method or stored != plain:
                raise ValueError("a record that is not stored as it is")
            at += ENTRY.size
            name = self.view[at : at + lengths[0]].tobytes().decode()
            self.entries[name.partition("/")[2]] = place, plain
            at += sum(lengths)

    def place(self, name: str) -> slice | None:
        """Of the bytes of a record; None where nothing was read."""
        header, size = self.entries[name]
        if header + LOCAL.size > self.known:
            return None
        mark, *lengths = LOCAL.unpack_from(self.view, header)
        first = header + LOCAL.size + sum(lengths)
        if mark != b"PK\3\4" or first + size > len(self.view):
            raise ValueError("a record that is not where the directory says")
        return slice(first, first + size) if first + size <= self.known else None


class TensorUnpickler(pickle.Unpickler):
    """Makes the tensors that the pickle of an archive describes."""

    def __init__(self, archive: Archive):
        super().__init__(io.BytesIO(archive.view[archive.place("data.pkl")]))
        self.archive = archive

    def find_class(self, module: str, name: str) -> Any:
        return known_names()[module, name]

    def persistent_load(self, described: tuple) -> "torch.Tensor | None":
        """A storage, as a flat tensor; None when it was not read."""
        import torch

        kind, dtype, key, _, numel = described
        if kind != "storage":
            raise ValueError("not a storage")
        if (place := self.archive.place(f"data/{key}")) is None:
            return None
        if place.stop - place.start != numel * dtype.itemsize:
            raise ValueError("a storage of another size than its record")
        return torch.frombuffer(self.archive.view, dtype=dtype, count=numel, offset=place.start)


def laid_over(storage, first: int, size: tuple, stride: tuple, requires_grad: bool, hooks: dict, dtype=None):
    """A tensor [size] in a flat storage; one without a dtype of its own holds bytes, and the tensor brings it."""
    if requires_grad or hooks:
        raise ValueError("not a plain tensor")
    if storage is None:
        return None
    return (storage if dtype is None else storage.view(dtype)).as_strided(size, stride, first)


@functools.cache
def known_names() -> dict[tuple[str, str], Any]:
    """All that a pickle may name: dtypes, by the name of their storage too, and how a tensor is laid over a storage."""
    import torch

    storages = {"Long": torch.int64, "Int": torch.int32, "Bool": torch.bool, "Byte": torch.uint8,
                "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16}  # fmt: skip
    return {
        ("collections", "OrderedDict"): dict,  # of hooks, always empty
        ("torch._utils", "_rebuild_tensor_v2"): laid_over,
        ("torch._utils", "_rebuild_tensor_v3"): laid_over,
        ("torch.storage", "UntypedStorage"): torch.uint8,
        ("torch", "float8_e4m3fn"): torch.float8_e4m3fn,
    } | {("torch", f"{name}Storage"): dtype for name, dtype in storages.items()}
