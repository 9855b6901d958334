"""What a training run says of itself: operations, rates, phases, and what becomes of the log on a full disk."""

import resource
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.errors import UserError
from common.packing import pack_documents
from common.step_profile import StepClock, to_device, to_host
from common.train_step import useful_flops
from common.training_log import TrainingLog, over_steps, read_metrics
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


def test_a_line_over_several_steps_has_their_rates_and_their_mean_loss():
    step = dict(accuracy_per_step=[0.5, 0.0], mfu=0.5, samples=2, learning_rate=1e-4)
    phases = {"forward": 10.0, "backward": 30.0}
    large = step | dict(loss=2.0, tokens=900, supervised_tokens=300, seconds=1.0, milliseconds=phases)
    small = step | dict(loss=6.0, tokens=100, supervised_tokens=100, seconds=1.0, mfu=0.1, milliseconds=phases)
    one = over_steps([large, small])
    assert one["tokens_per_second"] == 500 and one["supervised_tokens_per_second"] == 200
    assert one["loss"] == (2 * 300 + 6 * 100) / 400 and one["accuracy_per_step"] == [0.5, 0.0]
    assert one["samples_per_second"] == 2 and one["mfu"] == 0.3 and one["milliseconds"] == phases
    assert over_steps([small])["tokens_per_second"] == 100 and over_steps([small])["loss"] == 6.0


def test_a_full_disk_under_the_log_is_one_line_and_whole_steps_stay(tmp_path):
    log = TrainingLog(tmp_path, 0, tensorboard=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
        with pytest.raises(UserError, match="cannot write there .File too large"):
            for step in range(1, 20):
                log.write("train", step, {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, step))
    assert (tmp_path / "metrics.jsonl").stat().st_size == 200, "the last line is cut off, or this shows nothing"


@pytest.mark.gpu
def test_the_host_does_not_wait_for_what_is_queued_later():
    tensor = torch.ones(3, device="cuda")
    read = to_host(tensor)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of the device's time
    started = time.perf_counter()
    assert read() == [1.0] * 3
    to_device([2.0, 3.0, 4.0], tensor)
    later = to_host(tensor)
    assert time.perf_counter() - started < 0.3
    assert later() == [2.0, 3.0, 4.0] and time.perf_counter() - started > 0.3


def test_a_step_begins_where_the_one_before_ended():
    before = StepClock(torch.device("cpu"))
    before.mark("optimizer")
    time.sleep(0.05)
    clock = StepClock(torch.device("cpu"), before)
    clock.mark("fetch")
    clock.mark("forward")
    assert 50 <= clock.milliseconds()["fetch"] < 1000 and clock.milliseconds()["forward"] < 20
