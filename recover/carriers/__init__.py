"""Carriers move the data of one epoch among the replicas. Membership does not depend on them.

`mpi`   Open MPI's own collectives on a communicator made for the epoch: the fastest on one machine.
`gloo`  torch's gloo over sockets of the epoch: makes no MPI communicator at all.
`nccl`  NCCL on a group made for the epoch: data stay on the GPUs, of which each rank should have one of its own.
`auto`  `mpi`. Both pass the burst tests without losing a bystander (docs/world.md has the counts), and `mpi` is faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recover.carriers.base import DataCarrier, DataCarriers
from recover.carriers.worker import Worker
from recover.job.grid import Grid
from recover.job.spec import CARRIERS

if TYPE_CHECKING:
    from recover.fabrics.openmpi import OpenMPIFabric


def choose(name: str, fabric: OpenMPIFabric, grid: Grid, worker: Worker) -> DataCarriers:
    """The maker of carriers of that name. Some need torch, so each is imported only when it is asked for."""
    if name in ("auto", "mpi"):
        from recover.carriers.mpi import MpiCarriers

        return MpiCarriers(fabric, grid, worker)
    if name == "gloo":
        from recover.carriers.gloo import GlooCarriers

        return GlooCarriers(fabric, grid, worker)
    if name == "nccl":
        from recover.carriers.nccl import NcclCarriers

        return NcclCarriers(fabric, grid, worker)
    raise ValueError(f"there is no carrier {name!r}; it must be one of {', '.join(CARRIERS)}")


__all__ = ["DataCarrier", "DataCarriers", "choose"]
