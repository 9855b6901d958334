"""Attention over TTT steps: blocks and Triton kernels against a dense mask, values and gradients."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from common import ttt_attention as module
from common.packing import pack_documents
from common.ttt_attention import ttt_attention

LENGTHS = (1, 2, 7, 300)


def packed(lengths=LENGTHS, num_steps=3, supervised=0.5, seed=0, **budgets):
    """Query rows and starts of a real packed batch."""
    generator = torch.Generator().manual_seed(seed)
    documents = [
        SimpleNamespace(
            input_ids=torch.zeros(length, dtype=torch.int64),
            loss_mask=(torch.rand(length, generator=generator) < supervised).long(),
            states=[torch.zeros(length, 1)] * 2,
        )
        for length in lengths
    ]
    return pack_documents(documents, num_steps, **budgets)


def inputs(batch, steps, heads=6, kv=2, d=16, dtype=torch.float64, seed=1, device="cpu", values=None):
    """values: width of the values, where it is not that of the keys."""
    generator = torch.Generator().manual_seed(seed)
    tokens, queries, e = batch.positions.shape[0], batch.query_rows.shape[0], values or d
    shapes = [(queries, heads, d), (tokens, kv, d), (tokens, kv, e), (steps, queries, kv, d), (steps, queries, kv, e)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_() for s in shapes]
    return made, torch.randn(queries, heads, e, generator=generator, dtype=torch.float64).to(device, dtype)


def dense(query, keys, values, own_keys, own_values, rows, starts, scale=None, wrong_by=0):
    """Independent: a full boolean mask over step-0 keys and all own keys of all queries, one softmax."""
    queries, heads, d = query.shape
    tokens, steps = keys.shape[0], own_keys.shape[0]
    group = heads // keys.shape[1]
    all_keys = torch.cat((keys, own_keys.flatten(0, 1))).repeat_interleave(group, dim=1)
    all_values = torch.cat((values, own_values.flatten(0, 1))).repeat_interleave(group, dim=1)
    column = torch.arange(tokens, device=query.device)
    causal = (column <= rows[:, None] + wrong_by) & (column >= starts[:, None])
    own = torch.eye(queries, dtype=torch.bool, device=query.device).repeat(1, steps)
    mask = torch.cat((causal, own), dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, all_keys) * (d**-0.5 if scale is None else scale)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), all_values)


def relative(a, b):
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("steps", [0, 1, 6])
@pytest.mark.parametrize("block", [5, 128])
@pytest.mark.parametrize("values,scale", [(None, None), (10, 0.4)])
def test_blocks_equal_dense_mask(steps, block, values, scale, monkeypatch):
    monkeypatch.setattr(module, "QUERIES_PER_BLOCK", block)
    batch = packed()
    made, grad = inputs(batch, steps, values=values)
    ours = ttt_attention(*made, batch.query_rows, batch.query_starts, scale=scale)
    reference = dense(*made, batch.query_rows, batch.query_starts, scale)
    assert relative(ours, reference) < 1e-12
    gradients = torch.autograd.grad(ours, made, grad)
    for mine, theirs in zip(gradients, torch.autograd.grad(reference, made, grad), strict=True):
        assert mine.shape == theirs.shape
        if mine.numel():
            assert relative(mine, theirs) < 1e-12


def test_reference_notices_one_key_too_many():
    """The comparison can fail: a mask that is off by one position is far away."""
    batch = packed()
    made, _ = inputs(batch, 1)
    ours = ttt_attention(*made, batch.query_rows, batch.query_starts)
    assert relative(ours, dense(*made, batch.query_rows, batch.query_starts, wrong_by=1)) > 0.05


def test_documents_do_not_see_each_other():
    batch = packed()
    made, _ = inputs(batch, 2)
    before = ttt_attention(*made, batch.query_rows, batch.query_starts)
    last = batch.query_documents == len(LENGTHS) - 1
    with torch.no_grad():
        made[1][: sum(LENGTHS[:-1])] += 100.0
        made[2][: sum(LENGTHS[:-1])] += 100.0
    after = ttt_attention(*made, batch.query_rows, batch.query_starts)
    assert torch.equal(before[last], after[last])
    assert not torch.equal(before[~last], after[~last])


@pytest.mark.parametrize("kv,values,scale", [(2, None, None), (4, 3, 0.7)])
def test_gradcheck(kv, values, scale):
    batch = packed(lengths=(5, 3), supervised=1.0)
    made, _ = inputs(batch, 2, heads=4, kv=kv, d=4, values=values)
    run = lambda *x: ttt_attention(*x, batch.query_rows, batch.query_starts, scale=scale)  # noqa: E731
    assert torch.autograd.gradcheck(run, made)


def compare_fused(device, dtype, lengths, steps, heads, kv, d, supervised=0.5, values=None, scale=None, **budgets):
    """Worst relative error of the kernels' output and gradients against the dense mask in float64."""
    batch = packed(lengths, supervised=supervised, **budgets).to(device)
    made, grad = inputs(batch, steps, heads, kv, d, dtype, device=device, values=values)
    exact = [x.detach().double().requires_grad_() for x in made]
    ours = ttt_attention(*made, batch.query_rows, batch.query_starts, fused=True, scale=scale)
    reference = dense(*exact, batch.query_rows, batch.query_starts, scale)
    errors = [relative(ours.double(), reference)]
    theirs = torch.autograd.grad(reference, exact, grad.double())
    for mine, other in zip(torch.autograd.grad(ours, made, grad), theirs, strict=True):
        errors.append(relative(mine.double(), other) if mine.numel() else 0.0)
    return max(errors) if all(e == e for e in errors) else float("nan")


