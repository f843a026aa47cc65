"""Free slots in a real etcd: no slot is used twice, whichever agent places, ranks left of replicas form new ones."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from etcd_fabrics import TOKEN, Fabrics, at_once
from patience import PATIENCE, wait_until

from recover.launch.hosts.replica_restarts import ANEW, FREE, ReplicaRestarts, RestartedReplica
from recover.launch.hosts.slots import HostSlots
from recover.world.fabrics.base import NotAdmittedError
from recover.world.fabrics.etcd.agreement import DEAD, declare, rank_of
from recover.world.fabrics.etcd.client import EtcdClient
from recover.world.fabrics.etcd.entry import end_job
from recover.world.fabrics.etcd.host_lease import HOST

pytestmark = pytest.mark.filterwarnings("ignore:.*is etcd 3:UserWarning")


def agents(
    fabrics: Fabrics, free: dict[str, int], size: int, most: int = 1000, patience: float = 600.0
) -> dict[str, ReplicaRestarts]:
    """The restarts of each host, all of whose slots are free; each with an etcd client of its own."""
    found = {}
    for host, slots in free.items():
        fabrics.etcd.put(f"{HOST}{host}", b"")
        client = EtcdClient(fabrics.server.endpoint, prefix=fabrics.prefix, token=TOKEN)
        found[host] = ReplicaRestarts(
            client, host, HostSlots(slots, 0, 600), size, most, lambda newcomer: None, patience
        )
    return found


def placed(fabrics: Fabrics) -> list[RestartedReplica]:
    return [RestartedReplica.of(found) for found in fabrics.etcd.get_all(ANEW)[0]]


def look(*all_of: ReplicaRestarts, times: int = 8) -> None:
    for _ in range(times):
        at_once(*(one.look for one in all_of))


@pytest.mark.guarantee("Rejoining replicas", "Agents that place concurrently use every slot once.")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_agents_that_place_concurrently_use_every_slot_once(fabrics: Fabrics, size: int) -> None:
    fabrics.make(size, replica_size=size)
    free = {"h1": 3, "h2": 1, "h3": 2, "h4": 4}
    look(*agents(fabrics, free, size).values(), times=14)
    replicas = placed(fabrics)
    assert len(replicas) == 10 // size
    ranks = sorted(rank for replica in replicas for rank in replica.ranks)
    assert ranks == list(range(size, size + len(ranks)))
    seats = [(seat.host, seat.slot) for replica in replicas for seat in replica.seats]
    assert len(set(seats)) == len(seats)
    left = {found.key: json.loads(found.value) for found in fabrics.etcd.get_all(FREE)[0]}
    assert sum(map(len, left.values())) == 10 % size
    assert not {(key.removeprefix(FREE), slot) for key, slots in left.items() for slot in slots} & set(seats)


@pytest.mark.guarantee(
    "Rejoining replicas",
    "Nothing is placed on a host that is gone, beyond the available ids or after the end.",
)
def test_placement_avoids_gone_hosts_used_up_ids_and_ended_jobs(
    fabrics: Fabrics, capsys: pytest.CaptureFixture[str]
) -> None:
    fabrics.make(1)
    there = agents(fabrics, {"h1": 1, "h2": 3}, 1, most=3)
    fabrics.etcd.delete_all(f"{HOST}h1")
    look(*there.values())
    assert [seat.host for replica in placed(fabrics) for seat in replica.seats] == ["h2", "h2"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(there), "once by each host"
    assert {"recover: no replica is started any more: of the 3 ids" in line for line in said} == {True}, said
    end_job(fabrics.etcd, "it is over")
    look(*agents(fabrics, {"h3": 1}, 1).values())
    assert len(placed(fabrics)) == 2


@pytest.mark.guarantee("Rejoining replicas", "A replica that waits for a rank of a lost host is cancelled.")
def test_replica_that_waits_for_a_lost_host_is_cancelled(
    fabrics: Fabrics,
) -> None:
    ranks, _ = fabrics.make(2, replica_size=2)
    there = agents(fabrics, {"h1": 1, "h2": 1}, 2)
    look(*there.values())
    (replica,) = placed(fabrics)
    assert {seat.host for seat in replica.seats} == {"h1", "h2"}
    fabrics.etcd.delete_all(f"{HOST}h2")
    look(there["h1"], times=20)
    assert not fabrics.etcd.get_all(DEAD)[0], (
        "however often it was looked for: it may come back within its lease"
    )
    there["h1"]._patience = 0.0
    look(there["h1"])
    assert [rank_of(found) for found in fabrics.etcd.get_all(DEAD)[0]] == list(replica.on("h2"))
    assert wait_until(lambda: all(rank.failed() for rank in ranks))
    assert at_once(*(lambda rank=rank: rank.agree(1) for rank in ranks)) == [1, 1], "nobody else is disturbed"
    look(there["h1"], times=2)
    assert not there["h1"].known
    assert not placed(fabrics)


@pytest.mark.guarantee("Rejoining replicas", "Standbys are admitted only after a loss, one for each.")
def test_standbys_are_admitted_only_after_a_loss(fabrics: Fabrics, tmp_path: Path) -> None:
    ranks, _ = fabrics.make(2, limit=2)
    standbys = [fabrics.joiner(2) for _ in range(2)]
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.extend(at_once(*(standby.ask for standby in standbys))), daemon=True
    )
    asking.start()
    assert wait_until(lambda: all(rank._cache.asking == {2, 3} for rank in ranks))
    assert [rank.asking() for rank in ranks] == [frozenset()] * 2
    declare(fabrics.etcd, 1, "by decree")
    assert wait_until(lambda: ranks[0].asking() == {2}), "one for one"
    end_job(fabrics.etcd, "it is over")
    asking.join(PATIENCE)
    assert [type(answer) for answer in answers] == [NotAdmittedError] * 2, (
        "whoever still asks is told of the end"
    )
