"""train_drafter.py as a person runs it, on shards on the disk: does the GPU wait for data, how long is a cold start.

    python benchmarks/training_disk.py --work W --dims kimi --samples 200                           # 11 GB: waiting
    python benchmarks/training_disk.py --work W --dims smollm2 --samples 10000 --length 48 --steps 2  # cold start
    python benchmarks/training_disk.py --work W --dims tiny --samples 40 --device cpu --steps 3     # tries it here

Writes shards of random states (lengths and masks of the chat mix of benchmarks/training.py) and a checkpoint of the
parts of a target that training reads, empties them out of the page cache, measures how fast the disk reads them alone,
and runs train_drafter.py. Prints RESULT {json}: seconds to the first step, share of the time that the GPU stood idle
for data and tokens/s (over the second half of the steps), and the disk's own speed in tokens/s. Kernels that an earlier
run compiled are used again: set TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR to new folders to see a first start.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from benchmarks.training import DIMS, chat_mix  # noqa: E402
from common.shard_run import RunDirectory  # noqa: E402
from common.shard_writing import write_sample  # noqa: E402
from common.shards import Record, ShardReader, token_hash  # noqa: E402

POINTS, LAYERS = (3, 31, 59), 61


def write_target(folder: Path, d: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(
        architectures=["DeepseekV3ForCausalLM"], num_hidden_layers=LAYERS, hidden_size=d["hidden"],
        vocab_size=d["vocab"], num_attention_heads=d["heads"], num_key_value_heads=d["kv"], head_dim=d["head_dim"],
        intermediate_size=d["ffn"], max_position_embeddings=32768, rope_theta=50000.0, rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {
            "model.embed_tokens.weight": torch.randn(d["vocab"], d["hidden"]).mul_(0.02).bfloat16(),
            "lm_head.weight": torch.randn(d["vocab"], d["hidden"]).mul_(0.02).bfloat16(),
            "model.norm.weight": torch.ones(d["hidden"], dtype=torch.bfloat16),
        },
        folder / "model.safetensors",
    )


def write_shards(folder: Path, target: Path, d: dict, number: int, length: int | None) -> float:
    """Write the shards; returns GB/s written."""
    masks = [torch.from_numpy(mask) for mask in chat_mix(min(number, 512))]
    longest = length or 4096
    arena = torch.randn(longest + 256, d["hidden"], generator=torch.Generator().manual_seed(0)).bfloat16()
    identity = {"model": str(target), "capture_points": list(POINTS), "last_state": "pre-norm", "dtype": "bfloat16"}
    started, total = time.perf_counter(), 0
    with RunDirectory(folder, identity, rows=number, layout="v1") as run:

        def write(index):
            mask = masks[index % len(masks)][:length]
            if length:
                mask = torch.ones(length, dtype=torch.int64)
            ids = torch.randint(0, d["vocab"], (len(mask),), generator=torch.Generator().manual_seed(index))
            states = [arena[shift : shift + len(mask)] for shift in (0, 7, 11, index % 256)]
            written = write_sample(folder, index, ids, mask, states, "v1", run.rows_per_block)
            return Record(
                index, len(ids), int(mask.sum()), written.bytes, written.xxh3, token_hash([index, *ids[:8].tolist()])
            )

        with ThreadPoolExecutor(4) as pool:
            for first in range(0, number, 256):
                records = list(pool.map(write, range(first, min(first + 256, number))))
                run.commit(records)
                total += sum(record.bytes for record in records)
        run.finish()
    return total / 1e9 / (time.perf_counter() - started)


def empty_page_cache(paths) -> None:
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_alone(paths, at_most: float) -> float:
    """GB/s of sixteen threads that read files one after the other and do nothing else."""
    started, done = time.perf_counter(), 0

    def read(path):
        if time.perf_counter() - started > at_most:
            return 0
        with open(path, "rb", buffering=0) as file:
            total = 0
            while chunk := file.read(8 << 20):
                total += len(chunk)
        return total

    with ThreadPoolExecutor(16) as pool:
        done = sum(pool.map(read, paths))
    return done / 1e9 / (time.perf_counter() - started)


def main():
    parser = argparse.ArgumentParser(  # no abbreviations: what is not known here goes to train_drafter.py
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--work", type=Path, required=True, help="directory for shards, target and run; kept")
    parser.add_argument("--dims", choices=tuple(DIMS), default="kimi")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--length", type=int, help="every sample this long and all supervised, instead of the chat mix")
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps; 0: one pass")
    parser.add_argument("--tokens-per-step", type=int, default=16384)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--warm-cache", action="store_true", help="leave the shards in the page cache")
    options, more = parser.parse_known_args()
    d, work = DIMS[options.dims], options.work / options.dims
    write_target(work / "target", d)
    written = write_shards(work / "states", work / "target", d, options.samples, options.length)
    reader = ShardReader(work / "states")
    paths = [record.path for record in reader.records]
    empty_page_cache(paths)
    alone = read_alone(paths, 10.0)
    if not options.warm_cache:
        empty_page_cache(paths)
    command = [
        sys.executable, ROOT / "train_drafter.py", "--data", work / "states", "--output", work / "run", "--model",
        work / "target", "--intermediate_size", d["ffn"], "--num_key_value_heads", d["kv"], "--head_dim", d["head_dim"],
        "--draft_vocab_size", d["draft"], "--eval_fraction", 0, "--tensorboard", "False", "--device", options.device,
        "--tokens_per_step", options.tokens_per_step, "--save_every", 10**9, *more,
    ]  # fmt: skip
    if options.steps:
        command += ["--max_steps", options.steps]
    metrics = work / "run" / "metrics.jsonl"
    log = open(work / "train.log", "w")
    started, first = time.perf_counter(), None
    process = subprocess.Popen([str(part) for part in command], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    while process.poll() is None:
        if first is None and metrics.exists() and metrics.stat().st_size:
            first = time.perf_counter() - started
        time.sleep(0.1)
    print((work / "train.log").read_text()[-3000:])
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if not lines:
        raise SystemExit(f"train_drafter.py ended with status {process.returncode} before its first step")
    used = lines[len(lines) // 2 :]
    used = used[:-1] or used  # the last step of a pass is what was left over
    seconds = sum(line["seconds"] for line in used)
    waited = {phase: sum(line["milliseconds"][phase] for line in used) / 1e3 for phase in ("fetch", "h2d")}
    bytes_per_token = sum(record.bytes for record in reader.records) / sum(record.tokens for record in reader.records)
    result = dict(
        name=f"{options.dims}-disk", samples=len(paths), gigabytes=sum(r.bytes for r in reader.records) / 1e9,
        write_gb_per_s=written, disk_reads_gb_per_s=alone, disk_reads_tokens_per_s=alone * 1e9 / bytes_per_token,
        first_step_after_s=first, steps=len(lines), waiting=sum(waited.values()) / seconds,
        waiting_worst=max(sum(line["milliseconds"][p] for p in waited) / line["seconds"] / 1e3 for line in used),
        tokens_per_second=sum(line["tokens"] for line in used) / seconds,
        mfu=sum(line["mfu"] * line["seconds"] for line in used) / seconds if used[0]["mfu"] else None,
        peak_memory_gb=used[-1]["peak_memory_gb"], status=process.returncode,
    )  # fmt: skip
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