INTERPRETED = """
from tests.test_ttt_attention import compare_fused, LENGTHS
import torch
for lengths, steps, heads, kv, d, supervised, budgets in [
    (LENGTHS, 0, 4, 2, 16, 0.5, {}),
    (LENGTHS, 2, 4, 2, 16, 0.5, dict(tokens=333, queries=310)),
    ((3, 200, 170), 1, 3, 3, 32, 1.0, {}),
    ((150, 9, 20, 140), 3, 8, 1, 16, 1.0, {}),  # documents end inside tiles; positions of eight rows
    ((150, 90), 3, 6, 2, 16, 1.0, dict(tokens=256, queries=251)),  # groups of three leave a row of a block over
    ((3,) * 30, 1, 4, 1, 16, 1.0, dict(scale=30.0)),  # sums of exponentials so small that empty slots would overflow
    ((3, 40, 90), 2, 4, 2, 24, 0.5, {}),
    ((3, 40, 90), 2, 3, 3, 24, 0.5, dict(values=16, scale=0.3)),
    ((3, 40, 90), 1, 2, 2, 16, 0.5, dict(values=40)),
    ((70,), 1, 1, 1, 192, 0.5, dict(values=128, scale=0.1)),
]:
    error = compare_fused("cpu", torch.float32, lengths, steps, heads, kv, d, supervised, **budgets)
    print(lengths, steps, error)
    assert error < 1e-5, error
"""


def test_kernels_interpreted_equal_dense_mask():
    """The same Triton source, run by Triton's interpreter on the CPU in float32."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("block", [16, 64])
def test_query_ranges_by_brute_force(block):
    """What each block of keys is told: who sees any of its keys, and who sees them all."""
    pytest.importorskip("triton")
    from common.ttt_attention_triton import _query_ranges

    batch = packed((1, 70, 30, 7, 150), supervised=0.7, tokens=300, queries=280)
    rows, starts, num_keys = batch.query_rows, batch.query_starts, batch.positions.shape[0]
    order, *found = _query_ranges(rows, starts, num_keys, block).tolist()
    assert sorted(order) == list(range(-(-num_keys // block)))
    work = [last - first for first, last in zip(*found[:2], strict=True)]
    assert work == sorted(work, reverse=True)
    for number, first, last, a, b in zip(order, *found, strict=True):
        keys = torch.arange(number * block, (number + 1) * block)
        sees = (starts[:, None] <= keys) & (keys <= rows[:, None])
        assert sees.any(1).nonzero().flatten().tolist() == list(range(first, last))
        assert sees.all(1).nonzero().flatten().tolist() == list(range(a, b))


def test_too_many_heads_for_a_block_are_refused():
    pytest.importorskip("triton")
    batch = packed((5, 9), supervised=1.0)
    made, _ = inputs(batch, 0, heads=65, kv=1)
    with pytest.raises(ValueError, match="65 query heads for a kv head"):
        ttt_attention(*made, batch.query_rows, batch.query_starts, fused=True)


MLA = dict(values=128, scale=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("heads,kv,d,more", [(64, 8, 128, {}), (9, 3, 64, {}), (64, 64, 192, MLA), (16, 16, 256, {})])
@pytest.mark.parametrize("steps", [0, 3])
def test_kernels_on_gpu_equal_dense_mask(heads, kv, d, more, steps):
    lengths, room = LENGTHS + (513, 40), dict(tokens=1024, queries=800)
    assert compare_fused("cuda", torch.bfloat16, lengths, steps, heads, kv, d, **more, **room) < 1e-2
