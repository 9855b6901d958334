"""Which GPUs a process of `torchrun` works with: T a replica, replicas side by side, large T over several nodes.

    torchrun --nproc-per-node 8 extract.py ... --tp 1      8 replicas of one GPU
    torchrun --nproc-per-node 8 extract.py ... --tp 4      2 replicas of four GPUs
    torchrun --nnodes 2 --nproc-per-node 1 ... --tp 16     1 replica over two nodes of 8 GPUs
    python extract.py ... --tp 8                           1 replica of eight GPUs

The first process of a replica on a node starts that node's part of the engine; the others wait. Called by
extraction.py; `free_port` by engine.py and extract.py.
"""

import os
import secrets
import socket
from dataclasses import dataclass

from common.errors import UserError


@dataclass(frozen=True)
class Placement:
    """Where one process of the job stands."""

    replica: int  # which replica this process belongs to
    replicas: int
    starts_engine: bool  # False: another process of this replica on this node does
    base_gpu: int  # first GPU of this replica on this node
    engine_nodes: int  # nodes that the replica spans
    engine_node: int  # which of them this one is; node 0 reads prompts and commits samples
    first_rank: int  # rank of the replica's first process


def place(tp: int, rank: int, world_size: int, local_world_size: int, gpus_per_node: int) -> Placement:
    """Place `rank` of a job of `world_size` processes, `local_world_size` on each node of `gpus_per_node` GPUs.

    Raises UserError, naming what would be possible, for every combination that cannot be.
    """
    nodes = world_size // local_world_size
    if tp < 1:
        raise UserError(f"--tp {tp}: at least one GPU a replica is needed")
    if gpus_per_node % local_world_size:
        raise UserError(
            f"--nproc-per-node {local_world_size} does not divide the {gpus_per_node} GPUs of a node; "
            f"possible: {divisors(gpus_per_node)}"
        )
    gpus_per_process = gpus_per_node // local_world_size
    if tp > gpus_per_node:
        if tp % gpus_per_node or (nodes * gpus_per_node) % tp:
            possible = [t for t in range(1, nodes * gpus_per_node + 1) if fits(t, nodes, gpus_per_node)]
            raise UserError(
                f"--tp {tp} does not fit {nodes} node(s) of {gpus_per_node} GPUs; a replica takes part of a node, "
                f"or whole nodes. Possible: --tp {possible}"
            )
        span = tp // gpus_per_node
        node = rank // local_world_size
        replica = node // span
        first_rank = replica * span * local_world_size
        return Placement(replica, nodes // span, rank % local_world_size == 0, 0, span, node % span, first_rank)
    if gpus_per_node % tp:
        raise UserError(
            f"--tp {tp} does not divide the {gpus_per_node} GPUs of a node; possible: {divisors(gpus_per_node)}"
        )
    if tp < gpus_per_process:
        if world_size > 1:
            raise UserError(
                f"--tp {tp} with {gpus_per_process} GPUs a process leaves GPUs idle; possible: "
                f"--nproc-per-node {gpus_per_node // tp} (one process a replica) or --tp {gpus_per_process}"
            )
        return Placement(0, 1, True, 0, 1, 0, 0)
    if tp % gpus_per_process:
        raise UserError(
            f"--tp {tp} with {gpus_per_process} GPUs a process does not come out even; "
            f"possible: --nproc-per-node {gpus_per_node} (one GPU a process)"
        )
    processes = tp // gpus_per_process  # of one replica
    local_rank = rank % local_world_size
    return Placement(
        rank // processes,
        world_size // processes,
        local_rank % processes == 0,
        local_rank // processes * tp,
        1,
        0,
        rank // processes * processes,
    )


def fits(tp: int, nodes: int, gpus_per_node: int) -> bool:
    if tp <= gpus_per_node:
        return gpus_per_node % tp == 0
    return tp % gpus_per_node == 0 and (nodes * gpus_per_node) % tp == 0


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def free_port(replica: int) -> int:
    """A port of this host for the rendezvous of a replica's ranks, that is free now.

    It is bound only when the engine's processes have started, so the kernel, asked for any free port, would give the
    same one away again. Each of 20 replicas has 1,000 ports to choose from, none of which the kernel gives away by
    itself (from 32768 on); two jobs on one host begin to look at different places.
    """
    first, start = 10_000 + replica % 20 * 1000, secrets.randbelow(1000)
    for offset in range(1000):
        port = first + (start + offset) % 1000
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise UserError(f"no port of {first} to {first + 999} is free on {socket.gethostname()}; end what uses them")


@dataclass(frozen=True)
class Job:
    """This process among those that torchrun started; a single process without torchrun."""

    rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> "Job":
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(int(os.environ.get("RANK", "0")), world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
