"""The operations that MFU counts are those that the layer does, for both kinds of layer."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.packing import pack_documents
from common.train_step import useful_flops
from tests.test_drafter import document, make


def counted(run) -> int:
    """Operations of the matrix products that `run` does, 2 a multiply-add."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_useful_operations_are_those_of_the_layer(kind):
    drafter, _ = make(kind, dtype=torch.float32)
    batch = pack_documents([document(20, [9, 12, 13])], 4)
    batch.aux_states = batch.aux_states.float()
    c, w, num_steps = drafter.config, drafter.weights(), 4
    tokens, queries, predicted = batch.num_tokens, batch.num_queries, batch.num_predicted
    assert (batch.positions.shape[0], batch.query_rows.shape[0]) == (tokens, queries) and tokens > queries > predicted
    query, keys, values, state = drafter.first_step(w, batch)
    ids, positions = batch.chain_ids[:, 1].contiguous(), batch.positions[batch.query_rows]
    attended = torch.zeros(queries, c.num_attention_heads, values.shape[-1])
    fc = 2 * tokens * c.num_points * c.target_hidden_size * c.hidden_size
    layer = counted(lambda: drafter.first_step(w, batch)) - fc
    layer += (num_steps - 1) * counted(lambda: drafter.later_step(w, state, ids, positions))
    layer += num_steps * counted(lambda: drafter.finish_step(w, attended, state))
    seen = sum(batch.num_pairs + queries * k for k in range(num_steps))
    attention = 2 * c.num_attention_heads * (query.shape[-1] + values.shape[-1]) * seen
    head = 2 * predicted * c.hidden_size * c.draft_vocab_size * num_steps
    useful = useful_flops(c, tokens, queries, predicted, batch.num_pairs, num_steps)
    assert useful == 2 * fc + 3 * (layer + attention + head) + head / num_steps  # the teacher's head, forward only
