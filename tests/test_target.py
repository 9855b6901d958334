"""Embedding, head, norm and config read straight from checkpoints of every shape."""

import json

import pytest
import torch
from safetensors.torch import save_file

from common.errors import UserError
from common.load_drafter import load_drafter
from common.losses import rms_norm
from common.target import load_config, load_target_parts

V, H = 30, 8


def tensors(prefix="", head=True, seed=0, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(seed)
    made = {
        f"{prefix}model.embed_tokens.weight": torch.randn(V, H, generator=g).to(dtype),
        f"{prefix}model.norm.weight": torch.rand(H, generator=g).to(dtype),
        f"{prefix}model.layers.0.mlp.down_proj.weight": torch.randn(4, 4, generator=g).to(dtype),
    }
    if head:
        made[f"{prefix}lm_head.weight"] = torch.randn(V, H, generator=g).to(dtype)
    return made


def write(folder, files, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(hidden_size=H, vocab_size=V, rms_norm_eps=1e-5) | config))
    for name, content in files.items():
        save_file(content, folder / name)
    return folder


def indexed(folder, content, **config):
    names = list(content)
    files = {"model-00001-of-00002.safetensors": {n: content[n] for n in names[:2]},
             "model-00002-of-00002.safetensors": {n: content[n] for n in names[2:]}}  # fmt: skip
    write(folder, files, **config)
    where = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def test_single_file(tmp_path):
    content = tensors()
    parts = load_target_parts(write(tmp_path, {"model.safetensors": content}))
    assert torch.equal(parts.embed_tokens, content["model.embed_tokens.weight"]) and not parts.tied
    assert torch.equal(parts.lm_head, content["lm_head.weight"]) and parts.lm_head.dtype == torch.bfloat16
    assert torch.equal(parts.norm, content["model.norm.weight"]) and parts.eps == 1e-5


def test_tied_embeddings(tmp_path):
    parts = load_target_parts(write(tmp_path, {"model.safetensors": tensors(head=False)}, tie_word_embeddings=True))
    assert parts.lm_head is parts.embed_tokens and parts.tied
    assert parts.to(dtype=torch.float32).lm_head.dtype == torch.float32


def test_index_with_multimodal_prefix_and_quantised_experts(tmp_path):
    """The shape of Kimi-K2.5: text model under language_model., int4 experts beside a bf16 head."""
    content = tensors("language_model.")
    content["language_model.model.layers.1.mlp.experts.0.down_proj.weight_packed"] = torch.ones(4, dtype=torch.int32)
    text = dict(hidden_size=H, vocab_size=V, rms_norm_eps=2e-5, model_type="kimi_k2")
    folder = indexed(tmp_path, content, architectures=["KimiK25ForConditionalGeneration"], text_config=text)
    parts = load_target_parts(folder)
    assert torch.equal(parts.lm_head, content["language_model.lm_head.weight"]) and parts.eps == 2e-5


def test_missing_keys_are_named(tmp_path):
    with pytest.raises(UserError, match="no lm_head.weight.*tie_word_embeddings"):
        load_target_parts(write(tmp_path, {"model.safetensors": tensors(head=False)}))
    content = tensors()
    del content["model.norm.weight"]
    with pytest.raises(UserError, match="no final norm.*model.norm.weight"):
        load_target_parts(write(tmp_path, {"model.safetensors": content}))
    with pytest.raises(UserError, match="no embedding.*lm_head.weight"):
        load_target_parts(write(tmp_path, {"model.safetensors": {"lm_head.weight": torch.zeros(V, H)}}))
    with pytest.raises(UserError, match="config.json.*not found"):
        load_target_parts(tmp_path / "nowhere")


def test_an_incomplete_download_is_named(tmp_path):
    folder = indexed(tmp_path, tensors())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="model-00002-of-00002.safetensors: not found.*lm_head.weight"):
        load_target_parts(folder)


def test_quantised_head_and_unusual_targets_are_refused(tmp_path):
    content = tensors() | {"lm_head.weight": torch.zeros(V, H, dtype=torch.int8)}
    with pytest.raises(UserError, match="lm_head.weight is stored as torch.int8"):
        load_target_parts(write(tmp_path, {"model.safetensors": content}))
    with pytest.raises(UserError, match="final_logit_softcapping=30"):
        load_target_parts(write(tmp_path, {"model.safetensors": tensors()}, final_logit_softcapping=30.0))


def test_logits_equal_those_of_transformers(tmp_path):
    """argmax and teacher logits from the last state before the norm are the model's own; normed twice they are not."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        vocab_size=50,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.model.norm.weight.data.uniform_(0.2, 3.0)
    last = []
    model.model.layers[-1].register_forward_hook(lambda m, i, o: last.append(o[0] if isinstance(o, tuple) else o))
    model.save_pretrained(tmp_path)
    logits = model(torch.randint(0, 50, (1, 40))).logits[0]
    parts = load_target_parts(tmp_path)
    state = last[0].reshape(40, 32)
    ours = torch.cat(list(parts.logit_chunks(state, rows_per_chunk=7)))
    assert torch.allclose(ours, logits, atol=1e-5) and torch.equal(ours.argmax(-1), logits.argmax(-1))
    twice = torch.cat(list(parts.logit_chunks(rms_norm(state, parts.norm, parts.eps))))
    assert (twice - logits).norm() / logits.norm() > 0.1


def test_fingerprint_tells_targets_apart(tmp_path):
    one = load_target_parts(write(tmp_path / "a", {"model.safetensors": tensors()}))
    same = load_target_parts(indexed(tmp_path / "b", tensors()))
    other = load_target_parts(write(tmp_path / "c", {"model.safetensors": tensors(seed=1)}))
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()


@pytest.mark.parametrize("content, complaint", [(b"[]", "a JSON object, found list"), (b"\xff{}", "not valid JSON")])
def test_a_config_that_is_no_object_is_one_line(tmp_path, content, complaint):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=f"config.json: .*{complaint}"):
        load_config(tmp_path)
    with pytest.raises(UserError, match=f"config.json: .*{complaint}"):
        load_drafter(tmp_path)


@pytest.mark.parametrize("value", ["576", 0, -1, 12.5, None, [576], True])
def test_a_size_that_is_no_number_is_one_line(tmp_path, value):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 10, "hidden_size": value}}))
    with pytest.raises(UserError, match="hidden_size is .*, expected a whole number above 0"):
        load_config(tmp_path)
