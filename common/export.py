"""Drafters as other programs store them: written for SGLang and for speculators/vLLM, and read back from either.

train_drafter.py exports through `export_sglang` and `export_speculators` and starts warm from `load_drafter`, which
eval_acceptance.py uses too. SGLang skips a weight whose name it does not know without a word, so names, shapes and
types are held against a list written down here, before a file is written and again on what was read back.

Formats: SGLang 0.5.14, `LlamaForCausalLMEagle3` (config.json, model.safetensors) or, with latent attention,
`Eagle3DeepseekV2ForCausalLM` (the same with `layers.0` for `midlayer`); speculators 0.9.0, `Eagle3SpeculatorConfig` and
`Eagle3DraftModel` (Llama layers alone, `layers.0`, the target's embedding included), which is what vLLM loads.
"""

import json
import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from common.capture_points import CapturePoints
from common.drafter import Drafter, DrafterConfig
from common.drafter_config import MLA_SIZES
from common.errors import UserError
from common.rope import kind_of
from common.shard_writing import write_atomically
from common.target import text_config

SGLANG_ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "mla": "Eagle3DeepseekV2ForCausalLM"}
SPECULATORS_VERSION = "0.9.0"
NO_LATENT_SPECULATORS = (
    f"speculators {SPECULATORS_VERSION} has EAGLE-3 drafters with Llama and Qwen3 layers, none with latent attention "
    f"(mla): export for SGLang, or train a Llama drafter"
)
IGNORED_ON_READING = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")  # the target's own


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
    """Both files through temporary names, flushed to disk; a reader sees old files or new ones, never half of one."""
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".model.safetensors.{os.getpid()}"
    save_file(tensors, temporary, metadata={"format": "pt"})
    readable(temporary)
    fsync_file(temporary)
    os.replace(temporary, directory / "model.safetensors")
    write_atomically(directory / "config.json", json.dumps(config, indent=2).encode())


def readable(path: Path) -> None:
    """Give a file that safetensors wrote (mode 0600) the mode that the umask gives every other file."""
    os.umask(umask := os.umask(0))
    os.chmod(path, 0o666 & ~umask)


def fsync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- reading ---------------------------------------------------------------------------------------------------------


def load_drafter(path: str | os.PathLike, target_config: dict | None = None,
                 capture_points: tuple[int, ...] | None = None) -> tuple[Drafter, dict]:
    """Read an EAGLE-3 drafter in SGLang's or speculators' format: (drafter in float32, its config.json).

    target_config: the target's config.json; needed for drafters of other projects, whose layer ids mean different
    points for different targets.  capture_points: overrides what the file says.
    The embedding is the target's and is not set: `drafter.set_embedding`. Raises `UserError`, naming what does not
    fit, for a missing file, another kind of drafter, or weights that are missing, unknown or of another shape.
    """
    path = Path(path)
    try:
        raw = json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no config.json; give the directory of a drafter") from None
    except ValueError as error:
        raise UserError(f"{path / 'config.json'}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path / 'config.json'}: expected a JSON object, found {type(raw).__name__}")
    theirs, ours = raw.get("target_architecture"), (target_config or {}).get("architectures")
    if theirs and ours and theirs != ours[0]:
        raise UserError(f"{path}: a drafter for a target of class {theirs}, but this one is {ours[0]}")
    tensors = read_weights(path)
    speculators = "speculators_model_type" in raw
    layer = raw.get("transformer_layer_config") or {} if speculators else raw
    refuse_other_kinds(path, raw, layer, speculators)
    points = capture_points or (
        speculators_points(path, raw, target_config) if speculators else sglang_points(path, raw, target_config)
    )
    config = config_of(path, raw, layer, tensors, tuple(points))
    if "d2t" not in tensors and config.draft_vocab_size == config.vocab_size:
        tensors["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
    if "d2t" in tensors and "t2d" not in tensors:
        d2t = tensors["d2t"].to(torch.int64)
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][d2t + torch.arange(len(d2t))] = True
    for name, dtype in (("d2t", torch.int64), ("t2d", torch.bool)):
        if name in tensors:
            tensors[name] = tensors[name].to(dtype)
    check_tensors(tensors, config, str(path))
    drafter = Drafter(config)
    drafter.load_state_dict(tensors)
    drafter.set_vocab(tensors["d2t"], tensors["t2d"])
    return drafter, raw


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a drafter, under SGLang's names; the target's own weights that some files carry are left out."""
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    if not files:
        raise UserError(f"{path}: neither model.safetensors nor pytorch_model.bin")
    tensors = {}
    for file in files:
        try:
            tensors |= load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
        except Exception as error:  # a damaged file raises whatever its reader raises
            raise UserError(f"{file}: cannot be read ({type(error).__name__}: {str(error)[:200]})") from None
    renamed = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.").replace("layers.0.", "midlayer.")
        for number, legacy in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
            name = name.replace(legacy, f"fc_norm.{number}")
        if name not in IGNORED_ON_READING:
            renamed[name] = tensor
    return renamed


def refuse_other_kinds(path: Path, raw: dict, layer: dict, speculators: bool) -> None:
    """`UserError` for what this project's drafter does not compute."""
    kind = raw["speculators_model_type"] if speculators else (raw.get("architectures") or ["unknown"])[0]
    problems = []
    latent = kind == SGLANG_ARCHITECTURES["mla"]
    if kind not in ("eagle3", *SGLANG_ARCHITECTURES.values()):
        problems.append(f"it is a {kind} drafter, not EAGLE-3 with a Llama layer or latent attention")
    if latent and not layer.get("rope_interleave", True):
        problems.append("rope_interleave is off, only rotation of neighbours is computed here")
    if not latent and layer.get("model_type", "llama") != "llama":
        problems.append(f"its layer is of type {layer['model_type']}, only llama is computed here")
    if layer.get("num_hidden_layers", 1) != 1:
        problems.append(f"it has {layer['num_hidden_layers']} layers, only 1 is computed here")
    problems += [f"{name} is set, which is not computed here" for name in
                 ("norm_before_residual", "norm_before_fc") if raw.get(name)]  # fmt: skip
    problems += [f"{name} is set, which is not computed here" for name in
                 ("attention_bias", "mlp_bias", "bias", "sliding_window") if layer.get(name)]  # fmt: skip
    if problems:
        raise UserError(f"{path}: this drafter cannot be used: " + "; ".join(problems))


