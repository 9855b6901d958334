"""Our drafter and SGLang's own module compute the same logits from the same exported weights, over chained steps."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.drafting import DraftChain
from common.packing import pack_documents
from common.vocab import target_ids
from tests.test_drafter import LLAMA3, document, make, relative

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=32, beta_slow=1)


CASES = {
    "plain": {},
    "fc_norm, norm_output, llama3": dict(fc_norm=True, norm_output=True, rope_scaling=LLAMA3),
    "yarn": dict(rope_scaling=YARN),
}
STEPS = 7


def prepare(overrides):
    """(drafter, batch, slots of the second document, its case for tests/sglang_module.py)."""
    drafter, _ = make(dtype=torch.float32, head_dim=16, hidden_size=64, target_hidden_size=64, **overrides)
    c = drafter.config
    documents = [document(5, 0.5, width=64), document(40, [9, 30, 31], width=64)]
    for each in documents:
        each.states = [state.float() for state in each.states]
    batch = pack_documents(documents, STEPS)
    mine = torch.nonzero(batch.query_documents == 1).flatten().tolist()
    positions = batch.positions[batch.query_rows].tolist()
    config = c.to_dict() | dict(num_hidden_layers=1, tie_word_embeddings=False, capture_points=list(c.capture_points))
    case = dict(
        config=config, weights=drafter.state_dict(), embedding=drafter.embed_tokens.float(),
        input_ids=documents[1].input_ids, aux_states=torch.cat(documents[1].states[:-1], dim=-1),
        chains={positions[slot]: batch.chain_ids[slot, :STEPS] for slot in mine},
    )  # fmt: skip
    return drafter, batch, mine, case


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_same_logits_as_sglangs_module(tmp_path):
    prepared = {name: prepare(overrides) for name, overrides in CASES.items()}
    torch.save([case for *_, case in prepared.values()], tmp_path / "cases.pt")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("sglang_module.py"), tmp_path / "cases.pt", tmp_path / "results.pt"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = torch.load(tmp_path / "results.pt", weights_only=True)
    for (name, (drafter, batch, mine, _)), result in zip(prepared.items(), results, strict=True):
        assert torch.equal(result["hot_token_id"], target_ids(drafter.d2t))
        positions = batch.positions[batch.query_rows].tolist()
        chain = DraftChain(drafter, batch)
        assert len(mine) >= 9
        for k in range(STEPS):
            if k:
                chain.advance(batch.chain_ids[:, k])
            logits = torch.cat([x for _, x in chain.logit_chunks()])
            for slot in mine:
                expected = result["logits"][positions[slot]][k]
                # both are float32, and rounding grows along the chain; a wrong convention is off by more than 0.1
                assert relative(logits[slot], expected) < (1e-5 if k == 0 else 1e-3), (name, k, positions[slot])
        shifted = DraftChain(drafter, batch)
        shifted.positions = shifted.positions + 1  # the comparison can fail: rotary positions off by one
        shifted.advance(batch.chain_ids[:, 1])
        logits = torch.cat([x for _, x in shifted.logit_chunks()])
        assert max(relative(logits[slot], result["logits"][positions[slot]][1]) for slot in mine) > 2e-3
