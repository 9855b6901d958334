"""Placement under torchrun, for every combination of nodes, processes, GPUs and tensor parallelism up to four nodes."""

import itertools
import socket

import pytest

from common.errors import UserError
from common.placement import free_port, place


def everyone(tp, nodes, per_node, gpus):
    return [place(tp, rank, nodes * per_node, per_node, gpus) for rank in range(nodes * per_node)]


@pytest.mark.parametrize(
    ("tp", "nodes", "per_node", "replicas", "starters"),
    [(1, 1, 8, 8, 8), (4, 1, 8, 2, 2), (8, 1, 8, 1, 1), (8, 1, 1, 1, 1), (16, 2, 1, 1, 2), (16, 2, 8, 1, 2),
     (2, 2, 8, 8, 8)],
)  # fmt: skip
def test_the_examples(tp, nodes, per_node, replicas, starters):
    placed = everyone(tp, nodes, per_node, gpus=8)
    assert {p.replicas for p in placed} == {replicas}
    assert sum(p.starts_engine for p in placed) == starters


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_no_gpu_is_used_twice_and_each_replica_is_whole(gpus):
    for nodes, per_node, tp in itertools.product((1, 2, 4), (1, 2, 4, 8), range(1, 33)):
        try:
            placed = everyone(tp, nodes, per_node, gpus)
        except UserError:
            continue
        used = []
        for rank, p in enumerate(placed):
            if not p.starts_engine:
                continue
            here = min(tp, gpus)
            used += [(rank // per_node, gpu) for gpu in range(p.base_gpu, p.base_gpu + here)]
            assert p.base_gpu + here <= gpus
            assert p.engine_nodes * here == tp
        assert len(used) == len(set(used)), (gpus, nodes, per_node, tp)
        assert len(used) == placed[0].replicas * tp
        for replica in range(placed[0].replicas):
            mine = [p for p in placed if p.replica == replica]
            assert sorted(p.engine_node for p in mine if p.starts_engine) == list(range(mine[0].engine_nodes))
            assert {p.first_rank for p in mine} == {placed.index(mine[0])}


@pytest.mark.parametrize(
    ("tp", "nodes", "per_node", "gpus", "possible"),
    [(3, 1, 8, 8, "possible"), (16, 1, 8, 8, "Possible: --tp [1, 2, 4, 8]"), (12, 2, 8, 8, "Possible"),
     (1, 1, 3, 8, "possible"), (1, 1, 2, 8, "--nproc-per-node 8"), (0, 1, 1, 1, "at least one")],
)  # fmt: skip
def test_impossible_combinations_say_what_would_be_possible(tp, nodes, per_node, gpus, possible):
    with pytest.raises(UserError) as caught:
        everyone(tp, nodes, per_node, gpus)
    assert possible in str(caught.value)


def test_replicas_of_one_host_never_choose_the_same_port_nor_one_in_use(monkeypatch):
    ports = [free_port(replica) for replica in range(16)]
    assert len({port // 1000 for port in ports}) == 16 and max(ports) < 32768
    monkeypatch.setattr("secrets.randbelow", lambda n: 7)
    taken = free_port(3)
    with socket.socket() as other:
        other.bind(("", taken))
        assert free_port(3) > taken