def config_of(path: Path, raw: dict, layer: dict, tensors: dict, points: tuple[int, ...]) -> DrafterConfig:
    """The drafter's sizes out of its config.json; sizes that files leave out are taken from the weights."""
    head, t2d = tensors.get("lm_head.weight"), tensors.get("t2d")
    if head is None:
        raise UserError(f"{path}: no lm_head.weight; drafters that borrow the target's head are not supported")
    rope = layer.get("rope_parameters") or {}
    scaling = layer.get("rope_scaling") or {n: v for n, v in rope.items() if n != "rope_theta"}
    kind = kind_of(scaling)
    try:
        heads, latent = layer["num_attention_heads"], {}
        kv_heads, head_dim = layer.get("num_key_value_heads"), layer.get("head_dim")
        if (raw.get("architectures") or [None])[0] == SGLANG_ARCHITECTURES["mla"]:
            latent = {name: layer[name] for name in MLA_SIZES}
            kv_heads, head_dim = heads, latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"]
            if kind == "yarn":  # as SGLang takes it in latent attention
                kind = "deepseek_yarn"
                scaling = {name: value for name, value in scaling.items() if name != "type"} | {"rope_type": kind}
        return DrafterConfig(
            **latent,
            hidden_size=layer["hidden_size"],
            target_hidden_size=raw.get("target_hidden_size") or layer["hidden_size"],
            num_attention_heads=heads,
            num_key_value_heads=kv_heads or heads,
            head_dim=head_dim or layer["hidden_size"] // heads,
            intermediate_size=layer["intermediate_size"],
            vocab_size=len(t2d) if t2d is not None else layer["vocab_size"],
            draft_vocab_size=len(head),
            capture_points=points,
            max_position_embeddings=layer.get("max_position_embeddings", 2048),
            rms_norm_eps=layer.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or layer.get("rope_theta") or 10000.0),
            rope_scaling=None if kind == "default" else scaling,
            fc_norm=bool(raw.get("fc_norm") or raw.get("use_aux_norm")),
            norm_output=bool(raw.get("norm_output")),
        )
    except KeyError as error:
        raise UserError(f"{path / 'config.json'}: {error} is missing") from None
    except UserError as error:
        raise UserError(f"{path / 'config.json'}: {error}") from None


def sglang_points(path: Path, raw: dict, target_config: dict | None) -> list[int]:
    """The capture points of a drafter in SGLang's format: its own word, or its ids read as SGLang reads them."""
    if raw.get("capture_points"):
        return raw["capture_points"]
    if target_config is None:
        raise UserError(f"{path}: its layer ids mean different points for different targets; give the target model")
    layers = text_config(target_config)["num_hidden_layers"]
    ids = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not ids:  # what SGLang captures for a drafter that names no layers
        return [2, layers // 2, layers - 3]
    architecture = (target_config.get("architectures") or ["none"])[0]
    return look_up(path, ids, layers, lambda points: points.serving_ids(architecture))


def speculators_points(path: Path, raw: dict, target_config: dict | None) -> list[int]:
    """The capture points of a speculators drafter: its ids since 0.5, "output of layer i" before."""
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    version = tuple(int(part) for part in str(raw.get("speculators_version", "0.9")).split(".")[:2])
    if ids and version >= (0, 5):
        return ids
    if target_config is None:
        raise UserError(f"{path}: it does not say which layers it reads; give the target model")
    layers = text_config(target_config)["num_hidden_layers"]
    if not ids:
        return [2, layers // 2, layers - 3]
    return look_up(path, ids, layers, lambda points: points.speculators_v1_ids()[:-1])


def look_up(path: Path, ids: list[int], layers: int, name_of) -> list[int]:
    """The points that `name_of` calls by these ids, found by asking for the name of every point."""
    names = {}
    for point in range(2, layers):
        names[name_of(CapturePoints((point,), layers))[0]] = point
    if any(number not in names for number in ids):
        raise UserError(
            f"{path}: layer ids {ids} name no capture points of a target with {layers} layers; say which points "
            f"they are with --capture-points"
        )
    return [names[number] for number in ids]
