"""The shard doctor: what stored hidden states really are, by comparing them with states captured afresh.

eval_acceptance.py --diagnose reads a few stored samples, captures their tokens again (common/engine.py, or transformers
as an independent second engine) and asks this file, which is pure tensor code: for every stored tensor, which capture
point it is (the claimed k, a neighbour k-1 or k+1, or any other claimed point), whether the final norm was
applied, which precision its values carry, and how far two engines are apart there.

Errors are relative per token, |stored - reference| / |reference|, and their median counts: one attention-sink token
with activations a thousand times larger must not decide for all the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.losses import rms_norm
from common.state_dtypes import rounded_to_fp8

LAST = "last state"
NORMED = ", final norm applied"
UNRELATED = 0.5  # a median relative error above this is no match: unrelated directions give 1 or more
CLEAR = 0.7  # the best match must have at most this fraction of the runner-up's error to be called certain


def point_name(point: int) -> str:
    return f"point {point}"


@dataclass
class Finding:
    """One stored tensor: what it claims to be and what it is."""

    claimed: str  # "point 3", "last state"
    found: str | None  # label of the best match, None when nothing matches
    error: float  # median relative error to the best match
    claimed_error: float | None  # the same to the reference of the claimed name; None when there is none
    runner_up: str | None
    runner_up_error: float | None
    cosine: float  # median cosine similarity to the best match
    certain: bool
    stored_dtype: str
    value_dtype: str  # the narrowest of bfloat16, float16, float32 that holds every value exactly
    bad_values: int  # NaN or infinite
    rounding: float = 0.0  # median relative error that storing the best match in eight bits alone makes

    @property
    def right(self) -> bool:
        return self.found == self.claimed


def relative_errors(stored: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """float32 [N]: |stored - reference| / |reference| of each row of two [N, H] tensors."""
    stored, reference = stored.float(), reference.float()
    return (stored - reference).norm(dim=-1) / reference.norm(dim=-1).clamp_min(1e-12)


def value_dtype(x: torch.Tensor) -> str:
    """The narrowest of bfloat16, float16 and float32 that represents every finite value of x exactly."""
    finite = x[x.isfinite()].float()
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(finite.to(dtype).float(), finite):
            return str(dtype).removeprefix("torch.")
    return "float32"


def with_normed(references: dict[str, torch.Tensor], weight: torch.Tensor, eps: float) -> dict[str, torch.Tensor]:
    """The references and, beside each, the same after the target's final norm; all [N, H]."""
    normed = {name + NORMED: rms_norm(x, weight, eps) for name, x in references.items()}
    return {**references, **normed}


def examine(claimed: list[str], stored: list[torch.Tensor], references: dict[str, torch.Tensor],
            stored_in: list[str] | None = None) -> list[Finding]:  # fmt: skip
    """One Finding for each stored tensor [N, H] (rows of several samples end to end), against references [N, H].

    claimed: the names in stored order, "point k" or "last state"; references: by name, see `with_normed`.
    stored_in: the dtype of each in its file where `stored` is widened: "fp8" errors hold the rounding to eight bits,
    which is measured on the best match and left out where two candidates are weighed against each other.
    Tensors of another width match nothing (found is None, error infinite).
    """
    findings = []
    dtypes = stored_in or [str(tensor.dtype).removeprefix("torch.") for tensor in stored]
    for name, tensor, dtype in zip(claimed, stored, dtypes, strict=True):
        usable = tensor.isfinite().all(-1)
        medians = {
            label: float(relative_errors(tensor[usable], reference[usable]).median())
            for label, reference in references.items()
            if reference.shape == tensor.shape and usable.any()
        }
        ranked = sorted(medians, key=medians.get)
        best = ranked[0] if ranked else None
        error = medians[best] if best else float("inf")
        second = ranked[1] if len(ranked) > 1 else None
        matches = best is not None and error < UNRELATED
        cosine, rounding = float("nan"), 0.0
        if best and dtype == "fp8":
            whole = references[best][usable]
            rounding = float(relative_errors(rounded_to_fp8(whole), whole).median())
        if best:
            pair = tensor[usable].float(), references[best][usable].float()
            cosine = float(torch.nn.functional.cosine_similarity(*pair, dim=-1).median())
        findings.append(
            Finding(
                claimed=name,
                found=best if matches else None,
                error=error,
                claimed_error=medians.get(name),
                runner_up=second,
                runner_up_error=medians[second] if second else None,
                cosine=cosine,
                certain=matches
                and (second is None or clearly_nearer(beyond(error, rounding), beyond(medians[second], rounding))),
                stored_dtype=dtype,
                value_dtype=value_dtype(tensor),
                bad_values=int((~tensor.isfinite()).sum()),
                rounding=rounding,
            )
        )
    return findings


