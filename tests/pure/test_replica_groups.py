"""The torch groups inside a replica: the GPU that they are bound to, and their ranks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from recover.job import process
from recover.parallel.partition import ModelCut
from recover.parallel.threed.mesh import ReplicaMesh
from recover.parallel.torch_world import TIMEOUT, init_replica_world

WORLD: Any = SimpleNamespace(grid=SimpleNamespace(replica_size=1), replica=0, shard=0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of a fake `init_process_group`, which makes no group."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **told: calls.append({"backend": backend, **told})
    )
    return calls


@pytest.mark.guarantee("User code", "Torch groups inside a replica are bound to the GPU of their rank.")
@pytest.mark.parametrize(
    ("device", "chosen", "bound"),
    [
        ("cpu", None, None),
        ("cuda:1", None, "cuda:1"),
        ("cuda", 3, "cuda:3"),  # the current device, set by the script
        ("cuda", None, "cuda:2"),  # rank 6 on a host with 4 GPUs
    ],
)
def test_replica_default_group_is_bound_to_the_gpu_of_the_rank(
    asked: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    chosen: int | None,
    bound: str | None,
) -> None:
    current = [chosen]
    monkeypatch.setenv(process.RANK_ON_HOST, "6")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: current[0] is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: current.__setitem__(0, index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    init_replica_world(WORLD, device)
    (call,) = asked
    assert call["device_id"] == (torch.device(bound) if bound else None)
    assert call["backend"] == ("cpu:gloo,cuda:nccl" if bound else "gloo")


CUT = ModelCut(pp=2, tp=2, ep=2)


@pytest.fixture(params=range(8))
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One of eight ranks, in a fake torch world that moves no data."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=8)
    try:
        yield request.param
    finally:
        dist.destroy_process_group()


def test_replica_mesh_has_the_groups_of_its_grid(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor-parallel ranks are neighbours, pipeline stages are farthest apart; no group has a shorter timeout."""
    timeouts, new_group = [], dist.new_group

    def made(ranks: list[int], timeout: Any = None) -> Any:
        timeouts.append(timeout)
        return new_group(ranks, timeout=timeout)

    monkeypatch.setattr(dist, "new_group", made)
    mesh = ReplicaMesh(CUT, torch.device("cpu"), tied=True)
    here = {"pp": rank // 4, "ep": rank // 2 % 2, "tp": rank % 2}
    assert (mesh.stage, mesh.expert, mesh.tensor) == tuple(here.values())
    for name, stride in (("pp", 4), ("ep", 2), ("tp", 1)):
        first = rank - here[name] * stride
        group = mesh.device_mesh.get_group(name)
        assert dist.get_process_group_ranks(group) == [first, first + stride]
        assert mesh.device_mesh[name].get_local_rank() == here[name]
    assert mesh.device_mesh["ep", "tp"].mesh.flatten().tolist() == list(
        range(rank // 4 * 4, rank // 4 * 4 + 4)
    )
    assert mesh.over_ep is not None
    assert mesh.over_ep.ranks == dist.get_process_group_ranks(mesh.device_mesh.get_group("ep"))
    assert set(timeouts) == {TIMEOUT}
