"""Offline acceptance: runs a drafter from captured states and counts what the target would have accepted.

`evaluate` is the one loop over samples; train_drafter.py calls it for its held-out evaluation and eval_acceptance.py
for its report, so both print the same figures, bit for bit on the CPU (with the same number of threads): there every
sample is a batch of its own, its arithmetic does not depend on which others are evaluated, in which order, or on which
rank. On a GPU, where one sample is too little work, samples share batches; that can round differently.
What is counted, and how, is defined in common/acceptance.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from common.acceptance import AcceptanceCounts, temperature_terms
from common.capture_points import CapturePoints
from common.conversations import hash_of
from common.cpu_threads import one_thread
from common.draft_tree import grow_tree, tokens_on_target_path
from common.drafter import Drafter, DrafterConfig
from common.drafting import DraftChain, draft
from common.errors import UserError
from common.losses import Teacher
from common.packing import PackedBatch, pack_documents
from common.target import TargetParts
from common.vocab import target_ids

TOKENS_PER_BATCH = 8192  # of the samples that share a batch on a GPU; a tree's branches count as so many tokens


@dataclass(frozen=True)
class Setting:
    """What is drafted and how it is judged."""

    num_steps: int = 7  # K, drafted tokens a chain, or depth of the tree
    topk: int = 1  # branches a node; above 1 a tree is grown
    tree_tokens: int | None = None  # verified tokens of the tree, the last known token included; None: a chain
    temperature: float = 0.0  # above 0: expected acceptance of speculative sampling beside the greedy figures


@torch.no_grad()
def evaluate(
    drafter: Drafter,
    target: TargetParts,
    load: Callable,
    records: Iterable,
    setting: Setting,
    tick: Callable[[int, AcceptanceCounts], None] | None = None,
    tokens_per_batch: int | None = None,
) -> AcceptanceCounts:
    """Counts of all records, which may be none (a rank without samples): `counts.merge(those of the other ranks)`.

    drafter, target: on the same device; the target's parts should have the dtype the target computes in on a GPU and
    float32 on the CPU (`evaluation_target`). load(record) gives a `shards.Sample` (`reader.load`), or None for one that
    the caller left out, and counted. tick(samples done, counts so far) is called after each batch. tokens_per_batch: a
    batch is full when its samples have so many tokens; default: one sample on the CPU, TOKENS_PER_BATCH on a GPU.
    Samples with fewer than three tokens or nothing supervised add nothing. The weights are judged as export stores
    them, rounded to bfloat16, also in the middle of training.
    """
    counts = AcceptanceCounts(setting.num_steps)
    if tokens_per_batch is None:
        on_gpu = drafter.fc.weight.device.type == "cuda"
        tokens_per_batch = max(1, TOKENS_PER_BATCH // setting.topk) if on_gpu else 1
    with rounded_weights(drafter):
        for done, group in grouped(load, records, tokens_per_batch):
            if group:
                count_group(counts, drafter, target, group, setting)
            if tick is not None:
                tick(done, counts)
    return counts


def grouped(load: Callable, records: Iterable, tokens_per_batch: int) -> Iterator[tuple[int, list]]:
    """(records so far, the (record, sample) pairs of the next batch); no pairs where no sample waits for others."""
    group, tokens = [], 0
    for done, record in enumerate(records, start=1):
        sample = load(record)
        if sample is not None and int((sample.loss_mask[2:] != 0).sum()):
            group.append((record, sample))
            tokens += len(sample.input_ids)
        if not group or tokens >= tokens_per_batch:
            yield done, group
            group, tokens = [], 0
    if group:
        yield done, group


def count_group(counts: AcceptanceCounts, drafter: Drafter, target: TargetParts, group: list, setting: Setting) -> None:
    """Add the samples of one batch to `counts`. group: (record, sample) pairs, each with something supervised."""
    with one_thread():
        batch = pack_documents([sample for _, sample in group], setting.num_steps)
    batch = batch.to(drafter.fc.weight.device)
    own, first = target_tokens(target, batch), batch.counts[:, 0]  # [R]; [C], rows that count at step 0
    drafted = draft_batch(drafter, batch, own, setting)  # [C, K]
    expected = expected_terms(drafter, target, batch, drafted, setting) if setting.temperature > 0 else ()
    drafted, own, vocabulary = drafted[first].cpu(), own.cpu(), drafter.t2d.cpu().numpy()
    positions, documents = batch.positions[batch.query_rows][first].cpu(), batch.query_documents[first].cpu()
    expected = [terms[first.cpu().numpy()] for terms in expected]
    taken = 0
    for number, (record, sample) in enumerate(group):
        supervised = torch.nonzero(sample.loss_mask[2:] != 0).flatten() + 2
        target_next = torch.full((sample.input_ids.shape[0],), -1)
        target_next[supervised - 1] = own[taken : taken + len(supervised)]
        taken += len(supervised)
        here = documents == number
        counts.add(
            sample_key(record),
            drafted[here],
            positions[here],
            sample.input_ids,
            sample.loss_mask,
            target_next,
            vocabulary,
            category=record.category,
            source=record.source,
            expected=tuple(terms[here.numpy()] for terms in expected) or None,
        )


@contextmanager
def rounded_weights(drafter: Drafter):
    """Within it the drafter's weights are those that `export` writes (bfloat16 values); its masters come back after."""
    computed_in_bf16 = drafter.compute_dtype == torch.bfloat16  # then only the norms, kept in float32, need rounding
    kept = []
    for parameter in drafter.parameters():
        if parameter.dtype != torch.bfloat16 and (parameter.ndim == 1 or not computed_in_bf16):
            kept.append((parameter, parameter.detach().clone()))
            parameter.data.copy_(parameter.data.bfloat16())
    try:
        yield
    finally:
        for parameter, master in kept:
            parameter.data.copy_(master)


