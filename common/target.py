"""The parts of the target that training needs, read straight from its checkpoint: embedding, head, final norm, config.

No model is built and no other tensor is read, so a terabyte checkpoint costs the two matrices. Called by
train_drafter.py and eval_acceptance.py. Tensors keep the checkpoint's dtype.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from common import embedded_model
from common.errors import UserError
from common.losses import rms_norm

# Where the parts are called what, the prefix in front of them aside.
EMBEDDING_KEYS = ("model.embed_tokens.weight", "embed_tokens.weight")
HEAD_KEYS = ("lm_head.weight",)
NORM_KEYS = ("model.norm.weight", "norm.weight")
SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")  # of config.json: everything relies on them
PREFIXES = ("", "language_model.", "model.language_model.", "model.", "llm.")
# Config fields that mean logits are not lm_head(norm(x)), and the value that says they are off.
NOT_PLAIN = {
    "final_logit_softcapping": None,
    "logits_soft_cap": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
}


@dataclass
class TargetParts:
    """`lm_head` is `embed_tokens` itself when they are tied."""

    config: dict  # config.json as it is
    embed_tokens: torch.Tensor  # [V, H]
    lm_head: torch.Tensor  # [V, H]
    norm: torch.Tensor  # [H]
    eps: float
    tied: bool

    @property
    def vocab_size(self) -> int:
        return self.embed_tokens.shape[0]

    @torch.no_grad()
    def logit_chunks(self, last_states: torch.Tensor, rows_per_chunk: int = 1024):
        """Yield logits [n, V] for successive chunks of last states [r, H]; in the head's dtype."""
        for first in range(0, max(last_states.shape[0], 1), rows_per_chunk):
            x = rms_norm(last_states[first : first + rows_per_chunk], self.norm, self.eps, self.lm_head.dtype)
            yield x @ self.lm_head.T

    def to(self, device=None, dtype=None) -> "TargetParts":
        embed_tokens = self.embed_tokens.to(device, dtype)
        head = embed_tokens if self.tied else self.lm_head.to(device, dtype)
        return TargetParts(self.config, embed_tokens, head, self.norm.to(device, dtype), self.eps, self.tied)

    def fingerprint(self) -> str:
        """Short hash of a sample of the three tensors: tells whether a resumed run reads the same target."""
        digest = hashlib.sha256()
        for tensor in (self.embed_tokens, self.lm_head, self.norm[:, None]):
            step = max(1, tensor.shape[0] // 64)
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(tensor[::step].float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


def text_config(hf_config: dict) -> dict:
    """The language model's part of a config.json: multimodal targets nest it."""
    return hf_config.get("text_config") or hf_config.get("language_config") or hf_config


def checkpoint_folder(model: str, revision: str | None = None) -> Path:
    """The local folder of a target: a folder as it is, a hub id downloaded, the embedded SmolLM2 converted when absent.

    Raises UserError when there is no such model.
    """
    path = Path(model)
    if path.is_dir() and any(path.iterdir()):
        return path
    if path.name == embedded_model.DEFAULT_OUTPUT.name:
        return embedded_model.ensure(path)
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise UserError(f"{model}: no checkpoint folder there; give --model a folder or a hub id such as org/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision))
    except Exception as error:  # no network, no such id, no access: the library's own first line says which
        reason = str(error).strip().splitlines()[0][:300]
        raise UserError(f"{model}: neither a folder nor a hub id that can be downloaded: {reason}") from None


def model_of(info: dict) -> str | None:
    """The target that shards name in their dataset.json: where it was found then, else its name or hub id."""
    path = info.get("run", {}).get("model_path")
    return path if path and Path(path).is_dir() else info.get("model")


def target_folder(model: str, info: dict) -> Path:
    """The local folder of `model` (a folder or a hub id), the target of shards with this dataset.json.

    The hub id that the shards name is taken at the revision of their capture. UserError as `checkpoint_folder`.
    """
    theirs = model == info.get("model")
    if theirs and "/" not in model and not Path(model).is_dir():  # the folder's name is all that is left of it
        raise UserError(f"the shards were captured from {model}, and there is no such folder; give it as --model")
    return checkpoint_folder(model, info.get("revision") if theirs else None)


def load_config(model_path: str | Path) -> dict:
    """config.json of a checkpoint folder."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise UserError(f"{path}: not found; give the folder of a Hugging Face checkpoint")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:  # not JSON, or not UTF-8
        raise UserError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(config).__name__}")
    text = text_config(config)
    for name in SIZES if isinstance(text, dict) else ():
        if type(text.get(name, 1)) is not int or text.get(name, 1) < 1:
            raise UserError(f"{path}: {name} is {text[name]!r}, expected a whole number above 0")
    return config


def load_target_parts(model_path: str | Path) -> TargetParts:
    """Read embedding, head, final norm and config of the checkpoint at `model_path` (a local folder).

    One safetensors file or an index; tied embeddings; multimodal prefixes (`language_model.` and the like). Raises
    UserError naming the missing key and what is there; when the head or embedding is stored quantised; and for a
    target whose logits are not lm_head(norm(x)) (soft-capped or scaled logits, scaled embeddings, layer norms).
    """
    folder = Path(model_path)
    config = load_config(folder)
    text = text_config(config)
    _refuse_unusual(folder, text)
    where = _key_files(folder)
    prefix, embedding_key = _find(where, EMBEDDING_KEYS)
    if embedding_key is None:
        raise UserError(
            f"{folder}: no embedding; looked for {', '.join(EMBEDDING_KEYS)} with prefixes "
            f"{', '.join(repr(p) for p in PREFIXES)} among {len(where)} keys, such as {', '.join(sorted(where)[:3])}"
        )
    _, norm_key = _find(where, NORM_KEYS, prefix)
    if norm_key is None:
        raise UserError(f"{folder}: no final norm; looked for {', '.join(prefix + key for key in NORM_KEYS)}")
    _, head_key = _find(where, HEAD_KEYS, prefix)
    if head_key is None:  # some multimodal checkpoints keep the head outside the prefix
        _, head_key = _find(where, HEAD_KEYS)
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    if head_key is None and not tied:
        raise UserError(f"{folder}: no {prefix}lm_head.weight, and config.json does not say tie_word_embeddings: true")
    embed_tokens = _read(folder, where, embedding_key)
    norm = _read(folder, where, norm_key)
    tied = tied or head_key is None
    lm_head = embed_tokens if tied else _read(folder, where, head_key)
    if lm_head.shape[1] != norm.shape[0] or embed_tokens.shape[1] != norm.shape[0]:
        raise UserError(
            f"{folder}: embedding {tuple(embed_tokens.shape)}, head {tuple(lm_head.shape)} and norm "
            f"{tuple(norm.shape)} disagree on the hidden size"
        )
    return TargetParts(config, embed_tokens, lm_head, norm, float(text.get("rms_norm_eps", 1e-6)), tied)


def _refuse_unusual(folder: Path, text: dict) -> None:
    for name, off in NOT_PLAIN.items():
        if text.get(name) not in (None, off):
            raise UserError(f"{folder}: {name}={text[name]}: logits are not lm_head(norm(x)); target not supported")
    if str(text.get("model_type", "")).startswith("gemma"):
        raise UserError(f"{folder}: Gemma targets scale embeddings and norms in their own way; not supported")


def _key_files(folder: Path) -> dict[str, str]:
    """Every tensor name of the checkpoint -> its file name."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return json.loads(index.read_text())["weight_map"]
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: no model.safetensors, no index and no other *.safetensors file")
    where = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            where.update((name, file.name) for name in tensors.keys())
    return where


def _find(where: dict[str, str], names: tuple[str, ...], prefix: str | None = None) -> tuple[str, str | None]:
    """(prefix, full key) of the first of `names` that exists, under one prefix or any known one."""
    for front in PREFIXES if prefix is None else (prefix,):
        for name in names:
            if front + name in where:
                return front, front + name
    return "", None


def _read(folder: Path, where: dict[str, str], key: str) -> torch.Tensor:
    file = folder / where[key]
    if not file.is_file():
        raise UserError(f"{file}: not found, but the index says it holds {key}; is the checkpoint complete?")
    with safe_open(file, "pt") as tensors:
        tensor = tensors.get_tensor(key)
    if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UserError(
            f"{file}: {key} is stored as {tensor.dtype}; a quantised embedding, head or norm is not supported"
        )
    return tensor
