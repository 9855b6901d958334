"""The plan of Kimi-K2.5 against figures worked out by hand, and the configs that ship: every key is known."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from common.arguments import parse
from common.capture_points import CapturePoints
from common.plan import plan_of, plan_text
from common.plan_training import training_plan, training_text
from eval_acceptance import Arguments as EvalArguments
from extract import ExtractArguments
from train_drafter import TrainArguments

ROOT = Path(__file__).resolve().parent.parent
KIMI_K25 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": dict(
        num_hidden_layers=61, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
        num_attention_heads=64, num_key_value_heads=64, n_routed_experts=384, num_experts_per_tok=8,
        n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, vocab_size=163840, max_position_embeddings=262144, rope_theta=50000.0,
        rms_norm_eps=1e-5,
    ),
}  # fmt: skip


def test_ten_thousand_samples_of_kimi_k25_on_eight_gpus():
    mask = np.zeros(2100, np.int64)
    mask[1155:] = 1  # 45 %
    samples = [SimpleNamespace(input_ids=mask, loss_mask=mask)] * 10_000
    points = CapturePoints.default(61)
    target = {"points": points, "hidden_size": 7168, "vocab_size": 163840, "config": KIMI_K25}
    arguments = ExtractArguments(ring_gb=12.0)
    plan = plan_of(arguments, samples, target, gpus=8)
    assert (plan["samples"], plan["tokens"], plan["supervised_tokens"]) == (10_000, 21_000_000, 9_450_000)
    assert plan["bytes_per_token"] == 57_344 and plan["bytes"] == pytest.approx(1.204e12, rel=0.01)
    embedding_and_head = 2 * 163840 * 7168  # no part of a prefill
    assert plan["active_parameters"] + embedding_and_head == pytest.approx(32e9, rel=0.03)  # as its makers say
    # 21e6 tokens * 2 * 30.3e9 operations / (8 * 790e12 a second)
    assert plan["floor_seconds_h200"] == pytest.approx(202, rel=0.01)
    assert 300 < plan["expected_seconds_h200"] < 400
    assert plan["host_memory_bytes"] == 96e9
    assert plan["write_gb_per_second"] == pytest.approx(1204 / plan["expected_seconds_h200"], rel=0.01)
    training = training_plan(samples, target, plan["bytes"], plan["bytes_per_token"], gpus=8)
    assert training["queries"] == 10_000 * (945 + 6)  # the supervised ones, and those that reach them in 7 steps
    # The benchmark's chat mix, as densely supervised, trains at 32,358 tokens/s on one H200 (benchmarks/LOG.md).
    assert training["compute_seconds_per_epoch_h200"] == pytest.approx(21e6 / 32_358 / 8, rel=0.15)
    assert training["read_bytes_per_epoch"] == plan["bytes"]
    text = plan_text(plan) + training_text(training, 8)
    small = plan_of(replace(arguments, state_dtype="fp8"), samples, target, gpus=8)
    assert small["bytes_per_token"] == 3 * (7168 + 4) + 2 * 7168
    assert "1,204" in text and "30.3 B active" in text and "8 H200" in text and "GB/s keep the GPUs busy" in text


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_key_of_the_shipped_configs_is_known(path):
    for section, arguments in (("extract", ExtractArguments), ("train", TrainArguments), ("eval", EvalArguments)):
        required = ["--data", "d", "--output", "o"] if section == "train" else []
        parsed = parse(arguments, section, [str(path), *required])
        for key, value in (yaml.safe_load(path.read_text()).get(section) or {}).items():
            assert getattr(parsed, key) == value or key in ("data", "output")


def test_the_kimi_config_has_room_for_its_longest_sample():
    parsed = parse(ExtractArguments, "extract", [str(ROOT / "configs" / "kimi-k2.5.yaml")])
    rows = 2 * parsed.max_length + 2 * parsed.chunk_tokens
    assert rows * (57_344 + 32) < parsed.ring_gb * 1e9
    train = parse(TrainArguments, "train", [str(ROOT / "configs" / "kimi-k2.5.yaml"), "--data", "d", "--output", "o"])
    assert train.tokens_per_batch >= parsed.max_length and train.tokens_per_step == 8 * train.tokens_per_batch
