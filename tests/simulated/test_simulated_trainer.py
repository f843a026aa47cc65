"""The trainer of `recover train` itself on a simulated world: the files of a run are complete, whichever ranks die and
join."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recover_lab.simulated_world.carriers import SimulatedCarrier, SimulatedCarriers
from recover_lab.simulated_world.parts import simulated_parts
from recover_lab.simulated_world.scheduler import SimulatedFabric, Simulation
from simulated_training import LateWorker
from training import small_world

from recover.job.config_keys import read
from recover.job.grid import Grid
from recover.job.spec import JobSpec
from recover.train.config import parse
from recover.train.trainer import Trainer
from recover.world.world import World

STEPS = 6


def train(place: Path, kills: dict[int, int], joins: dict[int, int], seed: int = 0) -> dict[str, Any]:
    """Train on three replicas, and those that join. Returns the contents of the run directory at the end."""
    keys = ["replicas=3", "accum=2", f"steps={STEPS}", "reduction=reproducible", "checkpoint.every=0"]
    config = parse(read([*small_world(place / "world"), *keys, "eval.every=0"]))
    simulation = Simulation(Grid(3), seed, kills, kept=True, joiners=len(joins), limit=400_000)
    run_dir = place / "run"
    run_dir.mkdir()
    warmed: list[tuple[int, bool]] = []  # the rank, and whether the others counted on it by then

    groups: list[tuple[int, str, int]] = []  # the rank, what it did with a group, and the size of the group

    class Carriers(SimulatedCarriers):
        def warm_up(self) -> None:
            warmed.append((self._fabric.rank, self._fabric.rank in self._fabric.participants))

        def make(self, members: tuple[int, ...]) -> SimulatedCarrier:
            made = super().make(members)
            build, free = made.build, made.free
            made.retire = lambda: None  # type: ignore[method-assign]  # as with NCCL

            def noted(what: str, act: Any) -> Any:
                def run(*arguments: Any) -> None:
                    act(*arguments)
                    groups.append((self._fabric.rank, what, len(members)))

                return run

            made.build, made.free = noted("built", build), noted("freed", free)  # type: ignore[method-assign]
            return made

    def rank(fabric: SimulatedFabric) -> str:
        worker = LateWorker()
        parts = replace(
            simulated_parts(simulation, fabric),
            worker=worker,
            carriers=Carriers(simulation, fabric, worker),
        )
        job = JobSpec(3, token="simulated", joining=fabric.rank >= 3, run_dir=str(run_dir))
        world = World(job, simulation.grid, parts)
        for _ in range(joins.get(fabric.rank, 0)):
            fabric.wait("warming up")
        trainer = Trainer(world, config, run_dir, None)
        work = trainer.engine.work

        def paced(*arguments: Any) -> Any:
            for each in work(*arguments):
                yield each
                fabric.wait("computing")

        trainer.engine.work = paced  # type: ignore[method-assign]
        trainer.run()
        parts.own.succeed()  # type: ignore[attr-defined]
        return "done"

    simulation.run(rank)
    assert set(simulation.finished.values()) == {"done"}
    told = {
        name: [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for name in ("steps", "incidents")
        for path in [run_dir / f"{name}.jsonl"]
    }
    told["warmed"] = sorted(warmed)
    told["groups"] = groups
    return {**told, "summary": json.loads((run_dir / "summary.json").read_text())}


@pytest.mark.guarantee(
    "Joining",
    "The trainer's records are complete and its bits unchanged after all ranks that began the run have died.",
)
def test_trainer_run_is_finished_by_joined_ranks_with_the_same_bits(
    tmp_path: Path,
) -> None:
    """Compares records, learning rates and the digest of the parameters: the writer was one of the dead."""
    calm = train(tmp_path / "calm", {}, {})
    rough = train(tmp_path / "rough", {0: 95, 1: 75, 2: 105}, {3: 0, 4: 5}, seed=2)
    assert rough["summary"]["parameters_digest"] == calm["summary"]["parameters_digest"]
    for name in ("step", "loss", "lr", "microbatches", "data_digest"):
        assert [line[name] for line in rough["steps"]] == [line[name] for line in calm["steps"]], name
    joined = [line for line in rough["incidents"] if line.get("kind") == "joined"]
    assert [line["joined_replicas"] for line in joined] == [[3, 4]]
    lost = [replica for line in rough["incidents"] for replica in line["dead_replicas"]]
    assert sorted(lost) == [0, 1, 2]
    summary = rough["summary"]
    assert (summary["failures"], summary["joined"]) == (3, 2)
    assert (summary["replicas_start"], summary["replicas_end"]) == (3, 2)
    assert [line["replicas"] for line in rough["steps"]][-1] == 2
    assert max(line["replicas"] for line in rough["steps"]) > 3
    assert (calm["warmed"], rough["warmed"]) == ([], [(3, False), (4, False)]), (
        "joining ranks, before they ask"
    )
    for member in range(3):
        done = [(what, size) for rank, what, size in rough["groups"] if rank == member]
        assert done.index(("built", 5)) < done.index(("freed", 3)), (
            "an admission does not wait for the old group"
        )
    for survivor in (3, 4):
        done = [(what, size) for rank, what, size in rough["groups"] if rank == survivor]
        smaller = next(index for index, (what, size) in enumerate(done) if what == "built" and size < 5)
        assert done.index(("freed", 5)) < smaller, "a death ends all operations first"
