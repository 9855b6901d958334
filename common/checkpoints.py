"""Checkpoints of a training run: a checkpoint is whole or it is not there, and a run continues from it exactly.

    OUT/checkpoints/step-00001200/
      drafter.safetensors      float32 weights, d2t, t2d
      optimizer.safetensors    float32 moments and step counts by parameter name, and the random number states
      state.json               step, place in the schedule, best figure, arguments, identity, size and xxh3-128 of both

train_drafter.py writes with `save` and continues with `latest` and `restore`. The directory is filled under a temporary
name, flushed to the disk and renamed; a killed run leaves a temporary directory, which the next one removes. Tensors
are stored by parameter name and whole, so a run may continue on another number of ranks, sharded or not.
"""

import fcntl
import json
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash
from safetensors.torch import load_file
from torch import nn

from common.batches import Schedule, fingerprint
from common.drafter import Drafter
from common.drafter_config import MLA_SIZES
from common.errors import UserError
from common.export import save_tensors
from common.shard_writing import cannot_write, fsync_directory, take_lock
from common.shards import hash_file
from common.target import TargetParts

NAME = re.compile(r"step-(\d{8})$")
TEMPORARY = re.compile(r"\.step-\d{8}\.\d+$")
FILES = ("drafter.safetensors", "optimizer.safetensors")
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@contextmanager
def own_directory(out: Path):
    """Within it, no other run trains into `out`; a run that was killed does not keep it. `UserError` when one does."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = take_lock(out / ".lock", fcntl.LOCK_EX)
    except OSError as error:
        raise cannot_write(out, error) from None
    if held is None:
        raise UserError(f"{out}: another run is training into this directory; wait for it, or use another --output")
    try:
        yield
    finally:
        os.close(held)


def directory_of(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:08d}"


def steps_saved(out: Path) -> list[int]:
    """Steps that have a checkpoint, ascending."""
    folder = out / "checkpoints"
    names = os.listdir(folder) if folder.is_dir() else []
    found = [int(match[1]) for name in names if (match := NAME.match(name)) and not (folder / name).is_symlink()]
    return sorted(found)


# ---- tensors out of a run and into one -------------------------------------------------------------------------------


def collect(drafter: nn.Module, optimizer: torch.optim.Optimizer, keep: bool = True) -> tuple[dict, dict]:
    """(weights and buffers, optimizer tensors) on the CPU, by name. Every rank must call it when sharded; those that
    do not `keep` them only give their shards."""
    weights = {name: whole(tensor, keep) for name, tensor in drafter.state_dict().items()}
    moments = {}
    for name, parameter in drafter.named_parameters():
        for key in MOMENTS:
            if key in optimizer.state.get(parameter, {}):
                moments[f"{key}.{name}"] = whole(optimizer.state[parameter][key], keep)
    moments["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        moments["random.cuda"] = torch.cuda.get_rng_state()
    return (weights, moments) if keep else ({}, {})


def whole(tensor: torch.Tensor, keep: bool = True) -> torch.Tensor | None:
    """A copy on the CPU, gathered over the ranks where it is sharded; None for a rank that does not `keep` it."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().to("cpu", copy=True).contiguous() if keep else None


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """The drafter's tensors in a checkpoint."""
    return load_file(path / FILES[0])


