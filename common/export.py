"""Drafters as other programs read them: written for SGLang and for speculators/vLLM.

train_drafter.py exports through `export_sglang` and `export_speculators`; common/load_drafter.py reads them. SGLang
skips a weight whose name it does not know without a word, so names, shapes and types are held against a list written
down here, before a file is written and again on what was read back.

Formats: SGLang 0.5.14, `LlamaForCausalLMEagle3` (config.json, model.safetensors) or, with latent attention,
`Eagle3DeepseekV2ForCausalLM` (the same with `layers.0` for `midlayer`); speculators 0.9.0, `Eagle3SpeculatorConfig` and
`Eagle3DraftModel` (Llama layers alone, `layers.0`, the target's embedding included), which is what vLLM loads.
"""

import json
import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from common.capture_points import CapturePoints
from common.drafter import Drafter, DrafterConfig
from common.drafter_config import MLA_SIZES
from common.errors import UserError
from common.shard_writing import cannot_write, write_atomically
from common.target import text_config

SGLANG_ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "mla": "Eagle3DeepseekV2ForCausalLM"}
SPECULATORS_VERSION = "0.9.0"
NO_LATENT_SPECULATORS = (
    f"speculators {SPECULATORS_VERSION} has EAGLE-3 drafters with Llama and Qwen3 layers, none with latent attention "
    f"(mla): export for SGLang, or train a Llama drafter"
)


def expected_tensors(config: DrafterConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, kind) of every tensor of a drafter in SGLang's naming; kind is float, int64 or bool."""
    hidden, ffn, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    queries, keys = heads * config.head_dim, config.num_key_value_heads * config.head_dim
    attention = {"q_proj": (queries, 2 * hidden), "k_proj": (keys, 2 * hidden), "v_proj": (keys, 2 * hidden),
                 "o_proj": (hidden, queries)}  # fmt: skip
    if config.drafter_type == "mla":
        q_latent, kv_latent = config.q_lora_rank, config.kv_lora_rank
        attention = {
            "q_a_proj": (q_latent, 2 * hidden), "q_a_layernorm": (q_latent,), "q_b_proj": (queries, q_latent),
            "kv_a_proj_with_mqa": (kv_latent + config.qk_rope_head_dim, 2 * hidden), "kv_a_layernorm": (kv_latent,),
            "kv_b_proj": (heads * (config.qk_nope_head_dim + config.v_head_dim), kv_latent),
            "o_proj": (hidden, heads * config.v_head_dim),
        }  # fmt: skip
    shapes = {
        "fc.weight": (hidden, len(config.capture_points) * config.target_hidden_size),
        **{f"midlayer.self_attn.{name}.weight": shape for name, shape in attention.items()},
        "midlayer.mlp.gate_proj.weight": (ffn, hidden),
        "midlayer.mlp.up_proj.weight": (ffn, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, ffn),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(len(config.capture_points))}
    expected = {name: (shape, "float") for name, shape in shapes.items()}
    expected["d2t"] = ((config.draft_vocab_size,), "int64")
    expected["t2d"] = ((config.vocab_size,), "bool")
    return expected


def check_tensors(tensors: dict[str, torch.Tensor], config: DrafterConfig, where: str) -> None:
    """Raise `UserError` unless `tensors` are exactly the drafter's: names, shapes, types, finite, a consistent map."""
    expected = expected_tensors(config)
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is not a weight of this drafter" for name in tensors if name not in expected]
    for name, (shape, kind) in expected.items():
        if name not in tensors:
            continue
        tensor = tensors[name]
        found = "float" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != shape or found != kind:
            problems.append(f"{name} is {found} {list(tensor.shape)}, expected {kind} {list(shape)}")
        elif kind == "float" and not torch.isfinite(tensor).all():
            problems.append(f"{name} holds NaN or Inf")
    if not problems:
        named = torch.arange(config.draft_vocab_size) + tensors["d2t"]  # [N] target id of each draft id
        if not torch.equal(named, torch.nonzero(tensors["t2d"]).flatten()):
            problems.append("d2t and t2d do not describe the same draft vocabulary")
    if problems:
        raise UserError(f"{where}: not a usable drafter: " + "; ".join(problems))


# ---- writing ---------------------------------------------------------------------------------------------------------


