"""The real `Membership` and `World` on etcd, in processes without MPI, under a tiny agent."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from etcd_ranks import EtcdRanks

from recover.world.fabrics.etcd.agreement import declare
from recover.world.fabrics.etcd.client import EtcdClient
from recover.world.fabrics.etcd.server import EtcdServer

pytestmark = pytest.mark.filterwarnings("ignore:.*is etcd 3:UserWarning")


@pytest.mark.guarantee(
    "On etcd",
    "A world on etcd continues after deaths with the same members, epochs and verdicts on all survivors.",
)
def test_etcd_world_continues_after_deaths_down_to_one_replica(
    server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    """Replicas of two: the peer of a dead rank leaves by itself."""
    with EtcdRanks(server.endpoint, prefix, tmp_path, [range(8)], "gloo", replica_size=2) as ranks:
        ranks.commit([0, 1, 2, 3, 4, 5, 6, 7])
        ranks.strike(0, signal.SIGKILL)
        ranks.commit([2, 3, 4, 5, 6, 7])
        ranks.strike(4, signal.SIGKILL)
        ranks.strike(7, signal.SIGKILL)
        ranks.commit([2, 3])
        ranks.finish([2, 3])
        assert ranks.agents[0].returncode == 0
        assert {ranks.end(rank) for rank in (1, 5, 6)} <= {"orphan", "fenced"}, (
            "by itself, or told by a decision"
        )


@pytest.mark.guarantee(
    "On etcd", "A rank that was declared dead while stopped or running ends itself and never commits."
)
def test_rank_declared_dead_ends_itself_and_never_commits(
    server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    etcd = EtcdClient(server.endpoint, prefix=prefix, token="secret")
    with EtcdRanks(server.endpoint, prefix, tmp_path, [range(5)]) as ranks:
        ranks.commit([0, 1, 2, 3, 4])
        ranks.strike(1, signal.SIGSTOP)
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


@pytest.mark.guarantee(
    "On etcd", "An etcd that is killed and restarted, or stopped for a while, costs no rank."
)
def test_etcd_killed_or_stopped_for_a_while_costs_no_rank(prefix: str, tmp_path: Path) -> None:
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


@pytest.mark.guarantee("On etcd", "A lost host takes only its own ranks, also if only its agent is stopped.")
def test_lost_host_takes_only_its_own_ranks(server: EtcdServer, prefix: str, tmp_path: Path) -> None:
    """One host vanishes with all its ranks; on another the agent alone is stopped, and its ranks run."""
    with EtcdRanks(server.endpoint, prefix, tmp_path, [[0, 3], [1, 4], [2, 5]], ttl=2.0) as ranks:
        ranks.commit([0, 1, 2, 3, 4, 5])
        ranks.agents[1].send_signal(signal.SIGSTOP)
        ranks.agents[2].kill()
        ranks.commit([0, 3])
        ranks.wait(lambda: ranks.end(1) == ranks.end(4) == "fenced")
        ranks.agents[1].kill()
        ranks.finish([0, 3])


@pytest.mark.guarantee(
    "On etcd", "Mixtures of deaths, declarations, pauses and outages keep every invariant."
)
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
def test_mixed_deaths_declarations_pauses_and_outages_keep_every_invariant(
    seed: int, prefix: str, tmp_path: Path
) -> None:
    rng, runs = random.Random(seed), tmp_path / "run"
    carrier, replica_size = ("gloo", 2) if seed % 2 else ("", 1)
    runs.mkdir()
    with EtcdServer(tmp_path / "etcd") as server:
        etcd = EtcdClient(server.endpoint, prefix=prefix, token="secret")
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
            time.sleep(1.1)  # the stopped ranks have been woken by now
            ranks.finish(living)


@pytest.mark.guarantee(
    "On etcd", "An etcd that is killed and restarted, or stopped for a while, costs no rank."
)
@pytest.mark.soak
def test_etcd_stopped_for_long_costs_no_rank(prefix: str, tmp_path: Path) -> None:
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


@pytest.mark.soak
def test_leases_of_two_seconds_hold_on_busy_cores(prefix: str, tmp_path: Path) -> None:
    """Many more ranks than cores, half of them computing."""
    hosts = [range(first, first + 12) for first in range(0, 48, 12)]
    everyone, burners = list(range(48)), []
    with EtcdServer() as server, EtcdRanks(server.endpoint, prefix, tmp_path, hosts, pace=0.05) as ranks:
        ranks.commit(everyone)
        try:
            burners += [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                ranks.commit(everyone, 1)
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()
        assert len(ranks.diary(0, "census")) == 1, "somebody was lost"
        ranks.finish(everyone)
