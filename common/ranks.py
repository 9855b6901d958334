"""Several ranks: joining them, agreeing on numbers, and wrapping the drafter.

extract.py and train_drafter.py use it; started without torchrun there is one rank and nothing is communicated. Small
numbers and objects travel over gloo on the CPU, gradients over NCCL where there are GPUs.
"""

import os
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from common.errors import UserError


def join(device: str, patience=timedelta(hours=2)) -> tuple[int, int, torch.device]:
    """(rank, number of ranks, device) for --device auto, cuda or cpu; under torchrun it joins the others,
    each of which waits for the slowest as long as `patience`."""
    on_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch finds no GPU here")
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(place)
        torch.set_float32_matmul_precision("high")
    if "RANK" not in os.environ:
        return 0, 1, place
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=patience)
    return dist.get_rank(), dist.get_world_size(), place


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def from_first(make):
    """What `make()` gives on rank 0, on every rank; a `UserError` there is raised on all, so that none waits."""
    if not dist.is_initialized():
        return make()
    made = [None, None]
    if dist.get_rank() == 0:
        try:
            made = [make(), None]
        except UserError as error:
            made = [None, str(error)]
    dist.broadcast_object_list(made, src=0, device=torch.device("cpu"))
    if made[1] is not None:
        raise UserError(made[1])
    return made[0]


def summed(numbers: list[float]) -> list[float]:
    """Element-wise sums over all ranks, in float64: exact for counts."""
    total = torch.tensor(numbers, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.tolist()


def gathered(thing) -> list:
    """`thing` of every rank, in order of rank."""
    if not dist.is_initialized():
        return [thing]
    things = [None] * dist.get_world_size()
    dist.all_gather_object(things, thing)
    return things


def distribute(drafter: nn.Module, shard: bool) -> nn.Module:
    """The module to call for the loss: the drafter itself, DDP around it, or itself sharded by FSDP2 in place.

    All of a drafter is used at once (it has one layer), so FSDP2 keeps it as one group: weights, gradients, optimizer
    state are shared out, and a whole copy of the weights exists while a step computes.
    """
    if not dist.is_initialized():
        if shard:
            raise UserError("--shard shares the drafter out over ranks: start it with torchrun")
        return drafter
    if shard:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        kind = next(drafter.parameters()).device.type
        return fully_shard(drafter, mesh=init_device_mesh(kind, (dist.get_world_size(),)), reshard_after_forward=False)
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(drafter, broadcast_buffers=False, gradient_as_bucket_view=True)
    wrapped._set_ddp_runtime_logging_sample_rate(10**9)  # each such look at the clock waits for the device
    return wrapped


@contextmanager
def accumulating(module: nn.Module, last: bool):
    """Around the forward and backward pass of one batch of a step: only the last one exchanges gradients."""
    if hasattr(module, "set_requires_gradient_sync"):  # FSDP2
        module.set_requires_gradient_sync(last)
        yield
    elif hasattr(module, "no_sync") and not last:  # DDP
        with module.no_sync():
            yield
    else:
        yield


@contextmanager
def whole_weights(drafter: nn.Module):
    """Within it, every rank has all weights as plain tensors, so that the drafter's methods can be called directly."""
    sharded = hasattr(drafter, "unshard")
    if sharded:
        drafter.unshard()
    try:
        yield
    finally:
        if sharded:
            drafter.reshard()
