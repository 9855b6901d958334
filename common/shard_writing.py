"""Writing shards: a sample's file, the log lines that make samples exist, and the locks around both.

`write_sample` runs in the tap's writer processes (on any node of the shared file system), which call `join_run`
once; the process that commits gets `Written(bytes, xxh3)` from them and hands it to `common/shard_run.py`.

    hold = join_run(out)                                  # in each process that writes files; lasts as long as it
    written = write_sample(out, index, input_ids, loss_mask, states, layout, rows_per_block)
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections import namedtuple
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from common.errors import UserError
from common.shards import TEMPORARY, last_state_rows, read_log, sample_path, to_line

if TYPE_CHECKING:
    import torch

Written = namedtuple("Written", "bytes xxh3")  # size of the file; xxh3-128 of all of it, hex
WRITERS_LOCK = ".writers.lock"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFull(UserError):
    """The file system under the output directory is full, or the quota is used up. What is committed stays."""


def cannot_write(path: Path, error: OSError) -> UserError:
    """The one line for an OSError while writing `path`."""
    if error.errno in DISK_FULL:
        return DiskFull(f"{path}: the disk is full ({error.strerror}); free some space and run the same command again")
    return UserError(f"{path}: cannot write there ({error.strerror}); expected a writable directory")


# ---- one file ------------------------------------------------------------------------------------------------------


class HashingFile:
    """What `torch.save` writes into: hashes and counts bytes on their way to the descriptor, without a second copy.

    Small pieces (torch's zip headers) are gathered, because each system call gives the interpreter away and gets it
    back late in a busy scheduler process; large ones go straight through. An OSError is kept in `.error` instead of
    raised, because torch's zip writer would hide it behind an error about file positions; `finish` raises it.
    """

    def __init__(self, descriptor: int):
        self.descriptor, self.bytes, self.error = descriptor, 0, None
        self.digest, self.gathered = xxhash.xxh3_128(), bytearray()

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        if len(view) < 1 << 16:
            self.gathered += view
        else:
            self._put(self.gathered)
            self.gathered = bytearray()
            self._put(view)
        return len(view)

    def _put(self, data: "bytearray | memoryview") -> None:
        self.bytes += len(data)
        if self.error is None:
            try:
                self.digest.update(data)  # releases the interpreter lock, as os.write does
                done = 0
                while done < len(data):
                    done += os.write(self.descriptor, memoryview(data)[done:])
            except OSError as error:
                self.error = error

    def flush(self) -> None:
        """torch.save calls it; `finish` does the work."""

    def finish(self) -> Written:
        """Write what is gathered, make it durable; size and hash. Raises the first OSError of any write."""
        self._put(self.gathered)
        self.gathered = bytearray()
        if self.error:
            raise self.error
        os.fsync(self.descriptor)
        return Written(self.bytes, self.digest.hexdigest())


def write_sample(
    out: str | os.PathLike,
    index: int,
    input_ids: "torch.Tensor | Sequence[int]",
    loss_mask: "torch.Tensor | Sequence[int]",
    states: "Sequence[torch.Tensor]",
    layout: str = "v1",
    rows_per_block: int = 2000,
    scales: "torch.Tensor | None" = None,
    last_state: str = "all",
) -> Written:
    """Write the file of source row `index` (temporary name, fsync, rename) and return its size and hash.

    input_ids, loss_mask: [L] int64 or lists; states: P+1 contiguous CPU tensors [L, H] of one dtype, capture points in
    order, the last state (pre-norm) at the end. They may be views of a larger (pinned) arena: only their own memory is
    stored, and it is not copied. scales: float32 [L, P], when the points are float8_e4m3fn codes and the last state is
    bfloat16 (common/state_dtypes.py). last_state: "all", or "supervised" to keep only `last_state_rows` of it (v1).
    The sample does not exist before its record is committed. Raises `DiskFull` or another UserError with the temporary
    file removed; ValueError for states of wrong shape.
    """
    import torch

    input_ids = torch.as_tensor(input_ids, dtype=torch.int64).contiguous().clone()
    loss_mask = torch.as_tensor(loss_mask, dtype=torch.int64).contiguous().clone()
    length = len(input_ids)
    for state in states:
        if state.shape != (length, states[0].shape[1]) or not state.is_contiguous() or state.device.type != "cpu":
            raise ValueError(
                f"row {index}: expected contiguous CPU states [{length}, H], found {tuple(state.shape)} "
                f"with strides {state.stride()} on {state.device}"
            )
    if length == 0 or len(loss_mask) != length:
        raise ValueError(f"row {index}: {length} tokens with a loss mask of {len(loss_mask)}")

    if (scales is None) == (states[0].dtype == torch.float8_e4m3fn):
        raise ValueError(f"row {index}: eight-bit states and scales go together")
    if layout == "arrow" and last_state != "all":
        raise ValueError(f"row {index}: layout arrow has the last state of every row")

    path = sample_path(Path(out), index, layout, rows_per_block)
    temporary = temporary_name(path)
    try:
        path.parent.mkdir(exist_ok=True)  # of an output directory that is still there
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    except OSError as error:
        raise cannot_write(path, error) from None
    try:
        file = HashingFile(descriptor)
        if layout == "v1":
            own = [own_storage(state) for state in states]
            if last_state == "supervised":
                own[-1] = own[-1][last_state_rows(loss_mask)]  # [R, H]
            content = {"input_ids": input_ids, "loss_mask": loss_mask, "hidden_states": own}
            torch.save(content | ({} if scales is None else {"scales": scales.contiguous().clone()}), file)
        else:
            write_safetensors(file, input_ids, loss_mask, states, scales)
        written = file.finish()
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise cannot_write(path, error) from None
        raise
    finally:
        os.close(descriptor)
    return written


def own_storage(tensor: "torch.Tensor") -> "torch.Tensor":
    """The same memory as a tensor whose storage is exactly that memory: torch.save stores whole storages."""
    import torch

    region = (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(region, dtype=tensor.dtype).view(tensor.shape)


def write_safetensors(
    file: HashingFile,
    input_ids: "torch.Tensor",
    loss_mask: "torch.Tensor",
    states: "Sequence[torch.Tensor]",
    scales: "torch.Tensor | None" = None,
    metadata: dict[str, str] | None = None,
    rows_at_once: int = 256,
) -> None:
    """safetensors with hidden_states [L, P+1, H], token_ids [L] and loss_mask [L], streamed.

    With scales [L, P] it is what hs_connectors' FP8Transfer reads: all P+1 states are float8_e4m3fn, with
    hidden_states_scales float32 [L, P+1, 1]; the last state is there in bfloat16, too, as last_state [L, H].
    The states arrive as P+1 tensors [L, H] and are interleaved `rows_at_once` rows at a time, so that no second copy of
    a sample exists; safetensors' own writer needs the whole stack in memory. Format: 8 bytes little-endian header
    length, JSON header, then the tensors' bytes.
    """
    import torch

    length, hidden = states[0].shape
    wanted = [("token_ids", "I64", [length], input_ids), ("loss_mask", "I64", [length], loss_mask)]
    if scales is not None:
        from common.state_dtypes import FP8, scale_of, to_stored

        last, largest = to_stored(states[-1], FP8)
        every = torch.cat((scales, scale_of(largest)[:, None]), dim=1)[:, :, None]  # [L, P+1, 1]
        wanted.append(("hidden_states_scales", "F32", [length, len(states), 1], every))
        wanted.append(("last_state", "BF16", [length, hidden], states[-1]))
        states = [*states[:-1], last]
    names = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}
    wanted.append(("hidden_states", names[states[0].dtype], [length, len(states), hidden], None))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | (metadata or {})}
    offset = 0
    for name, kind, shape, tensor in wanted:
        size = len(states) * states[0].nbytes if tensor is None else tensor.nbytes
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, _, _, tensor in wanted[:-1]:
        file.write(tensor.contiguous().view(torch.uint8).numpy())
    states = [state.view(torch.uint8) for state in states]  # not every operation knows eight-bit floats
    for first in range(0, length, rows_at_once):
        file.write(torch.stack([state[first : first + rows_at_once] for state in states], dim=1).numpy())


# ---- append-only logs ----------------------------------------------------------------------------------------------


def append_lines(path: Path, entries: Sequence[dict[str, Any]], data_directory: Path) -> None:
    """Group commit: make the names in `data_directory` durable, append all lines in one write, make them durable.

    An append that fails half-way (disk full) is cut off again, so that the file never ends inside a line while we live.
    """
    try:
        fsync_directory(data_directory)
        is_new = not path.exists()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            data = memoryview(b"".join(map(to_line, entries)))
            try:
                done = 0
                while done < len(data):
                    done += os.write(descriptor, data[done:])
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        if is_new:
            fsync_directory(path.parent)
            fsync_directory(path.parent.parent)
    except OSError as error:
        raise cannot_write(path, error) from None


def write_atomically(path: Path, data: bytes) -> None:
    """Temporary name, fsync, rename, fsync of the directory; UserError when the disk does not take it."""
    temporary = temporary_name(path)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise cannot_write(path, error) from None


def temporary_name(path: Path) -> Path:
    """A name in the directory of `path` that no other thread, process or node uses."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}{TEMPORARY}")


