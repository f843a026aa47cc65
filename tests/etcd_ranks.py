"""Runs hosts of ranks on the etcd fabric (`tests/programs/etcd_host.py`), and checks its laws on their diaries."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from patience import PATIENCE

from recover.world.fabrics.etcd.agreement import Decision
from recover.world.fabrics.etcd.client import KeyValue
from recover.world.fabrics.etcd.host_lease import GRACE, TTL

PROGRAM = Path(__file__).parent / "programs" / "etcd_host.py"


class EtcdRanks:
    """`hosts`: the ranks of each. Ends all of them at the end of the `with`."""

    def __init__(
        self,
        endpoint: str,
        prefix: str,
        directory: Path,
        hosts: Sequence[Sequence[int]],
        carrier: str = "",
        ttl: float = TTL,
        grace: float = GRACE,
        replica_size: int = 1,
        patience: float = 30.0,
        pace: float = 0.005,
    ) -> None:
        self.size, self.directory = sum(map(len, hosts)), directory
        shared = {"endpoint": endpoint, "prefix": prefix, "size": self.size, "carrier": carrier}
        shared |= {
            "ttl": ttl,
            "grace": grace,
            "replica_size": replica_size,
            "patience": patience,
            "pace": pace,
        }
        self._scenarios = [
            shared
            | {
                "directory": str(directory),
                "name": f"h{number}",
                "ranks": list(ranks),
                "address": "127.0.0.1",
            }
            for number, ranks in enumerate(hosts)
        ]
        self.agents: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> EtcdRanks:
        for scenario in self._scenarios:
            command = [sys.executable, "-P", str(PROGRAM), json.dumps(scenario)]
            with open(self.directory / f"{scenario['name']}.out", "wb") as out:
                self.agents.append(self.start(scenario, command, out))
        return self

    def start(self, scenario: dict[str, Any], command: Sequence[str], out: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdout=out, stderr=out)

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.kill()  # its ranks go with it
            agent.wait()

    def diary(self, rank: int, kind: str = "") -> list[dict[str, Any]]:
        path = self.directory / f"diary-{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = text.rpartition("\n")[0].splitlines()  # the last one may be half written
        notes = [json.loads(line) for line in lines]
        return [note for note in notes if not kind or note["kind"] == kind]

    def end(self, rank: int) -> str:
        path = self.directory / "ranks" / f"{rank}.end"
        return json.loads(path.read_text())["end"] if path.exists() else ""

    def strike(self, rank: int, how: signal.Signals) -> None:
        os.kill(self.diary(rank, "census")[0]["pid"], how)

    def wait(self, for_what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not for_what():
            assert time.monotonic() < deadline, self.picture()
            assert all(agent.poll() != 1 for agent in self.agents), self.picture()
            time.sleep(0.02)

    def picture(self) -> str:
        outputs = "\n".join(path.read_text() for path in self.directory.glob("*.out"))
        return f"{outputs}\n" + "\n".join(f"{rank}: {self.diary(rank)[-2:]}" for rank in range(self.size))

    def commit(self, ranks: Sequence[int], more: int = 5) -> None:
        """Wait until these ranks alone are the members, and have committed so many steps since."""
        counts = {rank: len(self.diary(rank, "commit")) for rank in ranks}

        def through() -> bool:
            return all(
                (census := self.diary(rank, "census"))
                and census[-1]["members"] == list(ranks)
                and len(self.diary(rank, "commit")) >= counts[rank] + more
                for rank in ranks
            )

        self.wait(through)

    def finish(self, survivors: Sequence[int]) -> None:
        """Let the survivors end, and check all diaries against the laws."""
        (self.directory / "stop").touch()
        self.wait(lambda: all(self.end(rank) for rank in survivors))
        assert {self.end(rank) for rank in survivors} == {"done"}, self.picture()
        for agent in self.agents:
            if agent.poll() is None:
                self.wait(lambda agent=agent: agent.poll() is not None)  # type: ignore[misc]
        self.check(survivors)

    def check(self, survivors: Sequence[int]) -> None:
        decisions: dict[int, str] = {}
        for rank in range(self.size):
            for note in self.diary(rank):
                told = decisions.setdefault(note["number"], note["decision"])
                assert note["decision"] == told, "one agreement was decided twice"
                assert rank not in json.loads(told)["dead"], "one that is dead has acted on a decision"
        gone: set[int] = set()
        for _, told in sorted(decisions.items()):
            decision = Decision.of(KeyValue("", told.encode(), 1, 1))
            assert gone.isdisjoint(decision.participants), "death is final"
            gone |= decision.dead - decision.participants
        for kind in ("census", "commit"):
            stories = {
                rank: [
                    {key: note[key] for key in note.keys() - {"pid", "at"}} for note in self.diary(rank, kind)
                ]
                for rank in range(self.size)
            }
            longest = stories[survivors[0]]
            assert all(stories[rank] == longest for rank in survivors), "survivors tell different stories"
            for rank, story in stories.items():  # the story of a dead rank is the same, up to some point
                assert story == longest[: len(story)], f"rank {rank} went a way of its own"
        members = [set(note["members"]) for note in self.diary(survivors[0], "census")]
        assert all(later <= before for before, later in pairwise(members))
        assert members[-1] == set(survivors)
