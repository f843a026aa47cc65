"""The laws that every schedule of a simulated training run must keep; held against all that the ranks wrote down, the
dead ones included."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulated_run import DRIFTED, Diary, Rank, has_drifted
from simulated_schedules import BATCH, STEPS, Schedule, without_one_fault

from recover.fabrics.simulated import HangError, Simulation
from recover.world.membership import FAILURES

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass(frozen=True)
class Played:
    """A schedule that was run, and what its ranks wrote down."""

    schedule: Schedule
    simulation: Simulation
    diaries: list[Diary]
    run_dir: Path

    @property
    def survivors(self) -> list[int]:
        return sorted(self.simulation.finished)

    def kinds(self) -> Iterator[str]:
        """What has happened in it."""
        dead = self.simulation.dead
        yield from dead.values()
        yield from set(self.simulation.finished.values())
        if self.simulation.stopped:
            yield "stopped"
        if any(dead.get(rank) == "excluded" for rank in self.simulation.sick):
            yield "left out"
        yield from (f"at {self.diaries[rank].place}" for rank, why in dead.items() if why == "killed")
        for _, incidents in self.diaries[self.survivors[0]].incidents if self.survivors else ():
            losses = [incident.dead_replicas for incident in incidents if incident.dead_replicas]
            yield from ["two at once"] * any(len(those) > 1 for those in losses)
            yield from ["one in the recovery from another"] * (len(losses) > 1)


def play(schedule: Schedule) -> Played:
    """Run one schedule and check it. Raises AssertionError or HangError."""
    simulation = Simulation(
        schedule.grid,
        schedule.seed,
        schedule.kills,
        schedule.stalls,
        sick=schedule.sick,
        stops=schedule.stops,
    )
    simulation.reluctant = schedule.reluctant
    diaries = [Diary() for _ in range(schedule.grid.ranks)]
    with tempfile.TemporaryDirectory(prefix="simulated-", dir=MEMORY) as directory:
        played = Played(schedule, simulation, diaries, Path(directory))
        simulation.run(
            lambda fabric: Rank(schedule, simulation, fabric, diaries[fabric.rank], played.run_dir).run()
        )
        check(played)
    return played


def check(played: Played) -> None:
    """Faults may cost their own replica and nothing else; survivors hold one view, one sum and one journal."""
    _check_ends(played)
    _check_views(played)
    for rank, diary in enumerate(played.diaries):
        replica = played.simulation.grid.replica(rank)
        for number, commit in diary.commits.items():
            _check_commit(played.schedule, replica, number, *commit)
    for rank in played.survivors:
        _check_incidents(played.schedule, played.diaries[rank])
    if set(played.simulation.finished.values()) == {"done"}:
        last = _check_last_step(played)
        _check_journal(played, last)


def _check_ends(played: Played) -> None:
    schedule, simulation, diaries = played.schedule, played.simulation, played.diaries
    grid, outcome = simulation.grid, simulation.finished
    sick = {r for r, (first, last, _) in simulation.sick.items() if last - first + 1 >= FAILURES}
    struck = {r for r, why in simulation.dead.items() if why == "killed"} | simulation.stopped | sick
    struck |= set(schedule.drifts) | {r for r, diary in enumerate(diaries) if diary.raised}
    if schedule.stalls:
        struck |= {r for r, why in simulation.dead.items() if why == "fenced"}
    spoiled = {grid.replica(rank) for rank in struck}
    ends = set(outcome.values())
    assert len(ends) <= 1, f"the survivors have come to different ends: {outcome}"
    if ends - {"done"}:  # all end by it: who comes to it a moment later than a mate may see that one go
        spoiled |= {grid.replica(rank) for rank in played.survivors}
    for rank, why in simulation.dead.items():
        assert grid.replica(rank) in spoiled, f"bystander {rank} lost: {why}"
    whole = {rank for rank in range(grid.ranks) if grid.replica(rank) not in spoiled}
    assert whole <= outcome.keys(), f"lost without a cause: {whole - outcome.keys()}"
    allowed = {"done"}
    allowed |= {"no carrier"} if sick else set()
    allowed |= {"diverged"} if schedule.drifts else set()
    allowed |= {"poisoned"} if schedule.poison else set()
    allowed |= {"out of range"} if schedule.too_large else set()
    assert ends <= allowed, f"{ends} without a cause"


def _check_views(played: Played) -> None:
    """Among the survivors: what only the dead have seen (an agreement whose result died with them) binds nobody."""
    for what in ("censuses", "commits"):
        views: dict[int, dict[Any, list[int]]] = {}
        for rank in played.survivors:
            for key, entry in getattr(played.diaries[rank], what).items():
                views.setdefault(key, {}).setdefault(entry, []).append(rank)
        for key, view in views.items():
            assert len(view) == 1, f"{what} {key} differ: {view}"


def _check_commit(
    schedule: Schedule, replica: int, number: int, samples: tuple[int, ...], result: Any, weight: float
) -> None:
    """B microbatches, each once, of this step; nothing that a drifted replica computed, unless it is the last one."""
    assert weight == BATCH, f"step {number} was taken on {weight} microbatches"
    if schedule.policy == "balanced":
        assert samples == tuple(range((number - 1) * BATCH, number * BATCH)), f"step {number}: {samples}"
    mark = number + DRIFTED * has_drifted(schedule, replica, number)
    for sums in result:
        counted = [value for value in sums if value]
        assert counted == [mark] * BATCH, f"step {number} has the sum {sums} on replica {replica}"


def _check_incidents(schedule: Schedule, diary: Diary) -> None:
    """What is not lost is not run again. (Who left a step may bring nothing to it, and is dealt to.)"""
    for layout, incidents in diary.incidents if not schedule.leaves else ():
        for incident in incidents[:1]:  # later ones follow another plan than the layout
            lost = [layout.share(replica) for replica in incident.dead_replicas]
            most = sum(len(share.run) for share in lost if share.counts)
            assert incident.extra_microbatches <= most, f"{incident} for the loss of {lost}"
            if schedule.policy == "balanced":
                assert not incident.discarded_microbatches, f"{incident} throws work away"


def _check_last_step(played: Played) -> int:
    commits = {tuple(played.diaries[rank].commits) for rank in played.survivors}
    assert len(commits) == 1, f"the survivors have committed different steps: {commits}"
    (numbers,) = commits
    last = numbers[-1] if numbers else 0
    assert numbers == tuple(range(1, last + 1))
    asked = played.schedule.asks_to_stop
    assert last == STEPS or asked, f"the run ended after step {last}"
    if asked and asked[0] in played.survivors:
        assert last == min(STEPS, asked[1]), f"step {asked[1]} was to be the last, and {last} is"
    return last


def _check_journal(played: Played, last: int) -> None:
    """Every step and every loss is in it once, whoever wrote and died."""
    steps, incidents = (
        [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for path in (played.run_dir / "steps.jsonl", played.run_dir / "incidents.jsonl")
    )
    assert [line["step"] for line in steps] == list(range(1, last + 1)), f"the journal has {steps}"
    keys = [(line["step"], line["epoch"]) for line in incidents]
    assert keys == sorted(set(keys)), f"the journal has {incidents}"
    told = [rank for line in incidents for rank in line["dead_ranks"]]
    (lost,) = {played.diaries[rank].lost for rank in played.survivors}
    assert sorted(told) == sorted(lost), f"{lost} were lost, and the journal has {incidents}"


def violation(schedule: Schedule) -> str | None:
    """What is wrong with a schedule, if anything is."""
    try:
        play(schedule)
    except (AssertionError, HangError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def shrink(schedule: Schedule) -> Schedule:
    """The same violation (or another) with as few faults as can be found by leaving out one after the other."""
    smaller = True
    while smaller:
        smaller = False
        for less in without_one_fault(schedule):
            if violation(less):
                schedule, smaller = less, True
                break
    return schedule
