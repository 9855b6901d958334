"""train_drafter.py --drafter-type mla and what follows it, as a person runs them; a tiny target, latent attention."""

import json

import pytest
import torch
from safetensors.torch import load_file

from common import checkpoints
from common.errors import UserError
from common.load_drafter import load_drafter
from common.training_log import read_metrics
from tests.test_eval_acceptance import evaluate
from tests.test_train_drafter import killed, launch, losses
from tests.training_fixtures import make_sample, train_here, write_shards, write_target

LATENT = dict(
    architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", q_lora_rank=48, kv_lora_rank=32,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, rope_parameters=None, rope_theta=10000.0,
    rope_scaling=dict(type="yarn", factor=8.0, original_max_position_embeddings=256, beta_fast=32, beta_slow=1,
                      mscale=1.0, mscale_all_dim=1.0),
)  # fmt: skip
RUN = ["--tokens-per-step", "1024", "--learning-rate", "5e-3", "--eval-fraction", "0.1", "--eval-every", "12",
       "--save-every", "6", "--max-steps", "24"]  # fmt: skip
SIZES = {"--q-lora-rank": 48, "--kv-lora-rank": 32, "--qk-nope-head-dim": 16, "--qk-rope-head-dim": 8,
         "--v-head-dim": 12}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """target/ with latent attention, llama-target/ without, and states/ of 200 samples of the first."""
    folder = tmp_path_factory.mktemp("mla")
    write_target(folder / "llama-target")
    target = write_target(folder / "target", **LATENT)
    write_shards(folder / "states", target, [make_sample(40, seed) for seed in range(200)])
    return folder


def mla(folder, name, *more):
    """Train a drafter with latent attention into folder/name."""
    run = folder / name
    train_here(None, "--data", folder / "states", "--output", run, *RUN, "--drafter-type", "mla", *more)
    return run


@pytest.fixture(scope="module")
def learned(folder):
    return mla(folder, "learned")


@pytest.fixture(scope="module")
def short(folder):
    return mla(folder, "short", "--tokens-per-batch", "512", "--max-steps", "4", "--eval-every", "2")


@pytest.fixture(scope="module")
def llama(folder):
    run = folder / "llama"
    train_here(None, "--data", folder / "states", "--output", run, *RUN, "--max-steps", "1")
    return run


