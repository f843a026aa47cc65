"""Schedules of faults in a simulated training run: drawn from a seed, and made smaller fault by fault."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from recover.faults.locations import (
    AFTER_VERDICT,
    IN_INSTALMENTS,
    IN_RECOVERY,
    JOIN_PHASES,
    LOCATIONS,
    OUTSIDE,
    REPAIR_PHASES,
    VERIFIED,
)
from recover.job.grid import Grid
from recover.policy import get_policy
from recover.world.membership import WORD_BITS

STEPS = 3
BATCH = 6
RECOVERIES = (*(f"repair:{phase}" for phase in REPAIR_PHASES), "extra")
# Places at which real faults strike, without those of tensors and of files.
PLACES = tuple(
    place
    for place in LOCATIONS
    if place not in (*IN_RECOVERY, *OUTSIDE, *VERIFIED, *IN_INSTALMENTS, "backward", "checkpoint")
)


@dataclass(frozen=True)
class Schedule:
    """A schedule of faults. Every field but the first three and `kept` is a fault that can be left out."""

    seed: int
    grid: Grid
    policy: str = "balanced"
    kills: dict[int, int] = field(default_factory=dict)  # rank: killed after this number of calls
    aims: dict[int, tuple[int, str]] = field(default_factory=dict)  # rank: dies in this step, at this place
    stops: dict[int, int] = field(default_factory=dict)  # rank: stopped for ever after this number of calls
    stalls: int = 0  # agreements whose result does not reach one rank
    sick: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    reluctant: bool = False  # an excluded rank does not leave by itself
    # rank: the step before which a bit of its state flips
    drifts: dict[int, int] = field(default_factory=dict)
    leaves: dict[int, int] = field(default_factory=dict)  # rank: the step that it leaves early, once
    notices: dict[int, int] = field(
        default_factory=dict
    )  # rank: its host is asked to leave after this number of calls
    poison: tuple[int, int] | None = None  # (step, slot): any rank that computes it raises
    too_large: tuple[int, int] | None = (
        None  # (step, slot): its gradient is too large for the exponents of that step
    )
    asks_to_stop: tuple[int, int] | None = None  # (rank, step)
    links: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # rank: after this number of calls it does not reach that other rank
    verify: int = 0  # slots that two replicas compute in each step
    # rank: its device errs from this step on, in this share of the microbatches, at most this number of times, always
    # with the same wrong result (or not)
    errs: dict[int, tuple[int, float, int, bool]] = field(default_factory=dict)
    # rank: from this step on, this number of times, a bit flips in its "local" sum, or in its reduced "result"
    wrong_sums: dict[int, tuple[int, int, str]] = field(default_factory=dict)
    # The following fields only where decisions are kept, as etcd keeps them.
    joins: dict[int, int] = field(default_factory=dict)  # replica: asks to join after this number of calls
    suspicions: dict[int, int] = field(default_factory=dict)  # rank: declared dead while it lives
    # rank: cut off after this number of calls, for this number of seconds
    cuts: dict[int, tuple[int, float]] = field(default_factory=dict)
    torn: dict[int, int] = field(default_factory=dict)  # rank: this number of exchanges fail without a death
    kept: bool = False  # decisions of agreements are kept, as etcd keeps them
    instalments: bool = False  # joining replicas get the state in instalments

    @property
    def steps(self) -> int:
        return (4 if self.instalments else 2) * STEPS if self.joins else STEPS

    @property
    def ranks(self) -> range:
        """All ranks of the whole run: joining ranks get numbers that no rank had before."""
        return range((max(self.joins, default=self.grid.replicas - 1) + 1) * self.grid.replica_size)


def random_schedule(seed: int) -> Schedule:
    """A world of 2 to 8 ranks: deaths, some of them in bursts, and now and then a rarer fault."""
    rng = random.Random(seed)
    replica_size = rng.choice((1, 1, 2))
    grid = Grid(rng.randint(2, 8 // replica_size), replica_size)
    ranks = range(grid.ranks)
    victims = rng.sample(ranks, rng.randint(0, grid.ranks - 1))
    burst = rng.randint(0, 90)
    kills = {v: rng.randint(0, 120) if rng.random() < 0.5 else burst + rng.randint(0, 6) for v in victims}
    sick = {}
    for rank in rng.sample(ranks, rng.randint(1, 2)) if rng.random() < 0.2 else ():
        first = rng.randint(1, 4)
        sick[rank] = (first, rng.choice((first, first + 1, 10**6)), rng.random() < 0.5)

    def sometimes(share: float, make: Callable[[], Any], otherwise: Any) -> Any:
        return make() if rng.random() < share else otherwise

    def place() -> tuple[int, int]:
        return rng.randint(1, STEPS), rng.randrange(BATCH)

    return Schedule(
        seed,
        grid,
        rng.choice(("balanced", "balanced", "static")),
        kills,
        stops=sometimes(0.1, lambda: {rng.choice(ranks): rng.randint(5, 100)}, {}),
        stalls=sometimes(0.1, lambda: 1, 0),
        sick=sick,
        reluctant=rng.random() < 0.1,
        drifts=sometimes(0.15, lambda: {rng.choice(ranks): rng.randint(2, STEPS)}, {}),
        leaves=sometimes(0.15, lambda: dict.fromkeys(rng.sample(ranks, 2), rng.randint(1, STEPS)), {}),
        poison=sometimes(0.08, place, None),
        too_large=sometimes(0.15, place, None),
        asks_to_stop=sometimes(0.15, lambda: (rng.choice(ranks), rng.randint(1, STEPS)), None),
    )


def kept_schedule(seed: int) -> Schedule:
    """A random schedule where decisions are kept: a rank that is cut off, or slow, is declared dead, and may live
    on."""
    schedule, rng = random_schedule(seed), random.Random(f"kept/{seed}")
    few = rng.sample(range(schedule.grid.ranks), 1)
    return replace(
        schedule,
        stalls=0,
        kept=True,
        suspicions=dict.fromkeys(few, rng.randint(0, 120)) if rng.random() < 0.3 else {},
        cuts=dict.fromkeys(few, (rng.randint(0, 120), rng.choice((0.1, 0.6, 3.0))))
        if rng.random() < 0.3
        else {},
    )


def parted_schedule(seed: int) -> Schedule:
    """Links between ranks break at any moment, between two or among many, alone (one in two) or among deaths, joins
    and leaves."""
    rng = random.Random(f"parted/{seed}")
    schedule = noticed_schedule(seed) if rng.random() < 0.5 else kept_schedule(seed)
    if rng.random() < 0.5:
        schedule = Schedule(seed, schedule.grid, schedule.policy, kept=True)
    return replace(schedule, links=_links(schedule, rng))


def _links(schedule: Schedule, rng: random.Random) -> dict[int, tuple[int, int]]:
    size = schedule.grid.replica_size
    ranks = rng.sample(schedule.ranks, rng.randint(1, max(1, len(schedule.ranks) // 2)))
    others = {rank: [o for o in schedule.ranks if o != rank and o % size == rank % size] for rank in ranks}
    return {rank: (rng.randint(0, 100), rng.choice(there)) for rank, there in others.items() if there}


def noticed_schedule(seed: int) -> Schedule:
    """Hosts are asked to leave at any moment: those of some ranks, now and then of all, alone (one in two) or among
    deaths and joins. It may be that only one rank of a replica gets the notice, as where a replica spans hosts."""
    rng = random.Random(f"noticed/{seed}")
    schedule = joining_schedule(seed)
    if rng.random() < 0.5:
        schedule = Schedule(seed, schedule.grid, schedule.policy, kept=True)
    return replace(schedule, notices=_notices(schedule, rng))


def _notices(schedule: Schedule, rng: random.Random) -> dict[int, int]:
    ranks = schedule.ranks
    asked = ranks if rng.random() < 0.1 else rng.sample(ranks, rng.randint(1, max(1, len(ranks) // 2)))
    return {rank: rng.randint(0, 120) for rank in asked}


def elastic_schedule(seed: int) -> Schedule:
    """Replicas join in instalments, hosts are asked to leave, links break, and any rank may die."""
    schedule, rng = instalments_schedule(seed), random.Random(f"elastic/{seed}")
    notices = _notices(schedule, rng) if rng.random() < 0.7 else {}
    links = _links(schedule, rng) if rng.random() < 0.7 else {}
    return replace(schedule, notices=notices, links=links)


def joining_schedule(seed: int) -> Schedule:
    """Replicas join at any time, and any rank may die at any time: a joining rank, an original one, or one that sends
    its state."""
    schedule, rng = kept_schedule(seed), random.Random(f"joining/{seed}")
    grid = schedule.grid
    if grid.ranks > 6:
        grid = replace(grid, replicas=6 // grid.replica_size)
    joins = {grid.replicas + n: rng.randint(0, 150) for n in range(rng.randint(1, 3))}
    schedule = replace(schedule, grid=grid, joins=joins)
    ranks = schedule.ranks
    kills = {rank: calls for rank, calls in schedule.kills.items() if rank < grid.ranks}
    for rank in kills if rng.random() < 0.5 else ():
        kills[rank] += rng.randint(0, 80)  # later, in the midst of a join
    kills |= {rank: rng.randint(0, 140) for rank in ranks[grid.ranks :] if rng.random() < 0.2}

    def living(faults: dict[int, Any]) -> dict[int, Any]:
        return {rank: value for rank, value in faults.items() if rank < grid.ranks}

    asks = schedule.asks_to_stop
    return replace(
        schedule,
        kills=kills,
        stops=living(schedule.stops),
        sick=living(schedule.sick),
        drifts=living(schedule.drifts) if rng.random() < 0.5 else {},
        leaves=living(schedule.leaves),
        suspicions=living(schedule.suspicions),
        cuts=living(schedule.cuts) | ({ranks[-1]: (rng.randint(0, 60), 0.6)} if rng.random() < 0.05 else {}),
        asks_to_stop=asks if asks and asks[0] < grid.ranks else None,
        torn={rng.choice(ranks[grid.ranks :]): rng.randint(1, 4)} if rng.random() < 0.15 else {},
    )


def instalments_schedule(seed: int) -> Schedule:
    """A joining schedule in which the state is handed over in instalments."""
    rng = random.Random(f"instalments/{seed}")
    return replace(joining_schedule(seed), instalments=True, verify=rng.choice((0, 0, 1)))


def aimed_instalments_schedule(seed: int) -> Schedule:
    """A rank dies while the state is handed over in instalments: the joining rank, or a member."""
    schedule, rng = aimed_join_schedule(seed), random.Random(f"aimed instalments/{seed}")
    places = (*IN_INSTALMENTS, *IN_INSTALMENTS, *(f"repair:{phase}" for phase in JOIN_PHASES))
    aims = {
        rank: (0, rng.choice((*places, "vote", "bucket") if rank >= schedule.grid.ranks else places))
        for rank in schedule.aims
    }
    return replace(schedule, instalments=True, aims=aims)


def aimed_schedule(seed: int) -> Schedule:
    """A cell of the matrix of `recover faults`: a replica of some role dies at some place, alone or with another, or
    another one dies in the recovery."""
    rng = random.Random(f"aimed/{seed}")
    grid, policy = (
        Grid(rng.randint(3, 7), rng.choice((1, 1, 2))),
        rng.choice(("balanced", "static", "static")),
    )
    step, place, mode = rng.randint(1, STEPS), rng.choice(PLACES), rng.choice(("one", "two", "then", "then"))
    roles = {
        s.replica: s.role
        for s in get_policy(policy, grid.replicas).layout(range(grid.replicas), BATCH).shares
    }
    role = rng.choice(sorted(set(roles.values())))
    first = rng.choice([replica for replica, its in roles.items() if its is role])
    second = rng.choice([replica for replica in roles if replica != first])
    aims = {first * grid.replica_size + rng.randrange(grid.replica_size): (step, place)}
    if mode == "two":
        aims[second * grid.replica_size] = (step, place)
    elif mode == "then":
        where = rng.choice((*RECOVERIES, "extra", "extra"))
        aims[second * grid.replica_size] = (step + (place in AFTER_VERDICT), where)
    return Schedule(seed, grid, policy, aims=aims)


def aimed_join_schedule(seed: int) -> Schedule:
    """A replica joins, and a rank dies at some place of that join, or in the first step after it: a joining rank, a
    member that gives the state, or one of each."""
    rng = random.Random(f"aimed join/{seed}")
    grid = Grid(rng.randint(2, 4), rng.choice((1, 1, 2)))
    policy = rng.choice(("balanced", "balanced", "static"))
    schedule = Schedule(seed, grid, policy, joins={grid.replicas: rng.randint(0, 60)}, kept=True)
    newcomer, others = schedule.ranks[grid.ranks :], rng.sample(range(grid.ranks), grid.ranks)
    victims = rng.choice(([rng.choice(newcomer)], others[:1], others[:1], [others[0], newcomer[0]]))
    places = (
        *(f"repair:{phase}" for phase in (*REPAIR_PHASES, *JOIN_PHASES, *JOIN_PHASES)),
        "forward",
        "vote",
    )
    aims = {rank: (0, rng.choice(places if rank in newcomer else places[:-2])) for rank in victims}
    if rng.random() < 0.3:
        schedule = replace(schedule, kills={others[-1]: rng.randint(10, 150)})
    if rng.random() < 0.2:
        schedule, aims = replace(schedule, torn={newcomer[-1]: rng.randint(1, 4)}), {}
    return replace(schedule, aims=aims)


def verified_schedule(seed: int) -> Schedule:
    """The device of one rank errs: always, often or once, with one wrong result or with many; or one of its sums is
    wrong. Others die meanwhile, most of them at places where the error is being decided on."""
    rng = random.Random(f"verified/{seed}")
    grid = Grid(rng.choice((1, 2, 3, 3, 4, 5)), rng.choice((1, 1, 2)))
    ranks = rng.sample(range(grid.ranks), grid.ranks)
    how_often = rng.choice(((1.0, 10**6), (0.5, 10**6), (1.0, 1), (1.0, 2)))
    errs = {ranks[0]: (rng.randint(1, STEPS), *how_often, rng.random() < 0.5)}
    places = ("check", "vote", "vote", "in-totals", *RECOVERIES)
    aims = {
        r: (rng.choice((0, rng.randint(1, STEPS))), rng.choice(places)) for r in ranks[: rng.randint(0, 2)]
    }
    kills = {rank: rng.randint(0, 140) for rank in ranks[2 : rng.randint(2, 4)]}
    kept, verify = rng.random() < 0.3, rng.randint(1, 3)
    # A value that is too large: the step is run again, with its checks.
    large = (rng.randint(1, STEPS), rng.randrange(BATCH)) if rng.random() < 0.1 else None
    wrong: dict[int, tuple[int, int, str]] = {}
    if rng.random() < 0.5:  # a sum of a rank is wrong, of one whose device errs, too, or of another one
        how = rng.choice(((1, "result"), (2, "result"), (10**6, "result"), (1, "local")))
        wrong = {rng.choice((ranks[0], ranks[-1])): (rng.randint(1, STEPS), *how)}
        errs = errs if rng.random() < 0.3 else {}
        aims |= dict.fromkeys(ranks[1 : rng.randint(1, 2)], (0, "reduced"))
    return Schedule(
        seed,
        grid,
        "balanced",
        kills,
        aims,
        verify=verify,
        errs=errs,
        too_large=large,
        kept=kept,
        wrong_sums=wrong,
    )


def paced_schedule(seed: int) -> Schedule:
    """A schedule of any kind above, with shares by speed."""
    draw = (random_schedule, kept_schedule, joining_schedule, joining_schedule, aimed_schedule)[seed % 5]
    return replace(draw(seed), policy="paced")


def large_schedule(seed: int) -> Schedule:
    """More ranks than one word of an agreement has bits, or (one in four) than two words have; deaths of ranks beyond
    the first word."""
    rng = random.Random(f"large/{seed}")
    replica_size = rng.choice((1, 2))
    ranks = rng.randint(WORD_BITS + 1, WORD_BITS + 5) if seed % 4 else 2 * WORD_BITS + 2
    grid = Grid(ranks // replica_size + 1, replica_size)
    victims = {*rng.sample(range(WORD_BITS, grid.ranks), 2), *rng.sample(range(grid.ranks), 1)}
    burst = rng.randint(0, 60)
    return Schedule(seed, grid, kills={victim: burst + rng.randint(0, 6) for victim in sorted(victims)})


def without_one_fault(schedule: Schedule) -> list[Schedule]:
    """All schedules with one fault less."""
    found = []
    for fault in fields(schedule)[3:]:
        if fault.name == "kept":
            continue  # the kind of agreements is no fault, and some faults depend on it
        value = getattr(schedule, fault.name)
        if isinstance(value, dict):
            found += [
                replace(schedule, **{fault.name: {k: v for k, v in value.items() if k != key}})
                for key in value
            ]
        elif value:
            found.append(replace(schedule, **{fault.name: type(value)() if isinstance(value, int) else None}))
    return found