def spread(items: list, most: int | None) -> list:
    """At most so many of them, in order and evenly spread, so that every directory and file keeps its share."""
    if most is None or most >= len(items):
        return items
    return [items[number * len(items) // most] for number in range(most)]


def sample_key(record) -> str:
    """Name of a sample, unique over several shard directories and equal on every rank."""
    return str(record.path) if record.path is not None else f"row {record.index}"


def evaluation_target(target: TargetParts, device) -> TargetParts:
    """The target's parts where and how `evaluate` wants them: as stored on a GPU, float32 on the CPU."""
    return target.to(device, None if torch.device(device).type == "cuda" else torch.float32)


def free_gpu() -> None:
    """Give back the GPU memory that this process only holds in reserve. Before an engine starts: SGLang refuses to
    split a target over GPUs of which one has less room than the others."""
    gc.collect()
    torch.cuda.empty_cache()


def target_tokens(target: TargetParts, batch: PackedBatch) -> torch.Tensor:
    """int64 [R]: the target's own token for each predicted token of the batch, from the stored last states.

    Where the row's token ties with the largest logit (16-bit logits tie often) the row's token is taken: the engine
    that wrote the row broke that tie.
    """
    own, first = [], 0
    for logits in target.logit_chunks(batch.last_states, rows_per_chunk(target)):
        row_tokens = batch.predicted_ids[first : first + logits.shape[0]]
        best = logits.max(-1)
        tied = logits.gather(1, row_tokens[:, None]).squeeze(1) >= best.values
        own.append(torch.where(tied, row_tokens, best.indices))
        first += logits.shape[0]
    return torch.cat(own)


def rows_per_chunk(target: TargetParts) -> int:
    """Rows of logits over the whole vocabulary at a time: about 64 Mi numbers."""
    return max(1, (1 << 26) // target.lm_head.shape[0])


def draft_batch(drafter: Drafter, batch: PackedBatch, own: torch.Tensor, setting: Setting) -> torch.Tensor:
    """int64 [C, K]: the greedy chain, or what a draft tree holds of the target's path (-1 where it left it).

    own: [R] from `target_tokens`.
    """
    if setting.topk == 1:
        return draft(drafter, batch, setting.num_steps)
    chain = DraftChain(drafter, batch)  # of the previous step's nodes: one, then topk a row, row after row
    count = batch.query_rows.shape[0]

    def expand(step, tokens, parent_beam):
        nonlocal chain
        if step:
            beams = chain.normed.shape[0] // count
            rows = torch.arange(count, device=tokens.device)[:, None] * beams + parent_beam  # [C, topk]
            chain = chain.select(rows.flatten())
            chain.advance(tokens.flatten())
        ids, logprobs = chain.top(min(setting.topk, drafter.config.draft_vocab_size))
        return logprobs.exp().unflatten(0, (count, -1)), ids.unflatten(0, (count, -1))

    tree = grow_tree(expand, setting.num_steps, setting.topk, setting.tree_tokens)
    return tokens_on_target_path(tree, own[batch.teacher_rows[:, : setting.num_steps]])


def expected_terms(drafter: Drafter, target: TargetParts, batch: PackedBatch, drafted: torch.Tensor, setting: Setting):
    """The pair of float64 [C, K] arrays of `acceptance.temperature_terms` at setting.temperature.

    drafted: [C, K], the greedy chain; a tree's is drawn anew.
    """
    count, num_steps, heat = batch.query_rows.shape[0], setting.num_steps, setting.temperature
    if setting.topk > 1:
        drafted = draft(drafter, batch, num_steps)
    names = target_ids(drafter.d2t)  # [N]
    normaliser = torch.cat(  # [R] log of the sum over the target's whole vocabulary
        [(x.float() / heat).logsumexp(-1) for x in target.logit_chunks(batch.last_states, rows_per_chunk(target))]
    )
    beta = torch.zeros(count, num_steps, dtype=torch.float64)
    ratio = torch.zeros(count, num_steps, dtype=torch.float64)
    prob_of_drafted = torch.zeros(count, num_steps, dtype=torch.float64)
    head_of_drafts = Teacher.from_target(target, names)

    def on_logits(step, rows, logits):
        size = max(1, (1 << 25) // logits.shape[1])
        for first in range(0, logits.shape[0], size):
            part = slice(rows.start + first, min(rows.start + first + size, rows.stop))
            teacher = batch.teacher_rows[part, step]  # [n]
            q = (logits[first : first + size].float() / heat).softmax(-1)  # [n, N]
            target_logits = head_of_drafts.logits(batch.last_states[teacher]).float()  # [n, N]
            p = (target_logits / heat - normaliser[teacher, None]).exp()
            beta[part, step] = torch.minimum(p, q).sum(-1).double().cpu()
            row_token = drafter.draft_of_target[batch.chain_ids[part, step + 1]]  # [n] draft id, -1 outside
            inside = row_token >= 0
            p_x, q_x = (d.gather(1, row_token.clamp(min=0)[:, None]).squeeze(1) for d in (p, q))
            accept = torch.where(inside, (q_x / p_x.clamp_min(1e-30)).clamp(max=1.0), 0.0)  # q(x) = 0 outside
            ratio[part, step] = accept.double().cpu()
            mine = drafter.draft_of_target[drafted[part, step]]
            prob_of_drafted[part, step] = p.gather(1, mine[:, None]).squeeze(1).double().cpu()

    draft(drafter, batch, num_steps, own_tokens=False, on_logits=on_logits)
    row = batch.chain_ids[:, 1 : num_steps + 1].cpu()
    return temperature_terms(beta, ratio, prob_of_drafted, drafted.cpu(), row)


def check_fit(drafter: DrafterConfig, info: dict, target: TargetParts, sample, name: str, data: str) -> None:
    """Raise UserError naming what of a drafter does not fit the shards; nothing is evaluated on a guess.

    info: `ShardReader.info` (empty for shards that another program wrote); sample: one loaded sample; name, data: what
    the message calls the drafter and the shards.
    """

    def differ(what, drafters, shards):
        raise UserError(f"{name}: {what} {drafters} does not fit the shards in {data}, which have {shards}")

    stored_points, width = len(sample.states) - 1, sample.states[0].shape[1]
    points = info.get("capture_points")
    if points is not None and list(points) != list(drafter.capture_points):
        differ("capture points", list(drafter.capture_points), list(points))
    if stored_points != drafter.num_points:
        differ("number of capture points", drafter.num_points, f"{stored_points} and the last state")
    if width != drafter.target_hidden_size:
        differ("target hidden size", drafter.target_hidden_size, width)
    if info.get("config_hash", hash_of(target.config)) != hash_of(target.config):
        raise UserError(
            f"the shards in {data} are of {info.get('model')} ({info.get('architecture')}, {info.get('num_layers')} "
            f"layers), but the target's config.json is another; give the checkpoint they were captured from as --model"
        )
    if target.norm.shape[0] != width:
        raise UserError(f"the target's hidden size {target.norm.shape[0]} does not fit the shards in {data}: {width}")
    if drafter.vocab_size > target.vocab_size:
        raise UserError(
            f"{name}: vocabulary {drafter.vocab_size} is larger than the target's {target.vocab_size}; give the "
            f"drafter of this target"
        )
    largest = int(sample.input_ids.max())
    if largest >= drafter.vocab_size:
        differ("vocabulary", drafter.vocab_size, f"token id {largest}")
    last = info.get("last_state")
    if last is not None and last != "pre-norm":
        differ("norm option: the last state is read as", "pre-norm", f"{last!r} (see --diagnose)")


def points_in_order(reader, num_layers: int) -> CapturePoints:
    """Capture points of a ShardReader's states: what dataset.json says, or the caller where another program wrote them.

    Raises UserError where nobody says: the wrong guess costs most of the acceptance, and nothing would show it.
    """
    points = reader.info.get("capture_points")
    if points is None or (reader.foreign and reader.named_points is None):  # ours beside them say nothing of theirs
        usual = ""
        if num_layers >= 7:
            new, old = CapturePoints.speculators_default(num_layers), CapturePoints.default(num_layers)
            usual = (
                f"; for {num_layers} layers speculators' default is {' '.join(map(str, new.points))} (0.5 and later) "
                f"or {' '.join(map(str, old.points))} (before)"
            )
        raise UserError(
            f"{(reader.foreign or ['the shards'])[0]}: nothing says which layers these states are; name them with "
            f"--data-points{usual}"
        )
    return CapturePoints(tuple(points), num_layers)
