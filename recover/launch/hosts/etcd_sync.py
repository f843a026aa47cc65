"""Exchange between the supervisor of a host and etcd, on a thread of its own, which may wait for
etcd; the supervisor's thread may not.

Keys, under the prefix of the run:

    ends/<rank>   how a rank of the writer's host has ended: its marker, or nothing if it left none
    order         the job is to be ended, by which host and why; written once
    notices/<host>  this host was asked to leave: the id of its agent
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from recover.job.output import say
from recover.job.supervised import Supervised, SupervisorError
from recover.launch.hosts.placement import Seat
from recover.launch.hosts.rendezvous import HostPlan, Rendezvous
from recover.launch.hosts.replica_restarts import ReplicaRestarts, RestartedReplica
from recover.launch.verdict import as_marker
from recover.runs.records.rank_ends import name_ranks
from recover.world.fabrics.etcd.agreement import DEAD, DECISION, Decision, declare, rank_of
from recover.world.fabrics.etcd.client import (
    EtcdClient,
    EtcdError,
    UnansweredError,
    absent,
    get,
    get_all,
    put,
)
from recover.world.fabrics.etcd.entry import end_job
from recover.world.fabrics.etcd.host_lease import LOST, without_lease
from recover.world.rank_exit import ON_NOTICE, End

LOOK = 0.25  # seconds between two passes
ENDS, ORDER, NOTICES = "ends/", "order", "notices/"
KEPT = 60.0  # seconds that the end of a lost rank stays readable, where replicas are restarted
GONE = 20  # passes in a row without a sign of its agent after which a host is gone


@dataclass(frozen=True)
class Order:
    """An order to end the job: from which host, why, and with which signal, if any."""

    host: str
    why: str
    signal: int = 0


@dataclass(frozen=True)
class JobView:
    """The job on all hosts, as of one pass. It is never changed: the supervisor's thread reads it
    without a lock."""

    hosts: Mapping[str, Any]  # by name: id and address
    seats: Mapping[int, Seat]  # of all ranks that there have been
    counted: frozenset[int]  # the first ranks, and those that have joined
    ends: Mapping[int, str] = field(default_factory=dict)  # markers, as the agents of all hosts report them
    order: Order | None = None  # once it is committed in etcd
    over: bool = False  # every rank has ended, as far as any host can still tell
    silent_since: float | None = None  # etcd has not answered since
    refusal: str = ""  # what etcd answers instead, if it refuses
    restarted: frozenset[int] = (
        frozenset()
    )  # ranks of the replicas that were placed after the start, and exist
    asked: frozenset[int] = frozenset()  # those of them that have asked to join
    failure: SupervisorError | None = None  # why the thread has ended, where it had to
    dead: frozenset[int] = frozenset()  # ranks that were declared dead
    noticed: frozenset[str] = frozenset()  # hosts that were asked to leave

    def has_whole_replica_beside(self, host: str, replica_size: int) -> bool:
        """Whether another host, or several together, hold a living replica."""
        alive = [rank for rank in self._living if self.seats[rank].host != host]
        sizes = Counter(rank // replica_size for rank in alive)
        return replica_size in sizes.values()

    @property
    def all_hosts_noticed(self) -> bool:
        """Whether all hosts with living ranks were asked to leave."""
        return bool(self.noticed) and {self.seats[rank].host for rank in self._living} <= self.noticed

    @property
    def _living(self) -> list[int]:
        return [rank for rank in self.counted - self.ends.keys() - self.dead if rank in self.seats]


class EtcdSync:
    """The exchange of one host with etcd. `caught`: the signals that this process has got; the
    first one ends the job on all hosts.

    `fence_hung_ranks` is called in every pass. `place` registers ranks with the lease of this host.
    `on_loss` is called with ranks that were lost on another host: host, ranks, reason. `restarts`
    is set before the start, where lost replicas are restarted.

    All state belongs to the thread, except the outbox and the order to be given, which have the
    lock. Other threads see the state as `view`.
    """

    def __init__(
        self,
        client: EtcdClient,
        rendezvous: Rendezvous,
        plan: HostPlan,
        caught: list[int],
        fence_hung_ranks: Callable[[], object],
        place: Callable[[Sequence[int]], bool],
        on_loss: Callable[[str, Sequence[int], str], object],
    ) -> None:
        self._client, self._rendezvous, self._plan, self._caught = client, rendezvous, plan, caught
        self._fence_hung_ranks, self._place, self._on_loss = fence_hung_ranks, place, on_loss
        self.restarts: ReplicaRestarts | None = None
        seats = dict(enumerate(plan.seats))
        self._view = JobView(dict(plan.hosts), seats, frozenset(seats))
        self._seats: Mapping[int, Seat] = seats
        self._counted = frozenset(seats)
        self._hosts: Mapping[str, Any] = self._view.hosts
        self._ends: Mapping[int, str] = {}
        self._order: Order | None = None
        self._over = self._finished = False
        self._silent_since: float | None = None
        self._refusal = ""
        self._failure: SupervisorError | None = None
        self._dead: set[int] = set()
        self._missed: dict[str, int] = {}
        self._placed: list[RestartedReplica] = []  # not yet handed over: see `_publish`
        self._restarted: queue.SimpleQueue[RestartedReplica] = queue.SimpleQueue()
        # The first ranks of a host that rejoins ended with its agent before.
        self._mine = set() if rendezvous.late else set(plan.ranks_of(rendezvous.me.host))
        self._outbox: dict[int, tuple[str | None, str]] = {}  # by rank: its marker; why it is dead, if it is
        self._to_order: Order | None = None
        self._noticed: frozenset[str] = frozenset()
        self._is_noticed = False
        self._lock, self._wake, self._stopped = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="recover-etcd-sync", daemon=True)

    @property
    def view(self) -> JobView:
        """The newest view of the job."""
        return self._view

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    def report_end(self, rank: int, marker: str | None, death: str) -> None:
        """A process of this host has ended. `marker`: None if it has never joined the job. `death`:
        why its rank is dead; "" if it has finished."""
        with self._lock:
            self._outbox[rank] = marker, death
            self._mine.discard(rank)
        self._wake.set()

    def next_restarted(self) -> RestartedReplica | None:
        """The next replica that was placed, on any host; its ranks on this host are to be started.
        None: no more."""
        try:
            return self._restarted.get_nowait()
        except queue.Empty:
            return None

    def add_restarted(self, replica: RestartedReplica) -> None:
        """A replica was placed. Called on the thread of this object; raises EtcdError.

        Its ranks are under the lease of this host before they are started: if the host were lost in
        between, no other host would declare them dead.
        """
        if mine := replica.on(self._rendezvous.me.host):
            with self._lock:
                ranks = sorted(self._mine | mine.keys())
            if not self._place(ranks):
                return  # this host was declared dead, and its successor of the same name starts them
            with self._lock:
                self._mine |= mine.keys()
        self._seats = {**self._seats, **dict(zip(replica.ranks, replica.seats, strict=True))}
        self._placed.append(replica)

    def give_order(self, order: Order) -> None:
        """End the job on all hosts. The first order counts; `view.order` is set once it is
        committed."""
        with self._lock:
            self._to_order = self._to_order or order
        self._wake.set()

    def give_notice(self) -> None:
        """Tell the other hosts that this host was asked to leave."""
        if not self._is_noticed:
            self._is_noticed = True
            self._wake.set()

    def declare_all(self, why: str, seconds: float, marker: str = "") -> bool:
        """Declare all ranks that are left here dead, with this marker. Returns whether it was
        committed within `seconds`."""
        with self._lock:
            self._outbox |= dict.fromkeys(self._mine, (marker, why))
            self._mine.clear()
        deadline = time.monotonic() + seconds
        while self._outbox and self._thread.is_alive() and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(LOOK / 10)
        return not self._outbox

    def _run(self) -> None:
        supervised = Supervised("the agent")
        while not self._stopped and self._failure is None:
            try:
                self._wake.wait(self._pause())
                self._wake.clear()
                self._pass(supervised)
                self._silent_since, self._refusal = None, ""
            except EtcdError as error:
                self._note_silence(error)
            except SupervisorError as failure:
                self._failure = failure
            except Exception as error:
                # A thread that ended silently would leave deaths of this host undeclared.
                self._failure = SupervisorError(f"the exchange with etcd: {type(error).__name__}: {error}")
            self._publish()

    def _pass(self, supervised: Supervised) -> None:
        parts = {
            "read what the others say": (self._read, True),
            "look for ranks that hang": (self._fence_hung_ranks, False),
            "place replicas": (self._place_replicas, False),
        }
        for what, (part, essential) in parts.items():
            # All ranks wait until a death is declared, so it is written before each part, not once
            # per pass.
            self._try(supervised, "tell the others what has ended", self._write, True)
            self._try(supervised, what, part, essential)

    def _publish(self) -> None:
        restarts = self.restarts
        known = [] if restarts is None else list(restarts.known.values())
        self._view = JobView(
            self._hosts,
            self._seats,
            self._counted,
            self._ends,
            self._order,
            self._over,
            self._silent_since,
            self._refusal,
            frozenset(rank for replica in known for rank in replica.ranks),
            frozenset() if restarts is None else frozenset(restarts.asked),
            self._failure,
            frozenset(self._dead),
            self._noticed,
        )
        # After the view that knows them: the supervisor ends ranks that wait to join and that the
        # view does not know.
        while self._placed:
            self._restarted.put(self._placed.pop(0))

    def _note_silence(self, error: EtcdError) -> None:
        # A silence is not reported here. An error that etcd answers (an alarm, a missing
        # permission) is, because a person has to act on it.
        answers = not isinstance(error, UnansweredError) or bool(error.remedy)
        if answers and not self._refusal:
            say(f"etcd refuses this host, and the job ends if that does not pass (--rdzv-patience): {error}")
        self._refusal = str(error) if answers else ""
        if self._silent_since is None:
            self._silent_since = time.monotonic()

    @staticmethod
    def _try(supervised: Supervised, what: str, act: Callable[[], object], essential: bool) -> None:
        """Run one part of the pass. An exception in it does not keep the next one from running,
        except EtcdError: the next part would wait for the same silent etcd."""
        silent: EtcdError | None = None
        with supervised.part(what, essential):
            try:
                act()
            except EtcdError as error:
                silent = error
        if silent is not None:
            raise silent

    def _write(self) -> None:
        with self._lock:
            if self._caught:
                self._to_order = self._to_order or Order(self._rendezvous.me.host, "", self._caught[0])
            order, letters = self._to_order, dict(self._outbox)
        if order is not None and self._order is None:
            self._client.txn([absent(ORDER)], [put(ORDER, json.dumps(order.__dict__).encode())])
        me = self._rendezvous.me
        if self._is_noticed and me.host not in self._noticed:
            self._client.txn([], [put(f"{NOTICES}{me.host}", me.id.encode())])
        for rank, (marker, death) in letters.items():
            writes = [partial(self._write_end, rank, marker, death)]
            if death:
                writes.insert(0, partial(declare, self._client, rank, death))
            # The reason of a death is removed once all members know of the death. A rank that left is not
            # to be taken for one that was lost: its marker is there before its death.
            for write in reversed(writes) if death == ON_NOTICE else writes:
                write()
            with self._lock:
                del self._outbox[rank]

    def _write_end(self, rank: int, marker: str | None, death: str) -> None:
        if marker is not None:
            # All agents read it within a moment; the ends of weeks of restarts would fill the store.
            lease = self._client.grant(KEPT)[0] if death and self.restarts is not None else 0
            self._client.txn([], [put(f"{ENDS}{rank}", marker.encode(), lease)])

    def _read(self) -> None:
        asked = get_all(ENDS), get_all(DEAD), get(ORDER), get(DECISION), get_all(NOTICES), get_all(LOST)
        answer = self._client.read(*asked)
        # A forged order would keep a real one from being given, and a forged death a rank from
        # voting.
        self._client.remove_forged(found for found in answer.forged if found.key != DECISION)
        ends, dead, order, decision, notices, lost_hosts = answer.found
        plan, there = self._rendezvous.present(self._plan)
        self._hosts = plan.hosts
        # A notice of an earlier agent of a host does not count: the host has left, and rejoined.
        asked_of = {found.key.rpartition("/")[2]: found.value.decode() for found in notices}
        self._noticed = frozenset(
            host for host, agent in asked_of.items() if plan.hosts.get(host, {}).get("id") == agent
        )
        new = {rank: found.value.decode() for found in ends if (rank := rank_of(found)) not in self._ends}
        if new:
            self._ends = {**self._ends, **new}
        # A rank is done only after all ranks have agreed that the job is at its end.
        markers = map(as_marker, new.values())
        self._finished |= any(marker is not None and marker["end"] == End.DONE for marker in markers)
        lost = {rank_of(found): found.value.decode() for found in dead}
        # The keys of deaths that all members know of are removed: these deaths follow from the
        # participants of the decision.
        if decision and (decided := Decision.in_place(decision[0])) is not None:
            lost = dict.fromkeys(self._counted - decided.participants, "") | lost
            self._counted = self._counted.union(decided.participants)
        self._counted = self._counted.union(self._ends)
        lost |= {rank: ON_NOTICE for rank in lost if not lost[rank] and self._has_left(rank)}
        for found in lost_hosts:
            why = without_lease(found.key.rpartition("/")[2])
            lost |= {rank: why for rank in json.loads(found.value) if lost.get(rank) == ""}
        self._tell_losses({rank: why for rank, why in lost.items() if rank in self._counted})
        if order:
            self._order = Order(**json.loads(order[0].value))
        for host in self._hosts:
            self._missed[host] = 0 if host in there else self._missed.get(host, 0) + 1
        with self._lock:
            self._over = not self._outbox and all(map(self._has_ended, self._counted))
        self._publish()  # the supervisor need not wait for the rest of this pass
        if self.restarts is not None and not self.restarts.ended and (self._over or self._finished):
            self.restarts.ended = True
            end_job(self._client, "the job has come to its end")

    def _place_replicas(self) -> None:
        if self.restarts is not None and self.restarts.look():
            self._wake.set()

    def _pause(self) -> float:
        """Seconds until the next pass: a slot that is free sooner is used at once."""
        return LOOK if self.restarts is None else min(LOOK, self.restarts.next_free_in())

    def _has_ended(self, rank: int) -> bool:
        if rank in self._ends or rank in self._dead:
            return True
        seat = self._seats.get(rank)
        return seat is not None and self._missed.get(seat.host, 0) >= GONE

    def _has_left(self, rank: int) -> bool:
        marker = as_marker(self._ends.get(rank))
        return marker is not None and marker["end"] == End.LEFT

    def _tell_losses(self, dead: dict[int, str]) -> None:
        """Announce losses on other hosts; losses on this host are reported by its ranks and by the
        verdict."""
        mine, lost = self._rendezvous.me.host, dict[tuple[str, str], list[int]]()
        for rank in dead.keys() - self._dead:
            seat = self._seats.get(rank)
            if seat is not None and seat.host != mine:
                lost.setdefault((seat.host, dead[rank]), []).append(rank)
        for (host, why), ranks in lost.items():
            how = f" {why}" if why == ON_NOTICE else f" lost: {why}" if why else " lost"
            say(f"{name_ranks(ranks)} on {host}{how}")
            self._on_loss(host, sorted(ranks), why)
        self._dead |= dead.keys()