def test_it_learns_and_its_export_is_read_back(folder, learned):
    lines = read_metrics(learned)
    train = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(train) == 24 and train[-1] < 0.6 * train[0]
    assert [line for line in lines if line["kind"] == "eval"][-1]["step0_accuracy"] > 0.9
    drafter, raw = load_drafter(learned)
    assert raw["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and drafter.config.drafter_type == "mla"
    assert [getattr(drafter.config, name[2:].replace("-", "_")) for name in SIZES] == list(SIZES.values())
    assert drafter.config.rope_scaling | {"type": "yarn"} == LATENT["rope_scaling"] | {"rope_type": "deepseek_yarn"}
    final = load_file(checkpoints.directory_of(learned, 24) / "drafter.safetensors")
    last, _ = load_drafter(learned / "final")
    for name, tensor in last.state_dict().items():
        assert torch.equal(tensor, final[name].bfloat16().float() if tensor.is_floating_point() else final[name]), name


def test_killed_it_ends_with_the_same_weights(folder, learned):
    run = folder / "killed"
    killed("rename", 1, False, "--data", folder / "states", "--output", run, *RUN, "--drafter-type", "mla")
    assert checkpoints.steps_saved(run) == [6]
    mla(folder, "killed")
    assert losses(run) == losses(learned)
    step = "checkpoints/step-00000024/"
    for name in ("model.safetensors", "final/model.safetensors", f"{step}drafter.safetensors",
                 f"{step}optimizer.safetensors"):  # fmt: skip
        assert (run / name).read_bytes() == (learned / name).read_bytes(), name


def test_two_ranks_with_sharded_weights_give_the_losses_of_one(folder, short):
    run = folder / "sharded"
    launch("--data", folder / "states", "--output", run, *RUN, "--tokens-per-batch", "512", "--max-steps", "4",
           "--eval-every", "2", "--drafter-type", "mla", "--shard")  # fmt: skip
    for mine, theirs in zip(read_metrics(short), read_metrics(run), strict=True):
        for key in ("loss", "gradient_norm", "tau", "step0_accuracy"):
            if key in mine:
                assert mine[key] == pytest.approx(theirs[key], rel=1e-5), (mine["step"], key)


def test_offline_evaluation_equals_the_runs_own_bit_for_bit(folder, short, tmp_path):
    own = [line for line in read_metrics(short) if line["kind"] == "eval"]
    evaluate("--drafter", short / "final", "--data", folder / "states", "--eval-fraction", 0.1, "--num-steps", 2,
             "--output", tmp_path)  # fmt: skip
    summary = json.loads((tmp_path / "report.json").read_text())["offline"][0]["summary"]
    assert 0.05 < summary["step0_accuracy"] < 0.95  # neither nothing nor everything: equality says something
    assert {name for name, value in summary.items() if own[-1][name] != value} == set()
    assert own[0]["tau"] != summary["tau"]  # another checkpoint gives other figures


def test_a_warm_start_keeps_the_weights(folder, learned):
    warm = mla(folder, "warm", "--init-from", learned, "--max-steps", "1", "--learning-rate", "1e-6")
    assert [line for line in read_metrics(warm) if line["kind"] == "eval"][-1]["step0_accuracy"] > 0.9
    old, new = (load_file(each / "model.safetensors") for each in (learned, warm))
    assert set(old) == set(new) and torch.equal(old["d2t"], new["d2t"])
    name = "layers.0.self_attn.kv_b_proj.weight"
    assert (old[name].float() - new[name].float()).norm() < 1e-2 * old[name].float().norm()


def test_a_drafter_of_the_other_type_is_refused_by_name(folder, learned, llama, tmp_path):
    data = ["--data", folder / "states", "--output", tmp_path / "run"]
    with pytest.raises(UserError) as refused:
        train_here(None, *data, *RUN, "--drafter-type", "mla", "--init-from", llama)
    assert str(refused.value) == (f"{llama}: a drafter of type llama, but --drafter-type is mla; give --drafter-type "
                                  f"llama, or start from another (--init-from)")  # fmt: skip
    with pytest.raises(UserError, match="learned: a drafter of type mla, but --drafter-type is llama; give .* mla, or"):
        train_here(None, *data, *RUN, "--init-from", learned)
    before = (learned / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="step-00000024: a drafter of type mla, but .* train into another --output"):
        train_here(None, "--data", folder / "states", "--output", learned, *RUN)
    with pytest.raises(UserError, match="--v-head-dim was null, is 10"):
        mla(folder, "learned", "--v-head-dim", "10")
    assert (learned / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--drafter-type", "mla", "--export", "speculators"], "--export speculators: .*none with latent attention"),
        (["--drafter-type", "gru"], "--drafter-type gru: expected llama, mla"),
        (["--drafter-type", "mla", "--model", "LLAMA"], "latent attention.*: give --q-lora-rank, --kv-lora-rank, --qk"),
        (["--drafter-type", "mla", "--head-dim", "16"], "--head-dim: a drafter of type mla has no such size"),
        (["--kv-lora-rank", "16"], "--kv-lora-rank: a drafter of type llama has no such size"),
    ],
)
def test_bad_input_is_refused_in_one_line(folder, tmp_path, arguments, message):
    arguments = [folder / "llama-target" if each == "LLAMA" else each for each in arguments]
    with pytest.raises(UserError, match=message) as refused:
        train_here(None, "--data", folder / "states", "--output", tmp_path / "run", after=arguments)
    assert "\n" not in str(refused.value)


def test_a_target_without_latent_attention_takes_all_sizes_as_arguments(folder):
    sizes = [part for pair in SIZES.items() for part in pair]
    run = mla(folder, "by-hand", "--model", folder / "llama-target", *sizes, "--max-steps", "1")
    assert load_drafter(run)[0].config.kv_lora_rank == 32


@pytest.mark.gpu
@pytest.mark.parametrize("options", [["--cuda-graphs", "False"], ["--cuda-graphs", "True"], ["--compile", "False"]])
def test_a_gpu_learns_as_the_cpu_does(folder, learned, options):
    run = folder / f"gpu{'-'.join(options)}"
    arguments = ["--data", folder / "states", "--output", run, *RUN, "--drafter-type", "mla"]
    train_here(None, *arguments, after=["--device", "cuda", *options])
    on_cpu, on_gpu = (read_metrics(each) for each in (learned, run))
    for mine, theirs in zip(on_cpu[:5], on_gpu[:5], strict=True):
        assert theirs["tokens"] == mine["tokens"] and theirs["loss"] == pytest.approx(mine["loss"], rel=0.05)
    assert on_gpu[-1]["kind"] == "eval" and on_gpu[-1]["step0_accuracy"] > 0.9
