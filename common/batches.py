"""Which documents train together: the held-out split and the packing of documents into batches of a fixed size.

train_drafter.py makes one `Schedule`; common/feed.py reads the documents that it names. A batch has room for a fixed
number of tokens, of query rows and of predicted tokens (common/packing.py), so that every batch of a run has the same
shape whatever it holds, and the compiler sees one shape only. Documents are never split over batches and never see
each other.

The plan of an epoch is a function of the samples, the budget, the seed and the epoch: every rank computes the same one
and takes its own batches from it, and a resumed run continues at (epoch, step). It does not depend on the number of
ranks: a step is the next `batches_per_step` batches, shared out over ranks and accumulation steps. The end of an
epoch is filled up with empty batches, so every rank takes the same number of steps and every sample is used once.
"""

import io
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash

from common.errors import UserError
from common.packing import count_positions
from common.shard_writing import write_atomically

WINDOW = 512  # documents that a batch may choose from
PAIRS = 100  # of these, how many are tried two at a time to fill the last gap
SLACK = 1.02  # room for query rows and predicted tokens beyond their average share of the tokens
SCAN_CHUNK = 64  # samples that a thread reads and counts together


@dataclass(frozen=True)
class Budget:
    """Room of one batch."""

    tokens: int
    queries: int  # positions that need a query, see common/packing.py
    predicted: int  # tokens that are predicted


def batch_plan(tokens_per_step: int, tokens_per_batch: int, ranks: int) -> tuple[int, int]:
    """(tokens of one batch, batches of one step over all ranks). tokens_per_batch 0: one batch a rank and step."""
    tokens_per_batch = tokens_per_batch or tokens_per_step // ranks
    batches, rest = divmod(tokens_per_step, max(tokens_per_batch, 1))
    if rest or batches % ranks or not batches:
        raise UserError(
            f"--tokens-per-step {tokens_per_step} must be a multiple of --tokens-per-batch {tokens_per_batch} times "
            f"{ranks} ranks, so that every rank computes the same number of batches"
        )
    return tokens_per_batch, batches


def is_held_out(row_hash: str, fraction: float) -> bool:
    """Whether the row with this hash (hex) belongs to the held-out part.

    Depends on the row alone: added data never moves a row, duplicates stay together, and a larger fraction contains
    every smaller one.
    """
    return xxhash.xxh3_64_intdigest(row_hash.encode()) < fraction * 2**64


def split(records, fraction: float):
    """(training records, held-out records), each in the given order. Raises `UserError` when either would be empty."""
    if not 0 <= fraction < 1:
        raise UserError(f"--eval-fraction {fraction}: expected a number from 0 (no held-out part) to below 1")
    held_out = [record for record in records if is_held_out(record.row_hash, fraction)]
    training = [record for record in records if not is_held_out(record.row_hash, fraction)]
    if not training:
        raise UserError(f"no sample is left for training: {len(held_out)} are held out by --eval-fraction {fraction}")
    if fraction and not held_out:
        raise UserError(
            f"--eval-fraction {fraction} holds out none of {len(records)} samples; raise it, or give 0 to train "
            f"without evaluation"
        )
    return training, held_out


def scan(reader, records, num_steps: int, max_tokens: int, vocab_size: int, workers: int = 4):
    """Read ids and loss mask of every sample: what it takes of each budget, and how often each token is supervised.

    Only the first `max_tokens` tokens of a document count. Returns sizes int64 [N, 3] (tokens, query rows, predicted
    tokens) and frequencies int64 [vocab_size]. Raises `UserError` for a file that cannot be read or a token id outside
    the vocabulary, naming the file.
    """

    def measure(chunk):
        sizes, chosen = [], []
        for record in chunk:
            ids, mask = (tensor[:max_tokens] for tensor in reader.tokens(record))
            if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
                raise UserError(
                    f"{record.path}: token ids run from {int(ids.min())} to {int(ids.max())}, but the target's "
                    f"vocabulary has {vocab_size}; were these states made by another model?"
                )
            sizes.append((len(ids), *count_positions(mask, num_steps)))
            chosen.append(ids[mask != 0].numpy())
        return sizes, np.bincount(np.concatenate(chosen), minlength=vocab_size)

    sizes, frequencies = [], np.zeros(vocab_size, dtype=np.int64)
    chunks = [records[first : first + SCAN_CHUNK] for first in range(0, len(records), SCAN_CHUNK)]
    with ThreadPoolExecutor(workers) as pool:
        for some, counted in pool.map(measure, chunks):
            sizes += some
            frequencies += counted
    return np.array(sizes, dtype=np.int64).reshape(-1, 3), torch.from_numpy(frequencies)


