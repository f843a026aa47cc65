"""The grid of a replica as process groups of torch. Tensor-parallel ranks are neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from recover.gradients.replica_interface import Sharing
from recover.parallel.hsdp import ShardedReplica
from recover.parallel.partition import ModelCut
from recover.parallel.torch_world import TIMEOUT


class Holders:
    """Ranks that hold the same parameter, each with a part of its gradient."""

    def __init__(self, ranks: list[int], group: dist.ProcessGroup) -> None:
        self.ranks, self.size, self._group = ranks, len(ranks), group

    def add_up(self, sums: torch.Tensor) -> None:
        dist.all_reduce(sums, group=self._group)

    def copy_from_first(self, tensor: torch.Tensor) -> None:
        # Gloo sends and writes as many bytes as there are elements, from the first one on, whatever
        # the strides are.
        values = tensor.contiguous()
        dist.broadcast(values, src=self.ranks[0], group=self._group)
        if values is not tensor:
            tensor.copy_(values)


class ReplicaMesh:
    """This rank's coordinates in (pp, ep, tp), and its groups. All ranks of a replica create it."""

    def __init__(self, cut: ModelCut, device: torch.device, tied: bool) -> None:
        self.cut = cut
        self._ranks = torch.arange(cut.ranks).view(cut.pp, cut.ep, cut.tp)
        # Not `init_device_mesh`: where the default group is bound to a GPU, it splits that group,
        # and in torch 2.9 the gloo groups of one dimension would then use the same keys of the
        # store.
        self.device_mesh = DeviceMesh.from_group(
            [self._along(axis) for axis in range(3)],
            device.type,
            mesh=self._ranks,
            mesh_dim_names=("pp", "ep", "tp"),
        )
        self.stage, self.expert, self.tensor = (
            int(i) for i in self.device_mesh.get_coordinate() or (0, 0, 0)
        )
        # Ranks that share parameters, apart from tensor parallelism: dense weights over ep, routers
        # over ep and tp, and a tied embedding over both ends of the pipeline.
        self.over_ep = self._group(self._ranks.permute(0, 2, 1).reshape(-1, cut.ep))
        self.over_ep_and_tp = self._group(self._ranks.reshape(cut.pp, -1))
        ends = self._ranks[[0, -1]].permute(2, 0, 1).reshape(cut.tp, -1)
        self.over_ends = self._group(ends) if tied and cut.pp > 1 else None

    def rank_of_stage(self, stage: int) -> int:
        """The rank that runs a stage of this rank's own pipeline."""
        return int(self._ranks[stage % self.cut.pp, self.expert, self.tensor])

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        return self.device_mesh.get_group("pp")

    def _along(self, axis: int) -> dist.ProcessGroup:
        """The group of this rank along one dimension of the grid; the default group if all ranks
        are in it."""
        rows = self._ranks.movedim(axis, -1).reshape(-1, self._ranks.shape[axis])
        if len(rows) == 1:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        mine = _new_groups(rows)
        assert mine is not None
        return mine[1]

    def _group(self, rows: torch.Tensor) -> Holders | None:
        """The group of this rank; None where each rank would be alone, or where this rank is in
        none."""
        mine = _new_groups(rows) if rows.shape[1] > 1 else None
        return Holders(*mine) if mine else None


def _new_groups(rows: torch.Tensor) -> tuple[list[int], dist.ProcessGroup] | None:
    """Make a group of each row, on all ranks alike; returns this rank's row and its group.

    Groups have the timeout of the replica's own: a dead peer is found by the watcher, not by a
    clock.
    """
    mine = None
    for ranks in rows.tolist():
        group = dist.new_group(ranks, timeout=TIMEOUT)
        if dist.get_rank() in ranks:
            mine = ranks, group
    return mine


class MeshReplica(ShardedReplica):
    """A replica whose ranks form a grid, as a step sees it."""

    peers_hold_all_buffers = False

    def __init__(
        self, device: torch.device, shared: Iterable[tuple[torch.nn.Parameter, Sharing]], fill: float = 0.0
    ) -> None:
        assert dist.group.WORLD is not None
        super().__init__(dist.group.WORLD, device)
        self.fill = fill
        self._shared = dict(shared)
        self.seed: Callable[[int, int], None] | None = None  # starts the draws of a microbatch in a stage
        self._weights: list[float] | None = None

    def seed_with(self, seed: Callable[[int, int], None]) -> None:
        self.seed = seed

    def ran(self, weights: list[float]) -> None:
        """Note that a round's backward passes have run, each microbatch with its weight."""
        self._weights = weights

    def weights_of_round(self) -> list[float] | None:
        weights, self._weights = self._weights, None
        return weights

    def knows(self, parameter: torch.nn.Parameter) -> bool:
        return parameter in self._shared

    def sharing(self, parameter: torch.nn.Parameter) -> Sharing:
        return self._shared[parameter]
