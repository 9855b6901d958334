"""Packing, the held-out split, and the feed that reads ahead."""

import itertools
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import common.load_batch
from common.batches import (
    Budget,
    Schedule,
    batch_plan,
    choose_budget,
    fingerprint,
    is_held_out,
    pack,
    scan,
    scan_once,
    split,
)
from common.errors import UserError
from common.feed import Feed, SetAside
from common.load_batch import not_finite
from common.packing import count_positions, pack_documents
from common.shards import ShardReader
from tests.training_fixtures import VOCAB, make_sample, write_shards, write_target

STEPS = 3


@dataclass
class Row:
    """What the schedule reads of a `shards.Record`."""

    index: int
    tokens: int
    supervised: int
    row_hash: str
    path: str = "data_0.pt"
    xxh3: str | None = None


def chat_mix(count: int, mean: int = 1000, longest: int = 4096, seed: int = 0) -> np.ndarray:
    """int64 [N, 3] tokens, query rows, predicted tokens: log-normal lengths, about 45% supervised in a few replies."""
    chance = np.random.default_rng(seed)
    tokens = np.clip(chance.lognormal(np.log(mean) - 0.32, 0.8, count), 8, longest).astype(int)
    predicted = np.maximum((tokens * chance.beta(4.5, 5.5, count)).astype(int), 1)
    queries = np.maximum(np.minimum(predicted + 6 * chance.integers(1, 6, count), tokens - 2), predicted)
    return np.stack([tokens, queries, predicted], axis=1)


def rows(sizes: np.ndarray) -> list[Row]:
    return [Row(i, int(size[0]), int(size[2]), f"{i:032x}") for i, size in enumerate(sizes)]


# ---- packing ---------------------------------------------------------------------------------------------------------


def test_a_chat_mix_is_packed_with_less_than_one_percent_of_padding_within_every_budget():
    sizes = chat_mix(4000)
    budget = choose_budget(sizes, 8192)
    started = time.perf_counter()
    batches = pack(sizes, budget, (1, 0))
    seconds = time.perf_counter() - started
    assert sorted(itertools.chain(*batches)) == list(range(len(sizes)))
    used = np.array([sizes[batch].sum(0) for batch in batches])
    assert (used <= [budget.tokens, budget.queries, budget.predicted]).all()
    assert 1 - used[:, 0].sum() / (len(batches) * budget.tokens) < 0.01
    assert 1 - used[:, 1].sum() / (len(batches) * budget.queries) < 0.05
    assert seconds < 20, "packing must not delay the start of a run"


def test_packing_in_plain_order_would_not_pass_the_padding_check():
    sizes = chat_mix(4000)
    budget = choose_budget(sizes, 8192)
    batches, left = 1, np.array([budget.tokens, budget.queries, budget.predicted])
    for size in sizes:
        if (size > left).any():
            batches, left = batches + 1, np.array([budget.tokens, budget.queries, budget.predicted])
        left = left - size
    assert 1 - sizes[:, 0].sum() / (batches * budget.tokens) > 0.05


