"""Writes of agents to a real etcd: late writes, or writes after the host was declared lost, change nothing."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from etcd_fabrics import TOKEN, Fabrics
from patience import PATIENCE, wait_until

from recover.launch.hosts import rendezvous as meetings
from recover.launch.hosts.etcd_sync import EtcdSync, Order
from recover.launch.hosts.guarded_client import GuardedClient
from recover.launch.hosts.options import HostPart
from recover.launch.hosts.placement import Seat
from recover.launch.hosts.rendezvous import Rendezvous
from recover.launch.hosts.replica_restarts import ReplicaRestarts
from recover.launch.hosts.slots import HostSlots
from recover.parallel.etcd_store import EtcdStore
from recover.world.fabrics.etcd.agreement import DEAD, key_of
from recover.world.fabrics.etcd.client import EtcdClient, EtcdError, KeyValue, UnansweredError, put
from recover.world.fabrics.etcd.host_lease import HostLease, HostLeases
from recover.world.fabrics.etcd.progress import write_pulse
from recover.world.fabrics.etcd.slot_notes import EtcdNotes
from recover.world.slot_notes import RunNotes

pytestmark = pytest.mark.filterwarnings("ignore:.*is etcd 3:UserWarning")
LOST = "host h2 has lost its lease"
LONG = 600.0  # seconds: leases end when a test says so, however busy the machine is


class Recording(GuardedClient):
    """Records all transactions: the requests by which an agent writes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.loses = random.Random(7)
        self.lost = 0.0  # how often the answer to a request is lost, from 0 to 1

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if path == "/v3/kv/txn":
            self.asked.append((path, body))
        answer = super().call(path, body)
        if self.loses.random() < self.lost:
            raise UnansweredError("its answer was lost")
        return answer


class HostAgent:
    """The writers of an agent without its threads: tests call them."""

    def __init__(self, fabrics: Fabrics, lost: float = 0.0, host: str = "h2") -> None:
        def client(prefix: str) -> Recording:
            made = Recording(fabrics.server.endpoint, prefix=prefix, token=TOKEN)
            made.lost = lost
            return made

        part = HostPart(1, 2, 1, (fabrics.server.endpoint,), "j", host, None, "", returns=True)
        self.meeting = Rendezvous(client(f"{fabrics.prefix}meeting/"), part, "10.0.0.1", {}, 1)
        self.given_up: list[bool] = []
        self._etcd = fabrics.etcd
        self.bare, self.client = client(fabrics.prefix), client(fabrics.prefix)
        self.lease = HostLease(
            self.bare, "h2", (), LONG, lambda: self.given_up.append(True), self.meeting.me.id
        )
        self.client.guards = self.lease.guards
        self.slots = HostSlots(1, 0, 600)

    def come(self) -> None:
        self.meet()
        self.lease.start()
        self.sync = EtcdSync(
            self.client, self.meeting, self.plan, [], lambda: None, self.lease.place, lambda *_: None
        )
        self.returns = self.sync.restarts = ReplicaRestarts(
            self.client, "h2", self.slots, 1, 100, self.sync.add_restarted, 600.0
        )

    def meet(self) -> None:
        self.meeting.enter(lambda: False)
        self.plan = self.meeting.wait_for_plan(30.0, lambda: False)

    def work(self, rank: int) -> None:
        """Write once of each kind: about the agent, its slots, its ranks and their ends."""
        write_pulse(self.client, "h2", {str(rank): [[1, 2], "R"]})
        EtcdNotes(self.client, -1, RunNotes(None, -1)).leave(3, [(1, 1)], "it hung", rank)
        self.sync.report_end(rank, '{"end": "raised", "detail": ""}', "killed")
        self.sync._write()
        for _ in range(4):  # publish, place, hear
            self.returns.look()
        self.sync._read()

    def pause(self) -> None:
        """Stop its threads, and let its leases run out."""
        self.meeting._left.set()
        self.meeting._keeper.join()
        self.lease._left.set()
        for thread in self.lease._threads:
            thread.join()
        for lease in (self.lease._lease, self.meeting._lease):
            self._etcd.revoke(lease)

    def wake(self, rank: int) -> None:
        """Continue after the pause, write about a rank of its successor, and then leave."""
        self.meeting._left.clear()
        self.lease._left.clear()
        self.work(rank)
        self.sync.give_order(Order("h2", "it was asked to"))
        self.sync._write()
        self.returns._forget(list(self.returns.known))
        self.meeting._come_again()
        assert not self.lease.place([rank, rank + 1])
        assert not self.lease._registered_anew()
        assert self.given_up == [True]
        self.leave()

    def leave(self) -> None:
        self.lease.leave()
        self.meeting.leave("for a reason")
        self.meeting.clean()

    @property
    def asked(self) -> list[tuple[str, Mapping[str, Any]]]:
        clients: list[Any] = [self.meeting._client, self.bare, self.client]
        return [request for client in clients for request in client.asked]


def replay(fabrics: Fabrics, asked: list[tuple[str, Mapping[str, Any]]]) -> None:
    plain = EtcdClient(fabrics.server.endpoint, timeout=PATIENCE)
    for path, body in random.Random(3).sample(asked, len(asked)):
        try:
            plain.call(path, body)
        except EtcdError:
            pass  # the lease is gone: nothing was written


def changed(before: dict[str, KeyValue], after: dict[str, KeyValue]) -> set[str]:
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "LAST_CALL", 0.0)
    monkeypatch.setattr(meetings, "LEASE", LONG)


