"""Which positions of which documents train, and one packed batch of them.

This file owns the alignment of training-time test. For a document with tokens x[0..L) and capture points read at
every position:

* **Position t** at step 0 sees the captured points at t and the embedding of x[t+1]; it predicts x[t+2], and its
  teacher is the target's last state at t+1. At step k it sees its own previous state and the embedding of x[t+1+k]
  (the true token in training), has rotary position t+k, predicts x[t+2+k], and its teacher is the last state at t+1+k.
* **It counts at step k** when x[t+2+k] exists in the same document and is supervised. Token ids, teacher row and mask
  are therefore all read at the one predicted token s = t+2+k; nothing is shifted separately.
* **It needs a query** when it counts at any step 0..K-1 (a chain that counts at step 3 passes through steps 0 to 2).
  The others contribute their step-0 key and value and nothing else. At every step, each supervised token s >= 2+k is
  predicted by exactly one position, t = s-2-k, so the loss of step k is an average over the same tokens for every k
  (less the first k tokens of a document).

So the loss walks over predicted tokens, R of them (one teacher row each, used by all steps), and the layer over query
rows, C of them; R <= C <= R + (K-1) * (supervised spans). A three-token prompt with a reply of one token, K = 3:
x[3] is predicted by t=1 at step 0 and by t=0 at step 1; C = 2, R = 1.

Called by common/batches.py (training) and eval_acceptance.py; read by common/drafter.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Protocol

import torch

from common.errors import UserError
from common.shared_memory import PAGE
from common.state_dtypes import FP8


class Document(Protocol):
    """What `pack_documents` reads: `common.shards.Sample` is one."""

    input_ids: torch.Tensor  # [L] int64
    loss_mask: torch.Tensor  # [L] int64, 1 where supervised
    states: Sequence[torch.Tensor]  # P capture points, then the last state (pre-norm): P+1 tensors [L, H_target]
    # and, where only some rows of the last state were kept, last_rows: int64 [R]; where the points are float8_e4m3fn,
    # scales: float32 [L, P]


@dataclass
class PackedBatch:
    """Documents packed end to end: T tokens, C query rows, R predicted tokens; tails beyond the real ones are padding.

    With budgets given, T, C, R are the same in every batch, so shapes are static. Padding tokens form one document of
    their own at the end, padding queries stand at row T-1, padding predictions weigh nothing: they change no result.
    """

    embed_ids: torch.Tensor  # [T] int64: x[t+1], whose embedding position t reads at step 0; 0 at a document's end
    aux_states: torch.Tensor  # [T, P * H_target] capture points side by side, in order; uint8: codes, see aux_scales
    positions: torch.Tensor  # [T] int64: t within its own document
    query_rows: torch.Tensor  # [C] int64, ascending: the row (0..T-1) of each position that needs a query
    query_starts: torch.Tensor  # [C] int64, ascending: the row at which the query's document begins
    chain_ids: (
        torch.Tensor
    )  # [C, K+1] int64: x[t+1] ... x[t+1+K], 0 past the document's end; chain_ids[:, k+1] is predicted
    counts: torch.Tensor  # [C, K] bool: whether the row counts at step k
    teacher_rows: (
        torch.Tensor
    )  # [C, K] int64: row of last_states that is the teacher of (c, k); 0 where it does not count
    query_documents: torch.Tensor  # [C] int64: index of the document in the packed sequence, -1 for padding
    last_states: torch.Tensor  # [R, H_target] last state at s-1 for each predicted token s, pre-norm
    predicted_ids: torch.Tensor  # [R] int64: x[s]
    slots: torch.Tensor  # [R, K] int64: which query row (0..C-1) predicts this token at step k; 0 where none does
    weights: torch.Tensor  # [R, K] float32: 1 where slots is real, else 0
    num_documents: int
    num_tokens: int  # real ones, without padding; likewise below
    num_queries: int
    num_predicted: int
    num_pairs: int  # (query, step-0 key) pairs that attention computes, for counting operations
    aux_scales: torch.Tensor | None = None  # [T, P] float32, where aux_states are codes (`state_dtypes.widen`)

    @property
    def num_steps(self) -> int:
        return self.counts.shape[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), torch.Tensor)}

    def numbers(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name.startswith("num_")}

    def to(self, device, non_blocking: bool = True) -> "PackedBatch":
        """A copy on `device`; from pinned memory the copies are asynchronous."""
        return replace(self, **{n: t.to(device, non_blocking=non_blocking) for n, t in self.tensors().items()})

    def pin(self) -> "PackedBatch":
        return replace(self, **{n: t.pin_memory() for n, t in self.tensors().items()})

    def copy_into(self, other: "PackedBatch") -> None:
        """Overwrite the tensors of `other` (same budgets): how a captured CUDA graph is fed its next batch."""
        for name, tensor in self.tensors().items():
            getattr(other, name).copy_(tensor, non_blocking=True)


def query_positions(loss_mask: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Positions t of one document that need a query, ascending int64 [c]: any of x[t+2 .. t+1+K] supervised.

    loss_mask: [L] integer or bool. 0 <= t <= L-3; empty for documents of fewer than three tokens.
    """
    return torch.nonzero(needs_query(loss_mask != 0, loss_mask.shape[0], num_steps)).flatten()


