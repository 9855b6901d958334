"""Drafters read from what other programs store: ours and anybody's for SGLang, and those of speculators/vLLM.

    drafter, config = load_drafter("drafter/", target_config)

train_drafter.py starts warm from it, eval_acceptance.py judges what it gives. Formats: see common/export.py.
"""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file

from common.capture_points import CapturePoints
from common.drafter import Drafter, DrafterConfig
from common.drafter_config import MLA_SIZES
from common.errors import UserError
from common.export import SGLANG_ARCHITECTURES, check_tensors
from common.rope import kind_of
from common.target import text_config

IGNORED_ON_READING = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")  # the target's own


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