def scan_once(path: Path, reader, records, num_steps: int, max_tokens: int, vocab_size: int, workers: int = 4):
    """`scan`, kept in the file `path`, so that a continued run need not open every sample again.

    Raises `UserError` when the file cannot be written, too.
    """
    key = [fingerprint(records), num_steps, max_tokens, vocab_size]
    try:
        kept = torch.load(path, weights_only=True)
        if kept["key"] == key:
            return kept["sizes"].numpy(), kept["frequencies"]
    except Exception:  # not there, or cut short by a kill: it is made again
        pass
    sizes, frequencies = scan(reader, records, num_steps, max_tokens, vocab_size, workers)
    content = io.BytesIO()
    torch.save({"key": key, "sizes": torch.from_numpy(sizes), "frequencies": frequencies}, content)
    write_atomically(path, content.getbuffer())
    return sizes, frequencies


def fit(records, sizes: np.ndarray, max_tokens: int, long_documents: str) -> tuple[np.ndarray, Counter]:
    """int64 [M]: which of the records can be trained on; and how many are left out or trimmed, by reason.

    A document longer than `max_tokens` is trimmed to its first `max_tokens` tokens ("trim": exact for what is kept,
    because every position looks back only), left out ("skip") or refused ("refuse": `UserError`).
    """
    kept, counts = [], Counter()
    for place, record in enumerate(records):
        too_long = record.tokens > max_tokens
        if too_long and long_documents == "refuse":
            raise UserError(
                f"{record.path}: {record.tokens} tokens do not fit into a batch of {max_tokens}; raise "
                f"--tokens-per-batch, or say --long-documents trim (or skip)"
            )
        if too_long and long_documents == "skip":
            counts[f"left out: longer than {max_tokens} tokens"] += 1
        elif sizes[place, 2] == 0:
            counts["left out: no supervised token to predict"] += 1
        else:
            if too_long:
                counts[f"trimmed to {max_tokens} tokens"] += 1
                counts["tokens trimmed off"] += record.tokens - max_tokens
            kept.append(place)
    if not kept:
        raise UserError(f"none of {len(records)} samples can be trained on: {dict(counts)}")
    return np.array(kept), counts


def choose_budget(sizes: np.ndarray, max_tokens: int) -> Budget:
    """Room for `max_tokens` tokens and for the query rows and predicted tokens that this many hold on average.

    sizes: int64 [N, 3] as from `scan`. Each room takes the largest document and is a multiple of 16, from 4,096 rows on
    of 128 (matrix tiles). A data set smaller than one batch gets a batch of its own size.
    """
    total, largest = sizes.sum(0), sizes.max(0)
    tokens = max(min(max_tokens, round_up(total[0], 16)), int(largest[0]))
    average = np.ceil(tokens * SLACK * total / total[0])
    tile = 128 if average[2] >= 4096 else 16  # large products run in larger tiles
    queries, predicted = (round_up(max(average[i], largest[i]), tile) for i in (1, 2))
    return Budget(tokens, max(queries, predicted), predicted)


