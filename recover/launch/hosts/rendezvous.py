"""Rendezvous: each host of a job writes a record of itself to etcd, and one plan is made of the
records, once.

Keys, under the prefix of the job's name:

    meet/<host>      the record of a host, under a lease that its agent keeps while it lives
    refused/<host>   why a host was refused
    plan             the hosts, the seats of all ranks, the token, and the name of the run, which prefixes its keys

A plan whose hosts have all gone is replaced by the next job of that name. A host that comes while a
host of the plan is there is refused, unless lost replicas are restarted and the plan allows more
hosts: then the new host joins late, without ranks, and offers free slots. A host whose facts differ
from those of the first one is refused, and the others wait for it.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from recover.job.output import say
from recover.launch.hosts.options import HostPart
from recover.launch.hosts.placement import Seat, place
from recover.launch.preflight import Refusal
from recover.world.fabrics.etcd.client import (
    Answer,
    EtcdClient,
    EtcdError,
    KeyValue,
    absent,
    delete,
    get,
    get_all,
    put,
    unchanged_since,
    value_is,
    version_is,
)

LEASE = 10.0  # seconds; longer than that of the ranks (`HostLease`), by which the loss of a host is noticed
KEEP = 2.0  # seconds between two renewals
LOOK = 0.2  # seconds between two reads
LAST_CALL = 5.0  # seconds for more hosts, when enough have come
SETTLE = 6.0  # seconds for a run of the same name that is about to end
MEET, PLAN, REFUSED = "meet/", "plan", "refused/"


@dataclass(frozen=True)
class HostRecord:
    """The record of a host in the rendezvous."""

    host: str
    id: str  # of its agent
    slots: int
    address: str
    order: int | None
    facts: dict[str, str]  # values by name that must be the same on all hosts

    def to_bytes(self) -> bytes:
        return json.dumps(self.__dict__).encode()

    @classmethod
    def of(cls, found: KeyValue) -> HostRecord:
        return cls(**json.loads(found.value))


@dataclass(frozen=True)
class HostPlan:
    run: str
    token: str  # "": each host has it from a file
    hosts: dict[str, Any]  # name to id and address
    seats: tuple[Seat, ...]
    problem: str = ""
    most: int = 0  # hosts that may take part; 0: no more than those of the plan

    def to_bytes(self) -> bytes:
        seats = [[seat.host, seat.slot] for seat in self.seats]
        return json.dumps(self.__dict__ | {"seats": seats}).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> HostPlan:
        found = json.loads(value)
        return cls(**found | {"seats": tuple(Seat(*seat) for seat in found["seats"])})

    def ranks_of(self, host: str) -> tuple[int, ...]:
        return tuple(rank for rank, seat in enumerate(self.seats) if seat.host == host)

    def present(self, there: Mapping[str, HostRecord]) -> list[str]:
        """The hosts of the plan whose agents are still there."""
        return [name for name, facts in self.hosts.items() if name in there and there[name].id == facts["id"]]


class Rendezvous:
    """The rendezvous as one agent takes part in it. `client`: under the prefix of the job's name."""

    def __init__(
        self, client: EtcdClient, part: HostPart, address: str, facts: Mapping[str, str], replica_size: int
    ) -> None:
        self._client, self._part, self._replica_size = client, part, replica_size
        self.me = HostRecord(part.host, secrets.token_hex(8), part.slots, address, part.order, dict(facts))
        self.late = False  # the job was running when this host came
        self._lease = 0
        self._left = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="recover-rendezvous", daemon=True)

    def enter(self, stopped: Callable[[], object]) -> None:
        """Write the record of this host. Raises Refusal if it cannot take part."""
        began = time.monotonic()
        while not stopped():
            there, plan, answer, _ = self._look()
            if others := self._with_another_token(answer):
                if time.monotonic() - began > SETTLE:
                    raise Refusal(self._refusal_of_token(others))
                time.sleep(LOOK)
                continue
            if plan is None or not (present := plan.present(there)):
                break
            if self.me.host not in present and len(present) < plan.most:
                self.late = True
                break
            # The record of a host that rejoins is there until the lease of its last agent has
            # run out.
            comes_back = self.me.host in present and plan.most
            if time.monotonic() - began > (LEASE if comes_back else 0) + SETTLE:
                raise Refusal(
                    f"--rdzv-id {self._part.job}: a job of that name runs already, on {', '.join(sorted(present))}; "
                    "give this one a name of its own, or end the other first"
                )
            time.sleep(LOOK)
        self._lease, _ = self._client.grant(LEASE)
        key, mine = f"{MEET}{self.me.host}", self.me.to_bytes()
        writes = [put(key, mine, self._lease), delete(f"{REFUSED}{self.me.host}")]
        answer = self._client.txn([absent(key)], writes, [get(key)])
        if not answer.succeeded and answer.found[0][0].value != mine:
            other = HostRecord.of(answer.found[0][0])
            raise Refusal(
                f"a host {self.me.host} is in job {self._part.job} already (at {other.address}); start one agent on "
                f"each host (srun: --ntasks-per-node=1), or give each a --host-name of its own; after a crash wait "
                f"{LEASE:g} s"
            )
        self._keeper.start()

    def wait_for_plan(self, patience: float, stopped: Callable[[], object]) -> HostPlan:
        """Return once the plan is decided. Raises Refusal if this host is not in it, or if too few
        hosts come, and InterruptedError if it is stopped."""
        part, began, seen = self._part, time.monotonic(), ("", "")
        fresh, count = began, 0
        while not stopped():
            there, plan, answer, version = self._look()
            if others := self._with_another_token(answer):
                raise Refusal(self._refusal_of_token(others))
            if plan is not None and plan.present(there):
                if not self.late or plan.hosts.get(self.me.host, {}).get("id") == self.me.id:
                    return self._mine(plan)
                self._compare({host: there[host] for host in plan.present(there)})
                self._come_late(plan, answer.found[1][0].value)
                continue
            self.late = False
            self._compare(there)
            if len(there) != count:
                fresh, count = time.monotonic(), len(there)
            enough = count >= part.most or (count >= part.least and time.monotonic() - fresh > LAST_CALL)
            if enough:
                self._decide(there, answer, version)
                continue
            sent_away = "; ".join(f"{_host_of(found)}: {found.value.decode()}" for found in answer.found[2])
            if (seen_now := (", ".join(sorted(there)), sent_away)) != seen:
                seen = seen_now
                away = f"; refused: {sent_away}" if sent_away else ""
                say(f"job {part.job}: {count} of {part.nnodes} hosts are here ({seen[0]}){away}")
            if time.monotonic() - began > patience:
                raise Refusal(
                    f"job {part.job}: after {patience:g} s {count} of {part.nnodes} hosts have come ({seen[0]}); start "
                    "the same command on the others, or ask for fewer by --nnodes"
                )
            time.sleep(LOOK)
        raise InterruptedError

    def present(self, plan: HostPlan) -> tuple[HostPlan, set[str]]:
        """The plan with the hosts that have joined since, and the names of those that are there,
        with this one."""
        there, now, _, _ = self._look()
        if now is not None and now.run == plan.run:
            plan = replace(plan, hosts=now.hosts)
        return plan, {*plan.present(there), self.me.host}

    def use_client(self, client: EtcdClient) -> None:
        """Use a client that does not wait for a silent etcd, from now on."""
        self._client = client

    def leave(self, why: str = "") -> None:
        """Remove the record of this host. `why`: the reason, if it was refused. Never raises."""
        if not self._lease:
            return
        self._left.set()
        try:
            word = [put(f"{REFUSED}{self.me.host}", why.encode(), self._client.grant(60.0)[0])] if why else []
            key = f"{MEET}{self.me.host}"
            self._client.txn([value_is(key, self.me.to_bytes())], [delete(key), *word])
            self._client.revoke(self._lease)
        except EtcdError:
            pass  # the record goes with its lease

    def others(self, plan: HostPlan) -> list[str]:
        """The hosts of the plan, without this one, whose agents are still there."""
        there, _, _, _ = self._look()
        return [name for name in plan.present(there) if name != self.me.host]

    def anybody(self) -> bool:
        """Whether the agent of any host is there, in the plan or not."""
        return bool(self._look()[0])

    def clean(self) -> None:
        """After leaving: remove all keys of the run, if this was the last host. Never raises."""
        try:
            there, plan, answer, _ = self._look()
            if plan is None or plan.present(there):
                return
            # The guard is the value, which names the run. Versions of the next run's plan count
            # from 1 again: by its version, a request that is carried out late would delete that
            # plan.
            if self._client.txn([value_is(PLAN, answer.found[1][0].value)], [delete(PLAN)]).succeeded:
                self._client.delete_all(f"{plan.run}/")
        except EtcdError:
            pass  # the next job of this name finds a plan without hosts, and replaces it

    def _look(self) -> tuple[dict[str, HostRecord], HostPlan | None, Answer, int]:
        """The records in the order in which the hosts came, the plan, the whole answer, and the
        version of the plan."""
        answer = self._client.read(get_all(MEET), get(PLAN), get_all(REFUSED))
        came = sorted(answer.found[0], key=lambda found: found.modified)
        plan = answer.found[1][0] if answer.found[1] else None
        # A plan that was sealed with another token is of an earlier job: it is replaced, so its
        # version counts.
        versions = [found.version for found in (*answer.found[1], *answer.forged) if found.key == PLAN]
        return (
            {_host_of(found): HostRecord.of(found) for found in came},
            HostPlan.from_bytes(plan.value) if plan else None,
            answer,
            versions[0] if versions else 0,
        )

    def _with_another_token(self, answer: Answer) -> list[str]:
        """Hosts that came before this one, and whose records were sealed with another token. Empty
        if another host has the token of this one: then the others are strangers."""
        if any(_host_of(found) != self.me.host for found in answer.found[0]):
            return []
        mine = [found.modified for found in answer.found[0] if _host_of(found) == self.me.host]
        return sorted(
            _host_of(found)
            for found in answer.forged
            if found.key.startswith(MEET) and not any(found.modified > own for own in mine)
        )

    def _refusal_of_token(self, others: list[str]) -> str:
        hosts = ", ".join(others)
        return (
            f"--rdzv-id {self._part.job}: a job of that name runs already, on {hosts}, with another token; "
            "give all hosts of a job the same --token-file, and this job a name of its own if it is another one"
        )

    def _mine(self, plan: HostPlan) -> HostPlan:
        if plan.problem:
            raise Refusal(plan.problem)
        if plan.hosts.get(self.me.host, {}).get("id") != self.me.id:
            raise Refusal(
                f"job {self._part.job} has begun without this host, on {', '.join(plan.hosts)}; raise --nnodes for more"
            )
        return plan

    def _compare(self, there: Mapping[str, HostRecord]) -> None:
        """Compare the facts of this host with those of the host that came first. Raises Refusal if
        one differs."""
        first = next(iter(there.values()), self.me)
        for name, mine in self.me.facts.items():
            if (theirs := first.facts.get(name)) != mine:
                raise Refusal(
                    f"{name} differs between hosts: it is {mine} on {self.me.host}, and {theirs} on {first.host}, "
                    "which came first; make them the same, and start again on the host that is wrong"
                )

    def _decide(self, there: Mapping[str, HostRecord], answer: Answer, version: int) -> None:
        """Write the plan for the hosts that are there, unless another host has, or the set of hosts
        has changed."""
        if any(attendance.facts != self.me.facts for attendance in there.values()):
            time.sleep(LOOK)  # a host with other facts is about to be refused
            return
        chosen = sorted(there.values(), key=_order)[: self._part.most]
        slots = {attendance.host: attendance.slots for attendance in chosen}
        size, total = self._replica_size, sum(slots.values())
        problem = ""
        if total >= size and not self._seats(slots):
            problem = (
                f"--standby is {self._part.standby}, which leaves no replica to start; lower it, or add hosts"
            )
        elif total < size or (self._part.least == self._part.most and total % size):
            each = ", ".join(f"{host} {count}" for host, count in slots.items())
            problem = (
                f"{total} ranks ({each}) do not make whole replicas of {size}; choose --nproc-per-node and "
                "--replica-size so that they do"
            )
        plan = HostPlan(
            run=secrets.token_hex(6),
            token="" if self._part.token else secrets.token_hex(16),
            hosts={a.host: {"id": a.id, "address": a.address} for a in chosen},
            seats=() if problem else self._seats(slots),
            problem=problem,
            most=self._part.most if self._part.returns else 0,
        )
        guards = [version_is(PLAN, version), unchanged_since(MEET, answer.revision)]
        # unchanged_since sees records that were written, not those that were deleted: a host that
        # has left since is noticed when the hosts compare their run directories.
        self._client.txn(guards, [put(PLAN, plan.to_bytes())])

    def _seats(self, slots: Mapping[str, int]) -> tuple[Seat, ...]:
        """The seats of the first ranks. Standbys are placed later, on the slots that are left free."""
        seats = place(slots, self._replica_size)
        return seats[: max(0, len(seats) - self._part.standby * self._replica_size)]

    def _come_late(self, plan: HostPlan, value: bytes) -> None:
        """Add this host to the plan of a running job. Its seats do not change; new replicas may be
        placed here."""
        me = {self.me.host: {"id": self.me.id, "address": self.me.address}}
        guards = [value_is(PLAN, value), value_is(f"{MEET}{self.me.host}", self.me.to_bytes())]
        self._client.txn(guards, [put(PLAN, replace(plan, hosts=plan.hosts | me).to_bytes())])

    def _keep(self) -> None:
        while not self._left.wait(KEEP):
            try:
                if not self._client.keep_alive(self._lease):
                    self._come_again()
            except EtcdError:
                pass  # again when etcd answers
            except (
                Exception
            ) as error:  # the thread must live: without a record the others take this host for gone
                say(
                    f"the attendance of host {self.me.host} could not be kept: {type(error).__name__}: {error}"
                )

    def _come_again(self) -> None:
        """Write the record under a new lease, unless another agent has this name now. `HostLease`
        decides which of the two is the host: this one tries again, and ends when it has been given
        up."""
        lease, _ = self._client.grant(LEASE)
        key, mine = f"{MEET}{self.me.host}", self.me.to_bytes()
        write, look = put(key, mine, lease), get(key)
        again = self._client.txn([value_is(key, mine)], [write, look], [look])
        if not again.found[0]:
            again = self._client.txn([absent(key)], [write, look], [look])
        if any(found.value == mine for found in again.found[0]):
            self._lease = lease


def _host_of(found: KeyValue) -> str:
    return found.key.rpartition("/")[2]


def _order(attendance: HostRecord) -> tuple[Any, ...]:
    """Sort key of hosts: the order that was given (SLURM_NODEID), then the name, with digits as numbers."""
    words = re.split(r"(\d+)", attendance.host)
    natural = [int(word) if word.isdigit() else word for word in words]
    return (attendance.order is None, attendance.order or 0, natural)
