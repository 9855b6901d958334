"""Draft vocabulary: order, ties, size, speed at Kimi's dimensions."""

import time

import pytest
import torch

from common.errors import UserError
from common.vocab import build_draft_vocab, draft_ids, target_ids


def test_most_frequent_supervised_tokens_ties_by_id():
    counts = torch.tensor([0, 0, 1, 0, 2, 0, 0, 2, 0, 3, 0, 0])
    d2t, t2d = build_draft_vocab(counts, 2)  # 9, then the tie of 4 and 7 goes to 4
    assert target_ids(d2t).tolist() == [4, 9]
    assert torch.nonzero(t2d).flatten().tolist() == [4, 9]
    assert (torch.arange(2) + d2t).tolist() == [4, 9] and d2t.dtype == torch.int64
    assert draft_ids(d2t, 12).tolist() == [-1, -1, -1, -1, 0, -1, -1, -1, -1, 1, -1, -1]


def test_capped_at_whole_tiles_of_many_distinct_tokens():
    counts = torch.zeros(5000, dtype=torch.int64)
    counts[100:1300] = torch.arange(1200, 0, -1)
    for size, number in ((32000 % 5000, 1152), (1200, 1200), (1201, 1152), (1100, 1100)):
        d2t, t2d = build_draft_vocab(counts, size)
        assert torch.equal(target_ids(d2t), torch.arange(100, 100 + number)) and int(t2d.sum()) == number


def test_capped_at_distinct_supervised_tokens():
    counts = torch.tensor([0, 3, 0, 1, 1])
    d2t, t2d = build_draft_vocab(counts, 4)
    assert d2t.shape == (3,) and t2d.tolist() == [False, True, False, True, True]


def test_full_vocabulary():
    d2t, t2d = build_draft_vocab(torch.tensor([0, 3, 0]), 0)
    assert d2t.tolist() == [0, 0, 0] and t2d.all()


def test_bad_input_is_named():
    with pytest.raises(UserError, match="no supervised token"):
        build_draft_vocab(torch.zeros(5, dtype=torch.int64), 3)
    with pytest.raises(UserError, match="-1"):
        build_draft_vocab(torch.ones(5, dtype=torch.int64), -1)


def test_32000_of_163840_ids_take_less_than_a_second():
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 1000, (163840,), generator=generator)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # processor time of one thread: other programs on the machine do not count
    started = time.process_time()
    d2t, t2d = build_draft_vocab(counts, 32000)
    seconds = time.process_time() - started
    torch.set_num_threads(threads)
    assert d2t.shape == (32000,) and t2d.sum() == 32000
    assert counts[t2d].min() >= counts[~t2d].max()
    assert seconds < 1.0, f"{seconds:.2f} s"
