"""The etcd fabric, on a real etcd: an agreement has one decision, a death is final, lost answers do no harm."""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from etcd_fabrics import TOKEN, Fabrics, agree, at_once
from patience import PATIENCE, wait_until

from recover.world.fabrics.base import FabricError
from recover.world.fabrics.etcd import agreement, host_lease
from recover.world.fabrics.etcd.agreement import Vote, cast, declare, key_of
from recover.world.fabrics.etcd.client import EtcdClient, KeyValue, UnansweredError, delete
from recover.world.fabrics.etcd.entry import OtherJobError, place
from recover.world.fabrics.etcd.fabric import DeclaredDeadError, EtcdFabric
from recover.world.fabrics.etcd.messages import MESSAGE_LIMIT
from recover.world.fabrics.etcd.server import EtcdServer
from recover.world.fabrics.etcd.watch import EtcdWatch
from recover.world.liveness.board import Board

pytestmark = pytest.mark.filterwarnings("ignore:.*is etcd 3:UserWarning")


@pytest.mark.guarantee(
    "On etcd", "A death fails agreements on all ranks until all have acknowledged it, in the order of deaths."
)
def test_death_fails_agreements_until_all_ranks_have_acknowledged_it(fabrics: Fabrics) -> None:
    ranks, _ = fabrics.make(5)
    assert agree(ranks, 0b111, 0b101, 0b1111, 0b101, 0b111) == [0b101] * 5
    # An agreement in which other ranks already wait.
    voters = threading.Thread(target=lambda: results.extend(agree(ranks[:3], 7)), daemon=True)
    results: list[Any] = []
    voters.start()
    assert wait_until(lambda: {key_of("vote/", rank) for rank in range(3)} <= fabrics.store().keys())
    ranks[0].declare(4, "by decree")
    ranks[1].fence(3)
    voters.join(PATIENCE)
    living = ranks[:3]
    assert results == [None] * 3
    assert [rank.failed() for rank in living] == [{3, 4}] * 3, "who was told None knows why"
    assert living[0].acknowledge(only=frozenset({3})) == frozenset(), (
        "notices are acknowledged in their order"
    )
    assert living[0].acknowledge(only=frozenset({4})) == {4}
    assert living[0].acknowledge() == {3, 4}
    assert agree(living, 7) == [None] * 3, "two have not acknowledged it"
    assert living[1].acknowledge() == living[2].acknowledge(only=frozenset({3, 4})) == {3, 4}
    assert agree(living, 7) == [7] * 3


@pytest.mark.guarantee(
    "On etcd", "A rank that was declared dead never votes again, even if its watch is silent."
)
def test_rank_declared_dead_never_votes_again(fabrics: Fabrics) -> None:
    ranks, _ = fabrics.make(3)
    assert agree(ranks, 1) == [1] * 3
    ranks[2].close()  # without its watch: only the guard of its writes can stop it
    ranks[0].declare(2, "by decree")
    (refused,) = agree(ranks[2:], 1)
    assert isinstance(refused, DeclaredDeadError)
    assert "by decree" in str(refused)
    assert key_of("vote/", 2) not in fabrics.store(), "its vote has come through"
    with pytest.raises(DeclaredDeadError):
        ranks[2].send(b"late", 0, 1)
    with pytest.raises(DeclaredDeadError):
        ranks[2].failed()  # polled by the watcher, which ends the rank
    assert agree(ranks[:2], 1) == [None] * 2


@pytest.mark.guarantee("On etcd", "A rank counted in a decision was alive when the decision was written.")
def test_death_between_read_and_decision_is_counted(fabrics: Fabrics) -> None:
    first, answered = threading.Lock(), threading.Event()

    class Struck(EtcdClient):
        """Declares one of the voters dead just before the first decision is written. All other decisions come
        later: a rank that knows of the death must not decide before it."""

        def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
            decides = any("request_delete_range" in one for one in body.get("success", ()))  # the votes
            # The attempt of the last voter to decide without reading the votes fails, as they differ.
            if not decides or any(guard["target"] == "VALUE" for guard in body["compare"]):
                return super().call(path, body)
            if not first.acquire(blocking=False):
                assert answered.wait(PATIENCE)
                return super().call(path, body)
            declare(fabrics.etcd, 2, "just now")
            try:
                return super().call(path, body)
            finally:
                answered.set()

    ranks, _ = fabrics.make(3, Struck)
    results = agree(ranks, 7, 7, 3)
    assert answered.is_set()
    assert results[:2] == [None] * 2, "a vote of the dead was counted"
    assert isinstance(results[2], DeclaredDeadError)
    assert json.loads(fabrics.store()["seen/decision"].value)["dead"] == [2]


