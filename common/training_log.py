"""What a training run writes about itself: metrics.jsonl, TensorBoard, Weights & Biases when asked.

train_drafter.py makes one on rank 0. Every figure goes to all places under the same name; lists (one number a TTT
step) become `name/0`, `name/1`, ... there. A resumed run first drops the lines beyond its checkpoint, so that every
step is there once.
"""

import json
import math
import uuid
from pathlib import Path

import torch

from common.errors import UserError
from common.shard_writing import cannot_write, write_atomically


class TrainingLog:
    """`kind` is "train" or "eval"; figures are numbers or lists of numbers."""

    def __init__(self, out: Path, first_step: int, tensorboard: bool = True, wandb_project: str | None = None,
                 arguments: dict | None = None):
        self.path = out / "metrics.jsonl"
        kept = [line for line in read_metrics(out) if line["step"] <= first_step]
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self.file = open(self.path, "a")
        self.tensorboard = self.wandb = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(str(out / "tensorboard"), purge_step=first_step + 1)
        if wandb_project:
            try:
                import wandb
            except ImportError:
                raise UserError("--wandb-project needs the wandb package: pip install wandb") from None
            name = out / "wandb_id"  # a resumed run goes on under it
            if not name.exists():
                write_atomically(name, uuid.uuid4().hex.encode())
            self.wandb = wandb.init(project=wandb_project, dir=str(out), config=arguments, resume="allow",
                                    id=name.read_text(), name=out.resolve().name)  # fmt: skip

    def write(self, kind: str, step: int, figures: dict) -> None:
        """UserError where the disk is full: a checkpoint could not be written either."""
        flat = {f"{kind}/{name}": value for name, value in flatten(figures)}
        try:
            self.file.write(json.dumps({"kind": kind, "step": step, **strict(figures)}) + "\n")
            self.file.flush()
            if self.tensorboard is not None:
                for name, value in flat.items():
                    self.tensorboard.add_scalar(name, value, step)
        except OSError as error:
            raise cannot_write(self.path.parent, error) from None
        if self.wandb is not None:
            self.wandb.log(flat, step=step)

    def close(self) -> None:
        self.file.close()
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()


def strict(value):
    """The value as strict JSON holds it: NaN and infinities become null."""
    if isinstance(value, dict):
        return {key: strict(each) for key, each in value.items()}
    if isinstance(value, list):
        return [strict(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flatten(figures: dict):
    """(name, number) pairs; lists and dicts give one pair an element, None gives none."""
    for name, value in figures.items():
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            yield from flatten({f"{name}/{key}": each for key, each in value.items()})
        elif isinstance(value, int | float):
            yield name, value


def read_metrics(out: Path) -> list[dict]:
    """All whole lines of metrics.jsonl; a last line that a killed run left half-written is dropped."""
    path = out / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    whole = lines[:-1]  # what follows the last newline was cut short, or is empty
    try:
        return [json.loads(line) for line in whole]
    except ValueError as error:
        raise UserError(f"{path}: expected one JSON object a line, found {error}; move the file away") from None


def step_figures(pending: dict, peak_tflops: float | None, device) -> dict:
    """The figures of one step, read from the device when it is over.

    pending: step, clock (a `StepClock`), rate, counts (predicted tokens at each TTT step), tokens, samples, flops,
    set_aside, and sums: a function that gives loss, entropy sums [K], hits [K], gradient norm and skipped steps
    (`step_profile.to_host`).  peak_tflops: of all ranks together, or None.
    """
    counts = pending["counts"]
    loss, *sums, norm, skipped = pending["sums"]()
    milliseconds = pending["clock"].milliseconds()
    seconds = sum(milliseconds.values()) / 1e3
    entropy, hits = sums[: len(counts)], sums[len(counts) :]
    return {
        "loss": loss,
        "loss_per_step": [value / max(count, 1) for value, count in zip(entropy, counts, strict=True)],
        "accuracy_per_step": [value / max(count, 1) for value, count in zip(hits, counts, strict=True)],
        "gradient_norm": norm,
        "learning_rate": pending["rate"],
        "skipped_steps": int(skipped),
        "set_aside": int(pending["set_aside"]),
        "tokens": int(pending["tokens"]),
        "supervised_tokens": int(counts[0]),
        "samples": int(pending["samples"]),
        "seconds": seconds,
        "tokens_per_second": pending["tokens"] / seconds,
        "supervised_tokens_per_second": counts[0] / seconds,
        "samples_per_second": pending["samples"] / seconds,
        "mfu": pending["flops"] / seconds / (peak_tflops * 1e12) if peak_tflops else None,
        "peak_memory_gb": torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None,
        "milliseconds": milliseconds,
    }


def over_steps(several: list[dict]) -> dict:
    """The figures of several steps as one: rates over all their time, the rest averaged by supervised tokens."""
    seconds = sum(figures["seconds"] for figures in several)
    weights = [figures["supervised_tokens"] or 1 for figures in several]

    def mean(values):
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)

    one = dict(several[-1])
    for name in ("tokens", "supervised_tokens", "samples"):
        one[f"{name}_per_second"] = sum(figures[name] for figures in several) / seconds
    one["loss"] = mean([figures["loss"] for figures in several])
    one["accuracy_per_step"] = [mean(values) for values in zip(*(f["accuracy_per_step"] for f in several), strict=True)]
    if one["mfu"] is not None:
        one["mfu"] = sum(figures["mfu"] * figures["seconds"] for figures in several) / seconds
    phases = [figures["milliseconds"] for figures in several]
    one["milliseconds"] = {name: sum(phase[name] for phase in phases) / len(phases) for name in phases[-1]}
    return one
