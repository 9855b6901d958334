"""A target and shards whose continuation is a known function of the captured states, for the trainer's tests.

At position t the first two capture points hold one of 8 codes each, u and v, out of the same codebook; the third is
noise; and x[t+2] = 8 u + v. So a drafter can know the next token from the points alone, and only if it reads the right
points in the right order at the right position. The last state at t+1 makes the target say x[t+2].
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from common.cpu_threads import one_thread
from common.shard_run import RunDirectory
from common.shard_writing import write_sample
from common.shards import Record, token_hash

ROOT = Path(__file__).resolve().parent.parent
CODES, VOCAB, HIDDEN, LAYERS, POINTS = 8, 64, 64, 8, (2, 4, 6)
SMALL = ["--intermediate-size", "128", "--ttt-steps", "2", "--draft-vocab-size", "0", "--tensorboard", "False",
         "--device", "cpu"]  # fmt: skip


def write_target(folder: Path, **changes) -> Path:
    """A Llama checkpoint of random embeddings with an orthogonal head; only the parts that training reads.

    changes: other values of its config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=128,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        tie_word_embeddings=False,
    ).save_pretrained(folder)  # fmt: skip
    if changes:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
    generator = torch.Generator().manual_seed(1)
    save_file({
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator).to(torch.bfloat16),
        "lm_head.weight": head().to(torch.bfloat16),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }, folder / "model.safetensors")  # fmt: skip
    return folder


def head() -> torch.Tensor:
    """Orthogonal rows [VOCAB, HIDDEN]."""
    return torch.linalg.qr(torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2)))[0].contiguous()


def make_sample(length: int, seed: int, prompt: int = 4):
    """input_ids [L], loss_mask [L] (all after the prompt), states: P+1 tensors [L, HIDDEN] bf16."""
    generator = torch.Generator().manual_seed(seed)
    codebook = torch.randn(CODES, HIDDEN, generator=torch.Generator().manual_seed(3))
    u, v = torch.randint(CODES, (2, length), generator=generator)
    ids = torch.randint(VOCAB, (length,), generator=generator)
    ids[2:] = (CODES * u + v)[:-2]
    noise = torch.randn(length, HIDDEN, generator=generator)
    last = torch.zeros(length, HIDDEN)
    last[:-1] = head()[ids[1:]]  # last[t+1] names x[t+2]
    mask = (torch.arange(length) >= prompt).long()
    return ids, mask, [state.to(torch.bfloat16) for state in (codebook[u], codebook[v], noise, last)]


def write_shards(folder: Path, target: Path, samples: list, layout: str = "v1", unfinished: int = 0) -> Path:
    """samples: [(input_ids, loss_mask, states)], the first rows of a source with `unfinished` more; row 0 of these more
    is set aside."""
    identity = {"model": str(target), "capture_points": list(POINTS), "last_state": "pre-norm", "dtype": "bfloat16"}
    with RunDirectory(folder, identity, rows=len(samples) + unfinished, layout=layout) as run:
        for index, (ids, mask, states) in enumerate(samples):
            written = write_sample(folder, index, ids, mask, states, layout, run.rows_per_block)
            run.commit([Record(index, len(ids), int(mask.sum()), written.bytes, written.xxh3,
                               token_hash(ids.tolist()))])  # fmt: skip
        if unfinished:
            run.put_aside(len(samples), "NaN at point 2", token_hash([len(samples)]))
        else:
            run.finish()
    return folder


def command(*arguments) -> list[str]:
    return [sys.executable, str(ROOT / "train_drafter.py"), *map(str, arguments), *SMALL]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **more}


def train_here(capsys, *arguments, after=()) -> str:
    """The same without a process of its own: what train_drafter.py printed. A `UserError` comes through."""
    import train_drafter

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    argv = sys.argv
    sys.argv = [*command(*arguments)[1:], *map(str, after)]
    try:
        with one_thread():
            assert train_drafter.main() == 0
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return capsys.readouterr().out if capsys else ""


def train(*arguments, expect: int = 0, timeout: float = 240, **more: str) -> subprocess.CompletedProcess:
    """Run train_drafter.py as a person does; `expect` is its exit status."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, env=environment(**more), timeout=timeout)
    assert done.returncode == expect, done.stdout + done.stderr
    return done