class Recording(EtcdClient):
    """Records all requests."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: list[tuple[str, Mapping[str, Any]]] = []

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append((path, body))
        return super().call(path, body)


def test_vote_is_the_only_request_of_a_rank_when_all_words_are_equal(fabrics: Fabrics) -> None:
    """The last rank to vote decides with the request of its vote; the watch reports the decision to the others."""
    ranks, clients = fabrics.make(4, Recording)
    for number in range(3):
        for client in clients:
            client.asked.clear()
        assert agree(ranks, 7) == [7] * 4
        assert [len(client.asked) for client in clients] == [1] * 4, number
    assert fabrics.store().keys().isdisjoint(key_of("vote/", rank) for rank in range(4))


def test_last_voter_compares_many_votes_without_reading_them(
    fabrics: Fabrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "COMPARED", 1)
    ranks, clients = fabrics.make(4, Recording)
    for number in range(1, 4):
        assert agree(ranks, 7) == [7] * 4
        assert fabrics.store()["seen/decision"].version == number
    asked = [body for client in clients for _, body in client.asked if "compare" in body]
    compared = [[one for one in body["compare"] if one["target"] == "VALUE"] for body in asked]
    assert max(map(len, compared)) == 4, "its own vote, and those of all others"
    assert agree(ranks, 7, 7, 3, 7) == [3] * 4
    ranks[0].declare(3, "by decree")
    assert agree(ranks[:3], 7) == [None] * 3


@pytest.mark.guarantee(
    "On etcd",
    "A vote decides by itself only if it is the last, all words are equal, and there is neither a death nor "
    "a join.",
)
@pytest.mark.parametrize("kind", ["dead", "another word", "let in", "let in by all", "not all", "earlier"])
def test_last_vote_decides_alone_only_without_deaths_or_joins(fabrics: Fabrics, kind: str) -> None:
    """Whatever the last voter knows: here it writes its vote as if there were no death, no join and no other word."""
    ranks, _ = fabrics.make(3)
    assert agree(ranks, 7) == [7] * 3
    plain = Vote(7, frozenset(), number=2)
    others = {
        "another word": Vote(3, frozenset(), number=2),
        "let in": Vote(7, frozenset(), frozenset({9}), 2),
        "let in by all": Vote(7, frozenset(), frozenset({9}), 2),
        "earlier": Vote(7, frozenset(), number=1),
    }.get(kind, plain)
    voters = [1] if kind == "not all" else [1, 2]
    for rank in voters:
        fabrics.etcd.txn([], cast(rank, others, frozenset(range(3)), 1))
    if kind == "dead":
        declare(fabrics.etcd, 2, "just now")
    last = others if kind == "let in by all" else plain
    fabrics.etcd.txn([], cast(0, last, frozenset(range(3)), 1))
    assert fabrics.store()["seen/decision"].version == 1, "it was decided"
    assert len([key for key in fabrics.store() if key.startswith("vote/")]) == len(voters) + 1


@pytest.mark.guarantee(
    "On etcd",
    "A broadcast message is written once, read without requests, readable after its sender's death, and "
    "deleted by the next decision.",
)
def test_broadcast_message_is_written_once_and_read_without_requests(fabrics: Fabrics) -> None:
    ranks, clients = fabrics.make(4, Recording)
    assert agree(ranks, 1) == [1] * 4
    for client in clients:
        client.asked.clear()
    ranks[0].send_to_all(b"table", [1, 2, 3], 5)
    heard = [rank.receive_as_all(0, 5) for rank in ranks[1:]]
    assert wait_until(lambda: all(one.done() for one in heard))
    assert [one.data for one in heard] == [b"table"] * 3
    assert [len(client.asked) for client in clients] == [1, 0, 0, 0]
    assert agree(ranks, 1) == [1] * 4
    assert not [key for key in fabrics.store() if "told" in key]
    # A message from a rank whose death is known before the message; and a message that was never sent.
    ranks[1].close()
    ranks[3].send_to_all(b"last words", [0, 1, 2], 7)
    ranks[0].declare(3, "by decree")
    ranks[1]._agreement.read_count()
    last, nothing = (ranks[1].receive_as_all(3, tag) for tag in (7, 8))
    assert last.done()
    assert last.data == b"last words"
    with pytest.raises(FabricError, match="rank 3 died before it sent the message"):
        nothing.done()


@pytest.mark.guarantee("On etcd", "Requests of ranks are idempotent, also when they are carried out late.")
def test_etcd_requests_are_idempotent(fabrics: Fabrics) -> None:
    ranks, clients = fabrics.make(3, Recording)
    rng, replay = random.Random(5), EtcdClient(fabrics.server.endpoint, timeout=PATIENCE)
    for number in range(8):
        if number == 4:
            ranks[0].declare(2, "by decree")
            del ranks[2]
        for rank in ranks[1:]:
            rank.send(b"letter", 0, number)
        assert agree(ranks, 7) == ([None] * 2 if number == 4 else [7] * len(ranks))
        for rank in ranks:
            rank.acknowledge()
        store = fabrics.store()
        asked = [request for client in clients for request in client.asked]
        for path, body in rng.sample(asked, len(asked)):
            replay.call(path, body)
        assert fabrics.store() == store, f"something late has come through after agreement {number + 1}"


@pytest.mark.guarantee("On etcd", "Lost requests and lost answers change no result.")
def test_lost_answers_of_etcd_change_no_result(fabrics: Fabrics) -> None:
    rng, lock, late = random.Random(11), threading.Lock(), []

    class Lossy(EtcdClient):
        """Loses requests and answers; what was lost may be carried out later all the same."""

        def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
            with lock:
                luck = rng.random()
                repeated = late.pop(rng.randrange(len(late))) if late and rng.random() < 0.3 else None
            if repeated:
                super().call(*repeated)
            if luck < 0.15:
                with lock:
                    late.append((path, body))
                raise UnansweredError("the request was lost on its way, or is late")
            answer = super().call(path, body)
            if luck < 0.3:
                raise UnansweredError("its answer was lost")
            return answer

    ranks, clients = fabrics.make(4, Lossy)
    told: dict[int, list[Any]] = {rank.rank: [] for rank in ranks}
    words = {(rank, number): rng.getrandbits(8) | 1 for rank in range(4) for number in range(1, 41)}

    def run(rank: EtcdFabric) -> Callable[[], None]:
        def program() -> None:
            for number in range(1, 41):
                if rank.rank == 0 and number == 20:
                    rank.declare(3, "by decree")
                if rank.rank:
                    rank.send(b"%d" % number, 0, number)
                else:
                    for source in {1, 2, 3} - rank.failed():
                        letter = rank.receive(source, number)
                        try:
                            while not letter.done():
                                rank.pause(0.001)
                            assert letter.data == b"%d" % number
                        except FabricError:
                            assert source == 3
                told[rank.rank].append((rank.agree(words[rank.rank, number]), rank.agreed.value))
                rank.acknowledge()

        return program

    ends = at_once(*map(run, ranks))
    assert ends[:3] == [None] * 3
    assert isinstance(ends[3], DeclaredDeadError)
    assert sum(client.unanswered for client in clients) > 50, "nothing was lost"
    assert told[0] == told[1] == told[2]
    assert told[3] == told[0][: len(told[3])]
    living = {0, 1, 2, 3}
    for number, (word, value) in enumerate(told[0], 1):
        living -= set(json.loads(value)["dead"])
        if word is not None:
            expected = -1
            for rank in living:
                expected &= words[rank, number]
            assert word == expected
    assert [word for word, _ in told[0]].count(None) == 1, "one death, one failed agreement"


@pytest.mark.guarantee(
    "On etcd",
    "A rank that others wait for too long is declared dead, and an outage of etcd does not count as waiting.",
)
def test_rank_awaited_too_long_is_declared_dead_unless_etcd_is_silent(
    fabrics: Fabrics,
) -> None:
    limit = 3.0
    ranks, clients = fabrics.make(3, hang_limit=limit)
    results: list[Any] = []
    voters = threading.Thread(target=lambda: results.extend(agree(ranks[:2], 1)), daemon=True)
    voters.start()
    assert wait_until(lambda: {key_of("vote/", rank) for rank in range(2)} <= fabrics.store().keys())
    os.kill(fabrics.server.pid, signal.SIGSTOP)
    last = threading.Thread(target=lambda: results.extend(agree(ranks[2:], 1)), daemon=True)
    last.start()
    time.sleep(1.1 * limit)  # would be longer than the hang limit if silence of etcd counted
    os.kill(fabrics.server.pid, signal.SIGCONT)
    voters.join(PATIENCE)
    last.join(PATIENCE)
    assert results == [1] * 3, "who could not vote while etcd was silent was taken for dead"
    assert all(client.unanswered for client in clients)
    assert agree(ranks[:2], 1) == [None] * 2
    assert ranks[0].failed() == ranks[1].failed() == {2}
    (late,) = agree(ranks[2:], 1)
    assert isinstance(late, DeclaredDeadError)


@pytest.mark.guarantee(
    "On etcd",
    "A rank that others wait for too long is declared dead, and an outage of etcd does not count as waiting.",
)
@pytest.mark.parametrize("kind", ["answers", "silent", "suspended"])
def test_vote_wait_counts_only_while_etcd_answers(
    fabrics: Fabrics, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A rank is declared dead after `hang_limit` of answers, not of silence, nor of a pause of the waiting process.

    Time passes by itself only in the reads of a waiting rank.
    """
    look_again, hang_limit, reads_needed = 0.005, 0.1, 30
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, sleep=time.sleep)

    class Delayed(EtcdClient):
        reads = 0

        def read(self, *operations: Any) -> Any:
            answer = super().read(*operations)
            self.reads += 1
            if kind != "suspended" or self.reads == 2:
                clock.now += 1000.0
            self.unanswered += kind == "silent"
            return answer

    monkeypatch.setattr("recover.world.fabrics.etcd.voting.time", clock)
    monkeypatch.setattr("recover.world.fabrics.etcd.voting.READ_AGAIN", look_again)
    ranks, clients = fabrics.make(2, Delayed, hang_limit=hang_limit)
    results: list[Any] = []
    voter = threading.Thread(target=lambda: results.extend(agree(ranks[:1], 1)), daemon=True)
    voter.start()
    if kind == "answers":
        voter.join(60)
        assert results == [None]
        assert ranks[0].failed() == {1}
        assert clients[0].reads * 2 * look_again > hang_limit
        return
    assert wait_until(lambda: clients[0].reads >= reads_needed or not voter.is_alive())
    assert not [key for key in fabrics.store() if key.startswith("seen/dead/")]
    assert agree(ranks[1:], 1) == [1]
    voter.join(60)
    assert results == [1]


