"""Loads one batch: reads its samples, checks those that the feed names (checksum, NaN and Inf), and packs them.

The threads of a `Feed` (common/feed.py) do it, in the training process or in processes of their own
(common/feed_process.py). A sample that fails its check is not in the batch, but named beside it.
"""

import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.batches import Budget, round_up
from common.errors import UserError
from common.packing import PackedBatch, Shapes, pack_documents, room_shapes
from common.shards import Record, Sample, ShardReader
from common.state_dtypes import FP8

SCRATCH = 256 << 20  # bytes of files that a thread reads at once into memory of its own; more are memory-mapped
own = threading.local()  # scratch: uint8, where a thread reads the files of a batch


@dataclass
class Loaded:
    """One packed batch in host memory (page-locked where there is a GPU)."""

    batch: PackedBatch
    indices: list[int]  # source rows of the samples in it
    set_aside: list[dict] = field(default_factory=list)  # index, path and reason of each sample that failed its check

    @property
    def samples(self) -> int:
        return len(self.indices)

    @property
    def counts(self) -> torch.Tensor:
        """float64 [K]: predicted tokens that count at each step."""
        return self.batch.weights.sum(0, dtype=torch.float64)


class BatchLoader:
    """What is the same for all batches of a run. Any number of threads may load at a time; it can be pickled.

    records: the first that can be read says how wide a batch is.  pinned: fresh buffers are page-locked.
    """

    def __init__(self, reader: ShardReader, records: list[Record], budget: Budget, num_steps: int, pinned: bool):
        self.reader, self.budget, self.num_steps, self.pinned = reader, budget, num_steps, pinned
        # Codes of eight bits are packed as they are where all samples have them; other engines' directories may not.
        self.widen = bool(reader.foreign) or reader.info.get("dtype") != "fp8"
        self._blank = self._empty_document(first_readable(reader, records, self.widen))
        self._dtypes = [state.dtype for state in self._blank.states]  # other directories may have other ones

    @staticmethod
    def _empty_document(sample: Sample) -> Sample:
        """One unsupervised token, with states as this sample's: what an empty batch holds."""
        scales = None if sample.scales is None else torch.zeros_like(sample.scales[:1])
        return Sample(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64),
                      [torch.zeros_like(state[:1]) for state in sample.states], None, scales=scales)

    def shapes(self) -> Shapes:
        """The tensors of a batch."""
        room = self.budget
        return room_shapes(room.tokens, room.queries, room.predicted, self.num_steps, self._blank.states)

    def load(self, records: list, check: list[bool], buffer: PackedBatch | None, copied=None) -> Loaded:
        """The batch of these records, those with `check` checked, in `buffer` (None: in fresh memory) once its copy,
        event `copied`, is over."""
        for record in records:
            read_ahead(record.path)
        if copied is not None:
            copied.synchronize()
        documents, set_aside = [], []
        for record, unchecked, room in zip(records, check, self._rooms(records), strict=True):
            sample, problem = self._read(record, unchecked, room)
            if problem:
                set_aside.append({"index": record.index, "path": str(record.path), "reason": problem})
            else:
                documents.append(sample)
        room = self.budget
        batch = pack_documents(documents or [self._blank], self.num_steps, tokens=room.tokens, queries=room.queries,
                               predicted=room.predicted, into=buffer)  # fmt: skip
        if self.pinned and buffer is None:
            batch = batch.pin()
        if not documents:
            batch.num_documents = batch.num_tokens = batch.num_pairs = 0
        return Loaded(batch, [sample.record.index for sample in documents], set_aside)

    def _rooms(self, records: list) -> list[torch.Tensor | None]:
        """Memory of this thread to read each file into, or None where that is much; the thread's next batch uses it
        again, because memory that is always fresh costs as much time as the reading."""
        sizes = [round_up(record.bytes, 64) for record in records]
        if sum(sizes) > SCRATCH:
            return [None] * len(records)
        if getattr(own, "scratch", None) is None or len(own.scratch) < sum(sizes):
            own.scratch = torch.empty(sum(sizes), dtype=torch.uint8)
        return list(own.scratch[: sum(sizes)].split(sizes))

    def _read(self, record, check: bool, room: torch.Tensor | None) -> tuple[Sample | None, str | None]:
        """The sample, cut to the length that fits a batch, or what is wrong with it."""
        sample, problem = read_sample(self.reader, record, check, room, self.widen)
        if problem:
            return None, problem
        length = self.budget.tokens
        states = [state[:length].to(dtype) for state, dtype in zip(sample.states, self._dtypes, strict=True)]
        rows = None if sample.last_rows is None else sample.last_rows[sample.last_rows < length]
        scales = None if sample.scales is None else sample.scales[:length]
        return Sample(sample.input_ids[:length], sample.loss_mask[:length], states, record, rows, scales), None


def read_ahead(path: Path) -> None:
    """Let the disk read the whole file while this thread is busy with others. It is advice: whatever is wrong with the
    file, or with advice on its file system, shows when it is read."""
    with suppress(OSError, AttributeError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe in its place would have this thread wait
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def read_sample(
    reader: ShardReader, record, check: bool, buffer: torch.Tensor | None = None, widen: bool = True
) -> tuple[Sample | None, str | None]:
    """(sample, None), or (None, what is wrong with it): unreadable, or with `check` also its checksum, NaN and Inf.

    buffer, widen: as in `ShardReader.load`.
    """
    try:
        sample = reader.load(record, verify=check, buffer=buffer, widen=widen)
    except UserError as error:
        return None, str(error)
    problem = not_finite(sample.states, sample.scales) if check else None
    return (None, problem) if problem else (sample, None)


def first_readable(reader: ShardReader, records: list[Record], widen: bool = True) -> Sample:
    """The first of these samples that can be read. UserError, that of the first, where none can."""
    first_problem = None
    for record in records:
        sample, problem = read_sample(reader, record, check=False, widen=widen)
        if sample is not None:
            return sample
        first_problem = first_problem or problem
    raise UserError(first_problem)


def not_finite(states: list[torch.Tensor], scales: torch.Tensor | None = None) -> str | None:
    """Names the first NaN or Inf in the states ("state 2 of 4, row 17"), or None.

    A row sum in float32 is NaN or Inf when the row holds one; only then is the row itself looked at, because large
    finite values could overflow the sum. scales: those of points in eight bits, which have one code for NaN and its
    negative, and no Inf.
    """
    for number, state in enumerate(states, 1):
        if state.dtype == FP8:
            scale = scales[:, number - 1]
            rows = torch.nonzero(((state.view(torch.uint8) & 0x7F) == 0x7F).any(-1) | ~scale.isfinite()).flatten()
            if len(rows):
                kind = "Inf" if scale[rows[0]].isinf() else "NaN"
                return f"{kind} in state {number} of {len(states)}, row {int(rows[0])}"
            continue
        sums = state.sum(-1, dtype=torch.float32)  # [L]
        for row in torch.nonzero(~torch.isfinite(sums)).flatten().tolist():
            if not torch.isfinite(state[row]).all():
                kind = "NaN" if state[row].isnan().any() else "Inf"
                return f"{kind} in state {number} of {len(states)}, row {row}"
    return None
