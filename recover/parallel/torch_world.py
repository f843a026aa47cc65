"""The torch world of one replica: no gloo or NCCL group spans replicas."""

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
from recover.parallel.replica_links import exchange_addresses, watch_connections
from recover.world.carriers.device_streams import own_device
from recover.world.fabrics.etcd.access import client_of

if TYPE_CHECKING:
    from recover.world.world import World


# A peer that is slow, or waits for a slow repair, is not dead. A rank that is blocked on a dead
# peer is ended by the watcher, not by this timeout.
TIMEOUT = timedelta(hours=12)

# Keeps stores alive: torch holds only the C++ half of a store that is written in Python, and uses
# it for groups that are created later.
_stores: list[dist.Store] = []


def init_replica_world(world: World, device: torch.device | str = "cpu") -> None:
    """Initialise torch's default process group over this replica, unless it is initialised."""
    if dist.is_initialized():
        if dist.get_world_size() != world.grid.replica_size:
            raise RuntimeError(
                f"torch.distributed is initialised over {dist.get_world_size()} ranks, but a replica has "
                f"{world.grid.replica_size}, and no torch group may span replicas; leave out init_process_group"
            )
        return
    device = torch.device(device)
    # Gloo as well as NCCL: checkpoints are gathered on the host.
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
        _stores.append(store)
        if job.interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", job.interface)
        if job.address:
            addresses = exchange_addresses(store, job.address, world.shard, world.grid.replica_size)
            watch_connections(addresses, job.link_timeout)
    elif world.grid.replica_size > 1:
        # On one host in the session directory, which is removed with the job; on several hosts in
        # the run directory that they share.
        here = on_one_host() or (job is not None and job.etcd is not None)
        directory = ((job.session if here else None) or job.run_dir) if job else None
        if directory is None:
            raise RuntimeError(
                "a replica of several ranks needs a directory that its ranks share to find each other; "
                "start the script with `recover run`, or set RECOVER_RUN_DIR"
            )
        # With the token, so that a job never finds files of an earlier one.
        path = Path(directory, f"replica-{world.replica}-{world.token}")
        store = dist.FileStore(str(path), world.grid.replica_size)
        if here:
            # Other hosts need no access to these sockets.
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

    From torch 2.15 on, NCCL does not use the current device: it takes LOCAL_RANK, otherwise the
    rank in the group, and the first rank of every replica would share GPU 0.
    """
    if device.type != "cuda":
        return None
    return device if device.index is not None else own_device()
