"""Carriers move the data of one epoch among the replicas. Membership does not depend on them.

`mpi`   Open MPI's own collectives on a communicator made for the epoch: the fastest on one machine.
`gloo`  torch's gloo over sockets of the epoch: makes no MPI communicator at all.
`nccl`  NCCL on a group made for the epoch: data stay on the GPUs, of which each rank should have one of its own. Data
        on the host travel by `mpi`, or by `gloo` where the fabric is not Open MPI.
`auto`  `nccl` where the script has chosen a GPU before `recover.init()` and each rank has one of its own, otherwise
        `mpi`: both `mpi` and `gloo` pass the burst tests without losing a healthy rank (docs/explanation/world.md),
        and `mpi` is faster. Where the fabric is not Open MPI, `gloo`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from recover.job.gpus import has_gpu_per_rank
from recover.job.grid import Grid
from recover.job.process import ranks_on_host
from recover.job.spec import CARRIERS, LINK_TIMEOUT
from recover.world.carriers.base import DataCarrier, DataCarriers
from recover.world.carriers.worker import Worker

if TYPE_CHECKING:
    from recover.world.fabrics.base import Fabric


def choose(
    name: str,
    fabric: Fabric,
    grid: Grid,
    worker: Worker,
    mpi: bool = True,
    address: str | None = None,
    link_timeout: float = LINK_TIMEOUT,
    token: str = "",
) -> DataCarriers:
    """Return the factory of the named carrier.

    Some carriers need torch, so each is imported only on demand.

    `mpi`: whether the fabric is Open MPI. `address`: of this host, where the others reach it.
    `link_timeout`: seconds after which a silent connection counts as lost. `token`: the job's.
    """
    if name == "auto":
        on_gpus = _computes_on_gpu() and has_gpu_per_rank(ranks_on_host())
        name = "nccl" if on_gpus else "mpi" if mpi else "gloo"
    if name == "mpi":
        from recover.world.carriers.mpi import MpiCarriers
        from recover.world.fabrics.openmpi import OpenMPIFabric

        if not isinstance(fabric, OpenMPIFabric):
            raise ValueError(
                "the carrier mpi needs Open MPI, which does not run here; use gloo, nccl or auto"
            )
        return MpiCarriers(fabric, grid, worker)
    if name == "gloo":
        from recover.world.carriers.gloo import GlooCarriers

        return GlooCarriers(fabric, grid, worker, address, link_timeout, token)
    if name == "nccl":
        from recover.world.carriers.host_and_device import HostAndDeviceCarriers
        from recover.world.carriers.nccl import NcclCarriers

        return HostAndDeviceCarriers(
            NcclCarriers(fabric, grid, worker),
            choose("mpi" if mpi else "gloo", fabric, grid, worker, mpi, address, link_timeout, token),
            worker,
        )
    raise ValueError(f"there is no carrier {name!r}; it must be one of {', '.join(CARRIERS)}")


def _computes_on_gpu() -> bool:
    """Whether this process has used a GPU so far, if only by selecting its own."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


__all__ = ["DataCarrier", "DataCarriers", "choose"]