def test_the_plan_is_a_function_of_seed_and_epoch():
    sizes = chat_mix(300)
    budget = choose_budget(sizes, 8192)
    assert pack(sizes, budget, (1, 0)) == pack(sizes, budget, (1, 0))
    assert pack(sizes, budget, (1, 0)) != pack(sizes, budget, (1, 1))
    assert pack(sizes, budget, (1, 0)) != pack(sizes, budget, (2, 0))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_each_step_without_overlap_and_take_equally_many_steps(ranks):
    sizes = chat_mix(206)
    schedule = Schedule(rows(sizes), sizes, 8192, 4, seed=0)
    seen = []
    for step in range(schedule.steps(0)):
        per_rank = [schedule.batches(0, step, rank, ranks) for rank in range(ranks)]
        assert [len(batches) for batches in per_rank] == [4 // ranks] * ranks
        seen += [record.index for batches in per_rank for batch in batches for record in batch]
        interleaved = [batch for group in zip(*per_rank, strict=True) for batch in group]
        assert interleaved == schedule.batches(0, step), "a step must not depend on the number of ranks"
    assert sorted(seen) == list(range(206))
    assert not schedule.batches(0, schedule.steps(0) - 1)[-1], "this case must end with an empty batch"


def test_epochs_and_steps_mean_what_they_say():
    sizes = chat_mix(200)
    schedule = Schedule(rows(sizes), sizes, 8192, 2, seed=0)
    assert schedule.total_steps(2) == schedule.steps(0) + schedule.steps(1)
    assert schedule.total_steps(1.5) == schedule.steps(0) + -(-schedule.steps(1) // 2)
    assert schedule.total_steps(0.001) == 1


def test_documents_longer_than_a_batch_are_trimmed_skipped_or_refused_and_counted():
    sizes = np.array([[100, 60, 50], [20, 10, 8], [300, 200, 190]])
    records = rows(sizes)
    cut = np.minimum(sizes, 128)
    trimmed = Schedule(records, cut, 128, 1, 0, "trim")
    assert trimmed.counts == {"trimmed to 128 tokens": 1, "tokens trimmed off": 172}
    skipped = Schedule(records, cut, 128, 1, 0, "skip")
    assert skipped.counts == {"left out: longer than 128 tokens": 1} and len(skipped.records) == 2
    with pytest.raises(UserError, match="300 tokens do not fit into a batch of 128.*--tokens-per-batch"):
        Schedule(records, cut, 128, 1, 0, "refuse")


def test_samples_with_nothing_to_predict_are_counted():
    sizes = np.array([[100, 60, 50], [20, 0, 0]])
    schedule = Schedule(rows(sizes), sizes, 128, 1, 0)
    assert schedule.counts == {"left out: no supervised token to predict": 1}
    with pytest.raises(UserError, match="none of 1 samples"):
        Schedule(rows(sizes)[1:], sizes[1:], 128, 1, 0)


def test_steps_that_ranks_cannot_share_are_refused():
    assert batch_plan(4096, 0, 2) == (2048, 2) and batch_plan(4096, 512, 2) == (512, 8)
    for wrong in ((4096, 1000, 1), (4096, 2048, 4), (512, 1024, 1)):
        with pytest.raises(UserError, match="must be a multiple"):
            batch_plan(*wrong)


# ---- held-out split --------------------------------------------------------------------------------------------------


def test_the_held_out_split_is_of_the_right_size_and_never_moves_a_row():
    records = rows(chat_mix(5000))
    training, held_out = split(records, 0.1)
    assert 400 < len(held_out) < 600 and len(training) + len(held_out) == 5000
    more = records + [Row(i, 10, 5, f"{i:032x}") for i in range(5000, 6000)]
    assert [r.index for r in split(more, 0.1)[1] if r.index < 5000] == [r.index for r in held_out]
    assert all(is_held_out(record.row_hash, 0.2) for record in held_out), "a larger share contains a smaller one"
    assert split(records, 0.0) == (records, [])


def test_empty_splits_are_refused():
    records = rows(chat_mix(3))
    with pytest.raises(UserError, match="holds out none of 3"):
        split(records, 1e-9)
    with pytest.raises(UserError, match="expected a number from 0"):
        split(records, 1.0)
    with pytest.raises(UserError, match="no sample is left"):
        split([record for record in records if is_held_out(record.row_hash, 0.999)], 0.999)


def test_the_fingerprint_sees_a_changed_or_missing_sample():
    records = rows(chat_mix(5))
    changed = [Row(**{**vars(records[0]), "row_hash": "ff"}), *records[1:]]
    assert len({fingerprint(records), fingerprint(records[:-1]), fingerprint(changed)}) == 3


# ---- scan and feed, on real shards -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    samples = write_some_bad(folder)
    return ShardReader(folder / "states"), samples


def write_some_bad(folder) -> list:
    """target/, and states/ of 40 samples, which are returned: 7 holds a NaN, 9 an Inf."""
    samples = [make_sample(10 + 7 * i % 50, seed=i) for i in range(40)]
    for bad, value in ((7, float("nan")), (9, float("inf"))):
        samples[bad][2][1][3, 5] = value
    write_shards(folder / "states", write_target(folder / "target"), samples)
    return samples


def damage(path) -> None:
    data = bytearray(path.read_bytes())
    data[-4000] ^= 1
    path.write_bytes(data)


def make_schedule(reader, batches_per_step: int = 2, max_tokens: int = 128):
    sizes, _ = scan(reader, reader.records, STEPS, max_tokens, VOCAB)
    return Schedule(reader.records, sizes, max_tokens, batches_per_step, seed=3)


def test_scan_counts_what_packing_needs_and_which_tokens_are_supervised(shards):
    reader, samples = shards
    sizes, frequencies = scan(reader, reader.records, STEPS, 40, VOCAB)
    expected = torch.zeros(VOCAB, dtype=torch.int64)
    for i, (ids, mask, _) in enumerate(samples):
        assert sizes[i].tolist() == [min(len(ids), 40), *count_positions(mask[:40], STEPS)]
        expected += torch.bincount(ids[:40][mask[:40] != 0], minlength=VOCAB)
    assert torch.equal(frequencies, expected)
    with pytest.raises(UserError, match="data_0.pt: token ids run from"):
        scan(reader, reader.records, STEPS, 40, vocab_size=10)


def test_a_scan_is_kept_whole_or_not_at_all(shards, tmp_path):
    reader, _ = shards
    arguments = (reader, reader.records, STEPS, 128, VOCAB)
    path = tmp_path / "scan.pt"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        with pytest.raises(UserError, match="scan.pt: cannot write there .File too large"):
            scan_once(path, *arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    made = scan_once(path, *arguments)
    kept = scan_once(path, None, *arguments[1:])  # no reader: out of the file
    assert (made[0] == kept[0]).all() and torch.equal(made[1], kept[1])


@pytest.mark.parametrize("scratch", [0, 256 << 20])
def test_the_feed_packs_what_the_schedule_names_and_sets_bad_samples_aside(shards, tmp_path, monkeypatch, scratch):
    monkeypatch.setattr(common.load_batch, "SCRATCH", scratch)  # mapped, and read
    reader, samples = shards
    schedule = make_schedule(reader)
    feed = Feed(reader, schedule, STEPS)
    said = []
    set_aside = SetAside(tmp_path / "set_aside.jsonl", said.append)
    for number, step in zip(range(schedule.steps(0)), feed, strict=False):
        assert (step.epoch, step.step) == (0, number)
        for loaded, records in zip(step.loaded, schedule.batches(0, number), strict=True):
            good = [record for record in records if record.index not in (7, 9)]
            assert {each["index"] for each in loaded.set_aside} == {r.index for r in records} - {r.index for r in good}
            set_aside.add(loaded.set_aside)
            assert loaded.samples == len(good) and loaded.batch.num_tokens == sum(record.tokens for record in good)
            if good:
                room = schedule.budget
                expected = pack_documents([reader.load(record) for record in good], STEPS, tokens=room.tokens,
                                          queries=room.queries, predicted=room.predicted)  # fmt: skip
                for name, tensor in expected.tensors().items():
                    assert torch.equal(tensor, loaded.batch.tensors()[name]), name
            assert loaded.counts.tolist() == loaded.batch.weights.sum(0).tolist()
        for loaded in step.loaded:
            feed.release(loaded)
    feed.close()
    assert len(set_aside.paths) == 2
    assert any("sample 7 set aside: NaN in state 2 of 4, row 3" in line for line in said)
    assert any("sample 9 set aside: Inf in state 2 of 4, row 3" in line for line in said)
    again = SetAside(tmp_path / "set_aside.jsonl", said.append)
    again.add([{"index": 7, "path": str(reader.records[7].path), "reason": "NaN"}])
    assert len(again.paths) == 1 and len(said) == 2, "a resumed run counts it and does not name it again"


def test_reading_threads_compute_alone_and_no_others_do(shards):
    reader, _ = shards
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        feed = Feed(reader, make_schedule(reader), STEPS, workers=2)
        next(feed)
        inside = list(feed._pool.map(lambda _: (torch.zeros(99).sum(), torch.get_num_threads())[1], range(20)))
        with ThreadPoolExecutor(1) as later:
            assert set(inside) == {1} and torch.get_num_threads() == later.submit(torch.get_num_threads).result() == 3
        feed.close()
    finally:
        torch.set_num_threads(before)


def test_without_the_check_bad_samples_go_through(shards):
    reader, _ = shards
    schedule = make_schedule(reader)
    feed = Feed(reader, schedule, STEPS, check=False, buffers=schedule.steps(0) * schedule.batches_per_step)
    loaded = [each for step in itertools.islice(feed, schedule.steps(0)) for each in step.loaded]
    feed.close()
    assert sum(each.samples for each in loaded) == 40 and not any(each.set_aside for each in loaded)
    assert not all(bool(each.batch.aux_states.isfinite().all()) for each in loaded)


def test_a_caller_that_gives_no_batch_back_is_told(shards):
    reader, _ = shards
    feed = Feed(reader, make_schedule(reader), STEPS, buffers=1)
    with pytest.raises(RuntimeError, match="release the batches"):
        list(itertools.islice(feed, 5))
    feed.close()


def test_a_feed_resumes_at_any_step_and_its_ranks_take_their_own_batches(shards):
    reader, _ = shards
    schedule = make_schedule(reader)
    steps = schedule.steps(0)

    def tokens(start, rank=0, ranks=1, take=steps + 3):
        feed = Feed(reader, schedule, STEPS, start, rank, ranks)
        out = []
        for step in itertools.islice(feed, take):
            out.append((step.epoch, step.step, [loaded.batch.embed_ids.clone() for loaded in step.loaded]))
            for loaded in step.loaded:
                feed.release(loaded)
        feed.close()
        return out

    def same(a, b):
        return a[:2] == b[:2] and all(torch.equal(x, y) for x, y in zip(a[2], b[2], strict=True))

    whole = tokens((0, 0))
    assert [each[:2] for each in whole] == [(0, i) for i in range(steps)] + [(1, 0), (1, 1), (1, 2)]
    resumed = tokens((0, 2), take=steps + 1)
    assert all(same(a, b) for a, b in zip(whole[2:], resumed, strict=True))
    assert same(tokens((0, steps), take=1)[0], whole[steps]), "the end of an epoch is the start of the next"
    for rank in (0, 1):
        for mine, all_of_it in zip(tokens((0, 0), rank, 2), whole, strict=True):
            assert torch.equal(mine[2][0], all_of_it[2][rank])


def test_a_damaged_file_is_set_aside_by_its_checksum(tmp_path):
    target = write_target(tmp_path / "target")
    write_shards(tmp_path / "states", target, [make_sample(30, seed=i) for i in range(6)])
    reader = ShardReader(tmp_path / "states")
    damage(reader.records[2].path)
    schedule = make_schedule(reader, 1)
    reader.records[4].path.unlink()
    os.mkfifo(reader.records[4].path)  # to read it would wait for ever
    with pytest.raises(UserError, match="data_4.pt: no regular file"):
        make_schedule(reader, 1)
    feed = Feed(reader, schedule, STEPS)
    problems = [each for step in itertools.islice(feed, schedule.steps(0)) for loaded in step.loaded
                for each in (loaded.set_aside, feed.release(loaded))[0]]  # fmt: skip
    feed.close()
    reasons = {each["index"]: each["reason"] for each in problems}
    assert reasons.keys() == {2, 4} and "xxh3" in reasons[2] and "no regular file" in reasons[4]


def test_not_finite_names_the_state_and_the_row_and_large_finite_rows_pass():
    states = [torch.full((4, 8), 3e38, dtype=torch.bfloat16) for _ in range(2)]  # their row sums overflow
    assert not_finite(states) is None
    states[1][2, 7] = float("-inf")
    assert not_finite(states) == "Inf in state 2 of 2, row 2"
    states[0][1, 0] = float("nan")
    assert not_finite(states) == "NaN in state 1 of 2, row 1"


def test_the_budget_has_room_for_the_largest_document_and_shrinks_to_a_small_data_set():
    assert choose_budget(np.array([[100, 90, 80], [3000, 50, 40]]), 4096) == Budget(3104, 144, 128)
    assert choose_budget(np.array([[100, 90, 80], [50, 5, 4]]), 4096) == Budget(160, 112, 96)
