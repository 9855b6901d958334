"""Things that go wrong inside the scheduler process, switched on and off in a running engine by the tests.

The engine is the real one; `run_scheduler` takes the place of `common.tap.run_scheduler` and adds scheduler methods
that the tests call through `Engine.collective_rpc`: `set_fault(name)`, `set_chunk(tokens)` and those of
tests/serving.py. Each fault breaks the capture in a way that has broken somebody's drafter; the code that must notice
is unmodified.
"""

import torch

import serving
from common import tap

NAN_TOKEN = 77  # rows of this token id get a NaN under the fault "nan"


def run_scheduler(server_args, *args, **kwargs):
    from sglang.srt.managers.scheduler import Scheduler

    Scheduler.serve_drafter, Scheduler.stop_serving = serving.serve_drafter, serving.stop_serving
    Scheduler.set_fault = lambda scheduler, name: set_fault(name)
    Scheduler.set_chunk = lambda scheduler, tokens: setattr(scheduler, "chunked_prefill_size", tokens)
    return tap.run_scheduler(server_args, *args, **kwargs)


class Original:
    """What the faults replace, so that the next one starts from the real thing."""

    residual_stream = staticmethod(tap.residual_stream)
    begin_batch = tap.Tap.begin_batch
    copy_rows = tap.Tap.copy_rows
    layer_done = tap.Tap.layer_done
    moved: list = []  # (layer, hooks it had)
    unreduced: list = []  # (linear layer, handle of the hook that reduces later)


def set_fault(name: str) -> None:
    restore()
    if name != "none":
        globals()[f"break_{name}"]()


def restore():
    tap.residual_stream = Original.residual_stream
    for method in ("begin_batch", "copy_rows", "layer_done"):
        setattr(tap.Tap, method, getattr(Original, method))
    for layer, hooks in Original.moved:
        layer._forward_hooks.clear()
        layer._forward_hooks.update(hooks)
    for linear, handle in Original.unreduced:
        linear.reduce_results = True
        handle.remove()
    Original.moved, Original.unreduced = [], []


def layers():
    return next(module for module in tap.model.modules() if hasattr(module, "layers_to_capture")).layers


def break_shifted():
    """Every capture point one layer late: the hooks sit on the next layer."""
    decoder = layers()
    hooked = [(i, dict(layer._forward_hooks)) for i, layer in enumerate(decoder) if layer._forward_hooks]
    Original.moved = [(layer, dict(layer._forward_hooks)) for layer in decoder]
    for i, _ in hooked[:-1]:
        decoder[i]._forward_hooks.clear()
    for i, hooks in hooked[:-1]:
        decoder[i + 1]._forward_hooks.update(hooks)


def break_shifted_last():
    """The last state one layer early."""
    decoder = layers()
    Original.moved = [(layer, dict(layer._forward_hooks)) for layer in decoder]
    hooks = dict(decoder[-1]._forward_hooks)
    decoder[-1]._forward_hooks.clear()
    decoder[-2]._forward_hooks.update(hooks)


def break_normed():
    """States after the final norm instead of before it."""

    def normed(output):
        hidden, residual = Original.residual_stream(output)
        return tap.tap.proof.norm(hidden if residual is None else hidden + residual), None

    tap.residual_stream = normed


def break_normed_after_proof():
    """As above, from the second batch on: only the check of every sample's own token can see it."""

    def normed(output):
        hidden, residual = Original.residual_stream(output)
        if tap.tap.proof.pending:
            return hidden, residual
        return tap.tap.proof.norm(hidden if residual is None else hidden + residual) * 0.05, None

    tap.residual_stream = normed


def break_partial():
    """One captured layer leaves its all-reduce to whoever comes after the hook, as SGLang's fused all-reduce does."""
    from sglang.srt.distributed import tensor_model_parallel_all_reduce

    layer = next(layer for layer in layers() if layer._forward_hooks)
    layer.mlp.down_proj.reduce_results = False

    def reduce_later(module, args, output):
        return (tensor_model_parallel_all_reduce(output[0].clone()), *output[1:])

    Original.unreduced = [(layer.mlp.down_proj, layer.register_forward_hook(reduce_later))]


def break_in_place():
    """No fault of ours: layers that overwrite what the layer before them returned, as fused norms on a GPU do."""
    for layer in layers():
        if layer._forward_hooks:

            def spoil(module, args, output):
                fresh = (output[0].clone(), output[1].clone(), *output[2:])
                output[0].fill_(1e3)
                output[1].fill_(-1e3)
                return fresh

            Original.unreduced.append((layer.mlp.down_proj, layer.register_forward_hook(spoil)))


def swap_requests(rids):
    """The first two captured requests of a batch change names, when they are equally long."""
    rids = list(rids)
    if len(rids) > 1 and rids[0].rsplit("-")[-1] == rids[1].rsplit("-")[-1]:
        rids[0], rids[1] = rids[1], rids[0]
    return rids


def break_swapped():
    """Rows of two samples go under each other's name."""

    def begin_batch(self, forward_batch):
        right = forward_batch.rids
        forward_batch.rids = swap_requests(right)
        try:
            Original.begin_batch(self, forward_batch)
        finally:
            forward_batch.rids = right

    tap.Tap.begin_batch = begin_batch


def break_swapped_states():
    """The states of two samples are swapped on their way to host memory, their token ids are not."""

    def copy_rows(self, slot, hidden, residual):
        if len(self.batch) > 1 and self.batch[0].rows == self.batch[1].rows:
            first, second = (slice(p.batch_start, p.batch_start + p.rows) for p in self.batch[:2])
            hidden = hidden.clone()
            hidden[first], hidden[second] = hidden[second].clone(), hidden[first].clone()
            residual = residual.clone()
            residual[first], residual[second] = residual[second].clone(), residual[first].clone()
        Original.copy_rows(self, slot, hidden, residual)

    tap.Tap.copy_rows = copy_rows


def poison(value: float):
    def layer_done(self, slot, forward_batch, output):
        hidden, residual = Original.residual_stream(output)
        if slot == 1:
            hidden = hidden.clone()
            hidden[forward_batch.input_ids == NAN_TOKEN, 3] = value
        Original.layer_done(self, slot, forward_batch, (hidden, residual))

    tap.Tap.layer_done = layer_done


def break_nan():
    poison(float("nan"))


def break_inf():
    poison(float("inf"))


def break_hook():
    """A defect in the hook itself."""

    def residual_stream(output):
        return torch.zeros(1), torch.zeros(2, 3)

    tap.residual_stream = residual_stream
