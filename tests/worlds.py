"""Runs programs under `recover run` with deaths on schedule, and checks what the ranks wrote against the laws."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patience import PATIENCE

from recover.job.grid import Grid

PROGRAMS = Path(__file__).parent / "programs"
# On a machine with GPUs: TEST_DEVICE=cuda TEST_CARRIERS="mpi gloo nccl".
CARRIERS = tuple(os.environ.get("TEST_CARRIERS", "mpi gloo").split())


@dataclass
class Outcome:
    """The files and the output of a run."""

    code: int
    output: str
    grid: Grid
    diaries: dict[int, list[dict[str, Any]]]
    ends: dict[int, str] = field(default_factory=dict)

    def notes(self, rank: int, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in self.diaries[rank] if entry["kind"] == kind]

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in self.diaries if self.ends.get(rank) == "done"]


def run_world(
    program: str,
    run_dir: Path,
    ranks: int,
    arguments: Sequence[object] = (),
    replica_size: int = 1,
    kills: Sequence[str] = (),
    hang_limit: float | None = None,
    link_timeout: float | None = None,
) -> Outcome:
    """Start a program of `tests/programs`; a hang is ended by the launcher, which prints every rank's stack."""
    command = [sys.executable, "-m", "recover.cli", "run", "-n", str(ranks)]
    command += ["--replica-size", str(replica_size), "--run-dir", str(run_dir), "--timeout", str(PATIENCE)]
    command += ["--hang-limit", str(hang_limit)] if hang_limit else []
    command += ["--link-timeout", str(link_timeout)] if link_timeout else []
    words = [word if isinstance(word, str) else json.dumps(word) for word in arguments]
    result = subprocess.run(
        [*command, str(PROGRAMS / program), *words],
        env={**_environment(), "RECOVER_KILL": " ".join(kills)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    diaries: dict[int, list[dict[str, Any]]] = {}
    ends: dict[int, str] = {}
    for rank in range(ranks):
        diary, end = run_dir / f"diary-{rank}.jsonl", run_dir / "ranks" / f"{rank}.end"
        diaries[rank] = (
            [json.loads(line) for line in diary.read_text().splitlines()] if diary.exists() else []
        )
        if end.exists():
            ends[rank] = json.loads(end.read_text())["end"]
    return Outcome(result.returncode, result.stdout, Grid.of(ranks, replica_size), diaries, ends)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RECOVER_")}


def check_laws(outcome: Outcome, victims: set[int]) -> None:
    """All survivors hold the same membership, epoch, census and verdict; only the victims' replicas are lost."""
    grid, story = outcome.grid, outcome.output
    assert outcome.code == 0, story
    spoiled = {grid.replica(rank) for rank in victims}
    expected = [rank for rank in range(grid.ranks) if grid.replica(rank) not in spoiled]
    assert outcome.survivors == expected, f"survivors {outcome.survivors}, expected {expected}\n{story}"
    for kind, key, facts in (
        ("census", ("epoch",), ("members", "lost", "steps", "digest")),
        ("verdict", ("step", "epoch"), ("agreed",)),
    ):
        views: dict[Any, dict[str, list[int]]] = {}
        for rank in expected:  # an agreement whose result only dead ranks have seen binds no survivor
            for entry in outcome.notes(rank, kind):
                view = views.setdefault(tuple(entry[k] for k in key), {})
                view.setdefault(json.dumps([entry[f] for f in facts]), []).append(rank)
        for where, view in views.items():
            assert len(view) == 1, f"{kind} {where} differs: {view}\n{story}"
    ends = {json.dumps([d["epoch"], d["members"]]) for rank in expected for d in outcome.notes(rank, "done")}
    assert ends == {json.dumps([max(e["epoch"] for e in outcome.notes(expected[0], "census")), expected])}, (
        story
    )
    for rank in expected:
        for census in outcome.notes(rank, "census"):
            assert len(set(census["steps"])) <= 1, f"a census joins different steps: {census}"
