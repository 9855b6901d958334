"""train_drafter.py on one GPU and on several: how much faster, and is the loss curve the same.

    python benchmarks/training_gpus.py --work W --dims kimi --samples 200 --ranks 2 --steps 24                # two GPUs
    python benchmarks/training_gpus.py --work W --dims tiny --samples 40 --ranks 2 --steps 3 --device cpu \\
        --tokens-per-rank 2048

The optimizer step is the same everywhere (ranks x --tokens-per-rank tokens; one GPU accumulates), so the losses must be
too, but for rounding. Runs one rank, then DDP and FSDP2 (--shard) under torchrun, on shards that stay in the page
cache. Prints tokens/s (full steps of the second half: DDP looks at the clock, and waits for the device, in each of its
first ten), the ratio to one rank, the largest relative difference of the loss, and RESULT {json}. NVLink multicast is
off (NCCL_NVLS_ENABLE=0), as containers often need it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.training import DIMS  # noqa: E402
from benchmarks.training_disk import write_shards, write_target  # noqa: E402


def train(work: Path, name: str, ranks: int, d: dict, options, *more) -> list[dict]:
    """The log lines of one run of train_drafter.py."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    command = [
        *launcher, ROOT / "train_drafter.py", "--data", work / "states", "--output", work / name, "--model",
        work / "target", "--intermediate_size", d["ffn"], "--num_key_value_heads", d["kv"], "--head_dim", d["head_dim"],
        "--draft_vocab_size", d["draft"], "--eval_fraction", 0, "--tensorboard", "False", "--device", options.device,
        "--tokens_per_batch", options.tokens_per_rank, "--tokens_per_step", options.ranks * options.tokens_per_rank,
        "--save_every", 10**9, "--max_steps", options.steps, *more,
    ]  # fmt: skip
    with open(work / f"{name}.log", "w") as log:
        environment = os.environ | {"NCCL_NVLS_ENABLE": "0"}
        code = subprocess.call(
            [str(part) for part in command], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
    if code:
        raise SystemExit(f"{name} ended with {code}:\n" + (work / f"{name}.log").read_text()[-3000:])
    lines = map(json.loads, (work / name / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory for shards, target and runs; kept")
    parser.add_argument("--dims", choices=tuple(DIMS), default="kimi")
    parser.add_argument("--samples", type=int, default=120)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tokens-per-rank", type=int, default=8192)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    d, work = DIMS[options.dims], options.work.resolve() / options.dims
    for name in ("one", "ddp", "fsdp2"):
        shutil.rmtree(work / name, ignore_errors=True)  # or a finished run would be resumed, and its old speed printed
    write_target(work / "target", d)
    write_shards(work / "states", work / "target", d, options.samples, None)
    runs = {
        "one": train(work, "one", 1, d, options),
        "ddp": train(work, "ddp", options.ranks, d, options),
        "fsdp2": train(work, "fsdp2", options.ranks, d, options, "--shard", "true"),
    }
    result = {}
    for name, lines in runs.items():
        most = max(line["tokens"] for line in lines)
        second = lines[len(lines) // 2 :]
        timed = [line for line in second if line["tokens"] > 0.9 * most] or second  # a pass ends in a smaller step
        speed = sum(line["tokens"] for line in timed) / sum(line["seconds"] for line in timed)
        pairs = zip(lines, runs["one"], strict=True)
        result[name] = {
            "ranks": 1 if name == "one" else options.ranks,
            "tokens_per_second": speed,
            "ratio": speed / result["one"]["tokens_per_second"] if result else 1.0,
            "loss_difference": max(abs(line["loss"] - first["loss"]) / first["loss"] for line, first in pairs),
            "peak_memory_gb": lines[-1]["peak_memory_gb"],
            "losses": [round(line["loss"], 4) for line in lines],
        }
        shown = " ".join(f"{key} {value}" for key, value in result[name].items() if key != "losses")
        print(f"{name:<6} {shown}", flush=True)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
