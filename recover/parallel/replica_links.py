"""Detection of broken links inside a replica that spans hosts.

An operation of torch's groups waits for its peer for ever, and all other replicas would wait for
this one. So the kernel closes a connection to another host of the replica whose kernel has not
answered for the link timeout: the operation raises, the rank ends, and the replica is lost as by a
death.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Collection

import torch.distributed as dist

from recover.job.sockets import detect_connection_loss
from recover.world.carriers.gloo_sockets import open_sockets

LOOK = 1.0  # seconds between two searches for new connections: groups may be made at any time


def exchange_addresses(store: dist.Store, mine: str, rank: int, size: int) -> set[str]:
    """The addresses of the other hosts of the replica."""
    store.set(f"address/{rank}", mine)
    return {store.get(f"address/{other}").decode() for other in range(size)} - {mine}


def watch_connections(addresses: Collection[str], seconds: float) -> None:
    """Keep looking for connections to these hosts, on a thread, until the process ends."""

    def loop() -> None:
        known: dict[int, str] = {}
        while True:
            known = detect_losses(addresses, seconds, known)
            time.sleep(LOOK)

    threading.Thread(target=loop, name="recover-replica-links", daemon=True).start()


def detect_losses(addresses: Collection[str], seconds: float, known: dict[int, str]) -> dict[int, str]:
    """Have the kernel detect the loss of connections to these hosts that are not `known`.

    Returns the sockets that need not be looked at again.
    """
    settled = {}
    for descriptor, name in open_sockets().items():
        if known.get(descriptor) != name:
            try:
                with socket.socket(fileno=os.dup(descriptor)) as found:
                    inet = found.family in (socket.AF_INET, socket.AF_INET6)
                    if inet and found.getpeername()[0] in addresses:
                        detect_connection_loss(found, seconds)
            except OSError:
                continue  # closed meanwhile, or not connected yet
        settled[descriptor] = name
    return settled
