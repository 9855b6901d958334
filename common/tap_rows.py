"""Which rows of a forward pass belong to which sample. For the tap (common/tap.py), in the scheduler processes.

A request of a capture session is called {session}-{index}-{tokens}; a forward pass holds the rows of its requests one
after the other, a long prompt in chunks over several passes.
"""

from dataclasses import dataclass

import torch

from common.tap_writer import Region


@dataclass
class Piece:
    """The rows of one request in one forward pass."""

    index: int  # of the sample
    batch_start: int  # first row in the batch
    rows: int
    prefix: int  # position of the first row in the sample
    tokens: int  # length of the sample
    region: Region | None = None
    region_start: int = 0

    def completes(self) -> bool:
        return self.prefix + self.rows == self.tokens


def pieces_of(forward_batch, rid_prefix: str) -> list[Piece]:
    """The pieces of a forward pass whose requests have names with this prefix."""
    pieces, start = [], 0
    lengths, prefixes = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
    for rid, rows, prefix in zip(forward_batch.rids, lengths, prefixes, strict=True):
        if rid.startswith(rid_prefix):
            index, tokens = map(int, rid.removeprefix(rid_prefix).split("-"))
            pieces.append(Piece(index, start, int(rows), int(prefix), tokens))
        start += int(rows)
    return pieces


def consecutive_rows(pieces: list[Piece]) -> list[tuple[int, int]]:
    """(first row, number of rows) of the pieces in the batch, neighbours merged."""
    runs: list[list[int]] = []
    for piece in pieces:
        if runs and runs[-1][0] + runs[-1][1] == piece.batch_start:
            runs[-1][1] += piece.rows
        else:
            runs.append([piece.batch_start, piece.rows])
    return [(start, count) for start, count in runs]


def gather(tensor: torch.Tensor, rows: list[tuple[int, int]]) -> torch.Tensor:
    """Runs of consecutive rows as one tensor; a single run stays a view."""
    parts = [tensor[start : start + count] for start, count in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