def round_up(number: int, multiple: int) -> int:
    return int(-(-int(number) // multiple) * multiple)


def pack(sizes: np.ndarray, budget: Budget, seed: tuple[int, ...]) -> list[list[int]]:
    """Share N documents out over batches: each inner list names the documents (0..N-1) of one batch.

    sizes: int64 [N, 3], each within the budget. A batch starts with the document that has waited longest, takes
    documents in shuffled order while there is room for two more of any length, and fills the rest with the document, or
    the pair, that leaves the least of any budget unused: under 1% of padding on mixed lengths, in about a millisecond.
    """
    room = np.array([budget.tokens, budget.queries, budget.predicted])
    order = np.random.default_rng(seed).permutation(len(sizes))
    batches, upcoming = [], min(WINDOW, len(order))
    window = order[:upcoming]
    while len(window):
        size = sizes[window]  # [W, 3]
        free, left, chosen = np.ones(len(window), dtype=bool), room, []
        reserve = 2 * size[:, 0].max()
        for place in range(len(window)):
            if chosen and left[0] < reserve:
                break
            if (size[place] <= left).all():
                free[place], left = False, left - size[place]
                chosen.append(place)
        while places := best_fill(size, free, left, room):
            free[places], left = False, left - size[places].sum(0)
            chosen += places
        batches.append(window[chosen].tolist())
        refill = order[upcoming : upcoming + len(chosen)]
        upcoming += len(refill)
        window = np.concatenate([window[free], refill])
    return batches


def best_fill(size: np.ndarray, free: np.ndarray, left: np.ndarray, room: np.ndarray) -> list[int]:
    """Places of the free document or pair of documents that leaves the least unused room; [] when nothing fits."""
    places = np.flatnonzero(free & (size <= left).all(1))
    if not len(places):
        return []
    unused = ((left - size[places]) / room).max(1)  # [S]
    best, choice = unused.min(), [int(places[unused.argmin()])]
    places = places[:PAIRS]
    after = [left[i] - size[places, i][:, None] - size[places, i] for i in range(3)]  # each [S, S]
    unused = np.maximum.reduce([rest / total for rest, total in zip(after, room, strict=True)])
    unused[np.minimum.reduce(after) < 0] = np.inf
    np.fill_diagonal(unused, np.inf)
    if unused.min() < best:
        choice = [int(places[i]) for i in np.unravel_index(unused.argmin(), unused.shape)]
    return choice


class Schedule:
    """The batches of every step of every epoch, the same on all ranks.

    records: what `split` returned for training.  sizes: their `scan`.  max_tokens: most tokens in a batch.
    batches_per_step: batches of one optimizer step, over all ranks and accumulation steps.
    """

    def __init__(self, records, sizes: np.ndarray, max_tokens: int, batches_per_step: int, seed: int,
                 long_documents: str = "trim"):
        kept, self.counts = fit(records, sizes, max_tokens, long_documents)
        self.records, self.sizes = [records[place] for place in kept], sizes[kept]
        self.budget = choose_budget(self.sizes, max_tokens)
        self.batches_per_step, self.seed = batches_per_step, seed
        self._plans: dict[int, list[list[int]]] = {}

    def _plan(self, epoch: int) -> list[list[int]]:
        """Batches of the epoch, filled up with empty ones to whole steps."""
        if epoch not in self._plans:
            self._keep(epoch, pack(*self._to_pack(epoch)))
        return self._plans[epoch]

    def plan_ahead(self, epoch: int, submit: Callable) -> Callable[[], None]:
        """Plan an epoch elsewhere, with `submit` of an executor. Call what is returned to take the plan over."""
        if epoch in self._plans:
            return lambda: None
        plan = submit(pack, *self._to_pack(epoch))
        return lambda: self._keep(epoch, plan.result())

    def _to_pack(self, epoch: int) -> tuple:
        return self.sizes, self.budget, (self.seed, epoch)

    def _keep(self, epoch: int, plan: list[list[int]]) -> None:
        """A few epochs are kept."""
        plan += [[]] * (-len(plan) % self.batches_per_step)
        kept = {old: made for old, made in self._plans.items() if old == 0 or old >= epoch - 1}
        self._plans = {**kept, epoch: plan}

    def steps(self, epoch: int) -> int:
        """Optimizer steps in the epoch; epochs may differ by a few, since each is packed anew."""
        return len(self._plan(epoch)) // self.batches_per_step

    def total_steps(self, epochs: float) -> int:
        """Optimizer steps of so many epochs; a fraction of an epoch is rounded up to whole steps."""
        whole = int(epochs)
        steps = sum(self.steps(epoch) for epoch in range(whole))
        if part := epochs - whole:
            steps += math.ceil(part * self.steps(whole))
        return max(1, steps)

    def batches(self, epoch: int, step: int, rank: int = 0, ranks: int = 1) -> list[list]:
        """The records in each batch of one rank in one step, in order of accumulation."""
        plan = self._plan(epoch)[step * self.batches_per_step : (step + 1) * self.batches_per_step]
        return [[self.records[place] for place in batch] for batch in plan[rank::ranks]]

    def padding(self, epoch: int = 0) -> dict[str, float]:
        """Unused share of each room in the epoch, empty batches included."""
        batches = len(self._plan(epoch))
        return {
            name: 1 - int(used) / (batches * room)
            for (name, room), used in zip(asdict(self.budget).items(), self.sizes.sum(0), strict=True)
        }


def fingerprint(records) -> str:
    """xxh3-128 over the samples in order: what a resumed run must find unchanged."""
    digest = xxhash.xxh3_128()
    for record in records:
        line = f"{record.index} {record.row_hash} {record.tokens} {record.supervised} {record.xxh3}\n"
        digest.update(line.encode())
    return digest.hexdigest()
