"""What a committed step was: the same on all replicas, but for the samples that each of them
brought."""

from __future__ import annotations

from dataclasses import dataclass, field

from recover.step.incident import Incident
from recover.step.loop.stragglers import Stragglers, busy
from recover.step.transaction import Transaction


@dataclass(frozen=True)
class StepResult:
    loss: float = float("nan")
    grad_norm: float = float("nan")
    weight: float = 0.0  # the sum of weights: the number of microbatches, by default
    samples: list[int] = field(default_factory=list)  # those that this replica contributed
    all_samples: list[int] = field(default_factory=list)  # those of all replicas
    incidents: list[Incident] = field(default_factory=list)  # what happened in it
    stragglers: dict[int, float] = field(
        default_factory=dict
    )  # replicas far slower than the median, by how much
    busy: dict[int, float] = field(default_factory=dict)  # seconds that each replica computed its share
    skipped: bool = False  # its gradient was not finite, or all weights were 0: the optimizer was not called
    reruns: int = (
        0  # how often it was run again because a value was too large for its exponents (reproducible sums)
    )
    stop_agreed: bool = False  # somebody had asked to stop, and all survivors know it


def result_of(transaction: Transaction, stragglers: Stragglers, number: int) -> StepResult:
    """Of a step that all have agreed on."""
    totals = transaction.totals
    weight = totals.weight or float("nan")  # where all weights are 0, there is nothing to take the mean over
    return StepResult(
        loss=totals.loss / weight,
        grad_norm=transaction.grad_norm / weight,
        weight=totals.weight,
        samples=transaction.attempt.contributed,
        all_samples=totals.samples,
        incidents=transaction.incidents,
        stragglers=stragglers.committed(totals.paces, number),
        busy=busy(transaction.layout, totals.paces, transaction.world.replicas),
        skipped=not (transaction.finite and totals.weight),
        reruns=transaction.maxima.reruns,
        stop_agreed=transaction.stop_agreed,
    )
