"""The dtypes that hidden states are stored in, and the rounding to eight bits.

`fp8` stores the capture points as float8_e4m3fn codes with one float32 scale a token and point, its largest magnitude
/ 448, and the last state, from which the teacher is computed, in bfloat16. The other dtypes store every tensor alike.
States are rounded where they are born (common/tap.py, on the device) and widened to bfloat16 where they are read
(common/shards.py), or, in training, where they are used (`widen`, on the device); a code is within 2^-4 of its value,
or within half a step of the subnormals (2^-10) times the scale.
"""

import functools

import torch

from common.errors import UserError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FP8 = torch.float8_e4m3fn
LARGEST_CODE = 448.0
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # a row of zeros has this scale, and stays zero
ROWS_AT_ONCE = 4096  # rounded at a time: float32 intermediates stay small beside a model that fills the device


def stored_dtypes(name: str, num_points: int) -> list[torch.dtype]:
    """dtype of each of the P+1 stored tensors under --state-dtype `name`, the last state at the end."""
    if name == "fp8":
        return [FP8] * num_points + [torch.bfloat16]
    return [DTYPES[name]] * (num_points + 1)


def to_stored(state: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What is stored of `state` [rows, H], and the largest magnitude of each row, float32 [rows].

    The largest magnitude is NaN or Inf exactly when the row holds one. That is seen before the rounding to eight bits
    (which has no Inf, and makes NaN of it) and after any other (float16 may overflow).
    """
    if dtype != FP8:
        state = state.to(dtype)
    largest = torch.linalg.vector_norm(state, ord=float("inf"), dim=-1).float()  # [rows]
    return quantise(state, scale_of(largest)) if dtype == FP8 else state, largest


def scale_of(largest: torch.Tensor) -> torch.Tensor:
    """float32 scales of rows with these largest magnitudes. A product, not a quotient: devices divide by a constant in
    different ways, and the scale that is written must be the one that was used."""
    return (largest * (1 / LARGEST_CODE)).clamp_min(SMALLEST_SCALE)


def quantise(state: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn codes [rows, H] of a state [rows, H] with scales [rows]; saturating, to nearest, ties to even."""
    codes = torch.empty(state.shape, dtype=FP8, device=state.device)
    for first in range(0, len(state), ROWS_AT_ONCE):
        some = slice(first, first + ROWS_AT_ONCE)
        codes[some] = torch.div(state[some].float(), scales[some, None]).clamp_(-LARGEST_CODE, LARGEST_CODE).to(FP8)
    return codes


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bfloat16 values of codes on the CPU, any shape; float32 scales broadcast against them. By table: half of
    the time that a conversion takes."""
    wide = torch.from_numpy(code_values()[codes.view(torch.uint8).numpy()])
    return wide.mul_(scales).to(torch.bfloat16)


def widen(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """bfloat16 [T, P * H] of codes uint8 [T, P * H] with scales float32 [T, P], on any device: to the bit what
    `dequantise` gives (compiled code may leave out the rounding to bfloat16 before a norm). values: `code_values()` as
    a tensor there, so that the device need not know float8."""
    if not torch.compiler.is_compiling() and len(codes) > ROWS_AT_ONCE:
        parts = zip(codes.split(ROWS_AT_ONCE), scales.split(ROWS_AT_ONCE), strict=True)
        return torch.cat([widen(*part, values) for part in parts])
    wide = values[codes.int()].unflatten(1, (scales.shape[1], -1)) * scales[:, :, None]
    return wide.to(torch.bfloat16).flatten(1)


def widened(states: list[torch.Tensor], scales: torch.Tensor | None, points: bool = True) -> tuple:
    """The P+1 states [L, H] with those stored in eight bits as bfloat16, and None. points: False widens the last state
    alone, and gives the scales [L, P] of the points, if they are in eight bits.

    scales: [L, P] of our v1 files, [L, P+1, 1] of our Arrow ones; [L, 1, 1], one a token, where hs_connectors wrote.
    """
    if strange := {state.dtype for state in states if state.dtype.itemsize == 1} - {FP8}:
        raise UserError(f"states in {strange.pop()}; of eight bits only {FP8} can be read")
    if scales is None:
        if any(state.dtype == FP8 for state in states):
            raise UserError("states in eight bits, but no scales beside them; its writer left them out")
        return states, None
    scales = scales.flatten(1)
    of = [scales[:, min(k, scales.shape[1] - 1), None] for k in range(len(states))]
    left = 0 if points or states[0].dtype != FP8 else len(states) - 1  # states that are left as they are
    wide = [dequantise(s, scale) if s.dtype == FP8 else s for s, scale in zip(states[left:], of[left:], strict=True)]
    return states[:left] + wide, torch.cat(of[:left], 1) if left else None


@functools.cache
def code_values():
    """float32 numpy array [256]: the value of each code."""
    return torch.arange(256, dtype=torch.uint8).view(FP8).float().numpy()


def rounded_to_fp8(state: torch.Tensor) -> torch.Tensor:
    """bfloat16: what becomes of a state [rows, H] on the CPU that is stored as fp8 and read again."""
    codes, largest = to_stored(state, FP8)
    return dequantise(codes, scale_of(largest)[:, None])
