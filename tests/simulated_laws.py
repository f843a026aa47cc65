"""The laws that every schedule of a simulated training run must keep, checked against the notes of all ranks, dead
ranks included."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recover_lab.simulated_world.scheduler import HangError, Simulation
from simulated_run import BUCKETS, DRIFTED, LARGE, WRONG, Diary, Rank, has_drifted
from simulated_schedules import BATCH, Schedule, without_one_fault

from recover.gradients.exponents import Exponents, codes_of
from recover.step.sum_check import TRIES as WRONG_TRIES
from recover.step.transaction import TRIES
from recover.world.liveness.board import ScriptStage
from recover.world.membership import FAILURES

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
# How ranks end that the others removed: by themselves, or because another rank ended them.
REMOVED = ("excluded", "seen off")


@dataclass(frozen=True)
class Played:
    """A schedule that was run, and the notes of its ranks."""

    schedule: Schedule
    simulation: Simulation
    diaries: list[Diary]
    run_dir: Path

    @property
    def survivors(self) -> list[int]:
        return sorted(self.simulation.finished)

    def censuses(self) -> dict[int, Any]:
        """Censuses by epoch, each as some rank that took part has seen it."""
        return {epoch: view for diary in self.diaries for epoch, view in diary.censuses.items()}

    def kinds(self) -> Iterator[str]:
        """The events that occurred in this run."""
        dead = self.simulation.dead
        yield from dead.values()
        yield from set(self.simulation.finished.values())
        if self.simulation.stopped:
            yield "stopped"
        if any(self.simulation.dead.get(rank) in REMOVED for rank in self.schedule.errs):
            yield "evicted for a wrong gradient"
        if any(self.simulation.dead.get(rank) in REMOVED for rank in self.schedule.wrong_sums):
            yield "evicted for a wrong sum"
        if any(
            incident.wrong_sums for diary in self.diaries for _, them in diary.incidents for incident in them
        ):
            yield "reduced again"
        if any(slots for diary in self.diaries for slots in diary.verified.values()):
            yield "verified"
        large = self.schedule.too_large
        if large and any(large[0] in self.diaries[rank].commits for rank in self.survivors):
            yield "reran"
        for epoch, (_, lost, joined) in self.censuses().items():
            if epoch > 1 and joined:
                yield "joined and lost in one repair" if lost else "joined"
        if self.survivors and not self.simulation.noticed.isdisjoint(self.survivors):
            yield "stayed although noticed"
        ends = {rank for link in self.simulation.broken_links for rank in link}
        if any(dead.get(rank) == "excluded" for rank in ends):
            yield "parted"
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
        kept=schedule.kept,
        joiners=len(schedule.ranks) // schedule.grid.replica_size - schedule.grid.replicas,
        suspicions=schedule.suspicions,
        cuts=schedule.cuts,
    )
    simulation.reluctant, simulation.torn = schedule.reluctant, dict(schedule.torn)
    simulation.notices = dict(schedule.notices)
    simulation.cut_links(schedule.links)
    diaries = [Diary() for _ in schedule.ranks]
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
        for number, commit in diary.commits.items():
            _check_commit(played.schedule, rank, number, diary.flaws[number], diary.verified[number], *commit)
    for rank in played.survivors:
        _check_incidents(played.schedule, played.diaries[rank])
    if set(played.simulation.finished.values()) == {"done"}:
        last = _check_last_step(played)
        _check_journal(played, last)


def _check_ends(played: Played) -> None:
    schedule, simulation, diaries = played.schedule, played.simulation, played.diaries
    grid, outcome = simulation.grid, simulation.finished
    # A reluctant rank may look stuck before the others end it.
    removed = (*REMOVED, "fenced") if schedule.reluctant else REMOVED
    sick = {r for r, (first, last, _) in simulation.sick.items() if last - first + 1 >= FAILURES}
    struck = {r for r, why in simulation.dead.items() if why == "killed"} | simulation.stopped | sick
    struck |= {*schedule.suspicions, *schedule.cuts, *schedule.errs}
    # A sum that is reduced again, and is right then, costs nothing.
    struck |= {
        r for r, (_, times, where) in schedule.wrong_sums.items() if where == "local" or times > WRONG_TRIES
    }
    struck |= {rank for link in simulation.broken_links for rank in link}  # one end of each goes, at least
    if any(count >= TRIES for count in schedule.torn.values()) or _half_are_sick(played, sick):
        # Where a connection fails, both of its ends fail: a replica that joined in the same repair may be removed with
        # the failing one. And where half of all replicas fail, joining replicas are removed before any member.
        struck |= {rank for rank, why in simulation.dead.items() if why in removed and rank >= grid.ranks}
    struck |= set(schedule.drifts) | {r for r, diary in enumerate(diaries) if diary.raised}
    # Where the state of every original replica has changed by itself, no replica can tell that from state that was
    # damaged on its way to a joining replica. Joined replicas never outvote the sender of their state, so they go.
    drifted = set(grid.replicas_of(schedule.drifts))
    for members, lost, _ in played.censuses().values():
        if drifted and set(grid.replicas_of(rank for rank in members if rank < grid.ranks)) <= drifted:
            # The repair that removes them may have no census: possibly no rank has lived to complete it.
            struck |= {r for r in (*members, *lost) if r >= grid.ranks and simulation.dead.get(r) in removed}
    if schedule.stalls:
        struck |= {r for r, why in simulation.dead.items() if why == "fenced"}
    if schedule.reluctant and schedule.instalments:
        # The wait for the end of a reluctant rank is longer than the hang limit here, and a joining rank is one vote
        # behind meanwhile: it looks stuck.
        struck |= {r for r, why in simulation.dead.items() if why == "fenced" and r >= grid.ranks}
    spoiled = {grid.replica(rank) for rank in struck}
    # Where all members end, joining ranks find no member that could give them the state.
    given_up = {rank for rank in outcome if rank >= grid.ranks and not diaries[rank].commits}
    ends = {end for rank, end in outcome.items() if rank not in given_up or end != "nobody holds the state"}
    ends = ends or set(outcome.values())
    assert len(ends) <= 1, f"the survivors have come to different ends: {outcome}"
    if ends - {"done"}:  # all end by it: a rank that comes to it later than a peer may see that peer go
        spoiled |= {grid.replica(rank) for rank in played.survivors}
    # A joining rank leaves when it finds that the job has ended; its peer may see it leave before.
    unneeded = {rank for rank, why in simulation.dead.items() if why == "unneeded"}
    unneeded |= {rank for rank in simulation.dead if grid.replica_peers(rank) & unneeded}
    # Where the state comes in instalments, the job may end while the joining rank is in the group.
    early = {rank for rank in unneeded if schedule.instalments and not diaries[rank].commits}
    assert all(rank >= grid.ranks and not diaries[rank].censuses for rank in unneeded - early), unneeded
    # A replica of which a rank was asked to leave leaves as a whole; a reluctant rank is ended by the others.
    left = {
        rank
        for rank, why in simulation.dead.items()
        if why == "left" or (why in removed and schedule.reluctant)
    }
    left = {rank for rank in left if grid.replica(rank) in grid.replicas_of(simulation.noticed)}
    for rank in left:
        stay = grid.replica_peers(rank) - left
        assert not stay or grid.replica(rank) in spoiled, (
            f"{rank} has left, and {stay} of its replica have not"
        )
    spoiled |= {grid.replica(rank) for rank in left}
    for rank, why in simulation.dead.items():
        assert rank in unneeded or grid.replica(rank) in spoiled, f"bystander {rank} lost: {why}"
    whole = {rank for rank in schedule.ranks if grid.replica(rank) not in spoiled} - unneeded
    if simulation.stopped - simulation.gone:  # no rank is left to fence it, and joining ranks wait for it
        without_state = {
            r for r in whole if r >= grid.ranks and simulation.board.stage(r) < ScriptStage.STATE
        }
        whole -= simulation.asked.keys() | without_state
    assert whole <= outcome.keys(), f"lost without a cause: {whole - outcome.keys()}"
    allowed = {"done"}
    # Rounds that fail because of a broken link add to those of ranks that are sick for a short time.
    allowed |= {"no carrier"} if sick or (simulation.sick and simulation.broken_links) else set()
    if all(rank >= grid.ranks for rank in outcome):
        allowed |= {"nobody holds the state"}
    allowed |= {"diverged"} if schedule.drifts else set()
    allowed |= {"poisoned"} if schedule.poison else set()
    # Two replicas with different results, or one with several, and no other to decide.
    allowed |= {"corrupt"} if schedule.errs else set()
    allowed |= {"corrupt"} if struck.intersection(schedule.wrong_sums) else set()
    assert ends <= allowed, f"{ends} without a cause"


def _half_are_sick(played: Played, sick: set[int]) -> bool:
    """Whether half or more of the replicas that held the state at some time were sick.

    A repair that no rank lived to complete has no census: its members are the original ranks that were alive at some
    time before the first rank was removed.
    """
    simulation = played.simulation
    replicas_of = simulation.grid.replicas_of
    worlds = [*(members for members, _, _ in played.censuses().values()), played.survivors]
    in_order = list(simulation.dead)
    first = next((i for i, rank in enumerate(in_order) if simulation.dead[rank] in REMOVED), len(in_order))
    members = {*range(simulation.grid.ranks)}
    worlds += [simulation.grid.whole(members.difference(in_order[:deaths])) for deaths in range(first + 1)]
    for world in worlds:
        holders = [rank for rank in world if rank < simulation.grid.ranks or played.diaries[rank].commits]
        if 2 * len(replicas_of(sick.intersection(world))) >= len(replicas_of(holders)) > 0:
            return True
    return False


def _check_views(played: Played) -> None:
    """Survivors hold equal censuses and commits. A result that only dead ranks have seen (of an agreement whose result
    died with them) binds no survivor. But where decisions are kept, the dead have seen the same."""
    for what in ("censuses", "commits"):
        views: dict[int, dict[Any, list[int]]] = {}
        for rank in played.schedule.ranks if played.schedule.kept else played.survivors:
            for key, entry in getattr(played.diaries[rank], what).items():
                views.setdefault(key, {}).setdefault(entry, []).append(rank)
        for key, view in views.items():
            assert len(view) == 1, f"{what} {key} differ: {view}"


def _check_commit(
    schedule: Schedule,
    rank: int,
    number: int,
    flaw: float,
    verified: tuple[int, ...],
    samples: tuple[int, ...],
    result: Any,
    weight: float,
    exponents: tuple[int, ...],
) -> None:
    """A commit holds B microbatches of this step, each once; no result of a drifted replica, unless it is the last
    replica; and the exponents of a run without failures, also where a value was too large and its owner has died."""
    assert weight == BATCH, f"step {number} was taken on {weight} microbatches"
    if schedule.policy == "balanced":
        assert samples == tuple(range((number - 1) * BATCH, number * BATCH)), f"step {number}: {samples}"
        assert exponents == calm_exponents(schedule, number), f"step {number}: {exponents}"
    if rank < schedule.grid.ranks:  # a joined rank has the state that it was given
        assert flaw == DRIFTED * has_drifted(schedule, schedule.grid.replica(rank), number)
    for sums in result:
        counted = [value for value in sums if value]
        if schedule.errs:  # unverified slots may be wrong, by the error of the device
            assert len(counted) == BATCH, f"step {number} has the sum {sums} on rank {rank}"
            assert all(0 <= value - number - flaw < 2**10 * WRONG for value in counted), (
                f"step {number}: {sums}"
            )
            wrong = [slot for slot in verified if sums[slot] != number + flaw]
            assert not wrong, (
                f"step {number}: verified slots {wrong} are wrong in the sum {sums} on rank {rank}"
            )
        else:
            assert counted == [number + flaw] * BATCH, f"step {number} has the sum {sums} on rank {rank}"


def calm_exponents(schedule: Schedule, number: int) -> tuple[int, ...]:
    """The exponents with which a run without failures commits this step."""
    exponents = Exponents(BATCH, [f"bucket {number}" for number in range(BUCKETS)])
    for step in range(1, number + 1):
        exponents.begin(step)
        is_large = schedule.too_large is not None and schedule.too_large[0] == step
        plain = float(step)
        maxima = codes_of([1.0, LARGE if is_large else plain, *[plain] * (BUCKETS - 1)])
        exponents.rerun(maxima)
        exponents.commit(maxima)
    return tuple(exponents.current.tolist())


def _check_incidents(schedule: Schedule, diary: Diary) -> None:
    """Microbatches that are not lost are not run again. (A replica that left a step early may hold none of it.)"""
    for layout, incidents in diary.incidents if not schedule.leaves else ():
        assert not any(i.redo_ms for i in incidents if i.joined_ranks), "a join repeats nothing"
        for incident in incidents:
            if incident.left_ranks and not incident.dead_ranks:
                repeated = incident.extra_microbatches + incident.discarded_microbatches
                # While other replicas join, a vote may have failed because of them as well.
                again = 0 if schedule.instalments else incident.redo_ms
                assert repeated + again == 0, f"{incident} repeats work for a leave"
        # A replica that was lost before the layout was made is not in it, and later incidents follow another plan.
        inside = [
            i
            for i in incidents
            if not (i.joined_ranks or i.left_ranks) and set(i.dead_replicas) <= set(layout.replicas)
        ]
        # The loss of a joining replica in the midst of the step changes the plan, too.
        joining = [
            i for i in incidents if schedule.instalments and not set(i.dead_replicas) <= set(layout.replicas)
        ]
        for incident in inside[:1] if not joining else ():
            lost = [layout.share(replica) for replica in incident.dead_replicas]
            most = sum(len(share.run) for share in lost if share.counts)
            assert incident.extra_microbatches <= most, f"{incident} for the loss of {lost}"
            if schedule.policy == "balanced":
                assert not incident.discarded_microbatches, f"{incident} throws work away"


def _check_last_step(played: Played) -> int:
    last = max((step for rank in played.survivors for step in played.diaries[rank].commits), default=0)
    for rank in played.survivors:
        numbers = tuple(played.diaries[rank].commits)
        began = 1 if rank < played.simulation.grid.ranks else min(numbers, default=last + 1)
        assert numbers == tuple(range(began, last + 1)), f"rank {rank} has committed {numbers} of {last}"
    grid, noticed = played.simulation.grid, played.simulation.noticed
    # All replicas stop where none would stay.
    all_leave = set(grid.replicas_of(played.survivors)) <= set(grid.replicas_of(noticed))
    assert last == played.schedule.steps or played.schedule.asks_to_stop or all_leave, (
        f"the run ended after step {last}"
    )
    asked = played.schedule.asks_to_stop
    if asked and asked[0] in played.survivors and not all_leave:
        assert last == min(played.schedule.steps, asked[1]), (
            f"step {asked[1]} was to be the last, and {last} is"
        )
    return last


def _check_journal(played: Played, last: int) -> None:
    """Every step and every loss is in the journal once, whichever ranks wrote it and died."""
    steps, incidents = (
        [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for path in (played.run_dir / "steps.jsonl", played.run_dir / "incidents.jsonl")
    )
    assert [line["step"] for line in steps] == list(range(1, last + 1)), f"the journal has {steps}"
    keys = [(line["step"], line["epoch"]) for line in incidents]
    assert keys == sorted(set(keys)), f"the journal has {incidents}"
    _check_told(played, incidents)


def _check_told(played: Played, incidents: list[dict[str, Any]]) -> None:
    """The journal names each lost and each joined rank once; one that joined and died before it held the state counts
    as lost only."""
    censuses = {
        epoch: view for rank in played.survivors for epoch, view in played.diaries[rank].censuses.items()
    }
    ever = set(censuses[min(censuses)][0]).union(*(joined for _, _, joined in censuses.values()))
    # The job has ended while these ranks were in the group and did not hold the state.
    ever -= {rank for rank, why in played.simulation.dead.items() if why == "unneeded"}
    ((members, group),) = {
        (played.diaries[rank].members, played.diaries[rank].group) for rank in played.survivors
    }
    ever -= set(group) - set(members)
    told = [rank for line in incidents for rank in (*line["dead_ranks"], *line["left_ranks"])]
    came = [rank for line in incidents for rank in line["joined_ranks"]]
    assert len(set(told)) == len(told), f"the journal has {incidents}"
    assert len(set(came)) == len(came), f"the journal has {incidents}"
    assert {rank for rank in members if rank >= played.simulation.grid.ranks} <= set(came), incidents
    if min(played.survivors) < played.simulation.grid.ranks:
        assert set(told) == ever - set(members), (
            f"{ever - set(members)} were lost, and the journal has {incidents}"
        )
    else:  # joined ranks have not seen the first losses
        assert set(told) >= ever - set(members), (
            f"{ever - set(members)} were lost, and the journal has {incidents}"
        )


def violation(schedule: Schedule) -> str | None:
    """The violated law of a schedule, if any."""
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