@pytest.mark.guarantee(
    "On etcd",
    "Late and repeated requests of an agent change nothing: hosts, ranks, ends, slots, plans, torch's store "
    "and a successor of the same name.",
)
@pytest.mark.guarantee(
    "Several hosts",
    "A paused host that wakes next to its successor of the same name ends, and the successor keeps its "
    "ranks.",
)
@pytest.mark.parametrize("lost", [0.0, 0.3], ids=["answers-come", "answers-are-lost"])
def test_late_requests_of_a_replaced_agent_change_nothing(
    fabrics: Fabrics, hurried: None, lost: float
) -> None:
    """All its requests arrive late, and then the agent wakes up and goes on, next to one of the same name."""
    fabrics.make(1)
    first, old, new = HostAgent(fabrics, host="h1"), HostAgent(fabrics, lost), HostAgent(fabrics)
    first.meet()
    old.come()
    old.work(50)
    assert set(old.returns.known) == {1}, "it has placed a replica on its free slot"
    old.pause()
    HostLeases(fabrics.etcd)._declare("h2", [1], old.meeting.me.id)
    assert fabrics.store()["seen/dead/0000000001"].value.decode() == LOST
    new.come()
    # The keys of the successor count their versions from 1 again: at some time each has the version that a late
    # request of the old agent expects.
    for write in (lambda: None, lambda: new.work(60), lambda: new.lease.place([3])):
        write()
        store = fabrics.store()
        assert store["seen/placed/h2"].value.startswith(new.meeting.me.id.encode())
        replay(fabrics, old.asked)
        assert changed(store, fabrics.store()) == set(), "something late has come through"
    assert new.lease.ranks == (3,)
    old.wake(3)
    assert changed(store, fabrics.store()) == set(), "it has written beside its successor"
    assert not new.given_up
    assert new.lease.place([3, 4])
    new.leave()
    left = {key for key in fabrics.store() if key.startswith(("seen/placed/", "seen/host/", "meeting/meet/"))}
    assert left == {"meeting/meet/h1"}
    store = fabrics.store()
    replay(fabrics, [*old.asked, *new.asked])
    assert changed(store, fabrics.store()) == set(), "one that has left is there again"
    first.meeting.leave()


@pytest.mark.guarantee(
    "Several hosts",
    "An agent that hears of a lost host only after all members have agreed on it still records the lost lease.",
)
def test_slow_agent_knows_that_a_host_was_lost_with_its_lease(fabrics: Fabrics, hurried: None) -> None:
    """Members remove the reason of a death when all know of it. A rank that died by itself has none then."""
    fabrics.make(1)
    first, second = HostAgent(fabrics, host="h1"), HostAgent(fabrics)
    first.meet()
    second.come()
    heard: dict[int, str] = {}
    sync = EtcdSync(
        first.client,
        first.meeting,
        first.meeting.wait_for_plan(30.0, lambda: False),
        [],
        lambda: None,
        first.lease.place,
        lambda _, ranks, why: heard.update(dict.fromkeys(ranks, why)),
    )
    sync._seats = {rank: Seat("h2", rank) for rank in (1, 2, 3)}
    sync._counted = frozenset(sync._seats)
    assert second.lease.place([1, 2])
    second.pause()
    HostLeases(fabrics.etcd)._declare("h2", [1, 2], second.meeting.me.id)
    for rank in (1, 2, 3):
        fabrics.etcd.txn([], [put(key_of(DEAD, rank), b"")])
    sync._read()
    assert heard == {1: LOST, 2: LOST, 3: ""}
    first.meeting.leave()


@pytest.mark.guarantee(
    "On etcd",
    "Late and repeated requests of an agent change nothing: hosts, ranks, ends, slots, plans, torch's store "
    "and a successor of the same name.",
)
def test_agent_writes_survive_lost_answers(fabrics: Fabrics, hurried: None) -> None:
    fabrics.make(1)
    agent = HostAgent(fabrics, lost=0.4)
    agent.come()
    for ranks in ([1], [1, 2], [2, 3], [2, 3, 4]):
        assert agent.lease.place(ranks), "it was there all the time"
        store = fabrics.store()
        assert store["seen/placed/h2"].value.endswith(str(ranks).encode())
        replay(fabrics, agent.asked)
        assert changed(store, fabrics.store()) == set(), f"ranks from before {ranks}"
    before = fabrics.store()["seen/host/h2"]
    fabrics.etcd.revoke(agent.lease._lease)  # its keepers get a new one
    assert wait_until(lambda: fabrics.store().get("seen/host/h2", before) != before, 30)
    assert not agent.given_up
    agent.leave()


@pytest.mark.guarantee(
    "On etcd",
    "Late and repeated requests of an agent change nothing: hosts, ranks, ends, slots, plans, torch's store "
    "and a successor of the same name.",
)
def test_new_plan_ignores_requests_about_an_earlier_plan(fabrics: Fabrics, hurried: None) -> None:
    """Versions count from 1 again when a key was removed."""
    fabrics.make(1)
    asked = []
    for _ in range(3):
        agent = HostAgent(fabrics)
        agent.come()
        store = fabrics.store()
        replay(fabrics, asked)
        assert changed(store, fabrics.store()) == set()
        agent.leave()
        asked += agent.asked


@pytest.mark.guarantee(
    "On etcd",
    "Late and repeated requests of an agent change nothing: hosts, ranks, ends, slots, plans, torch's store "
    "and a successor of the same name.",
)
def test_torch_store_keeps_the_newest_value(fabrics: Fabrics) -> None:
    client = Recording(fabrics.server.endpoint, prefix=fabrics.prefix)
    store = EtcdStore(client, "replica/0/", timedelta(seconds=30))
    for value in ("one", "two"):
        store.set("address", value)
        assert store.get("address") == value.encode()
    replay(fabrics, client.asked[:1])
    assert store.get("address") == b"two"