def fsync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def mend_log(path: Path, drop: Iterable[int] = ()) -> None:
    """Rewrite a log atomically: without half and broken lines, without the indices in `drop`, one line an index."""
    drop = set(drop)
    kept = [entry for index, entry in sorted(read_log(path).latest().items()) if index not in drop]
    write_atomically(path, b"".join(map(to_line, kept)))


# ---- locks ---------------------------------------------------------------------------------------------------------


def take_lock(path: Path, mode: int, wait_seconds: float = 0.0) -> int | None:
    """flock `path`; the descriptor, or None when another process has it. The kernel frees it with the process.

    Several nodes exclude each other where the file system carries flock between them (NFS, Lustre mounted with flock).
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return None
            time.sleep(0.1)


def join_run(out: str | os.PathLike) -> int:
    """Called once by every process that writes sample files: a shared lock, so that a new run first waits for orphans
    of a killed one. Returns the descriptor (the lock lasts as long as the process, or until os.close)."""
    try:
        descriptor = take_lock(Path(out) / WRITERS_LOCK, fcntl.LOCK_SH, wait_seconds=60)
    except OSError as error:
        raise cannot_write(Path(out), error) from None
    if descriptor is None:
        raise UserError(f"{out}: another run is starting in this directory; end one of the two")
    return descriptor
