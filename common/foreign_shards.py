"""Directories of hidden states that speculators wrote, with another engine: which of their rows can be used.

Called by common/shards.py where there is no dataset.json. Two kinds are known:

* Arrow (speculators 0.8 and later): the dataset of `speculators prepare-data` (input_ids, loss_mask, seq_len) and, from
  `speculators generate-offline-data`, hidden_states/hs_i.safetensors for row i as vLLM wrote it: hidden_states
  [L, P+1, H] and token_ids [L]; with hs_connectors' fp8 connector float8_e4m3fn and hidden_states_scales [L, 1, 1].
  The last of the P+1 is the output of the last layer before the final norm. A row without a file is not generated yet.
* v1 (speculators 0.3 to 0.7): data_i.pt anywhere below the directory.

Neither says which layers the states are, nor of which model, nor carries a checksum.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.shards import SAMPLE_NAME, Record, sample_path, token_hash

NAMED = 5  # files that a remark names


def foreign_records(out: Path) -> tuple[list[Record], Any, list[str]]:
    """(records sorted by row, the Arrow dataset or None, what was left out and why: one line a reason)."""
    return arrow_records(out) if (out / "state.json").exists() else v1_records(out)


def v1_records(out: Path) -> tuple[list[Record], None, list[str]]:
    import torch

    found, unreadable = [], []
    for path in sorted(path for path in out.rglob("data_*.pt") if SAMPLE_NAME.match(path.name)):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            ids, mask = content["input_ids"].numpy(), content["loss_mask"].numpy()
            states = content["hidden_states"]
            if {len(state) for state in states} != {len(ids)} or len(mask) != len(ids):
                raise ValueError("lengths differ")
            found.append((record(int(path.stem[5:]), path, ids, mask), (len(states), states[0].shape[1])))
        except Exception:  # cut short, or not what its name says
            unreadable.append(str(path.relative_to(out)))
    remarks = []
    if unreadable:
        names = ", ".join(unreadable[:NAMED]) + (", ..." if len(unreadable) > NAMED else "")
        remarks.append(f"{out}: {len(unreadable):,} of {len(found) + len(unreadable):,} files are no readable samples; "
                       f"left out: {names}")  # fmt: skip
        if not found:
            raise UserError(remarks[0])
    alike, odd = usual_shape(found)
    if odd:
        names = ", ".join(str(each.path.relative_to(out)) for each in odd[:NAMED])
        names += ", ..." if len(odd) > NAMED else ""
        remarks.append(f"{out}: {len(odd):,} files have another number or width of states; left out: {names}")
    return sorted(alike, key=lambda each: (each.index, each.path)), None, remarks


def usual_shape(found: list[tuple[Record, tuple]]) -> tuple[list[Record], list[Record]]:
    """(records whose states have the shape, their number and width, that most have; the others)."""
    if not found:
        return [], []
    usual = Counter(shape for _, shape in found).most_common(1)[0][0]
    return [each for each, shape in found if shape == usual], [each for each, shape in found if shape != usual]


def arrow_records(out: Path) -> tuple[list[Record], Any, list[str]]:
    from datasets import load_from_disk

    rows = load_from_disk(str(out)).with_format("numpy")
    if missing := {"input_ids", "loss_mask"} - set(rows.column_names):
        raise UserError(
            f"{out}: its Arrow dataset has no {' and no '.join(sorted(missing))} (it has "
            f"{', '.join(rows.column_names)}); expected what `speculators prepare-data` writes"
        )
    folder = out / "hidden_states"
    if not folder.is_dir():
        raise UserError(
            f"{out}: a dataset of {len(rows):,} rows, but no {folder}; `speculators generate-offline-data` fills it "
            f"(where its --output was another: link that to this name)"
        )

    def look(index: int) -> tuple[str | None, tuple[Record, tuple] | None]:
        """(why row `index` is left out, None) or (None, its record and the shape of its states)."""
        path, row = sample_path(out, index, "arrow", 0), rows[index]
        if not path.exists():
            return "have no states yet (`speculators generate-offline-data` continues)", None
        problem, shape = file_problem(path, row["input_ids"])
        if problem:
            return problem, None
        return None, (record(index, path, row["input_ids"], row["loss_mask"]), shape)

    with ThreadPoolExecutor(8) as pool:
        looked = list(pool.map(look, range(len(rows))))
    left_out: dict[str, list[int]] = {}
    for index, (reason, _) in enumerate(looked):
        if reason:
            left_out.setdefault(reason, []).append(index)
    found, odd = usual_shape([each for _, each in looked if each])
    if odd:
        left_out["have another number or width of states than most"] = [each.index for each in odd]
    remarks = []
    for reason, which in left_out.items():
        names = ", ".join(map(str, which[:NAMED])) + (", ..." if len(which) > NAMED else "")
        remarks.append(f"{out}: {len(which):,} of {len(rows):,} rows {reason}; left out: {names}")
    if not found:
        raise UserError("; ".join(remarks) or f"{out}: its Arrow dataset has no row")
    return found, rows, remarks


def file_problem(path: Path, ids: np.ndarray) -> tuple[str | None, tuple]:
    """(why a file cannot be the states of a row with these ids or None, number and width of its states).

    Reads its header and token ids.
    """
    from safetensors import safe_open

    try:
        with safe_open(path, "np") as file:
            states = file.get_slice("hidden_states")
            shape, eight_bits = states.get_shape(), states.get_dtype().startswith("F8")
            scaled = "hidden_states_scales" in file.keys()
            tokens = file.get_tensor("token_ids")
    except Exception as error:  # cut short, or not what its name says
        return f"have an unreadable file ({type(error).__name__})", ()
    if len(shape) != 3 or shape[0] != len(tokens):
        return "have states that are not [tokens, points + 1, hidden size]", ()
    if eight_bits and not scaled:
        return "have states in eight bits without their scales", ()
    if not np.array_equal(tokens, ids):
        return "have states of other tokens (was the dataset prepared again since? remove these files)", ()
    return None, tuple(shape[1:])


def record(index: int, path: Path, ids: np.ndarray, mask: np.ndarray) -> Record:
    return Record(index, len(ids), int(mask.sum()), path.stat().st_size, None, token_hash(ids), path)