def needs_query(supervised: torch.Tensor, ends: torch.Tensor | int, num_steps: int) -> torch.Tensor:
    """bool [T]: `query_positions` of documents end to end. supervised: bool [T]; ends: the row after the document of
    each token, int64 [T]."""
    before = torch.zeros(supervised.shape[0] + 1, dtype=torch.int64)  # before[i] = supervised tokens in rows [0, i)
    torch.cumsum(supervised, 0, out=before[1:])
    first = torch.arange(2, supervised.shape[0] + 2)  # the row that step 0 predicts; the last step's is K-1 further
    return before[(first + num_steps).clamp(max=ends)] > before[first.clamp(max=ends)]


def count_positions(loss_mask: torch.Tensor, num_steps: int) -> tuple[int, int]:
    """(query rows, predicted tokens) that one document adds to a batch: what packing to budgets adds up."""
    return query_positions(loss_mask, num_steps).shape[0], int((loss_mask[2:] != 0).sum())


def pack_documents(
    documents: Sequence[Document],
    num_steps: int,
    *,
    tokens: int | None = None,
    queries: int | None = None,
    predicted: int | None = None,
    into: PackedBatch | None = None,
) -> PackedBatch:
    """Pack documents in the given order.

    num_steps: K, the TTT steps to lay out. tokens, queries, predicted: the budgets T, C, R; by default exactly what the
    documents need (at least one row each, so that no tensor is empty), and `predicted` is `queries` when only that is
    given. into: a batch with the same budgets whose tensors are overwritten and returned (pinned buffers are reused).
    States keep their dtype; where documents differ, that of the first. Raises UserError when the documents do not fit
    the budgets, or a document's tensors disagree in length.
    """
    if not documents:
        raise UserError("pack_documents: no documents given")
    for number, document in enumerate(documents):
        length = document.input_ids.shape[0]
        rows = [document.loss_mask.shape[0], *(state.shape[0] for state in document.states)]
        if any(row != length for row in rows):
            raise UserError(f"document {number}: {length} tokens, but loss mask and states have {rows} rows")
        if (document.states[0].dtype == FP8) != (documents[0].states[0].dtype == FP8):
            raise UserError(f"document {number}: its points are codes of eight bits or document 0's are, not both")
    # Everything but the states is computed for all documents at once, on rows 0..N-1 of the packed sequence.
    lengths = torch.tensor([document.input_ids.shape[0] for document in documents])  # [D]
    num_tokens = int(lengths.sum())
    document_of = torch.repeat_interleave(torch.arange(len(documents)), lengths)  # [N]
    ends = lengths.cumsum(0)
    starts, ends, row = (ends - lengths)[document_of], ends[document_of], torch.arange(num_tokens)  # each [N]
    ids = torch.cat([document.input_ids for document in documents])
    supervised = torch.cat([document.loss_mask for document in documents]) != 0
    is_query = needs_query(supervised, ends, num_steps)
    is_predicted = supervised & (row >= starts + 2)
    q, s = torch.nonzero(is_query).flatten(), torch.nonzero(is_predicted).flatten()  # [c], [r]

    tokens = max(num_tokens, 1) if tokens is None else tokens
    if predicted is None:
        predicted = max(len(s), 1) if queries is None else queries
    queries = max(len(q), 1) if queries is None else queries
    for what, need, budget in (("tokens", num_tokens, tokens), ("query rows", len(q), queries),
                               ("predicted tokens", len(s), predicted)):  # fmt: skip
        if need > budget:
            raise UserError(f"{len(documents)} documents need {need} {what}, the batch holds {budget}")

    batch = _room(tokens, queries, predicted, num_steps, documents[0].states, into)
    batch.num_documents, batch.num_tokens = len(documents), num_tokens
    batch.num_queries, batch.num_predicted = len(q), len(s)
    batch.num_pairs = int((q - starts[q]).sum()) + len(q)

    _fill(batch.embed_ids, torch.where(row + 1 < ends, ids.roll(-1), 0))
    _fill(batch.positions, row - starts, torch.arange(tokens - num_tokens))
    _fill(batch.query_rows, q, tokens - 1)
    _fill(batch.query_starts, starts[q], num_tokens if num_tokens < tokens else tokens - int(lengths[-1]))
    _fill(batch.query_documents, document_of[q], -1)
    following = q[:, None] + 1 + torch.arange(num_steps + 1)  # [c, K+1]
    exists = following < ends[q, None]
    following.clamp_(max=num_tokens - 1)
    _fill(batch.chain_ids, torch.where(exists, _at(ids, following), 0))
    counts = (exists & _at(supervised, following))[:, 1:]
    _fill(batch.counts, counts)
    _fill(batch.teacher_rows, torch.where(counts, _at(is_predicted.cumsum(0) - 1, following)[:, 1:], 0))
    _fill(batch.predicted_ids, ids[s])
    source = s[:, None] - 2 - torch.arange(num_steps)  # [r, K]: t = s-2-k
    exists = source >= starts[s, None]
    _fill(batch.slots, torch.where(exists, _at(is_query.cumsum(0) - 1, source.clamp_(min=0)), 0))
    _fill(batch.weights, exists)

    first = prediction = 0
    teachers = torch.split(s - 1 - starts[s], torch.bincount(document_of[s], minlength=len(documents)).tolist())
    for number, (document, rows) in enumerate(zip(documents, teachers, strict=True)):
        require_kept(number, document, rows)
        *points, last = document.states
        here, first = slice(first, first + len(last)), first + len(last)
        if batch.aux_scales is not None:
            points = [point.view(torch.uint8) for point in points]
            batch.aux_scales[here] = document.scales
        torch.cat(points, 1, out=batch.aux_states[here])
        batch.last_states[prediction : prediction + len(rows)] = last.index_select(0, rows)
        prediction += len(rows)
    batch.aux_states[num_tokens:] = 0
    if batch.aux_scales is not None:
        batch.aux_scales[num_tokens:] = 0
    batch.last_states[prediction:] = 0
    return batch


