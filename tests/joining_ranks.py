"""Runs ranks that others join later (`tests/programs/joining.py`), and reads what they wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from patience import wait_until

from recover.world.fabrics.etcd.client import EtcdClient
from recover.world.fabrics.etcd.entry import place
from recover.world.rank_exit import STACK_SIGNAL

PROGRAM = Path(__file__).parent / "programs" / "joining.py"


class JoiningRanks:
    """A job of `size` ranks, of which the first are started at once. Ends all of them at the end of the `with`."""

    def __init__(
        self,
        endpoint: str,
        prefix: str,
        directory: Path,
        size: int,
        kind: str = "plain",
        replica_size: int = 1,
        steps: int = 10_000,
        batch: int = 6,
        pace: float = 0.02,
        policy: str = "balanced",
        faults: Sequence[str] = (),
        hang_limit: float | None = None,
        stuck: bool = False,
        own_count: bool = False,
        instalment: int = 0,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.replica_size = directory, replica_size
        self._etcd = EtcdClient(endpoint, prefix=prefix, token="secret")
        self._read: dict[int, tuple[int, list[dict[str, Any]]]] = {}  # of each diary: bytes read, and lines
        scenario = {
            "endpoint": endpoint,
            "prefix": prefix,
            "directory": str(directory),
            "size": size,
            "replica_size": replica_size,
            "kind": kind,
            "steps": steps,
            "batch": batch,
            "pace": pace,
            "policy": policy,
            "faults": list(faults),
            "hang_limit": hang_limit,
            "stuck": stuck,
            "own_count": own_count,
            "instalment": instalment,
        }
        self._agent = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM), json.dumps(scenario)], stdin=subprocess.PIPE
        )
        self.start(range(size))

    def __enter__(self) -> JoiningRanks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._agent.stdin is not None
        self._agent.stdin.close()
        self._agent.kill()  # its ranks go with it
        self._agent.wait()

    def start(self, ranks: Iterable[int]) -> None:
        assert self._agent.stdin is not None
        self._agent.stdin.write(json.dumps(list(ranks)).encode() + b"\n")
        self._agent.stdin.flush()

    def start_another_after(self, rank: int, steps: int) -> int:
        """Start a joining replica of one rank once `rank` has taken so many steps. Returns its rank."""
        self.wait_for(rank, steps)
        (came,) = self.start_another()
        return came

    def start_another(self) -> list[int]:
        """Start a joining replica. Returns its ranks, which are new numbers."""
        ranks = list(place(self._etcd))
        self.start(ranks)
        return ranks

    def diary(self, rank: int, kind: str = "commit") -> list[dict[str, Any]]:
        path, (at, lines) = self.directory / f"diary-{rank}.jsonl", self._read.get(rank, (0, []))
        if path.exists():
            with open(path, "rb") as file:  # only what is new in it: some tests look again and again
                file.seek(at)
                whole = file.read().rpartition(b"\n")[0]
            lines += map(json.loads, whole.splitlines())
            self._read[rank] = at + len(whole) + bool(whole), lines
        return [line for line in lines if line["kind"] == kind]

    def kill(self, rank: int) -> None:
        os.kill(self.diary(rank, "started")[0]["pid"], signal.SIGKILL)

    def write_stacks(self) -> None:
        """Write the stacks of all living ranks to `ranks/N.stack`: they show what the ranks wait for."""
        for path in self.directory.glob("diary-*.jsonl"):
            for line in self.diary(int(path.stem.partition("-")[2]), "started"):
                with suppress(ProcessLookupError):
                    os.kill(line["pid"], STACK_SIGNAL)
        time.sleep(1.0)

    def wait_for(self, rank: int, commits: int) -> None:
        """Wait until a rank has committed so many steps."""
        assert wait_until(lambda: len(self.diary(rank)) >= commits), f"rank {rank}: {self.end(rank)}"

    def finish(self, ranks: Iterable[int]) -> int:
        """End the run. Returns the last step; these ranks must have come to its end."""
        (self.directory / "stop").touch()
        return self.wait_for_ends(ranks)

    def wait_for_ends(self, ranks: Iterable[int]) -> int:
        for rank in ranks:
            wait_until(lambda rank=rank: self.end(rank) != "")
            assert self.end(rank) == "done", f"rank {rank}: {self.end(rank)}"
        (last,) = {self.diary(rank)[-1]["step"] for rank in ranks}
        return int(last)

    def differences(self, calm: JoiningRanks, ranks: Iterable[int]) -> list[tuple[int, int, str]]:
        """Where these ranks differed from the same shard of the calm run: rank, step, and what differed."""
        names = ("samples", "loss", "lr", "average", "counted", "parameters", "optimizer")
        expected = {
            shard: {line["step"]: line for line in calm.diary(shard)} for shard in range(self.replica_size)
        }
        return [
            (rank, line["step"], name)
            for rank in ranks
            for line in self.diary(rank)
            for name in names
            if line[name] != expected[rank % self.replica_size][line["step"]][name]
        ]

    def end(self, rank: int) -> str:
        path = self.directory / "ranks" / f"{rank}.end"
        return str(json.loads(path.read_text())["end"]) if path.exists() and path.stat().st_size else ""
