"""Kimi-K2.5 in small: a checkpoint of SGLang's own KimiK25ForConditionalGeneration with the structure of the real one.

    folder = kimi_k25(Path("kimi"))                        # 50 MB, real random weights in bfloat16
    folder = kimi_k25(Path("kimi"), int4=True, **ON_GPU)   # routed experts packed as the real checkpoint has them
    twin = as_deepseek_v3(folder, Path("twin"))            # the same numbers for transformers: the reference

61 layers, multi-head latent attention, one dense layer and then sigmoid-routed experts with one shared expert, the real
vocabulary of 163,840, everything under `language_model.`, two files with an index, a vision tower of one small layer
whose weights are left out; only the widths are small. Used by the engine tests and, by import, on a GPU machine.
"""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import engine_helpers
import standin_tokenizer
import tiny_models

LAYERS, VOCAB = 61, 163_840
PREFIX = "language_model."
# What the real config.json has in its text_config and a miniature can keep.
AS_IN_KIMI = {
    "vocab_size": VOCAB, "num_hidden_layers": LAYERS, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.827, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5,
    "rope_theta": 50_000.0, "bos_token_id": 163_584, "eos_token_id": 163_585, "pad_token_id": 163_839,
    "tie_word_embeddings": False, "hidden_act": "silu", "num_nextn_predict_layers": 0,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32,
    "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
# Kernels on a GPU want the real head sizes, and experts of at least a few hundred (marlin).
ON_GPU = {
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "kv_lora_rank": 512,
    "q_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
VISION = {
    "patch_size": 14, "init_pos_emb_height": 4, "init_pos_emb_width": 4, "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed", "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool",
    "video_attn_type": "spatial_temporal", "vt_hidden_size": 32, "vt_intermediate_size": 64,
    "vt_num_attention_heads": 2, "vt_num_hidden_layers": 1, "mm_projector_type": "patchmerger", "mm_hidden_size": 32,
    "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5,
}  # fmt: skip
QUANTISED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {"group_0": {
        "targets": ["Linear"], "input_activations": None, "output_activations": None,
        "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
                    "actorder": None, "block_structure": None, "dynamic": False, "observer": "minmax",
                    "observer_kwargs": {}},
    }},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}  # fmt: skip


def kimi_k25(folder: Path, int4: bool = False, dtype: torch.dtype = torch.bfloat16, seed: int = 0, says=(),
             **sizes) -> Path:  # fmt: skip
    """Write the checkpoint. int4: routed experts as `weight_packed`, `weight_scale`, `weight_shape`.

    says: token ids, an even number, that it answers with, when not just any.
    sizes: fields of text_config that are to differ from SMALL, such as num_hidden_layers.
    """
    text = AS_IN_KIMI | SMALL | sizes
    rope = {"rope_type": "yarn", **YARN, "rope_theta": text["rope_theta"]}
    config = AutoConfig.for_model("deepseek_v3", **text, rope_parameters=rope)
    with tempfile.TemporaryDirectory() as temporary:
        tensors = load_file(tiny_models.save(config, Path(temporary), seed) / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if "e_score_correction_bias" in name:  # float32 there too; small, so that tokens still choose for themselves
            tensors[name] = 0.02 * torch.randn(tensor.shape, generator=generator)
        elif "q_b_proj" in name or ("experts" in name and "down_proj" in name):
            tensors[name] = (tensor / 2).to(dtype)  # yarn doubles attention logits, routing the experts' part: undone
        elif name == "lm_head.weight" and says:
            rows = 40 * tensor[list(says)[::2]]  # in pairs of opposites, so that one is always above all the rest
            tensor[list(says)[::2]], tensor[list(says)[1::2]] = rows, -rows
            tensors[name] = tensor.to(dtype)
        else:
            tensors[name] = tensor.to(dtype)
    if int4:
        tensors = {new: made for name, tensor in tensors.items() for new, made in packed(name, tensor).items()}
    write(folder, {PREFIX + name: tensor for name, tensor in tensors.items()})
    text |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "rope_scaling": YARN,
             "dtype": str(dtype).removeprefix("torch.")}  # fmt: skip
    if int4:
        text["quantization_config"] = QUANTISED
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": text["dtype"],
        "text_config": text, "vision_config": VISION | {"text_hidden_size": text["hidden_size"]},
        "media_placeholder_token_id": 163_605, "use_unified_vision_chunk": True, "tie_word_embeddings": False,
        **{name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }, indent=1))  # fmt: skip
    return folder


CONFIG_CODE = """
from transformers import PretrainedConfig


class KimiK25Config(PretrainedConfig):
    model_type = "kimi_k25"


open({marker!r}, "a").write("config\\n")
"""


def add_remote_code(folder: Path, marker: Path) -> None:
    """What the real folder has too: a tokenizer and a config class as Python code. Both write to `marker` when run."""
    config = json.loads((folder / "config.json").read_text())
    standin_tokenizer.build(folder, marker=marker)
    (folder / "configuration_kimi_k25.py").write_text(CONFIG_CODE.format(marker=str(marker)))
    config["auto_map"] = {"AutoConfig": "configuration_kimi_k25.KimiK25Config"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Two safetensors files and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    files = {f"model-0000{part + 1}-of-00002.safetensors": names[part::2] for part in range(2)}
    for file, chosen in files.items():
        save_file({name: tensors[name].contiguous() for name in chosen}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, chosen in files.items() for name in chosen}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by name."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def as_deepseek_v3(folder: Path, out: Path) -> Path:
    """The language model of a miniature as transformers' DeepSeek-V3, packed experts unpacked to bfloat16."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in read(folder).items()}
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        parts = {part: tensors.pop(f"{module}.{part}") for part in ("weight_packed", "weight_scale", "weight_shape")}
        tensors[f"{module}.weight"] = unpacked(parts)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    text = {name: value for name, value in text.items() if name != "quantization_config"}
    rope = {**text.pop("rope_scaling"), "rope_type": "yarn", "rope_theta": text["rope_theta"]}
    text |= {"model_type": "deepseek_v3", "rope_parameters": rope}
    (out / "config.json").write_text(json.dumps(text))
    return out


def reference(twin: Path, points, dtype: torch.dtype = torch.float32):
    """The twin's states (engine_helpers.Reference). transformers gives the two norms inside the attention an eps of
    their own; SGLang gives them the model's."""
    made = engine_helpers.Reference(twin, points, dtype)
    for layer in made.model.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = made.model.config.rms_norm_eps
        layer.self_attn.kv_a_layernorm.variance_epsilon = made.model.config.rms_norm_eps
    return made


# ---- INT4 experts, by the library that defines the format ------------------------------------------------------------


def scheme():
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(**QUANTISED["config_groups"]["group_0"]["weights"])
    return QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")


def packed(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """{name: weight} as it is, or for a routed expert [out, in] its packed parts: int32 [out, in / 8], bf16 scales
    [out, in / 32], shape [2]."""
    if ".mlp.experts." not in name:
        return {name: weight}
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    scale = weight.float().unflatten(-1, (-1, 32)).abs().amax(-1).div(7.5).to(weight.dtype)
    parts = PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme())
    return {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}


def unpacked(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight [out, in] of the parts that `packed` made."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    return PackedQuantizationCompressor.decompress(parts, scheme())["weight"]
