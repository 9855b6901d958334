"""The proof of the first batch: the hooks see what SGLang's own EAGLE-3 capture sees, or the run stops with the cause.

Called by the tap (common/tap.py) in every scheduler process. For the first captured forward pass SGLang's capture is
switched on at each point and its two neighbours; its tensors arrive at the logits processor and are compared with what
the hooks took. The last state has no counterpart there; its norm must equal the normed states that the model hands to
its head. The neighbours are there to say what went wrong: shifted by a layer, normed twice, or one rank's partial sum.
After the proof the capture is switched off, so the rest of the run pays nothing.
"""

import contextlib

import torch

FINAL_NORM_NAMES = ("norm", "final_layernorm", "ln_f")


class ProofFailed(Exception):
    """Captured states are not what they are called; the message names the tensor and the likely cause."""


class FirstBatchProof:
    """One comparison of hooked states with SGLang's own capture; `pending` until it has been made.

    model: SGLang's model; points: capture points; names: of the stored tensors, last state at the end; ranks: TP size;
    sum_over_ranks: all-reduce of a tensor. Raises ProofFailed where the model has no EAGLE-3 capture, because then it
    could not serve an EAGLE-3 drafter either.
    """

    def __init__(self, model, points: list[int], names: list[str], ranks: int, sum_over_ranks):
        self.model, self.points, self.names = model, list(points), names
        self.ranks, self.sum_over_ranks = ranks, sum_over_ranks
        decoders = [module for module in model.modules() if hasattr(module, "layers_to_capture")]
        if len(decoders) != 1 or not hasattr(model, "set_eagle3_layers_to_capture"):
            raise ProofFailed(
                f"{type(model).__name__} has no EAGLE-3 capture in this SGLang, so it can neither prove the hooks nor "
                f"serve an EAGLE-3 drafter; choose a target that SGLang supports for EAGLE-3"
            )
        self.decoder = decoders[0]
        self.norm = next((m for n in FINAL_NORM_NAMES if (m := getattr(self.decoder, n, None)) is not None), None)
        if self.norm is None:
            raise ProofFailed(f"{type(self.decoder).__name__}: no final norm under any of {FINAL_NORM_NAMES}")
        last = len(self.decoder.layers) - 1
        around = {point + step for point in points for step in (-1, 0, 1)}
        self.captured = self.switch_on([point for point in sorted(around) if 1 <= point <= last])
        self.seen_outputs: dict[int, tuple] = {}
        self.pending = True

    def switch_on(self, points: list[int]) -> list[int]:
        """Make SGLang capture what enters `layers[k]` for these k; families differ in the ids they take for that."""
        found = None
        for wanted in (points, [point for point in points if point > 1]):
            for offset in (0, -1):
                self.stop()  # marks that an attempt before this one left on single layers
                with contextlib.suppress(IndexError):  # the family adds one, and there is no such layer
                    self.model.set_eagle3_layers_to_capture([point + offset for point in wanted])
                found = list(self.decoder.layers_to_capture)
                if found == wanted and set(self.points) <= set(wanted):
                    return wanted
        self.stop()
        raise ProofFailed(
            f"{type(self.model).__name__}: SGLang cannot capture the points {self.points} "
            f"(it set {found}); choose other points"
        )

    def stop(self):
        """Switch SGLang's own capture off again."""
        for module in self.model.modules():
            if hasattr(module, "layers_to_capture"):
                module.layers_to_capture = []
            if hasattr(module, "capture_aux_hidden_states"):
                module.capture_aux_hidden_states = False
            if hasattr(module, "_is_layer_to_capture"):
                module._is_layer_to_capture = False

    def seen(self, slot: int, hidden, residual):
        """Keep what a hook took, [T, H] and [T, H] or None, until the batch is complete.

        As copies: the next layer's fused norm works in place on both.
        """
        self.seen_outputs[slot] = (hidden.clone(), None if residual is None else residual.clone())

    def check(self, aux, post_norm: torch.Tensor) -> dict | None:
        """Compare; returns {"bit_equal": {name: share}, "relative_error": {name: x}, "neighbour_error": {...}}.

        aux: SGLang's captured tensors, each [T, H]; post_norm: [T, H], what the head reads. Runs on every rank.
        None, and still pending, when the model itself computed NaN or Inf in this batch: nothing equals that.
        """
        if aux is not None and self.any_rank(not all(x.isfinite().all() for x in (*aux, post_norm)), post_norm):
            return None
        self.pending = False
        self.stop()
        if aux is None or len(aux) != len(self.captured):
            raise ProofFailed(f"SGLang's own capture gave {0 if aux is None else len(aux)} tensors at {self.captured}")
        reference = dict(zip(self.captured, aux, strict=True))
        missing = [name for slot, name in enumerate(self.names) if slot not in self.seen_outputs]
        if self.any_rank(bool(missing), post_norm):
            raise ProofFailed(f"no layer hook ran for {', '.join(missing) or 'a layer on another rank'}")
        tolerance = max(2 * torch.finfo(post_norm.dtype).eps, 1e-5)
        result = {"tokens": len(post_norm), "bit_equal": {}, "relative_error": {}, "neighbour_error": {}}
        wrong = []
        for slot, name in enumerate(self.names):
            hidden, residual = self.seen_outputs[slot]
            state = hidden if residual is None else hidden + residual
            if slot < len(self.points):
                point = self.points[slot]
                expected, found = reference[point], state
                others = [relative_error(state, reference[p]) for p in reference if abs(p - point) == 1]
                result["neighbour_error"][name] = min(others) if others else None
            else:
                expected, found = post_norm, self.norm(state)
            result["bit_equal"][name] = (found == expected).float().mean().item()
            result["relative_error"][name] = relative_error(found, expected)
            if not result["relative_error"][name] <= tolerance * (1 if slot < len(self.points) else 2):
                wrong.append(slot)
        if self.any_rank(bool(wrong), post_norm):
            causes = [self.cause(slot, reference, post_norm, tolerance) for slot in range(len(self.names))]
            raise ProofFailed(
                "the hooks do not see what SGLang's own EAGLE-3 capture sees: "
                + "; ".join(causes[slot] for slot in (wrong or range(len(self.names))))
            )
        self.seen_outputs = {}
        return result

    def cause(self, slot: int, reference: dict, post_norm, tolerance: float) -> str:
        """What a wrong tensor most likely is. Runs on every rank alike, since it sums over ranks."""
        name = self.names[slot]
        hidden, residual = self.seen_outputs[slot]
        state = hidden if residual is None else hidden + residual
        summed = self.sum_over_ranks(hidden) + (0 if residual is None else residual)
        is_last = slot == len(self.points)
        close = 4 * tolerance
        for point, other in reference.items():
            distance = point - (len(self.decoder.layers) if is_last else self.points[slot])
            if distance and relative_error(state, other) <= close:
                return f"{name} is really point {point}: shifted by {distance:+d} layer"
        if is_last:
            if relative_error(state, post_norm) <= close:
                return f"{name} is already normed: the final norm was applied to it, and would be applied twice"
            if self.ranks > 1 and relative_error(self.norm(summed), post_norm) <= close:
                return f"{name} is one rank's partial sum: the all-reduce is missing"
            error = relative_error(self.norm(state), post_norm)
            return f"{name}: its norm differs from what the head reads by {error:.2g}, cause unknown"
        expected = reference[self.points[slot]]
        norms = [self.norm, getattr(self.decoder.layers[self.points[slot]], "input_layernorm", None)]
        if any(norm is not None and relative_error(state, norm(expected)) <= close for norm in norms):
            return f"{name} is already normed"
        if self.ranks > 1 and relative_error(summed, expected) <= close:
            return f"{name} is one rank's partial sum: the all-reduce is missing"
        return f"{name} differs by {relative_error(state, expected):.2g}, cause unknown"

    def any_rank(self, flag: bool, like: torch.Tensor) -> bool:
        return bool(self.sum_over_ranks(torch.tensor([float(flag)], device=like.device)).item() > 0)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest ||found - expected|| / ||expected|| over rows; both [T, H]."""
    found, expected = found.float(), expected.float()
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)).max().item()
