"""A target, shards and drafters small enough to compute by hand, written to disk in the real formats.

The target is a permutation: after token v it always says `successor[v]`, because its last state is the one-hot vector
of that token and its head is the identity. The drafter built from it reads the same one-hot vector at its
capture points and its MLP applies a permutation of its own, once a step: with the target's permutation it copies the
target; with another one it is wrong at known tokens, so that every figure can be computed without a model.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from common.drafter import Drafter, DrafterConfig
from common.export import export_sglang
from common.shard_run import RunDirectory
from common.shard_writing import write_sample
from common.shards import Record, token_hash

VOCAB = 64  # also the hidden size
POINTS = (2, 4, 6)
LAYERS = 8


def target_config() -> dict:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": VOCAB, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": VOCAB, "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }  # fmt: skip


def write_target(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(target_config()))
    embedding = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": torch.eye(VOCAB),
               "model.norm.weight": torch.ones(VOCAB)}  # fmt: skip
    save_file({name: t.to(torch.bfloat16) for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def in_hub_cache(home: Path, model: str, folder: Path, revision: str = "main") -> dict[str, str]:
    """Puts a checkpoint where huggingface_hub keeps the download of `model`; the environment that finds it there and
    asks no network."""
    repository = home / "hub" / f"models--{model.replace('/', '--')}"
    shutil.copytree(folder, repository / "snapshots" / "0123abcd")
    (repository / "refs").mkdir()
    (repository / "refs" / revision).write_text("0123abcd")
    return {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_HUB_OFFLINE": "1"}


def permutation(seed: int = 0) -> torch.Tensor:
    """int64 [VOCAB]: successor of every token; one cycle through all of them, so replies do not repeat soon."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))
    successor = torch.empty(VOCAB, dtype=torch.int64)
    successor[order] = order.roll(-1)
    return successor


def conversation(successor: torch.Tensor, lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, loss_mask): prompts and replies alternate with these lengths; prompts are random tokens but for their
    last, which follows the target's rule so that a drafter can know it."""
    generator = torch.Generator().manual_seed(seed)
    ids, mask = [], []
    for number, length in enumerate(lengths):
        for place in range(length):
            reply = number % 2 == 1
            follows = reply or (place == length - 1 > 0)
            drawn = torch.randint(VOCAB, (), generator=generator)
            ids.append(int(successor[ids[-1]] if follows else drawn))
            mask.append(int(reply))
    return torch.tensor(ids), torch.tensor(mask)


def states_of(ids: torch.Tensor, successor: torch.Tensor) -> list[torch.Tensor]:
    """P+1 tensors [L, VOCAB] bf16: one-hot of the target's next token at every point and in the last state."""
    one_hot = torch.nn.functional.one_hot(successor[ids], VOCAB).to(torch.bfloat16)
    return [one_hot.clone() for _ in range(len(POINTS) + 1)]


def identity(target: Path) -> dict:
    return {"model": str(target), "capture_points": list(POINTS), "num_layers": LAYERS, "hidden_size": VOCAB,
            "vocab_size": VOCAB, "last_state": "pre-norm", "dtype": "bfloat16", "seed": 0}  # fmt: skip


def write_shards(folder: Path, target: Path, samples: list, layout: str = "v1", labels=None, **changes) -> Path:
    """samples: [(input_ids, loss_mask, states)]; labels: [(category, source)]; changes: other dataset.json values."""
    with RunDirectory(folder, {**identity(target), **changes}, rows=len(samples), layout=layout) as run:
        for index, (ids, mask, states) in enumerate(samples):
            written = write_sample(folder, index, ids, mask, states, layout, run.rows_per_block)
            category, source = labels[index] if labels else (None, None)
            run.commit([Record(index, len(ids), int(mask.sum()), written.bytes, written.xxh3, token_hash(ids.tolist()),
                               category=category, source=source)])  # fmt: skip
        run.finish()
    return folder


def copying_drafter(successor: torch.Tensor, draft_vocab: torch.Tensor | None = None, **config) -> Drafter:
    """A drafter whose step applies `successor` to the token it believes was last; draft_vocab: bool [VOCAB]."""
    kept = torch.ones(VOCAB, dtype=torch.bool) if draft_vocab is None else draft_vocab
    names = torch.nonzero(kept).flatten()
    made = DrafterConfig.from_target(
        target_config(), capture_points=POINTS, draft_vocab_size=len(names), **config
    )
    drafter = Drafter(made)
    drafter.init_weights(seed=0)
    eye = torch.eye(VOCAB)
    permute = eye[:, successor]  # permute @ one_hot(v) = one_hot(successor[v])
    size = VOCAB**0.5  # norm(one_hot) = sqrt(VOCAB) * one_hot
    with torch.no_grad():
        for projection in drafter.midlayer["self_attn"].values():
            projection.weight.zero_()
        drafter.fc.weight.copy_(torch.cat([eye / len(POINTS)] * len(POINTS), dim=1))
        drafter.midlayer["mlp"]["gate_proj"].weight.copy_(eye)
        drafter.midlayer["mlp"]["up_proj"].weight.copy_(eye)
        gain = torch.nn.functional.silu(torch.tensor(size)) * size
        drafter.midlayer["mlp"]["down_proj"].weight.copy_((permute - eye) / gain)
        drafter.lm_head.weight.copy_(eye[names])
    d2t = names - torch.arange(len(names))
    drafter.set_vocab(d2t, kept)
    return drafter


def write_drafter(folder: Path, drafter: Drafter) -> Path:
    export_sglang(folder, drafter, target_config(), "tiny permutation target")
    return folder


def other_config(drafter: Drafter, **changes) -> DrafterConfig:
    return replace(drafter.config, **changes)