def _at(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """values[rows] for `rows` of any shape, in a tenth of the time."""
    return values.index_select(0, rows.flatten()).view(rows.shape)


def _fill(tensor: torch.Tensor, real: torch.Tensor, padding: torch.Tensor | int = 0) -> None:
    """Write the real rows, then the padding, over all of `tensor`."""
    tensor[: len(real)] = real
    tensor[len(real) :] = padding


def require_kept(number: int, document: Document, rows: torch.Tensor) -> None:
    """UserError when the last state is read at a row where it was not kept: it would be a teacher of zeros."""
    if (kept := getattr(document, "last_rows", None)) is None:
        return
    missing = rows[~torch.isin(rows, kept)]
    if len(missing):
        record = getattr(document, "record", None)
        where = record.path if record else f"document {number}"
        raise UserError(
            f"{where}: the last state of row {int(missing[0])} (and {len(missing) - 1} more) was not kept "
            f"(--last-state supervised), but is asked for; extract again with --last-state all, or keep the loss mask"
        )


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]  # of each tensor of a batch


def room_shapes(tokens: int, queries: int, predicted: int, num_steps: int, states: Sequence[torch.Tensor]) -> Shapes:
    """The tensors of a batch with these budgets. states: of one document."""
    points, last, in_codes = len(states) - 1, states[-1], states[0].dtype == FP8
    scales = {"aux_scales": ((tokens, points), torch.float32)} if in_codes else {}
    return {
        "embed_ids": ((tokens,), torch.int64),
        "aux_states": ((tokens, points * states[0].shape[1]), torch.uint8 if in_codes else states[0].dtype),
        "positions": ((tokens,), torch.int64),
        "query_rows": ((queries,), torch.int64),
        "query_starts": ((queries,), torch.int64),
        "chain_ids": ((queries, num_steps + 1), torch.int64),
        "counts": ((queries, num_steps), torch.bool),
        "teacher_rows": ((queries, num_steps), torch.int64),
        "query_documents": ((queries,), torch.int64),
        "last_states": ((predicted, last.shape[1]), last.dtype),
        "predicted_ids": ((predicted,), torch.int64),
        "slots": ((predicted, num_steps), torch.int64),
        "weights": ((predicted, num_steps), torch.float32),
    } | scales


def room_bytes(shapes: Shapes) -> int:
    """Memory that `room_in` needs."""
    return _starts(shapes)[-1]


def room_in(memory: torch.Tensor, shapes: Shapes) -> PackedBatch:
    """A batch to be written whose tensors lie in `memory`, uint8, of `room_bytes` or more."""
    made = {}
    for (name, (shape, dtype)), start in zip(shapes.items(), _starts(shapes), strict=False):
        made[name] = memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
    return PackedBatch(**made, num_documents=0, num_tokens=0, num_queries=0, num_predicted=0, num_pairs=0)


def _starts(shapes: Shapes) -> list[int]:
    """Bytes from the start at which each tensor begins, a page apart so that none shares one, and the end of all."""
    pages = [-(-math.prod(shape) * dtype.itemsize // PAGE) for shape, dtype in shapes.values()]
    return [PAGE * number for number in accumulate(pages, initial=0)]


def _room(
    tokens: int, queries: int, predicted: int, num_steps: int, states: Sequence[torch.Tensor],
    into: PackedBatch | None,
) -> PackedBatch:  # fmt: skip
    """A batch to be written: fresh memory, or `into` once its shapes are seen to be right. states: of one document."""
    shapes = room_shapes(tokens, queries, predicted, num_steps, states)
    if into is None:
        made = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    else:
        made = into.tensors()
        for name, (shape, dtype) in shapes.items():
            if tuple(made[name].shape) != shape or made[name].dtype != dtype:
                found = f"{made[name].dtype} {tuple(made[name].shape)}"
                raise UserError(f"pack_documents(into=...): {name} is {found}, expected {dtype} {shape}")
    return PackedBatch(**made, num_documents=0, num_tokens=0, num_queries=0, num_predicted=0, num_pairs=0)