@torch.no_grad()
def restore(path: Path, drafter: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the tensors of a checkpoint into a drafter and its optimizer, sharded or not."""
    weights = weights_of(path)
    for name, tensor in drafter.state_dict().items():
        tensor.copy_(like(weights[name], tensor))
    moments = load_file(path / FILES[1])
    for name, parameter in drafter.named_parameters():
        state = {key: moments[f"{key}.{name}"] for key in MOMENTS if f"{key}.{name}" in moments}
        if state:
            fused = optimizer.param_groups[0].get("fused") or optimizer.param_groups[0].get("capturable")
            step = state.pop("step")
            optimizer.state[parameter] = {
                "step": step.to(parameter.device) if fused else step,
                **{key: like(tensor, parameter).to(parameter.device, copy=True) for key, tensor in state.items()},
            }
    torch.set_rng_state(moments["random.cpu"])
    if "random.cuda" in moments and torch.cuda.is_available():
        torch.cuda.set_rng_state(moments["random.cuda"])


def like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`tensor` (whole) laid out as `parameter` is: this rank's shard of it where that is sharded."""
    if not hasattr(parameter, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)


# ---- files -----------------------------------------------------------------------------------------------------------


def save(out: Path, step: int, weights: dict, moments: dict, state: dict) -> Path:
    """Write the checkpoint of `step`; called by one rank. state: plain JSON values. `UserError` on a full disk."""
    final = directory_of(out, step)
    temporary = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        files = {}
        for name, tensors in zip(FILES, (weights, moments), strict=True):
            save_tensors(tensors, temporary / name)
            files[name] = {"bytes": (temporary / name).stat().st_size, "xxh3": hash_file(temporary / name)}
        with open(temporary / "state.json", "w") as file:
            json.dump({"step": step, "files": files, **state}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        fsync_directory(temporary)
        if final.exists():  # the same step again, after a resume with other arguments
            shutil.rmtree(final)
        os.rename(temporary, final)
        fsync_directory(final.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise cannot_write(final, error) from None
    return final


def latest(out: Path, note=print) -> tuple[Path, dict] | None:
    """(directory, state) of the newest checkpoint whose files are whole, or None. Damaged ones are named to `note`."""
    damaged = []
    for step in reversed(steps_saved(out)):
        path = directory_of(out, step)
        problem, state = inspect(path)
        if problem is None:
            return path, state
        damaged.append(f"{path}: {problem}")
        note(f"checkpoint passed over: {damaged[-1]}")
    if damaged:
        raise UserError(
            f"{out}: every checkpoint is damaged ({'; '.join(damaged)}); remove {out / 'checkpoints'} to start anew"
        )
    return None


def inspect(path: Path) -> tuple[str | None, dict]:
    """(what is wrong with the checkpoint or None, its state)."""
    try:
        state = json.loads((path / "state.json").read_text())
        for name, expected in state["files"].items():
            if (found := (path / name).stat().st_size) != expected["bytes"]:
                return f"{name} has {found} bytes, expected {expected['bytes']}", {}
            if hash_file(path / name) != expected["xxh3"]:
                return f"{name} does not match its checksum", {}
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}", {}
    return None, state


def prune(out: Path, keep: int, best_step: int | None) -> list[int]:
    """Remove all but the newest `keep` checkpoints and that of the best step; returns the steps removed.

    Only directories that `save` itself names so, directly under OUT/checkpoints, are touched. A checkpoint is renamed
    before its files go, so that a kill in between leaves none that looks whole.
    """
    removed = [step for step in steps_saved(out)[:-keep] if step != best_step]
    for step in removed:
        path = directory_of(out, step)
        doomed = path.with_name(f".{path.name}.{os.getpid()}")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return removed


def remove_unfinished(out: Path) -> int:
    """Remove what killed runs left half-written; returns how many. Call it when no other process trains into `out`."""
    folder = out / "checkpoints"
    names = [name for name in (os.listdir(folder) if folder.is_dir() else []) if TEMPORARY.match(name)]
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)
    return len(names)


SAME_ARGUMENTS = (
    "draft_vocab_size", "init_from", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "max_position_embeddings", "fc_norm", "norm_output", "ttt_steps", "step_decay", "tokens_per_step", "seed",
    "long_documents", "eval_fraction", *MLA_SIZES,
)  # fmt: skip


def identify(arguments: dict, target: TargetParts, drafter: Drafter, schedule: Schedule, held_out: list) -> dict:
    """What must be the same for a run to continue; `require_same` names each entry that is not."""
    return {
        "data": f"{len(schedule.records)} training samples, fingerprint {fingerprint(schedule.records)}",
        "held-out data": f"{len(held_out)} samples, fingerprint {fingerprint(held_out)}",
        "target": target.fingerprint(),
        "drafter": drafter.config.to_dict(),
        "draft vocabulary": xxhash.xxh3_128_hexdigest(drafter.d2t.cpu().numpy().tobytes()),
        "tokens of a batch": schedule.budget.tokens,
        **{f"--{name.replace('_', '-')}": arguments[name] for name in SAME_ARGUMENTS},
    }


def require_same(saved: dict, now: dict, path: Path) -> None:
    """Raise `UserError` naming every entry of the run's identity (data, target, drafter, batches) that has changed."""
    names = sorted(set(saved) | set(now))
    plain = json.loads(json.dumps(now))  # tuples become lists, as they did in the file
    changed = [
        f"{name} was {json.dumps(saved.get(name))}, is {json.dumps(plain.get(name))}"
        for name in names if saved.get(name) != plain.get(name)
    ]  # fmt: skip
    if changed:
        raise UserError(
            f"{path}: this run cannot be resumed, something that it depends on has changed: {'; '.join(changed)}. "
            f"Restore it, or train into another --output (--init-from keeps the weights)"
        )
