"""What a step offers beside taking steps: things to do once, its state as a whole, what it was built with."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any

import torch

from recover.gradients.module_gradients import Gradients
from recover.policy import Layout
from recover.step.joining.extra import Extra
from recover.step.on_first import OnFirst
from recover.step.position import Position
from recover.step.result import TellsOfLastStep
from recover.step.state import StepState
from recover.step.transaction import Transaction
from recover.world.world import World


class BesideTraining(TellsOfLastStep):
    extra: dict[str, Extra]
    _position: Position
    _world: World
    _model: torch.nn.Module
    _optimizer: torch.optim.Optimizer
    _scheduler: Any
    _transaction: Transaction
    _gradients: Gradients
    _exact_sum: bool
    _on_first: OnFirst
    _attempt: Generator[list[Any], None, None] | None

    @property
    def index(self) -> int:
        """Committed steps. `load_state_dict` sets it: with it goes the sample that comes next."""
        return self._position.index

    @property
    def skipped(self) -> int:
        """Committed steps whose gradient was not finite, or whose weights were all 0: the optimizer was not called."""
        return self._position.skipped

    @property
    def world(self) -> World:
        return self._world

    def on_first(
        self, act: Callable[..., Any], *arguments: Any, background: bool = False, **named: Any
    ) -> None:
        """Call `act(*arguments, **named)` on the first rank of the first living replica, and nowhere else.

        To be called by all replicas after the same step, outside of the loop over microbatches. If that rank is lost
        before it is through, its successor calls it, so it may run twice. What it raises is told, and costs nobody.
        Draws of `act` leave the user's generators as they were. `background`: in a thread, in order, while training
        goes on; it may then neither draw nor touch the model. In a sharded replica `act` runs on one rank alone, and
        may not compute with the model.
        """
        self.refuse_inside_step("step.on_first")
        name = getattr(act, "__qualname__", repr(act))
        self._on_first.call(self.index, partial(act, *arguments, **named), name, background)

    def refuse_inside_step(self, what: str) -> None:
        """Replicas are at different microbatches there, some have none at all, and after a death others have more."""
        if self._attempt is not None and getgeneratorstate(self._attempt) != GEN_CLOSED:
            raise RuntimeError(
                f"{what} was called inside the loop over microbatches, which no two replicas go through alike; call it "
                "after the loop: the step is committed when it ends"
            )

    def state(self, extra: Mapping[str, Any] | None = None) -> StepState:
        """The state after the last committed step as a whole; `extra` are the user's own parts of it, by name, beside
        what the step was given as such."""
        return StepState(self._model, self._optimizer, self._scheduler, {**self.extra, **(extra or {})})

    @property
    def numerics(self) -> dict[str, Any]:
        """What the bits of the sums depend on."""
        return {
            "reduction": "reproducible" if self._exact_sum else "fast",
            "buckets": [bucket.local.numel() for bucket in self._gradients.buckets],
        }

    @property
    def layout(self) -> Layout:
        """How the last step was shared out when it began."""
        return self._transaction.layout
