"""Drafters in SGLang's and speculators' format: what is written, what is refused, and what is read back."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from common.drafter import Drafter, DrafterConfig
from common.drafting import draft
from common.errors import UserError
from common.export import export_sglang, export_speculators, serving_ids_for
from common.load_drafter import load_drafter
from common.packing import pack_documents
from common.shards import Sample
from common.target import load_target_parts
from common.vocab import build_draft_vocab
from tests.test_shards import installed
from tests.training_fixtures import HIDDEN, LAYERS, POINTS, VOCAB, environment, make_sample, write_target

KEYS_OF_CONVENTIONS_5 = {
    "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight", "midlayer.self_attn.o_proj.weight",
    "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight", "midlayer.mlp.down_proj.weight",
    "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "midlayer.post_attention_layernorm.weight",
}  # fmt: skip


MLA = dict(drafter_type="mla", q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
DEEPSEEK_YARN = dict(rope_type="deepseek_yarn", factor=8.0, original_max_position_embeddings=256, beta_fast=32,
                     beta_slow=1, mscale=0.8, mscale_all_dim=1.2)  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = write_target(tmp_path_factory.mktemp("export") / "target")
    return folder, load_target_parts(folder)


def make_drafter(target, draft_vocab_size: int = 40, **options) -> Drafter:
    counts = torch.randint(1, 100, (VOCAB,), generator=torch.Generator().manual_seed(4))
    d2t, t2d = build_draft_vocab(counts, draft_vocab_size)
    drafter = Drafter(DrafterConfig.from_target(
        target.config, capture_points=POINTS, draft_vocab_size=len(d2t), intermediate_size=96, **options
    ))  # fmt: skip
    drafter.set_vocab(d2t, t2d)
    drafter.init_weights(7, target.lm_head)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if weight.ndim == 1:  # so that a norm read under a wrong name shows
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) * 0.2)
            weight.copy_(weight.to(torch.bfloat16))
    drafter.set_embedding(target.embed_tokens.float())
    return drafter


def test_what_sglang_reads_is_written_with_the_names_of_conventions_5(target, tmp_path):
    folder, parts = target
    drafter = make_drafter(parts)
    export_sglang(tmp_path, drafter, parts.config, str(folder))
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == KEYS_OF_CONVENTIONS_5
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items() if not t.is_floating_point()} == {
        "d2t": (torch.int64, (40,)), "t2d": (torch.bool, (VOCAB,)),
    }  # fmt: skip
    assert torch.equal(tensors["d2t"] + torch.arange(40), torch.nonzero(tensors["t2d"]).flatten())
    config = AutoConfig.from_pretrained(tmp_path)  # as SGLang opens it
    assert config.architectures == ["LlamaForCausalLMEagle3"] and config.draft_vocab_size == 40
    assert config.eagle_config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]  # Llama: SGLang adds one to each
    assert config.max_position_embeddings == 2048 and config.num_hidden_layers == 1
    assert config.tie_word_embeddings is False and config.vocab_size == VOCAB and config.head_dim == 16
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "temporary files are gone"


def test_serving_ids_follow_the_target_family_and_an_unknown_one_is_refused(target):
    _, parts = target
    config = make_drafter(parts).config
    assert serving_ids_for(config, parts.config | {"architectures": ["DeepseekV3ForCausalLM"]}) == list(POINTS)
    with pytest.raises(UserError, match="NovelForCausalLM"):
        serving_ids_for(config, parts.config | {"architectures": ["NovelForCausalLM"]})


def test_latent_attention_is_written_with_the_names_that_its_class_maps(target, tmp_path):
    """That SGLang's own load_weights and ModelConfig take all of it is in tests/test_sglang_module.py."""
    folder, parts = target
    export_sglang(tmp_path, make_drafter(parts, **MLA, rope_scaling=DEEPSEEK_YARN), parts.config, str(folder))
    latent = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    expected = {name.replace("midlayer.", "layers.0.") for name in KEYS_OF_CONVENTIONS_5 if "self_attn" not in name}
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == expected | {f"layers.0.self_attn.{name}.weight" for name in latent}
    assert tensors["layers.0.self_attn.q_a_proj.weight"].shape == (24, 2 * HIDDEN)
    assert tensors["layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape == (28, 2 * HIDDEN)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == ["Eagle3DeepseekV2ForCausalLM"] and config.model_type == "deepseek_v3"
    assert config.rope_interleave and config.num_hidden_layers == 1 and config.draft_vocab_size == 40
    assert config.rope_parameters["rope_type"] == "yarn" and config.rope_parameters["mscale_all_dim"] == 1.2


def test_speculators_has_no_latent_attention(target, tmp_path):
    folder, parts = target
    with pytest.raises(UserError, match="none with latent attention .mla.: export for SGLang"):
        export_speculators(tmp_path / "out", make_drafter(parts, **MLA), parts.config, str(folder))
    assert not (tmp_path / "out").exists()


COMES_BACK = [{}, {"fc_norm": True}, {"norm_output": True}, {"draft_vocab_size": 0}]


@pytest.mark.parametrize(
    "write, options",
    [(write, options) for write in (export_sglang, export_speculators) for options in COMES_BACK]
    + [(export_sglang, MLA), (export_sglang, MLA | dict(rope_scaling=DEEPSEEK_YARN, fc_norm=True, rope_theta=50000.0))],
)
def test_a_drafter_comes_back_as_it_was(target, tmp_path, options, write):
    folder, parts = target
    drafter = make_drafter(parts, **options)
    write(tmp_path, drafter, parts.config, str(folder))
    again, raw = load_drafter(tmp_path)
    assert again.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert raw == json.loads((tmp_path / "config.json").read_text())
    if write is export_sglang:
        other = parts.config | {"architectures": ["SomeOtherForCausalLM"]}
        with pytest.raises(UserError, match="a drafter for a target of class .*, but this one is SomeOtherForCausalLM"):
            load_drafter(tmp_path, other)


def test_ropes_come_back_as_they_were(target, tmp_path):
    folder, parts = target
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    drafter = make_drafter(parts, rope_scaling=scaling, rope_theta=50000.0, max_position_embeddings=8192)
    export_sglang(tmp_path, drafter, parts.config, str(folder))
    again, _ = load_drafter(tmp_path)
    assert again.config == drafter.config and torch.equal(again.rope_frequencies, drafter.rope_frequencies)
    seen = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert (seen["rope_theta"], seen["rope_type"], seen["factor"]) == (50000.0, "yarn", 4.0)


SPECULATORS_DRAFTS = """
import sys, torch
from safetensors.torch import load_file
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.model_definitions import model_classes
assert set(model_classes) == {"llama", "qwen3"}, "the reason for which latent attention is refused"
case = torch.load(sys.argv[1], weights_only=True)
drafted = []
for folder in sys.argv[3:]:
    model = Eagle3DraftModel.from_pretrained(folder)
    assert not [name for name, t in model.state_dict().items() if t.is_floating_point() and t.isnan().any()]
    model.config.transformer_layer_config._attn_implementation = "eager"  # flex attention needs a GPU
    model = type(model)(model.config)
    report = model.load_state_dict(load_file(folder + "/model.safetensors"), strict=False)
    assert set(report.missing_keys) <= {"verifier_norm.weight", "verifier_lm_head.weight"}
    assert not report.unexpected_keys
    documents = torch.zeros(1, len(case["ids"]), dtype=torch.long)
    with torch.no_grad():
        tokens = model.float().eval()(case["points"][None], case["ids"][None], documents, ttt_steps=3)
    drafted.append([step[0] for step in tokens])
torch.save(drafted, sys.argv[2])
"""


def test_speculators_itself_loads_the_export_and_drafts_the_same_tokens(target, tmp_path):
    """speculators 0.9.0's own model class, from our files, on the same states: the same argmax at three steps."""
    folder, parts = target
    drafters = {"plain": make_drafter(parts), "normed": make_drafter(parts, fc_norm=True, norm_output=True)}
    for name, drafter in drafters.items():
        export_speculators(tmp_path / name, drafter, parts.config, str(folder))
    ids, mask, states = make_sample(40, seed=1, prompt=0)
    torch.save({"points": torch.cat(states[:3], dim=1).float()[:-1], "ids": ids[1:]}, tmp_path / "case.pt")
    done = subprocess.run(
        [sys.executable, "-c", SPECULATORS_DRAFTS, *(str(tmp_path / n) for n in ("case.pt", "tokens.pt", *drafters))],
        capture_output=True, text=True, env=environment(PYTHONPATH=str(installed("0.9.0", "hs-connectors==0.9.0"))),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    mask = torch.ones_like(mask)
    for drafter, theirs in zip(drafters.values(), torch.load(tmp_path / "tokens.pt", weights_only=True), strict=True):
        names = torch.nonzero(drafter.t2d).flatten()  # theirs: 3 of [39] draft ids
        for order, same in (((0, 1, 2, 3), True), ((1, 0, 2, 3), False)):  # points that are swapped show
            batch = pack_documents([Sample(ids, mask, [states[i].float() for i in order], None)], 3)
            ours = draft(drafter, batch, 3, own_tokens=False)  # [38, 3] target ids
            agree = [ours[c, k] == names[theirs[k][c]] for c in range(38) for k in range(3) if batch.counts[c, k]]
            assert all(agree) == same


def test_weights_that_cannot_be_served_are_not_written(target, tmp_path):
    folder, parts = target
    drafter = make_drafter(parts)
    with torch.no_grad():
        drafter.fc.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="fc.weight holds NaN or Inf"):
        export_sglang(tmp_path / "nan", drafter, parts.config, str(folder))
    assert not (tmp_path / "nan").exists()
    state = make_drafter(parts).state_dict()
    for change, message in (
        ({"norm.weight": None}, "norm.weight is missing"),
        ({"extra.weight": torch.zeros(1)}, "extra.weight is not a weight of this drafter"),
        ({"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}, "fc.weight is float"),
        ({"d2t": torch.zeros(40, dtype=torch.int64)}, "same draft vocabulary"),
    ):
        changed = {name: tensor for name, tensor in {**state, **change}.items() if tensor is not None}
        with pytest.raises(UserError, match=message):
            export_sglang(tmp_path / "bad", make_drafter(parts), parts.config, str(folder), state=changed)


def public_drafter(folder, target, options=None, **changes):
    """A drafter as other projects publish them for SGLang: no notes of ours, names that vary."""
    drafter = make_drafter(target, **(options or {}))
    export_sglang(folder, drafter, target.config, "somebody/target")
    config = json.loads((folder / "config.json").read_text())
    for name in ("capture_points", "target_model", "target_architecture", "target_num_hidden_layers"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config | changes))
    return drafter


def test_public_drafters_need_the_target_to_name_their_points(target, tmp_path):
    _, parts = target
    drafter = public_drafter(tmp_path, parts)
    with pytest.raises(UserError, match="give the target model"):
        load_drafter(tmp_path)
    assert load_drafter(tmp_path, parts.config)[0].config.capture_points == POINTS
    deepseek = parts.config | {"architectures": ["DeepseekV3ForCausalLM"]}
    assert load_drafter(tmp_path, deepseek, (2, 4, 6))[0].config.capture_points == POINTS
    with pytest.raises(UserError, match="layer ids .1, 3, 5. name no capture points"):
        load_drafter(tmp_path, deepseek)
    public_drafter(tmp_path, parts, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 6]})
    assert load_drafter(tmp_path, deepseek)[0].config.capture_points == (2, 4, 6)
    assert load_drafter(tmp_path, parts.config)[0].config.capture_points == (3, 5, 7)
    public_drafter(tmp_path, parts, eagle_config=None)
    assert load_drafter(tmp_path, parts.config)[0].config.capture_points == (2, LAYERS // 2, LAYERS - 3)
    assert drafter.config.capture_points == POINTS


def test_old_speculators_ids_mean_the_output_of_a_layer(target, tmp_path):
    folder, parts = target
    export_speculators(tmp_path, make_drafter(parts), parts.config, str(folder))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == list(POINTS)
    config |= {"speculators_version": "0.4.0", "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_drafter(tmp_path, parts.config)[0].config.capture_points == POINTS


def test_names_that_public_files_use_are_understood(target, tmp_path):
    _, parts = target
    drafter = public_drafter(tmp_path, parts)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("midlayer.", "model.layers.0."): t for name, t in tensors.items() if name != "t2d"}
    renamed["embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
    save_file(renamed, tmp_path / "model.safetensors")
    again, _ = load_drafter(tmp_path, parts.config)
    assert torch.equal(again.t2d, drafter.t2d), "t2d is made from d2t where a file leaves it out"
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert torch.equal(load_drafter(tmp_path, parts.config)[0].fc.weight, drafter.fc.weight)


def test_public_drafters_with_latent_attention_are_understood(target, tmp_path):
    """As Kimi-K2.5's are published: model type kimi_k2, yarn named by `type` alone, the embedding in the file."""
    _, parts = target
    scaling = {name: value for name, value in DEEPSEEK_YARN.items() if name != "rope_type"} | {"type": "yarn"}
    changes = dict(model_type="kimi_k2", rope_scaling=scaling, num_key_value_heads=4, head_dim=8)
    drafter = public_drafter(tmp_path, parts, MLA | dict(rope_scaling=DEEPSEEK_YARN), **changes)
    tensors = load_file(tmp_path / "model.safetensors") | {"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}
    save_file({name: tensor for name, tensor in tensors.items() if name != "t2d"}, tmp_path / "model.safetensors")
    again, _ = load_drafter(tmp_path, parts.config)
    assert again.config == drafter.config and again.score_scale == drafter.score_scale
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    for changes, message in (
        ({"rope_interleave": False}, "rope_interleave is off"),
        ({"q_lora_rank": None}, "config.json: drafter of type mla: q_lora_rank must be given"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "type mla: rope scaling 'linear'"),
        ({"kv_lora_rank": 21}, r"kv_b_proj.weight is float .88, 20., expected float .88, 21."),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "layer is of type deepseek_v3"),
    ):
        public_drafter(tmp_path, parts, MLA, **changes)
        with pytest.raises(UserError, match=message):
            load_drafter(tmp_path, parts.config)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": ["LlamaForCausalLMEagle"]}, "LlamaForCausalLMEagle drafter, not EAGLE-3"),
        ({"num_hidden_layers": 2}, "2 layers"),
        ({"attention_bias": True}, "attention_bias is set"),
        ({"model_type": "qwen3"}, "type qwen3"),
        ({"intermediate_size": 97}, "gate_proj.weight is float .96, 64., expected float .97, 64."),
        ({"fc_norm": True}, "fc_norm.0.weight is missing"),
    ],
)
def test_drafters_that_are_not_computed_here_are_refused_by_name(target, tmp_path, changes, message):
    _, parts = target
    public_drafter(tmp_path, parts, **changes)
    with pytest.raises(UserError, match=message):
        load_drafter(tmp_path, parts.config)


def test_missing_and_damaged_files_are_named(target, tmp_path):
    _, parts = target
    with pytest.raises(UserError, match="no config.json"):
        load_drafter(tmp_path)
    public_drafter(tmp_path, parts)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:1000])
    with pytest.raises(UserError, match="model.safetensors: cannot be read"):
        load_drafter(tmp_path, parts.config)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="neither model.safetensors nor"):
        load_drafter(tmp_path, parts.config)
