"""How a process enters a job in etcd: it checks that it is the right job, and claims its rank.

Rank numbers are never reused. The first ranks of a job have the numbers from 0; each number is
claimed once, before the first agreement is decided. An agent that places a joining replica takes
the next numbers: the version of the key `ids` counts the placed replicas, and the agent writes an
empty claim for each of their ranks, which the process of that rank fills.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recover.world.fabrics.base import NotAdmittedError
from recover.world.fabrics.etcd.agreement import ASKING, CLAIM, DEAD, DECISION, ENDED, key_of
from recover.world.fabrics.etcd.client import EtcdClient, Operation, absent, get, put, value_is, version_is

JOB, IDS = "job", "ids"
UNCLAIMED, CLAIMED = 1, 2  # versions of the claim of a joining rank
CLOSED = "admits nobody after its start: start it with --return, or with --nnodes MIN:MAX"


class OtherJobError(RuntimeError):
    """The keys under this prefix belong to another job, or another process is this rank."""


class NotPlacedError(RuntimeError):
    """The guards for placing a replica do not hold."""


class NoRoomError(NotPlacedError):
    """All numbers of ranks that the job may have are used."""


@dataclass(frozen=True)
class EnteredJob:
    """The facts of a job that must be equal in all of its processes."""

    size: int  # at the start
    replica_size: int = 1
    admits: bool = False  # whether ranks may join later

    def to_bytes(self) -> bytes:
        return json.dumps(self.__dict__).encode()


def place(client: EtcdClient) -> range:
    """Take the numbers of a joining replica, before its processes are started.

    Raises NotAdmittedError without a job.

    If the replica does not start, `declare` one of them dead: the next decision deletes the keys of
    all.
    """
    return place_replica(client)


def place_replica(
    client: EtcdClient,
    most: int | None = None,
    guards: Sequence[Operation] = (),
    record: Callable[[range], list[Operation]] = lambda ranks: [],
) -> range:
    """Take the numbers of a joining replica in one transaction with `record`, the writes about these numbers.

    Raises NotPlacedError if the guards do not hold, NoRoomError if there would be more than `most`
    numbers.
    """
    me = uuid.uuid4().hex.encode()
    while True:
        job, ids = (found[0] if found else None for found in client.read(get(JOB), get(IDS)).found)
        if job is None:
            raise NotAdmittedError(
                f"etcd holds no job under {client.prefix}: it has not started, or was cleaned away"
            )
        known, placed = json.loads(job.value), ids.version if ids else 0
        if not known["admits"]:
            raise NotAdmittedError(f"the job under {client.prefix} {CLOSED}")
        first = known["size"] + placed * known["replica_size"]
        ranks = range(first, first + known["replica_size"])
        if most is not None and ranks.stop > most:
            raise NoRoomError(f"there is no room for ids beyond {most}")
        claims = [put(key_of(CLAIM, rank), b"") for rank in ranks]
        conditions = [version_is(IDS, placed), *guards]
        answer = client.txn(conditions, [put(IDS, me), *claims, *record(ranks)], [get(IDS)])
        if answer.succeeded:
            return ranks
        ids_now = [(found.value, found.version) for found in answer.found[0]]
        if ids_now == [(me, placed + 1)]:  # the answer to an earlier attempt was lost
            return ranks
        if guards and [version for _, version in ids_now] in ([], [placed]):
            raise NotPlacedError("what was to be true is not any more")


def enter(client: EtcdClient, job: EnteredJob, rank: int, address: str = "") -> bytes:
    """Check that this is the right job, and claim this rank permanently. Returns the claim."""
    content, joins = job.to_bytes(), rank >= job.size
    create = [] if joins else [put(JOB, content)]
    answer = client.txn([absent(JOB)], [*create, get(JOB)], [get(JOB)])
    if answer.forged:
        raise OtherJobError(
            f"what etcd holds under {client.prefix}{JOB} was not written with this job's token: the token of this "
            "process is another one, or somebody without it wrote there"
        )
    there = answer.found[0][0].value if answer.found[0] else b""
    if not there:
        raise NotAdmittedError(
            f"rank {rank} is to join a job under {client.prefix}, and etcd holds none there"
        )
    if there != content:
        known = json.loads(there)
        raise OtherJobError(
            f"etcd holds another job under {client.prefix} ({known['size']} ranks in replicas of "
            f"{known['replica_size']}; this one has {job.size} in replicas of {job.replica_size}); give the job a name "
            "of its own, or remove what a job that has ended left there"
        )
    if joins and not job.admits:
        raise NotAdmittedError(f"rank {rank} is to join the job under {client.prefix}, which {CLOSED}")
    key = key_of(CLAIM, rank)
    claim = json.dumps({"process": uuid.uuid4().hex, "address": address}).encode()
    guards = [version_is(key, UNCLAIMED)] if joins else [absent(key), version_is(DECISION, 0)]
    answer = client.txn([*guards, absent(key_of(DEAD, rank))], [put(key, claim)], [get(key)])
    if not answer.succeeded and [found.value for found in answer.found[0]] != [claim]:
        raise OtherJobError(
            f"another process is or was rank {rank} under {client.prefix}, or the others go on without it; a rank does "
            "not come back: start the job under a new name"
        )
    return claim


def ask(client: EtcdClient, rank: int, claim: bytes) -> None:
    """Ask to be admitted.

    The request names the process, as the claim does. The guards let it happen only once, even if it
    is carried out late.
    """
    mine = key_of(CLAIM, rank)
    guards = [version_is(mine, CLAIMED), value_is(mine, claim), absent(key_of(DEAD, rank)), absent(ENDED)]
    client.txn(guards, [put(mine, claim), put(key_of(ASKING, rank), claim)])


def end_job(client: EtcdClient, why: str) -> None:
    """The members have ended: ranks that ask to join are refused from now on."""
    client.txn([absent(ENDED)], [put(ENDED, why.encode())])
