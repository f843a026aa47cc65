"""The progress of the ranks of every host, which its agent writes into etcd twice a second.

pulse/<host>   the rows of its living ranks, as `recover.world.liveness.other_hosts` converts them
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from recover.world.fabrics.etcd.client import EtcdClient

PULSE = "pulse/"


def write_pulse(client: EtcdClient, host: str, told: Mapping[str, Sequence[object]]) -> None:
    client.put(f"{PULSE}{host}", json.dumps(told).encode())


def pulses(client: EtcdClient) -> dict[str, dict[int, tuple[list[int], str]]]:
    """The row of every rank, by host and rank, and the state of its process as the kernel's letter.
    They lag."""
    return {
        found.key.removeprefix(PULSE): {
            int(rank): (row, state) for rank, (row, state) in json.loads(found.value).items()
        }
        for found in client.get_all(PULSE)[0]
    }
