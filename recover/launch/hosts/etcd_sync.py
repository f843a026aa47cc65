"""An agent's correspondence with etcd, on a thread of its own, so that a silent etcd never keeps it from its ranks.

Keys, under the prefix of the run:

    ends/<rank>   how a rank of the writer's host has ended: its marker, or nothing if it left none
    order         the job is to be ended, by whom and why; written once
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from recover.job.output import say
from recover.job.supervised import Supervised, SupervisorError
from recover.launch.hosts.rendezvous import HostPlan, Meeting
from recover.launch.hosts.replica_restarts import Newcomer, Returns
from recover.launch.verdict import as_marker, name_ranks
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
from recover.world.rank_exit import End

LOOK = 0.25  # seconds between two looks
ENDS, ORDER = "ends/", "order"
KEPT = 60.0  # seconds that the end of a lost rank is to be read, where replicas come and go
GONE = 20  # looks in a row without a sign of its agent after which a host is gone


@dataclass(frozen=True)
class Order:
    """To end the job."""

    host: str
    why: str
    signal: int = 0


class Clerk:
    """`caught`: the signals that this agent has got; the first one ends the job everywhere. `heard` is told of
    ranks that were lost on another host: where, which, and why."""

    def __init__(
        self,
        client: EtcdClient,
        meeting: Meeting,
        plan: HostPlan,
        caught: list[int],
        look_for_hung_ranks: Callable[[], object],
        place: Callable[[Sequence[int]], bool],
        heard: Callable[[str, Sequence[int], str], object],
    ) -> None:
        self._client, self._meeting, self._plan, self._caught = client, meeting, plan, caught
        self._look_for_hung_ranks, self._place, self._heard = look_for_hung_ranks, place, heard
        self.returns: Returns | None = None  # set before the start, where lost replicas are started again
        self.seats = dict(enumerate(plan.seats))
        self.counted = set(self.seats)  # the ranks of the start, and those who have joined since
        self.hosts: dict[str, Any] = dict(plan.hosts)
        self._mine = set(plan.ranks_of(meeting.me.host))
        self._newcomers: deque[Newcomer] = deque()
        self.order: Order | None = None
        self.over = False  # every rank has ended, as far as anybody can still tell
        self.silent_since: float | None = None  # nobody answers
        self.refusal = ""  # what etcd says meanwhile, if anything
        self.ends: dict[int, str] = {}  # what the agents say
        self._finished = False
        self.failed: SupervisorError | None = None  # why it has ended, where it had to
        self._outbox: dict[
            int, tuple[str | None, str]
        ] = {}  # by rank: its marker, and why it is dead, if it is
        self._ordered: Order | None = None
        self._dead: set[int] = set()
        self._missed: dict[str, int] = {}
        self._lock, self._wake, self._stopped = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="recover-agent-clerk", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        self._thread.join()

    def tell_end(self, rank: int, marker: str | None, death: str) -> None:
        """A process of this host has ended; `death`: why its rank is dead, "" if it has finished. `marker`: None if it
        was never part of the job."""
        with self._lock:
            self._outbox[rank] = marker, death
            self._mine.discard(rank)
        self._wake.set()

    def newcomer(self) -> Newcomer | None:
        """The next one of which this host is to start a rank, or which should be written down."""
        return self._newcomers.popleft() if self._newcomers else None

    def hear(self, newcomer: Newcomer) -> None:
        """A replica was placed. Its ranks are this host's before they are started. Raises EtcdError."""
        if mine := newcomer.on(self._meeting.me.host):
            with self._lock:
                ranks = sorted(self._mine | mine.keys())
            if not self._place(ranks):
                return  # this host was given up, and one of its name starts them
            with self._lock:
                self._mine |= mine.keys()
        self.seats |= dict(zip(newcomer.ranks, newcomer.seats, strict=True))
        self._newcomers.append(newcomer)

    def give_order(self, order: Order) -> None:
        """The first one counts. `self.order` is it, as soon as etcd has it."""
        self._ordered = self._ordered or order
        self._wake.set()

    def declare_all(self, why: str, seconds: float) -> bool:
        """All ranks that are left here were ended, and the others must know. Whether etcd has taken it in time."""
        with self._lock:
            self._outbox |= dict.fromkeys(self._mine, ("", why))
            self._mine.clear()
        deadline = time.monotonic() + seconds
        while self._outbox and self._thread.is_alive() and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(LOOK / 10)
        return not self._outbox

    def _run(self) -> None:
        supervised = Supervised("the agent")
        looks = {
            "read what the others say": (self._read, True),
            "look for ranks that hang": (self._look_for_hung_ranks, False),
            "place replicas": (self._look_for_returns, False),
        }
        while not self._stopped:
            self._wake.wait(self._pause())
            self._wake.clear()
            try:
                for what, (look, essential) in looks.items():
                    # The others wait to hear of a death: not for all that is looked at here.
                    self._try(supervised, "tell the others what has ended", self._write, True)
                    self._try(supervised, what, look, essential)
                self.silent_since, self.refusal = None, ""
            except EtcdError as error:
                # A silence explains itself. What etcd says (an alarm, a missing permission) must be read by somebody.
                says = not isinstance(error, UnansweredError) or bool(error.remedy)
                if says and not self.refusal:
                    say(
                        f"etcd refuses this host, and the job ends if that does not pass (--rdzv-patience): {error}"
                    )
                self.refusal = str(error) if says else ""
                if self.silent_since is None:
                    self.silent_since = time.monotonic()
            except SupervisorError as failed:
                self.failed = failed
                return

    @staticmethod
    def _try(supervised: Supervised, what: str, act: Callable[[], object], essential: bool) -> None:
        """One look after the other: what goes wrong in one, a silent etcd aside, keeps nobody from the next."""
        silent: EtcdError | None = None
        with supervised.part(what, essential):
            try:
                act()
            except EtcdError as error:
                silent = error
        if silent is not None:
            raise silent

    def _write(self) -> None:
        if self._caught:
            self._ordered = self._ordered or Order(self._meeting.me.host, "", self._caught[0])
        if self._ordered is not None and self.order is None:
            self._client.txn([absent(ORDER)], [put(ORDER, json.dumps(self._ordered.__dict__).encode())])
        with self._lock:
            letters = dict(self._outbox)
        for rank, (marker, death) in letters.items():
            if death:
                declare(self._client, rank, death)
            if marker is not None:
                # All agents read it within a moment; those of weeks would fill the store.
                lease = self._client.grant(KEPT)[0] if death and self.returns is not None else 0
                self._client.txn([], [put(f"{ENDS}{rank}", marker.encode(), lease)])
            with self._lock:
                del self._outbox[rank]

    def _read(self) -> None:
        asked = get_all(ENDS), get_all(DEAD), get(ORDER), get(DECISION)
        answer = self._client.read(*asked)
        # A forged order would keep a real one from being given, and a forged death a rank from voting.
        self._client.remove_forged(found for found in answer.forged if found.key != DECISION)
        ends, dead, order, decision = answer.found
        plan, there = self._meeting.present(self._plan)
        self.hosts = plan.hosts
        new = {rank: found.value.decode() for found in ends if (rank := rank_of(found)) not in self.ends}
        self.ends = self.ends | new
        # Nobody is done before all have come to the end.
        markers = map(as_marker, new.values())
        self._finished |= any(marker is not None and marker["end"] == End.DONE for marker in markers)
        lost = {rank_of(found): found.value.decode() for found in dead}
        # Those whose deaths all know of may be forgotten by now.
        if decision and (decided := Decision.in_place(decision[0])) is not None:
            participants = decided.participants
            lost = dict.fromkeys(self.counted - participants, "") | lost
            self.counted |= participants
        self.counted |= self.ends.keys()
        self._tell_losses({rank: why for rank, why in lost.items() if rank in self.counted})
        if order:
            self.order = Order(**json.loads(order[0].value))
        for host in self.hosts:
            self._missed[host] = 0 if host in there else self._missed.get(host, 0) + 1
        with self._lock:
            self.over = not self._outbox and all(
                rank in self.ends or rank in self._dead or self._gone(rank) for rank in self.counted
            )
        if self.returns is not None and not self.returns.ended and (self.over or self._finished):
            self.returns.ended = True
            end_job(self._client, "the job has come to its end")

    def _look_for_returns(self) -> None:
        if self.returns is not None and self.returns.look():
            self._wake.set()

    def _pause(self) -> float:
        """Until the next look: a place that is free sooner is used at once."""
        return LOOK if self.returns is None else min(LOOK, self.returns.next_free_in())

    def _gone(self, rank: int) -> bool:
        seat = self.seats.get(rank)
        return seat is not None and self._missed.get(seat.host, 0) >= GONE

    def _tell_losses(self, dead: dict[int, str]) -> None:
        """Of other hosts: what is lost here is told by the ranks and the verdict."""
        mine, lost = self._meeting.me.host, dict[tuple[str, str], list[int]]()
        for rank in dead.keys() - self._dead:
            seat = self.seats.get(rank)
            if seat is not None and seat.host != mine:
                lost.setdefault((seat.host, dead[rank]), []).append(rank)
        for (host, why), ranks in lost.items():
            say(f"{name_ranks(ranks)} on {host} lost" + (f": {why}" if why else ""))
            self._heard(host, sorted(ranks), why)
        self._dead |= dead.keys()
