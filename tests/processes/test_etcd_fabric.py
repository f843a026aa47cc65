"""The etcd fabric, on a real etcd: one decision each, death is final, and no lost answer or lost etcd does harm.

Those with processes run the real `Membership` or `World`, without MPI, under a tiny agent.
"""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from etcd_ranks import EtcdRanks

from recover.fabrics import etcd_host
from recover.fabrics.base import FabricError
from recover.fabrics.etcd import MESSAGE_LIMIT, DeclaredDeadError, EtcdFabric, OtherJobError
from recover.fabrics.etcd_agreement import declare
from recover.fabrics.etcd_client import EtcdClient, EtcdError, KeyValue, UnansweredError, delete
from recover.fabrics.etcd_server import EtcdServer
from recover.fabrics.etcd_watch import EtcdWatch
from recover.liveness.board import Board

pytestmark = pytest.mark.filterwarnings("ignore:.*is etcd 3:UserWarning")


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"/recover/{request.node.name}/"


class Fabrics:
    """Many ranks in one process, each with a fabric and, in an agreement, a thread of its own."""

    def __init__(self, server: EtcdServer, prefix: str, directory: Path) -> None:
        self.server, self.prefix, self.directory = server, prefix, directory
        self.made: list[EtcdFabric] = []
        self.etcd = EtcdClient(server.endpoint, prefix=prefix)

    def make(
        self, size: int, client: type[EtcdClient] = EtcdClient, **options: Any
    ) -> tuple[list[EtcdFabric], list[Any]]:
        board = Board(self.directory / "board", size)
        clients = [client(self.server.endpoint, prefix=self.prefix) for _ in range(size)]
        made = [EtcdFabric(each, rank, size, board, **options) for rank, each in enumerate(clients)]
        self.made += made
        return made, clients

    def close(self) -> None:
        for fabric in self.made:
            fabric.close()

    def store(self) -> dict[str, KeyValue]:
        return {found.key: found for found in self.etcd.get_all()[0]}


@pytest.fixture
def fabrics(server: EtcdServer, prefix: str, tmp_path: Path) -> Iterator[Fabrics]:
    made = Fabrics(server, prefix, tmp_path)
    yield made
    made.close()


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each returns, or the exception that it raises."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=[index], daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "an agreement hangs"
    return results


def agree(fabrics: Sequence[EtcdFabric], *words: int) -> list[Any]:
    def vote(fabric: EtcdFabric, word: int) -> Callable[[], Any]:
        return lambda: fabric.agree(word)

    words = words if len(words) == len(fabrics) else words * len(fabrics)
    return at_once(*map(vote, fabrics, words))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# One process, many fabrics: the contract, and every guard.


def test_a_death_fails_agreements_on_all_alike_until_all_have_acknowledged_it(fabrics: Fabrics) -> None:
    ranks, _ = fabrics.make(5)
    assert agree(ranks, 0b111, 0b101, 0b1111, 0b101, 0b111) == [0b101] * 5
    # One that others already wait for.
    voters = threading.Thread(target=lambda: results.extend(agree(ranks[:3], 7)))
    results: list[Any] = []
    voters.start()
    time.sleep(0.05)
    ranks[0].declare(4, "by decree")
    ranks[1].fence(3)
    voters.join(30)
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


def test_whoever_was_declared_dead_never_votes_again(fabrics: Fabrics) -> None:
    ranks, _ = fabrics.make(3)
    assert agree(ranks, 1) == [1] * 3
    ranks[2].close()  # cut off from the news: the guard alone can stop it
    before = fabrics.store()["vote/2"]
    ranks[0].declare(2, "by decree")
    (refused,) = agree(ranks[2:], 1)
    assert isinstance(refused, DeclaredDeadError)
    assert "by decree" in str(refused)
    assert fabrics.store()["vote/2"] == before, "its vote has come through"
    with pytest.raises(DeclaredDeadError):
        ranks[2].send(b"late", 0, 1)
    assert agree(ranks[:2], 1) == [None] * 2


