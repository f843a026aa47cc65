"""A replica is closed: its ranks have a torch world of their own, and no gloo or NCCL group ever spans replicas."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from recover.job.process import on_one_host
from recover.job.spec import current_job
from recover.parallel.etcd_store import EtcdStore
from recover.world.carriers.device_streams import own_device
from recover.world.fabrics.etcd.access import client_of

if TYPE_CHECKING:
    from recover.world.world import World


# A mate that is slow, or waits for a slow repair, is not dead: whoever is blocked on a dead mate is ended by the
# watcher, not by this clock.
TIMEOUT = timedelta(hours=12)

_kept: list[
    dist.Store
] = []  # torch keeps only half of a store that is written in Python, for groups made later


def init_replica_world(world: World, device: torch.device | str = "cpu") -> None:
    """Make torch's default process group that of this replica. Does nothing if it is there already."""
    if dist.is_initialized():
        if dist.get_world_size() != world.grid.replica_size:
            raise RuntimeError(
                f"torch.distributed is initialised over {dist.get_world_size()} ranks, but a replica has "
                f"{world.grid.replica_size}, and no torch group may span replicas; leave out init_process_group"
            )
        return
    device = torch.device(device)
    # Gloo beside NCCL: checkpoints are gathered on the host.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store: dist.Store = dist.HashStore()
    job = current_job()
    if (
        world.grid.replica_size > 1
        and job is not None
        and job.etcd is not None
        and world.replica in job.across
    ):
        store = EtcdStore(client_of(job.etcd), f"replica/{world.replica}/", TIMEOUT)
        _kept.append(store)
        if job.interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", job.interface)
    elif world.grid.replica_size > 1:
        # On one host in the session, which is removed with the job; over several, in the run directory they share.
        here = on_one_host() or (job is not None and job.etcd is not None)
        directory = ((job.session if here else None) or job.run_dir) if job else None
        if directory is None:
            raise RuntimeError(
                "a replica of several ranks needs a directory that its ranks share to find each other; "
                "start the script with `recover run`, or set RECOVER_RUN_DIR"
            )
        # The token: a job never finds what an earlier one has left.
        path = Path(directory, f"replica-{world.replica}-{world.token}")
        store = dist.FileStore(str(path), world.grid.replica_size)
        if here:
            # Nobody outside has business with these sockets.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend,
        store=store,
        rank=world.shard,
        world_size=world.grid.replica_size,
        timeout=TIMEOUT,
        device_id=_gpu(device),
    )


def _gpu(device: torch.device) -> torch.device | None:
    """The GPU that NCCL must use; None on the host. Groups that are made later inherit it.

    From torch 2.15 on, NCCL does not use the current device: it takes LOCAL_RANK, otherwise the rank in the group, and
    the first rank of every replica would share GPU 0.
    """
    if device.type != "cuda":
        return None
    return device if device.index is not None else own_device()