def drafter_tensors(drafter: Drafter, state: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """What is exported: weights bf16 on the CPU, d2t int64, t2d bool. `state` replaces the drafter's own (sharded)."""
    return {
        name: tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in (drafter.state_dict() if state is None else state).items()
    }


def sglang_config(config: DrafterConfig, target_config: dict, target_name: str, serving_ids: list[int]) -> dict:
    """config.json for SGLang. Keys after `eagle_config` are this project's own, for `load_drafter`."""
    return {
        "architectures": [SGLANG_ARCHITECTURES[config.drafter_type]],
        **(llama_fields(config) if config.drafter_type == "llama" else mla_fields(config)),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": len(config.capture_points),
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": serving_ids, "use_aux_hidden_state": True},
        "capture_points": list(config.capture_points),
        "target_model": target_name,
        "target_architecture": (target_config.get("architectures") or [None])[0],
        "target_num_hidden_layers": text_config(target_config)["num_hidden_layers"],
    }


def llama_fields(config: DrafterConfig) -> dict:
    """The part of config.json that describes one Llama layer."""
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "vocab_size": config.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def mla_fields(config: DrafterConfig) -> dict:
    """The part of config.json that describes one layer with latent attention, as DeepSeek-V3's own configs do.

    Its rope scaling is called "yarn" there; SGLang makes deepseek_yarn of it in latent attention.
    """
    names = ("num_key_value_heads", "head_dim", "mlp_bias")  # derived from the others, or unknown to this model type
    fields = {name: value for name, value in llama_fields(config).items() if name not in names}
    scaling = config.rope_scaling and {**config.rope_scaling, "type": "yarn", "rope_type": "yarn"}
    latent = {name: getattr(config, name) for name in MLA_SIZES}
    return fields | latent | {"model_type": "deepseek_v3", "rope_scaling": scaling, "rope_interleave": True}


def serving_ids_for(config: DrafterConfig, target_config: dict) -> list[int]:
    """The layer ids that make SGLang capture the drafter's points on this target; `UserError` for an unknown family."""
    points = CapturePoints(config.capture_points, text_config(target_config)["num_hidden_layers"])
    return points.serving_ids((target_config.get("architectures") or ["no architecture in config.json"])[0])


def export_sglang(directory: Path, drafter: Drafter, target_config: dict, target_name: str,
                  serving_ids: list[int] | None = None, state: dict | None = None) -> None:
    """Write `directory`/config.json and model.safetensors, each whole or not at all, and read them back.

    target_config: the target's config.json.  serving_ids: for a target whose family `CapturePoints` does not know.
    state: weights by name, in place of the drafter's own (which may be sharded). Raises `UserError` for an unknown
    family and for weights that are not finite or not as expected.
    """
    serving_ids = serving_ids or serving_ids_for(drafter.config, target_config)
    tensors = drafter_tensors(drafter, state)
    check_tensors(tensors, drafter.config, f"export to {directory}")
    layer = "midlayer." if drafter.config.drafter_type == "llama" else "layers.0."
    named = {name.replace("midlayer.", layer): tensor for name, tensor in tensors.items()}
    write_model(directory, sglang_config(drafter.config, target_config, target_name, serving_ids), named)
    stored = {n.replace(layer, "midlayer."): tensor for n, tensor in load_file(directory / "model.safetensors").items()}
    check_tensors(stored, drafter.config, str(directory))
    different = [name for name in tensors if not torch.equal(tensors[name], stored[name])]
    if different:
        raise UserError(f"{directory}: reading back gave other values for {different}; is the disk sound?")


def export_speculators(directory: Path, drafter: Drafter, target_config: dict, target_name: str,
                       state: dict | None = None, draft_tokens: int = 3) -> None:
    """Write the layout of speculators 0.9.0, which vLLM serves; its layer ids are the capture points themselves.

    draft_tokens: how many tokens a cycle proposes by default (a serving setting stored in the file). Raises `UserError`
    for latent attention, which speculators has no layer for.
    """
    config = drafter.config
    if config.drafter_type != "llama":
        raise UserError(f"export to {directory}: {NO_LATENT_SPECULATORS}")
    tensors = drafter_tensors(drafter, state)
    check_tensors(tensors, config, f"export to {directory}")
    if config.draft_vocab_size == config.vocab_size:
        del tensors["d2t"], tensors["t2d"]  # its reader has no buffers for a full vocabulary
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    if drafter.embed_tokens is None:
        raise UserError(f"export to {directory}: the target's embedding is needed in this format and is not loaded")
    tensors["embed_tokens.weight"] = drafter.embed_tokens[: config.vocab_size].to("cpu", torch.bfloat16).contiguous()
    layer = {"architectures": ["LlamaForCausalLM"], **llama_fields(config)}
    proposal = {"proposal_type": "greedy", "speculative_tokens": draft_tokens, "verifier_accept_k": 1,
                "accept_tolerance": 0.0}  # fmt: skip
    write_model(directory, {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_name, "architectures": target_config.get("architectures") or []},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.capture_points),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }, tensors)  # fmt: skip
    with safe_open(directory / "model.safetensors", "pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    if found != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
        raise UserError(f"{directory}: reading back gave other names or shapes; is the disk sound?")


def write_model(directory: Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    """Both files through temporary names, flushed to disk; a reader sees old files or new ones, never half of one.
    `UserError` on a full disk."""
    temporary = directory / f".model.safetensors.{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_tensors(tensors, temporary, {"format": "pt"})
        os.replace(temporary, directory / "model.safetensors")
        write_atomically(directory / "config.json", json.dumps(config, indent=2).encode())
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise cannot_write(directory, error) from None


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, flushed to disk, with the mode that the umask gives every other file. OSError when the disk
    is full or refuses it; safetensors itself tells that in the text of its error only, and gives mode 0600."""
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        if not (found := re.search(r"\(os error (\d+)\)", str(error))):
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from None
    os.umask(umask := os.umask(0))
    os.chmod(path, 0o666 & ~umask)
    fsync_file(path)


def fsync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
