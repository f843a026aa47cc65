"""Joins on a real etcd: members never admit different ones, ids are never used twice, and nothing is left behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
from etcd_fabrics import TOKEN, Fabrics, agree, at_once
from patience import PATIENCE, wait_until

from recover.world.fabrics.base import Admission, NotAdmittedError
from recover.world.fabrics.etcd.agreement import (
    ASKING,
    CLAIM,
    DECISION,
    ENDED,
    Decision,
    declare,
    rank_of,
    replica_ranks,
    whole,
)
from recover.world.fabrics.etcd.client import EtcdClient, UnansweredError
from recover.world.fabrics.etcd.entry import OtherJobError, end_job, place
from recover.world.fabrics.etcd.fabric import DeclaredDeadError, EtcdFabric

pytestmark = pytest.mark.filterwarnings("ignore:.*is etcd 3:UserWarning")


class Asking(threading.Thread):
    """A rank that asks to join, in a thread of its own."""

    def __init__(self, fabric: EtcdFabric) -> None:
        super().__init__(daemon=True)
        self.fabric, self.told = fabric, None
        self.start()

    told: Any

    def run(self) -> None:
        try:
            self.told = self.fabric.ask()
        except Exception as error:
            self.told = error

    def answer(self) -> Any:
        self.join(PATIENCE)
        return self.told


@pytest.mark.guarantee(
    "On etcd",
    "An admitted rank takes part from the next agreement on, and joins and deaths are one decision.",
)
def test_admitted_ranks_take_part_from_the_next_agreement(fabrics: Fabrics) -> None:
    ranks, _ = fabrics.make(2)
    assert agree(ranks, 1) == [1, 1]
    joiners = [fabrics.joiner(2) for _ in range(2)]
    assert [joiner.rank for joiner in joiners] == [2, 3]
    asking = [Asking(joiner) for joiner in joiners]
    assert wait_until(lambda: all(rank.asking() == {2, 3} for rank in ranks))
    assert at_once(
        lambda: ranks[0].agree(3, frozenset({2, 3, 9})), lambda: ranks[1].agree(3, frozenset({3, 9}))
    ) == [3, 3]
    assert [rank.participants for rank in ranks] == [{0, 1, 3}] * 2, (
        "one was admitted by one alone, one does not ask"
    )
    assert asking[1].answer() == Admission(2, frozenset({0, 1, 3}))
    assert joiners[1].agreed.value == ranks[0].agreed.value
    assert asking[0].is_alive()
    trio = [*ranks, joiners[1]]
    assert [rank.asking() for rank in trio] == [{2}] * 3
    trio[1].send(b"hello", 3, 0)
    letter = trio[2].receive(1, 0)
    assert wait_until(letter.done)
    assert letter.data == b"hello"
    assert agree(trio, 7, 7, 5) == [5] * 3
    ranks[0].declare(0, "by decree")
    assert agree(trio[1:], 1) == [None, None], "a death drops the word, and nobody is admitted with it"
    for rank in trio[1:]:
        rank.acknowledge()
    assert at_once(*(lambda rank=rank: rank.agree(1, frozenset({2})) for rank in trio[1:])) == [1, 1]
    assert trio[1].participants == {1, 2, 3}, "a join and a death are one decision"
    assert asking[0].answer() == Admission(5, frozenset({1, 2, 3}))
    assert agree([trio[1], joiners[0], joiners[1]], 1) == [1] * 3


@pytest.mark.guarantee(
    "On etcd", "A joining rank that dies is not admitted and is forgotten with its replica."
)
def test_joining_rank_that_dies_is_forgotten_with_its_replica(fabrics: Fabrics) -> None:
    ranks, _ = fabrics.make(2, replica_size=2)
    before = fabrics.store().keys()
    mine, peer = fabrics.replica(2, 2)
    asking = Asking(mine)
    assert wait_until(lambda: all(rank._cache.asking for rank in ranks))
    assert not ranks[0].asking(), "its replica is not whole"
    other = Asking(peer)
    assert wait_until(lambda: all(rank.asking() == {2, 3} for rank in ranks))
    declare(fabrics.etcd, 3, "by decree")
    for _ in range(2):
        assert at_once(*(lambda rank=rank: rank.agree(1, frozenset({2, 3})) for rank in ranks)) == [1, 1]
    assert isinstance(other.answer(), DeclaredDeadError)
    assert isinstance(asking.answer(), DeclaredDeadError), "it would wait for ever"
    assert fabrics.store().keys() - before == {"ids", "seen/decision"}
    assert list(place(fabrics.etcd)) == [4, 5]


@pytest.mark.guarantee("On etcd", "A job that has ended admits no rank, and an id is never used twice.")
def test_join_is_refused_after_the_end_of_a_job_and_for_used_ids(fabrics: Fabrics) -> None:
    ranks, _ = fabrics.make(1)
    asking, late = Asking(fabrics.joiner(1)), fabrics.joiner(1)
    for wrong, why in ((1, "another process is or was rank 1"), (3, "or the others go on without it")):
        with pytest.raises(OtherJobError, match=why):
            fabrics.join(1, wrong)
    end_job(fabrics.etcd, "its script has ended")
    for one in (asking, Asking(late)):
        answer = one.answer()
        assert isinstance(answer, NotAdmittedError)
        assert "its script has ended" in str(answer)
    lost = Asking(fabrics.joiner(1))
    with pytest.raises(NotAdmittedError, match="holds no job"):
        place(EtcdClient(fabrics.server.endpoint, prefix="/nobody/"))
    assert isinstance(lost.answer(), NotAdmittedError)
    del ranks


class Schedule:
    """Ranks that agree again and again, each in its thread, over connections that lose requests and answers; methods
    that declare deaths and start joining replicas; and all requests to etcd."""

    def __init__(self, fabrics: Fabrics, seed: int, replicas: int, replica_size: int) -> None:
        self.fabrics, self.seed, self.size, self.replica_size = (
            fabrics,
            seed,
            replicas * replica_size,
            replica_size,
        )
        self.rng, self.lock = random.Random(seed), threading.Lock()
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.late: list[tuple[str, Mapping[str, Any]]] = []
        self.told: dict[int, list[Decision]] = {}
        self.admitted: dict[int, Admission] = {}
        self.admits: dict[tuple[int, int], frozenset[int]] = {}
        self.ends: dict[int, Exception | None] = {}
        self.threads: list[threading.Thread] = []
        self.unkind, self.stop = True, False
        schedule = self

        class Lossy(EtcdClient):
            def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
                with schedule.lock:
                    luck = schedule.rng.random() if schedule.unkind else 1.0
                    late = schedule.late
                    repeated = late.pop(schedule.rng.randrange(len(late))) if late and luck < 0.3 else None
                    if path == "/v3/kv/txn":
                        schedule.asked.append((path, body))
                if repeated:
                    super().call(*repeated)
                if luck < 0.04:
                    with schedule.lock:
                        schedule.late.append((path, body))
                    raise UnansweredError("the request was lost on its way, or is late")
                answer = super().call(path, body)
                if luck < 0.08:
                    raise UnansweredError("its answer was lost")
                return answer

        self.client = Lossy
        self.etcd = Lossy(fabrics.server.endpoint, prefix=fabrics.prefix, token=TOKEN)
        for rank in range(self.size):
            self.run(rank)

    def word(self, rank: int, number: int) -> int:
        return random.Random(f"{self.seed} {rank} {number}").getrandbits(12) << 1

    def run(self, rank: int) -> None:
        thread = threading.Thread(target=self.program, args=[rank], daemon=True)
        self.threads.append(thread)
        thread.start()

    def program(self, rank: int) -> None:
        story = self.told.setdefault(rank, [])
        try:
            fabric = self.fabrics.join(self.size, rank, self.client, replica_size=self.replica_size)
            if rank >= self.size:
                self.admitted[rank] = fabric.ask()
            while not story or story[-1].word is None or not story[-1].word & 1:
                number, stop = fabric.agreed.number + 1, self.stop
                # A rank that is about to leave admits no rank.
                admit = self.admits[rank, number] = (
                    fabric.asking() if number % 3 and not stop else frozenset()
                )
                word = fabric.agree(self.word(rank, number) | stop, admit)
                story.append(fabric.agreed)
                assert word == fabric.agreed.word
                fabric.acknowledge()
            self.ends[rank] = None
        except Exception as error:
            self.ends[rank] = error

    def wait_for_agreements(self, more: int) -> None:
        before = self.decided()
        assert wait_until(lambda: self.decided() >= before + more), "an agreement hangs"

    def decided(self) -> int:
        return max((story[-1].number for story in self.told.values() if story), default=0)

    def participants(self) -> frozenset[int]:
        last = max(
            (story[-1] for story in list(self.told.values()) if story), key=lambda decision: decision.number
        )
        return last.participants

    def strike_or_add(self) -> None:
        if self.rng.random() < 0.5:
            for rank in place(self.etcd):
                self.run(rank)
        known = {rank for rank in self.told if self.ends.get(rank, 0) == 0}
        living = self.participants() & whole(known, self.replica_size)
        victims = self.rng.sample(sorted(known), min(len(known), self.rng.choice([0, 0, 1, 2])))
        lost = {peer for victim in victims for peer in replica_ranks(victim, self.replica_size)}
        if len(living - lost) >= 2 * self.replica_size:
            for rank in victims:  # their peers go with them
                declare(self.etcd, rank, "by decree")

    def finish(self) -> None:
        self.unkind = False
        self.wait_for_agreements(3)
        self.stop = True
        survivors = self.participants
        assert wait_until(lambda: all(self.ends.get(rank, 0) is None for rank in survivors())), self.ends
        end_job(self.fabrics.etcd, "it is over")
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        self.check()

    def check(self) -> None:
        decisions: dict[int, Decision] = {}
        for rank, story in self.told.items():
            first = self.admitted[rank].number + 1 if rank in self.admitted else 1
            assert [decision.number for decision in story] == list(range(first, first + len(story)))
            for decision in story:
                assert decisions.setdefault(decision.number, decision).value == decision.value, (
                    "decided twice"
                )
                assert rank in decision.participants, "one that is dead has acted on a decision"
        assert decisions.keys() == set(range(1, len(decisions) + 1))
        participants, ever = frozenset(range(self.size)), set(range(self.size))
        for number, decision in sorted(decisions.items()):
            counted = participants - decision.dead
            assert decision.dead <= participants
            if decision.word is None:
                assert decision.participants == participants
                assert not decision.joined
            else:
                word = -1
                for rank in counted:
                    word &= self.word(rank, number) | decision.word & 1
                    assert decision.joined <= self.admits[rank, number], "somebody has not admitted it"
                assert decision.word == word
                assert decision.participants == counted | decision.joined
            assert whole(decision.joined, self.replica_size) == decision.joined
            assert ever.isdisjoint(decision.joined), "an id was used twice"
            ever |= decision.joined
            for rank in decision.joined & self.admitted.keys():
                assert self.admitted[rank] == Admission(number, decision.participants)
            participants = decision.participants
        wrong = [
            end
            for end in self.ends.values()
            if not isinstance(end, (type(None), DeclaredDeadError, NotAdmittedError, OtherJobError))
        ]
        assert not wrong
        assert len(ever) > self.size, "nobody has joined"
        assert any(decision.dead for decision in decisions.values()), "nobody has died"


def random_schedule(fabrics: Fabrics, seed: int, replica_size: int, rounds: int) -> None:
    schedule = Schedule(fabrics, seed, 3, replica_size)
    schedule.wait_for_agreements(3)
    for _ in range(rounds):
        schedule.strike_or_add()
        time.sleep(schedule.rng.uniform(0, 0.05))
    schedule.finish()
    store = fabrics.store()
    ours = {rank_of(found) for key, found in store.items() if key.startswith((CLAIM, ASKING))}
    asking = {rank_of(found) for key, found in store.items() if key.startswith(ASKING)}
    waiting = {rank for rank, end in schedule.ends.items() if isinstance(end, NotAdmittedError)}
    assert asking <= waiting, "one that was admitted still asks"
    assert ours - waiting == schedule.participants(), "keys of the dead are left behind"
    assert {key for key in store if not key.startswith((CLAIM, ASKING))} == {"job", "ids", DECISION, ENDED}
    replay = EtcdClient(fabrics.server.endpoint, timeout=PATIENCE)
    for path, body in schedule.rng.sample(schedule.asked, min(len(schedule.asked), 1500)):
        replay.call(path, body)
    assert fabrics.store() == store, "something late has come through"


@pytest.mark.guarantee(
    "On etcd",
    "Schedules of deaths, joins and lost or late requests split no decision, reuse no id and leave no keys.",
)
@pytest.mark.parametrize("replica_size", [1, 2])
def test_schedules_of_deaths_joins_and_lost_answers_keep_every_invariant(
    fabrics: Fabrics, replica_size: int
) -> None:
    random_schedule(fabrics, 7, replica_size, 40)


@pytest.mark.guarantee(
    "On etcd",
    "Schedules of deaths, joins and lost or late requests split no decision, reuse no id and leave no keys.",
)
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_long_schedules_of_deaths_and_joins_keep_every_invariant(fabrics: Fabrics, seed: int) -> None:
    random_schedule(fabrics, seed, 1 + seed % 3, 200)
