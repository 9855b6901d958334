"""A directory as speculators 0.9.0 and vLLM leave it, made with their own code where that runs without a GPU.

The Arrow dataset is written by `speculators prepare-data`. The states, which vLLM would compute, are handed in; a file
holds what vLLM's ExampleHiddenStatesConnector saves (hidden_states [L, P+1, H], token_ids [L]), or in eight bits what
hs_connectors' FP8HiddenStatesConnector makes of it, with its own function.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def installed(version: str, *packages: str) -> Path:
    """speculators of that version alone in build/, without its dependencies; fetched once."""
    target = Path(__file__).parent.parent / "build" / f"speculators-{version}"
    if not (target / "speculators" / "train" / "data.py").exists():
        pip = [sys.executable, "-m", "pip", "install"]
        if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
            pip = [shutil.which("uv") or "uv", "pip", "install", "--python", sys.executable]
        wanted = [f"speculators=={version}", *packages]
        done = subprocess.run([*pip, "--no-deps", "--target", str(target), *wanted], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"speculators {version} cannot be fetched here: {done.stderr.strip()[-300:]}")
    return target


def prepare(folder: Path, model: Path, rows: list[dict]) -> list[dict]:
    """Run `speculators prepare-data` on tokenised rows into `folder`; its rows, in its own order."""
    from datasets import load_from_disk

    data = folder.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "speculators", "prepare-data", "--model", model, "--data", data]
    command += ["--output", folder, "--num-preprocessing-workers", 1, "--seq-length", 2048]
    environment = ENVIRONMENT | {"PYTHONPATH": str(installed("0.9.0", "hs-connectors==0.9.0")), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, cwd=folder.parent)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [{"input_ids": row["input_ids"], "loss_mask": row["loss_mask"]} for row in load_from_disk(str(folder))]


def store(folder: Path, index: int, ids, states: list[torch.Tensor], eight_bits: bool = False) -> Path:
    """Write hidden_states/hs_{index}.safetensors of states, P+1 tensors [L, H]."""
    tensors = {"hidden_states": torch.stack(states, 1), "token_ids": torch.as_tensor(ids)}
    if eight_bits:
        source = installed("0.9.0", "hs-connectors==0.9.0") / "hs_connectors" / "fp8_utils.py"
        spec = importlib.util.spec_from_file_location("fp8_utils", source)
        theirs = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(theirs)
        tensors["hidden_states"], scales = theirs.quantize_tensor_to_fp8(tensors["hidden_states"])
        tensors[theirs.SCALES_KEY] = scales
    path = folder / "hidden_states" / f"hs_{index}.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path)
    return path
