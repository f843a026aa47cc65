"""`recover.Step` itself on a simulated world: a small model trains, ranks die, and fresh ranks join.

A rank is a task of this process, with a model, an optimizer, a scheduler and an extra of the user's own. Random draws
inside of a microbatch follow from its slot, so tasks do not disturb each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import toy
from recover_lab.simulated_world.carriers import SimulatedCarriers
from recover_lab.simulated_world.parts import simulated_parts
from recover_lab.simulated_world.scheduler import SimulatedFabric, Simulation

import recover
from recover.gradients.state_hash import optimizer_tensors
from recover.job.grid import Grid
from recover.job.spec import JobSpec
from recover.step.errors import StateDivergedError
from recover.step.joining.joining_rank import NobodyHoldsTheStateError
from recover.step.joining.parcel import OtherStateError
from recover.world.carriers.worker import Work, Worker
from recover.world.world import World

BATCH, STEPS = 4, 6
COMMITTED = tuple[Any, ...]


class Average:
    """A moving average of the loss, as users keep one."""

    def __init__(self) -> None:
        self.value, self.steps = torch.zeros(()), 0

    def see(self, loss: float) -> None:
        self.value, self.steps = self.value.lerp(torch.tensor(loss), 0.25), self.steps + 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.steps = state["value"], state["steps"]


class LateWorker(Worker):
    """Runs a posted task when another one waits for it: no task stops in the middle of a backward pass."""

    def __init__(self) -> None:
        self._late: list[Work] = []
        self._failed: list[Work] = []
        self._running = False

    def post(self, task: Callable[[], object], is_ready: Callable[[], bool] = lambda: True) -> Work:
        work = _LateWork(task)
        work.worker = self
        self._late.append(work)
        return work

    def drain(self) -> None:
        while self._late:
            work = self._late.pop(0)
            self._running = True
            try:
                work.run()
            finally:
                self._running = False
            if work.error is not None:
                self._failed.append(work)

    @property
    def busy(self) -> bool:
        return self._running

    @property
    def ended(self) -> int:
        return 0

    @property
    def is_at_wire(self) -> bool:
        return False  # no task waits for other ranks in the background


class _LateWork(Work):
    worker: LateWorker

    def wait(self, timeout: float | None = None) -> bool:
        self.worker.drain()
        return self.ok

    def behind(self) -> Any:
        self.worker.drain()
        return super().behind()


@dataclass
class Training:
    """A simulated training run of a small model. `joins`: for each rank beyond the grid's, how many calls it takes
    before it is ready. `commits`: by rank and step, the state and the result that the rank had after that step."""

    replicas: int
    seed: int = 0
    kills: dict[int, int] = field(default_factory=dict)
    joins: dict[int, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    reduction: Any = "reproducible"
    model: dict[str, Any] = field(default_factory=dict)  # arguments of the model's constructor
    commits: dict[int, dict[int, COMMITTED]] = field(default_factory=dict)
    joined: dict[int, Any] = field(default_factory=dict)
    between: Callable[[int, recover.Step], object] = lambda rank, step: None  # after each step, on each rank
    run_dir: str | None = None
    last_words: dict[int, str] = field(default_factory=dict)
    incidents: list[Any] = field(default_factory=list)  # as the first rank has them
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(
        parameters, lr=0.01
    )
    hooks: Callable[[int], Any] | None = None  # by rank: its probe at the places of fault schedules
    prepare: Callable[[torch.nn.Module, torch.optim.Optimizer], object] = lambda model, optimizer: None

    def run(self) -> Simulation:
        joiners = max(self.joins, default=self.replicas - 1) + 1 - self.replicas
        self.simulation = Simulation(
            Grid(self.replicas), self.seed, self.kills, kept=True, joiners=joiners, limit=200_000
        )
        self.simulation.run(self._rank)
        return self.simulation

    def _rank(self, fabric: SimulatedFabric) -> str:
        worker = LateWorker()
        carriers = SimulatedCarriers(self.simulation, fabric, worker)
        parts = replace(simulated_parts(self.simulation, fabric), worker=worker, carriers=carriers)
        joining = fabric.rank >= self.replicas
        job = JobSpec(self.replicas, token="simulated", joining=joining, run_dir=self.run_dir, records=False)
        die = parts.own.die

        def die_with_last_words(how: Any, text: str, *more: Any, **options: Any) -> Any:
            self.last_words[fabric.rank] = text
            return die(how, text, *more, **options)

        parts.own.die = die_with_last_words  # type: ignore[method-assign]
        if self.hooks is not None:
            parts = replace(parts, hooks=self.hooks(fabric.rank))
        world = World(job, self.simulation.grid, parts)
        torch.manual_seed(fabric.rank if joining else 3)
        model = toy.Model(**{"dropout": 0.1, **self.model})
        optimizer = self.make_optimizer(model.parameters())
        self.prepare(model, optimizer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        average, mine = Average(), self.commits.setdefault(fabric.rank, {})
        step = recover.Step(
            world,
            model,
            optimizer,
            BATCH,
            clip=1.0,
            scheduler=scheduler,
            reduction=self.reduction,
            buffers=toy.MEMORY,
            bucket_mb=0.02,
            extra={"average": average},
            **self.options,
        )
        for _ in range(self.joins.get(fabric.rank, 0)):
            fabric.wait("warming up")
        try:
            while step.index < self.steps:
                for sample in step.microbatches(toy.Stream()):
                    step.backward(toy.loss_of(model, sample))
                    fabric.wait("computing")
                average.see(step.loss)
                mine[step.index] = (
                    tuple(step.all_samples),
                    step.loss,
                    scheduler.get_last_lr()[0],
                    float(average.value),
                    average.steps,
                    _bits([*model.parameters(), *model.buffers()]),
                    _bits(optimizer_tensors(optimizer)),
                )
                for incident in step.incidents:
                    if incident.joined_ranks:
                        self.joined[step.index] = incident
                self.incidents += step.incidents if fabric.rank == 0 else []
                self.between(fabric.rank, step)
        except NobodyHoldsTheStateError:
            return "nobody holds the state"
        except StateDivergedError as error:
            return str(error)
        except OtherStateError as error:
            parts.own.die("raised", str(error))
        parts.own.succeed()  # type: ignore[attr-defined]
        return "done"


def _bits(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)
