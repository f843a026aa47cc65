"""The result of a committed step. All fields but `samples` are the same on all replicas."""

from __future__ import annotations

from dataclasses import dataclass, field

from recover.runs.records.kinds import WRONG_RESULTS
from recover.step.incident import Incident
from recover.step.loop.stragglers import Stragglers, busy
from recover.step.transaction import Transaction


@dataclass(frozen=True)
class StepResult:
    loss: float = float("nan")
    grad_norm: float = float("nan")
    weight: float = 0.0  # the sum of weights: the number of microbatches, by default
    samples: list[int] = field(default_factory=list)  # contributed by this replica
    all_samples: list[int] = field(default_factory=list)  # contributed by all replicas
    incidents: list[Incident] = field(default_factory=list)  # losses and joins
    # Replicas that are far slower than the median, with the factor.
    stragglers: dict[int, float] = field(default_factory=dict)
    busy: dict[int, float] = field(default_factory=dict)  # seconds that each replica computed its share
    skipped: bool = False  # its gradient was not finite, or all weights were 0: the optimizer was not called
    # How often it was run again because a value exceeded its exponents (reproducible sums).
    reruns: int = 0
    verified: int = 0  # slots whose gradients two replicas computed alike
    unverified: int = 0  # slots that were to be verified, and lost their pair
    corrupt: int = 0  # replicas that were evicted because of a wrong gradient, or a wrong sum of them
    wrong_sums: int = 0  # reduced sums that were wrong on a rank, and were reduced again
    # Digests: of the parameters of a replica before the step, and of the contents of its microbatches ("": unknown).
    parameters_before: str = ""
    contents: str = ""
    # Replicas that are joining in instalments, with the percentage of the state that they hold, as the first rank knows
    # it.
    joining: dict[int, int] = field(default_factory=dict)
    stop_agreed: bool = False  # some rank had asked to stop, and all survivors know it


def result_of(transaction: Transaction, stragglers: Stragglers, number: int) -> StepResult:
    """The result of a step that all replicas have agreed on."""
    totals = transaction.totals
    verified, unverified = transaction.verification.commit(totals.checked())
    weight = totals.weight or float("nan")  # where all weights are 0, there is nothing to take the mean over
    return StepResult(
        loss=totals.loss / weight,
        grad_norm=transaction.grad_norm / weight,
        weight=totals.weight,
        samples=transaction.attempt.contributed,
        all_samples=totals.samples,
        incidents=transaction.incidents,
        stragglers=stragglers.committed(totals.paces, number, len(transaction.world.replicas)),
        busy=busy(transaction.layout, totals.paces, transaction.world.replicas, transaction.replica.fill),
        skipped=not (transaction.finite and totals.weight),
        reruns=transaction.maxima.reruns,
        verified=verified,
        unverified=unverified,
        corrupt=sum(
            why.startswith(WRONG_RESULTS)
            for incident in transaction.incidents
            for why in incident.reasons.values()
        ),
        wrong_sums=sum(len(incident.wrong_sums) for incident in transaction.incidents),
        parameters_before=transaction.parameters_before,
        contents=f"{totals.contents:x}" if totals.contents else "",
        stop_agreed=transaction.stop_agreed,
    )