def test_a_death_between_the_look_and_the_decision_is_counted(fabrics: Fabrics) -> None:
    struck: list[Any] = []

    class Struck(EtcdClient):
        """Just before a decision is written, one of the voters is declared dead."""

        def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
            if (
                "request_delete_range" in json.dumps(body) and not struck
            ):  # the mail that a decision cleans away
                struck.append(body)
                declare(fabrics.etcd, 2, "just now")
            return super().call(path, body)

    ranks, _ = fabrics.make(3, Struck)
    results = agree(ranks, 7)
    assert struck
    assert results[:2] == [None] * 2, "a vote of the dead was counted"
    assert isinstance(results[2], DeclaredDeadError)
    assert json.loads(fabrics.store()["seen/decision"].value)["dead"] == [2]


class Recording(EtcdClient):
    """Keeps all that is ever asked."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: list[tuple[str, Mapping[str, Any]]] = []

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append((path, body))
        return super().call(path, body)


def test_whatever_was_asked_changes_nothing_when_it_is_carried_out_again(fabrics: Fabrics) -> None:
    ranks, clients = fabrics.make(3, Recording)
    rng, replay = random.Random(5), EtcdClient(fabrics.server.endpoint)
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


def test_answers_that_are_lost_do_no_harm(fabrics: Fabrics) -> None:
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
    for number, (word, value) in enumerate(told[0], 1):
        living = {0, 1, 2, 3} - set(json.loads(value)["dead"])
        if word is not None:
            expected = -1
            for rank in living:
                expected &= words[rank, number]
            assert word == expected
    assert [word for word, _ in told[0]].count(None) == 1, "one death, one failed agreement"


def test_one_that_is_waited_for_too_long_is_declared_dead_and_silence_of_etcd_is_no_reason(
    fabrics: Fabrics,
) -> None:
    ranks, clients = fabrics.make(3, hang_limit=1.2)
    results: list[Any] = []
    voters = threading.Thread(target=lambda: results.extend(agree(ranks[:2], 1)))
    voters.start()
    time.sleep(0.1)
    os.kill(fabrics.server.pid, signal.SIGSTOP)
    last = threading.Thread(target=lambda: results.extend(agree(ranks[2:], 1)))
    last.start()
    time.sleep(1.5)
    os.kill(fabrics.server.pid, signal.SIGCONT)
    voters.join(30)
    last.join(30)
    assert results == [1] * 3, "who could not vote while etcd was silent was taken for dead"
    assert all(client.unanswered for client in clients)
    assert agree(ranks[:2], 1) == [None] * 2
    assert ranks[0].failed() == ranks[1].failed() == {2}
    (late,) = agree(ranks[2:], 1)
    assert isinstance(late, DeclaredDeadError)


def test_nobody_votes_without_its_hosts_lease_and_a_host_that_is_back_in_time_loses_nobody(
    fabrics: Fabrics,
) -> None:
    ranks, _ = fabrics.make(2, host="a", grace=60.0)
    lost = threading.Event()
    lease = etcd_host.HostLease(fabrics.etcd, "a", [0, 1], ttl=2.0, lost=lost.set)
    lease.start()
    assert agree(ranks, 1) == [1] * 2
    lease._client = EtcdClient("127.0.0.1:1", patience=0.0)  # its holder hears nothing for a while
    fabrics.etcd.revoke(lease._lease)
    results: list[Any] = []
    voters = threading.Thread(target=lambda: results.extend(agree(ranks, 1)))
    voters.start()
    time.sleep(0.5)
    assert {found.version for key, found in fabrics.store().items() if key.startswith("vote/")} == {1}
    lease._client = fabrics.etcd
    voters.join(30)
    assert results == [1] * 2
    etcd_host.HostsSeen(fabrics.etcd)._declare("a", [0, 1])  # by one who has not heard that it is back
    assert not [key for key in fabrics.store() if key.startswith("seen/dead/")]
    fabrics.etcd.txn([], [delete("seen/host/a")])
    etcd_host.HostsSeen(fabrics.etcd)._declare("a", [0, 1])
    assert [isinstance(end, DeclaredDeadError) for end in agree(ranks, 1)] == [True, True]
    fabrics.etcd.revoke(lease._lease)
    assert lost.wait(30), "who was given up must not register anew"
    lease.leave()
    assert not [key for key in fabrics.store() if key.startswith(("seen/host/", "seen/placed/"))]


def test_messages_are_there_until_the_next_agreement_and_then_gone(fabrics: Fabrics) -> None:
    ranks, _ = fabrics.make(3)
    ranks[1].send(b"one", 0, 7)
    ranks[2].send(b"", 0, 7)
    letters = [ranks[0].receive(source, 7) for source in (1, 2)]
    never = ranks[0].receive(1, 8)
    wait_until(lambda: all(letter.done() for letter in letters))
    assert [letter.data for letter in letters] == [b"one", b""]
    assert not never.done()
    ranks[0].declare(1, "by decree")
    wait_until(lambda: 1 in ranks[0].failed())
    with pytest.raises(FabricError, match="rank 1 is dead"):
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


def test_agreements_leave_no_keys_behind(fabrics: Fabrics) -> None:
    ranks, _ = fabrics.make(2)
    assert keys_after(fabrics, ranks, 3) == keys_after(fabrics, ranks, 300)


@pytest.mark.soak
def test_ten_thousand_agreements_leave_no_keys_behind(fabrics: Fabrics) -> None:
    ranks, _ = fabrics.make(2)
    assert keys_after(fabrics, ranks, 3) == {
        key for _ in range(100) for key in keys_after(fabrics, ranks, 100)
    }


def test_another_job_and_a_second_process_of_a_rank_are_refused(fabrics: Fabrics) -> None:
    fabrics.make(2, token="ours")
    board = Board(fabrics.directory / "board", 3)
    for size, rank, token, why in (
        (3, 2, "ours", "2 ranks; this one has 3"),
        (2, 0, "theirs", "another job"),
    ):
        with pytest.raises(OtherJobError, match=why):
            EtcdFabric(fabrics.etcd, rank, size, board, token)
    with pytest.raises(OtherJobError, match="another process is or was rank 1"):
        EtcdFabric(fabrics.etcd, 1, 2, board, "ours")


def test_news_come_through_compactions_and_lost_connections(server: EtcdServer, prefix: str) -> None:
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
            wait_until(lambda turn=turn: told.get("seen/1") == b"%d" % turn)  # type: ignore[misc]
            watch._response.fp.raw._sock.shutdown(socket.SHUT_RDWR)
            etcd.put("seen/2", b"%d" % turn)
            etcd.put("seen/3", b"short")
            etcd.txn([], [delete("seen/3"), delete("seen/0")])
            etcd.compact(etcd.get_all()[1])  # what happened meanwhile cannot be told any more
            wait_until(lambda turn=turn: told.get("seen/2") == b"%d" % turn)  # type: ignore[misc]
        assert told["seen/0"] is None
        assert told.get("seen/3") is None
    finally:
        watch.stop()


# The server.


def test_an_etcd_of_ones_own_listens_on_one_address_ends_with_its_starter_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    program = (
        "import time; from recover.fabrics.etcd_server import EtcdServer; s = EtcdServer().start(); "
        "print(s.endpoint, s.pid, s._directory, flush=True); time.sleep(600)"
    )
    starter = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    endpoint, pid, directory = starter.stdout.readline().split()
    try:
        host, port = endpoint.split(":")
        assert host == "127.0.0.1"
        socket.create_connection((host, int(port)), 5).close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", int(port)), 5)
        assert directory.startswith("/dev/shm/")
    finally:
        starter.kill()
        starter.wait()
        starter.stdout.close()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    shutil.rmtree(directory)  # of one whose starter was killed
    with EtcdServer() as server:
        assert EtcdClient(server.endpoint).version() == ".".join(map(str, server.version))
        mine = server._directory
        assert mine is not None
        assert mine.exists()
    assert not mine.exists()


def test_an_etcd_that_has_lost_its_data_is_told(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path / "etcd")
    try:
        made = Fabrics(server.start(), "/lost/", tmp_path)
        (rank,), _ = made.make(1)
        assert agree([rank], 1) == [1]
        server.kill()
        shutil.rmtree(tmp_path / "etcd")
        server.start()
        (error,) = agree([rank], 1)
        assert isinstance(error, EtcdError)
        assert "has lost its data" in str(error)
        made.close()
    finally:
        server.stop()


def test_a_user_who_may_write_under_the_jobs_prefix_alone_is_enough(tmp_path: Path) -> None:
    with EtcdServer() as server:
        etcd = EtcdClient(server.endpoint)
        ours, behind = (base64.b64encode(key).decode() for key in (b"/recover/ours/", b"/recover/ours0"))
        permission = {"permType": "READWRITE", "key": ours, "range_end": behind}
        for path, body in (
            ("user/add", {"name": "root", "password": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("role/add", {"name": "job"}),
            ("role/grant", {"name": "job", "perm": permission}),
            ("user/add", {"name": "trainer", "password": "secret"}),
            ("user/grant", {"user": "trainer", "role": "job"}),
            ("enable", {}),
        ):
            etcd.call(f"/v3/auth/{path}", body)

        def client(prefix: str, password: str) -> EtcdClient:
            return EtcdClient(server.endpoint, prefix, "trainer", password)

        rank = EtcdFabric(client("/recover/ours/", "secret"), 0, 1, Board(tmp_path / "board", 1))
        try:
            assert agree([rank], 1) == [1]
        finally:
            rank.close()
        for prefix, password in (("/recover/theirs/", "secret"), ("/recover/ours/", "guessed")):
            with pytest.raises(EtcdError, match="may user 'trainer' read and write under"):
                client(prefix, password).put("key", b"value")
        with pytest.raises(EtcdError, match="give a user"):
            etcd.put("key", b"value")


# Real processes: Membership and World over the fabric, without MPI.


def test_a_world_on_etcd_goes_on_after_deaths_down_to_one_replica(
    server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    """Replicas of two: the mate of a dead rank leaves by itself."""
    with EtcdRanks(server.endpoint, prefix, tmp_path, [range(8)], "gloo", replica_size=2) as ranks:
        ranks.commit([0, 1, 2, 3, 4, 5, 6, 7])
        ranks.strike(0, signal.SIGKILL)
        ranks.commit([2, 3, 4, 5, 6, 7])
        ranks.strike(4, signal.SIGKILL)
        ranks.strike(7, signal.SIGKILL)
        ranks.commit([2, 3])
        ranks.finish([2, 3])
        assert ranks.agents[0].returncode == 0
        assert {ranks.end(rank) for rank in (1, 5, 6)} == {"orphan"}


def test_one_declared_dead_while_it_is_stopped_or_runs_ends_itself_and_never_commits(
    server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    etcd = EtcdClient(server.endpoint, prefix=prefix)
    with EtcdRanks(server.endpoint, prefix, tmp_path, [range(5)]) as ranks:
        ranks.commit([0, 1, 2, 3, 4])
        ranks.strike(1, signal.SIGSTOP)
        time.sleep(0.1)  # the others wait for it in an agreement
        declare(etcd, 1, "by decree, while it was stopped")
        ranks.commit([0, 2, 3, 4])
        ranks.strike(1, signal.SIGCONT)
        ranks.wait(lambda: bool(ranks.end(1)))
        ranks.strike(4, signal.SIGSTOP)
        declare(etcd, 4, "by decree, wherever it was stopped")
        ranks.strike(4, signal.SIGCONT)
        ranks.commit([0, 2, 3])
        ranks.wait(lambda: bool(ranks.end(4)))
        declare(etcd, 0, "by decree, while it ran")
        ranks.commit([2, 3])
        ranks.wait(lambda: bool(ranks.end(0)))
        assert ranks.end(0) == ranks.end(1) == ranks.end(4) == "fenced"
        ranks.finish([2, 3])


def test_an_etcd_that_is_killed_or_stopped_for_a_while_costs_nobody(prefix: str, tmp_path: Path) -> None:
    data, runs = tmp_path / "etcd", tmp_path / "run"
    runs.mkdir()
    with (
        EtcdServer(data) as server,
        EtcdRanks(server.endpoint, prefix, runs, [[0, 1], [2]], ttl=2.0, grace=5.0) as ranks,
    ):
        ranks.commit([0, 1, 2])
        server.kill()
        time.sleep(0.3)
        server.start()
        ranks.commit([0, 1, 2])
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(3.2)  # longer than a lease
        os.kill(server.pid, signal.SIGCONT)
        ranks.commit([0, 1, 2])
        assert len(ranks.diary(0, "census")) == 1, "somebody was lost"
        ranks.finish([0, 1, 2])


def test_a_host_that_is_lost_takes_its_own_ranks_and_nobody_else(
    server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    """One vanishes with all its ranks; of another the agent alone is stopped, and its ranks run."""
    with EtcdRanks(server.endpoint, prefix, tmp_path, [[0, 3], [1, 4], [2, 5]], ttl=2.0) as ranks:
        ranks.commit([0, 1, 2, 3, 4, 5])
        ranks.agents[1].send_signal(signal.SIGSTOP)
        ranks.agents[2].kill()
        ranks.commit([0, 3])
        ranks.wait(lambda: ranks.end(1) == ranks.end(4) == "fenced")
        ranks.agents[1].kill()
        ranks.finish([0, 3])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
def test_no_mixture_of_deaths_decrees_pauses_and_silences_of_etcd_breaks_a_law(
    seed: int, prefix: str, tmp_path: Path
) -> None:
    rng, runs = random.Random(seed), tmp_path / "run"
    carrier, replica_size = ("gloo", 2) if seed % 2 else ("", 1)
    runs.mkdir()
    with EtcdServer(tmp_path / "etcd") as server:
        etcd = EtcdClient(server.endpoint, prefix=prefix)
        with EtcdRanks(
            server.endpoint, prefix, runs, [range(4), range(4, 8)], carrier, replica_size=replica_size
        ) as ranks:
            living = list(range(8))
            ranks.commit(living)
            while len(living) > 2 * replica_size:
                time.sleep(rng.uniform(0, 0.2))
                victims = rng.sample(living, rng.randint(0, min(2, len(living) - 2)))
                for victim in victims:
                    how = rng.choice(["kill", "decree", "stop", "stop"])
                    if how == "stop":
                        ranks.strike(victim, signal.SIGSTOP)
                        time.sleep(rng.uniform(0, 0.05))
                    if how != "kill":
                        declare(etcd, victim, f"by decree ({how})")
                    if how == "stop":
                        threading.Timer(rng.uniform(0, 1), ranks.strike, [victim, signal.SIGCONT]).start()
                    if how == "kill":
                        ranks.strike(victim, signal.SIGKILL)
                silence = rng.choice(["", "", "kill", "stop"])
                if silence == "kill":
                    server.kill()
                    time.sleep(rng.uniform(0, 1))
                    server.start()
                elif silence == "stop":
                    os.kill(server.pid, signal.SIGSTOP)
                    time.sleep(rng.uniform(0, 2))
                    os.kill(server.pid, signal.SIGCONT)
                lost = {victim // replica_size for victim in victims}
                living = [rank for rank in living if rank // replica_size not in lost]
                ranks.commit(living)
            time.sleep(1.1)  # those that were stopped have been woken
            ranks.finish(living)


@pytest.mark.soak
def test_an_etcd_that_is_stopped_for_long_costs_nobody(prefix: str, tmp_path: Path) -> None:
    runs = tmp_path / "run"
    runs.mkdir()
    with (
        EtcdServer(tmp_path / "etcd") as server,
        EtcdRanks(server.endpoint, prefix, runs, [[0, 1], [2, 3]], carrier="gloo", grace=5.0) as ranks,
    ):
        ranks.commit([0, 1, 2, 3])
        for silence in range(2):
            if silence:
                server.kill()
                time.sleep(20)
                server.start()
            else:
                os.kill(server.pid, signal.SIGSTOP)
                time.sleep(20)
                os.kill(server.pid, signal.SIGCONT)
            ranks.commit([0, 1, 2, 3])
        assert len(ranks.diary(0, "census")) == 1, "somebody was lost"
        ranks.finish([0, 1, 2, 3])