@pytest.mark.guarantee("On etcd", "A rank whose vote arrives before its declaration stays alive.")
def test_vote_before_the_declaration_keeps_a_rank_alive(
    fabrics: Fabrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has waited too long for rank 1, has seen no vote of rank 1, and is about to declare it dead."""
    monkeypatch.setattr("recover.world.fabrics.etcd.voting.READ_AGAIN", 0.01)
    declaration = base64.b64encode(f"{fabrics.prefix}{key_of('seen/dead/', 1)}".encode()).decode()
    late_results: list[Any] = []
    late = threading.Thread(target=lambda: late_results.extend(agree(ranks[1:], 0b011)), daemon=True)
    decided = threading.Event()

    class Overtaken(EtcdClient):
        """The vote of rank 1 arrives in etcd just before the declaration. Rank 1 itself decides nothing."""

        def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
            if not late.ident and f'"request_put": {{"key": "{declaration}"' in json.dumps(body):
                late.start()
                assert wait_until(lambda: key_of("vote/", 1) in fabrics.store())
            return super().call(path, body)

        def read(self, *operations: Any) -> Any:
            if threading.current_thread() is not voter:
                decided.wait(60)
            return super().read(*operations)

    ranks, _ = fabrics.make(2, Overtaken, hang_limit=0.0)
    results: list[Any] = []
    voter: Any = threading.Thread(target=lambda: results.append(ranks[0].agree(0b110)), daemon=True)
    voter.start()
    voter.join(60)
    decided.set()
    assert late.ident, "rank 0 never tried to declare rank 1 dead"
    assert results == [0b010], "a rank was declared dead although its vote was there"
    assert not [key for key in fabrics.store() if key.startswith("seen/dead/")]
    late.join(60)
    assert late_results == [0b010]


@pytest.mark.guarantee(
    "On etcd", "A rank votes only under the lease of its host, and a host that renews in time loses no rank."
)
def test_rank_votes_only_under_the_lease_of_its_host(
    fabrics: Fabrics,
) -> None:
    ranks, _ = fabrics.make(2, host="a", grace=60.0)
    lost = threading.Event()
    lease = host_lease.HostLease(fabrics.etcd, "a", [0, 1], ttl=2.0, lost=lost.set)
    lease.start()
    for ranks_there in ([0], [0, 1, 2], [0, 1]):
        lease.place(ranks_there)
        agent, ranks_told = fabrics.store()["seen/placed/a"].value.decode().split(" ", 1)
        assert json.loads(ranks_told) == ranks_there
    assert agree(ranks, 1) == [1] * 2
    lease._client = EtcdClient("127.0.0.1:1", patience=0.0)  # the host cannot reach etcd for a while
    fabrics.etcd.revoke(lease._lease)
    results: list[Any] = []
    voters = threading.Thread(target=lambda: results.extend(agree(ranks, 1)), daemon=True)
    voters.start()
    assert not wait_until(lambda: [key for key in fabrics.store() if key.startswith("vote/")], 0.5)
    lease._client = fabrics.etcd
    voters.join(PATIENCE)
    assert results == [1] * 2
    host_lease.HostLeases(fabrics.etcd)._declare(
        "a", [0, 1], agent
    )  # by a rank that does not know that the host is back
    assert not [key for key in fabrics.store() if key.startswith("seen/dead/")]
    fabrics.etcd.txn([], [delete("seen/host/a")])
    host_lease.HostLeases(fabrics.etcd)._declare("a", [0, 1], "somebody else")  # an earlier agent
    assert not [key for key in fabrics.store() if key.startswith("seen/dead/")]
    host_lease.HostLeases(fabrics.etcd)._declare("a", [0, 1], agent)
    assert [isinstance(end, DeclaredDeadError) for end in agree(ranks, 1)] == [True, True]
    fabrics.etcd.revoke(lease._lease)
    assert lost.wait(PATIENCE), "who was given up must not register anew"
    lease.leave()
    assert not [key for key in fabrics.store() if key.startswith(("seen/host/", "seen/placed/"))]


@pytest.mark.guarantee("On etcd", "Agreements and messages leave no keys behind.")
def test_messages_are_deleted_by_the_next_agreement(fabrics: Fabrics) -> None:
    ranks, _ = fabrics.make(3)
    ranks[1].send(b"one", 0, 7)
    ranks[2].send(b"", 0, 7)
    letters = [ranks[0].receive(source, 7) for source in (1, 2)]
    never = ranks[0].receive(1, 8)
    assert wait_until(lambda: all(letter.done() for letter in letters))
    assert [letter.data for letter in letters] == [b"one", b""]
    assert not never.done()
    ranks[0].declare(1, "by decree")
    assert wait_until(lambda: 1 in ranks[0].failed())
    with pytest.raises(FabricError, match="rank 1 died before it sent"):
        never.done()
    with pytest.raises(ValueError, match=f"takes {MESSAGE_LIMIT} at most"):
        ranks[2].send(bytes(MESSAGE_LIMIT + 1), 0, 9)
    ranks[2].send(bytes(MESSAGE_LIMIT), 0, 9)
    assert agree([ranks[0], ranks[2]], 1) == [None] * 2
    assert not [key for key in fabrics.store() if key.startswith("mail/")]


def keys_after(fabrics: Fabrics, ranks: Sequence[EtcdFabric], agreements: int) -> set[str]:
    def run(rank: EtcdFabric) -> Callable[[], None]:
        def program() -> None:
            for number in range(agreements):
                if number % 10 == 0 and rank.rank:
                    rank.send(b"row", 0, number)
                assert rank.agree(3) == 3

        return program

    assert at_once(*map(run, ranks)) == [None] * len(ranks)
    return set(fabrics.store())


@pytest.mark.guarantee("On etcd", "Agreements and messages leave no keys behind.")
def test_agreements_leave_no_keys_behind(fabrics: Fabrics) -> None:
    ranks, _ = fabrics.make(2)
    assert keys_after(fabrics, ranks, 3) == keys_after(fabrics, ranks, 300)


@pytest.mark.guarantee("On etcd", "Agreements and messages leave no keys behind.")
@pytest.mark.soak
def test_ten_thousand_agreements_leave_no_keys_behind(fabrics: Fabrics) -> None:
    ranks, _ = fabrics.make(2)
    assert keys_after(fabrics, ranks, 3) == {
        key for _ in range(100) for key in keys_after(fabrics, ranks, 100)
    }


@pytest.mark.guarantee("On etcd", "A second job of the same name and a second process of a rank are refused.")
def test_second_job_of_a_name_and_second_process_of_a_rank_are_refused(fabrics: Fabrics) -> None:
    fabrics.make(2, admits=False)
    board = Board(fabrics.directory / "board", 3)
    with pytest.raises(OtherJobError, match=r"2 ranks in replicas of 1; this one has 3"):
        EtcdFabric(fabrics.etcd, 2, 3, board, TOKEN)
    theirs = EtcdClient(fabrics.server.endpoint, prefix=fabrics.prefix, token="theirs")
    with pytest.raises(OtherJobError, match="was not written with this job's token"):
        EtcdFabric(theirs, 0, 2, board, "theirs")
    with pytest.raises(OtherJobError, match="another process is or was rank 1"):
        EtcdFabric(fabrics.etcd, 1, 2, board, TOKEN)


@pytest.mark.guarantee("On etcd", "A rank that was declared dead before it arrives cannot enter.")
def test_rank_declared_dead_before_it_arrives_cannot_enter(fabrics: Fabrics) -> None:
    """Its launcher has seen it fail, or has stopped waiting, before it came to etcd; the others rely on its death."""
    fabrics.join(2, 0)
    (joining,) = place(fabrics.etcd)
    for rank in (1, joining):
        before = fabrics.store().get(key_of("claim/", rank))
        declare(fabrics.etcd, rank, "its process did not start in time")
        with pytest.raises(OtherJobError, match=f"rank {rank} "):
            fabrics.join(2, rank)
        assert fabrics.store().get(key_of("claim/", rank)) == before, "a dead rank has claimed its number"


@pytest.mark.guarantee("On etcd", "The membership watch survives compactions and lost connections.")
def test_membership_watch_survives_compactions_and_lost_connections(server: EtcdServer, prefix: str) -> None:
    etcd, told = EtcdClient(server.endpoint, prefix=prefix), {}

    def hear(news: Sequence[KeyValue]) -> None:
        assert [one.modified for one in news] == sorted(one.modified for one in news)
        told.update({one.key: one.value if one.version else None for one in news})

    etcd.put("seen/0", b"there before")
    watch = EtcdWatch(etcd, "seen/", hear)
    watch.start()
    try:
        assert told == {"seen/0": b"there before"}
        for turn in range(3):
            etcd.put("seen/1", b"%d" % turn)
            assert wait_until(lambda turn=turn: told.get("seen/1") == b"%d" % turn)  # type: ignore[misc]
            watch._connection.shut_down()
            etcd.put("seen/2", b"%d" % turn)
            etcd.put("seen/3", b"short")
            etcd.txn([], [delete("seen/3"), delete("seen/0")])
            etcd.compact(etcd.get_all()[1])  # etcd can no longer send what happened meanwhile
            assert wait_until(lambda turn=turn: told.get("seen/2") == b"%d" % turn)  # type: ignore[misc]
        assert told["seen/0"] is None
        assert told.get("seen/3") is None
    finally:
        watch.stop()
