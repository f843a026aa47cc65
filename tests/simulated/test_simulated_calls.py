"""Replicas that make different collective calls, under schedules in which ranks are slow and die at any moment."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from recover_lab.simulated_world.fabric import SimulatedFabric
from recover_lab.simulated_world.parts import simulated_parts
from recover_lab.simulated_world.scheduler import Simulation

from recover.job.grid import Grid
from recover.job.spec import JobSpec
from recover.world.calls import Call, CollectiveCallError
from recover.world.world import CALL_PATIENCE, World

RANKS, SEEDS = 4, 25
CALLS = {"save": Call.SAVE, "resume": Call.RESUME, "confirm": Call.CONFIRM}


def run(
    scripts: Mapping[int, Sequence[str]], seed: int, kills: Mapping[int, int] | None = None
) -> dict[int, str]:
    """The end of each survivor: "done", or the error that it raised."""
    grid = Grid(RANKS)
    simulation = Simulation(grid, seed, kills)
    rng = random.Random(seed)

    def program(fabric: SimulatedFabric) -> str:
        parts = simulated_parts(simulation, fabric)
        world = World(JobSpec(RANKS, token="simulated"), grid, parts)
        try:
            for place, name in enumerate(scripts[fabric.rank]):
                for _ in range(rng.choice((0, 0, 3, 30))):
                    fabric.wait("working by itself")
                make_call(world, name, 1 + list(scripts[fabric.rank][:place]).count("step"))
            parts.own.succeed()  # type: ignore[attr-defined]
        except CollectiveCallError as error:
            return str(error)
        return "done"

    return simulation.run(program)


def make_call(world: World, name: str, number: int) -> None:
    if name == "step":
        with world.step(number):
            while world.agree(world.cross.all_reduce(np.ones(1)).wait()) != 1:
                world.repair(b"in a step")
    elif name == "left":
        with world.step(number):
            world._fabric.pause(2 * CALL_PATIENCE * (world.rank % 2))
    elif name == "agree":
        while world.agree(1) is None:
            world.repair(b"in no step")
    else:
        with world.call(CALLS[name]):
            pass


@pytest.mark.guarantee(
    "Membership",
    "All replicas name a collective call that only some of them make, without losses, and never accuse a "
    "slow replica.",
)
@pytest.mark.parametrize(
    ("mine", "theirs", "told"),
    [
        (
            ["save"],
            ["step"],
            "recover.save must be called by all replicas; replicas 1, 2, 3 did not (they are in step 2)",
        ),
        (
            ["save"],
            [],
            "recover.save must be called by all replicas; replicas 1, 2, 3 did not (their scripts have ended)",
        ),
        (
            ["step"],
            ["save"],
            "recover.save must be called by all replicas; replica 0 did not (it is in step 2)",
        ),
        (
            ["agree"],
            ["step"],
            "world.agree must be called by all replicas; replicas 1, 2, 3 did not (they are in step 2)",
        ),
        (
            ["resume"],
            ["confirm"],
            "recover.resume must be called by all replicas; replicas 1, 2, 3 did not (they are in step.confirm)",
        ),
    ],
)
def test_differing_collective_calls_are_named_by_all_replicas(
    mine: list[str], theirs: list[str], told: str
) -> None:
    for seed in range(SEEDS):
        outcome = run({rank: ["step", *(theirs if rank else mine)] for rank in range(RANKS)}, seed)
        assert {text.partition("\n")[0] for text in outcome.values()} == {told}, (seed, outcome)
        assert len(outcome) == RANKS, "nobody is lost for it"


@pytest.mark.guarantee(
    "Membership",
    "All replicas name a collective call that only some of them make, without losses, and never accuse a "
    "slow replica.",
)
def test_differing_collective_calls_with_deaths_end_all_survivors_alike() -> None:
    """The replica with the differing call may be among the dead: then the others may finish without an error."""
    seen = set()
    for seed in range(3 * SEEDS):
        rng = random.Random(seed)
        kills = {rank: rng.randrange(20, 90) for rank in rng.sample(range(RANKS), rng.choice((1, 1, 2)))}
        scripts = {rank: ["step", "step", *["save"] * (rank == 0), "step"] for rank in range(RANKS)}
        outcome = run(scripts, seed, kills)
        kinds = {text == "done" for text in outcome.values()}
        assert len(kinds) <= 1, (seed, kills, outcome)
        seen |= kinds
    assert seen == {True, False}


@pytest.mark.guarantee(
    "Membership",
    "All replicas name a collective call that only some of them make, without losses, and never accuse a "
    "slow replica.",
)
def test_slow_replicas_with_equal_calls_are_never_accused() -> None:
    script = ["resume", "step", "save", "agree", "step", "agree", "confirm", "step", "save"]
    for seed in range(SEEDS):
        outcome = run(dict.fromkeys(range(RANKS), script), seed, {3: 60} if seed % 2 else None)
        assert set(outcome.values()) == {"done"}, (seed, outcome)


def test_early_exits_from_a_step_are_separate_calls() -> None:
    """All replicas leave the same step, one after the other: the first of them are in the next call by then."""
    script = ["step", "left", "save", "left", "step"]
    for seed in range(SEEDS):
        outcome = run(dict.fromkeys(range(RANKS), script), seed)
        assert set(outcome.values()) == {"done"}, (seed, outcome)


@pytest.mark.guarantee(
    "Rejoining replicas",
    "A rejoining replica runs the code of the job or is refused by name before it asks, and a host with "
    "edited files starts none.",
)
def test_rank_with_other_code_is_refused_before_it_asks_to_join() -> None:
    """The members never learn of the refused rank: no repair, no pause."""
    grid = Grid(2)
    simulation = Simulation(grid, 1, kept=True, joiners=1)

    def program(fabric: SimulatedFabric) -> int:
        differs = "train.py differs" if fabric.rank == 2 else ""
        code = SimpleNamespace(differs=lambda: differs, publish=lambda first: None)
        parts = replace(simulated_parts(simulation, fabric), code=code)
        world = World(JobSpec(2, token="simulated", joining=fabric.rank == 2), grid, parts)
        if world.outside:
            world.join(b"")
        for number in range(1, 6):
            make_call(world, "step", number)
            assert world.asking == ()
        return world.epoch

    assert simulation.run(program) == {0: 1, 1: 1}
    assert simulation.dead == {2: "refused"}