def clearly_nearer(error: float, second: float) -> bool:
    return error < second and error <= CLEAR * second


def beyond(error: float, rounding: float) -> float:
    """What is left of a relative error without a rounding that is independent of the rest of it."""
    return max(error**2 - rounding**2, 0.0) ** 0.5


def conclusions(findings: list[Finding], stored_width: int, model_width: int, model_dtype: str) -> list[str]:
    """What is wrong, in sentences, worst first; empty when every tensor is what it claims."""
    if stored_width != model_width:
        return [f"states of another model: {stored_width} numbers a token, this model has {model_width}"]
    points = [f for f in findings if f.claimed != LAST]
    out = []
    if all(f.found is None for f in findings):
        nearest = min(f.error for f in findings)
        out.append(
            f"states of another model (or other weights, or other tokens): nothing matches, the nearest reference is "
            f"{nearest:.0%} away"
        )
        return out
    numbers = [(_number(f.claimed), _number(f.found)) for f in points]
    shifts = {found - claimed for claimed, found in numbers if found is not None}
    claimed_set, found_set = {c for c, _ in numbers}, {f for _, f in numbers}
    if all(f.found and NORMED not in f.found for f in points):
        if len(shifts) == 1 and shifts != {0}:
            shift = shifts.pop()
            out.append(
                f"all points are shifted by {shift:+d}: they claim {[c for c, _ in numbers]} and are "
                f"{[f for _, f in numbers]}; a drafter trained on them must be served with {[f for _, f in numbers]}"
            )
        elif claimed_set == found_set and shifts != {0}:
            order, claim = [f for _, f in numbers], [c for c, _ in numbers]
            out.append(f"points are swapped: stored in the order {order}, not {claim}")
    for finding in findings:
        if finding.found is None:
            out.append(f"{finding.claimed} matches nothing: nearest reference is {finding.error:.0%} away")
        elif finding.claimed == LAST and finding.found == LAST + NORMED:
            out.append("the last state is post-norm: norming it once more, as training does, ruins the teacher")
        elif NORMED in finding.found:
            out.append(f"{finding.claimed} has the final norm applied")
        elif not finding.right and not any("shifted" in line or "swapped" in line for line in out):
            out.append(f"{finding.claimed} is really {finding.found}")
        elif not finding.right and finding.claimed == LAST:
            out.append(f"the last state is really {finding.found}")
        if finding.found and not finding.certain:
            out.append(
                f"{finding.claimed}: {finding.found} fits best ({finding.error:.1%}), but {finding.runner_up} is "
                f"almost as near ({finding.runner_up_error:.1%}); examine more samples"
            )
        if finding.bad_values:
            out.append(f"{finding.claimed} holds {finding.bad_values} values that are NaN or infinite")
    fitting = (model_dtype, "bfloat16")
    in_full = [f for f in findings if f.stored_dtype != "fp8"]  # eight bits are chosen, and named in the report
    wrong_dtype = [f for f in in_full if f.stored_dtype != model_dtype or f.value_dtype not in fitting]
    if wrong_dtype:
        kinds = sorted({f"{f.stored_dtype} with {f.value_dtype} values" for f in wrong_dtype})
        names = ", ".join(f.claimed for f in wrong_dtype)
        out.append(f"precision: {names} stored as {' and '.join(kinds)}, this model computes in {model_dtype}")
    return out


def head_agreement(last: torch.Tensor, head: torch.Tensor, weight: torch.Tensor, eps: float,
                   next_ids: torch.Tensor) -> dict[str, float]:  # fmt: skip
    """Share of rows whose head argmax equals the next token of the row, under two readings of `last` [N, H].

    head [V, H], weight [H], next_ids int64 [N]. "pre-norm" applies the final norm first; "post-norm" does not. On text
    the target itself wrote, the true reading is near 1.
    """
    readings = {"pre-norm": rms_norm(last, weight, eps, torch.float32), "post-norm": last.float()}
    return {
        name: float(((x @ head.float().T).argmax(-1) == next_ids).float().mean()) for name, x in readings.items()
    }


def neighbours(points: list[int], num_layers: int) -> list[int]:
    """Sorted points to capture as references: every claimed k with k-1 and k+1, within 1 .. num_layers - 1."""
    around = {k + d for k in points for d in (-1, 0, 1)}
    return sorted(k for k in around if 1 <= k < num_layers)


def _number(label: str | None) -> int | None:
    if label is None or not label.startswith("point "):
        return None
    return int(label.removeprefix("point ").removesuffix(NORMED))
