"""A rehearsal: losses and joins played through a policy, without a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from recover.policy.base import Policy
from recover.policy.census import FailureEvent, Holding
from recover.policy.losses import Join, Loss
from recover.policy.plan import Layout, PolicyDecision
from recover.policy.roles import Role


@dataclass(frozen=True)
class Outcome:
    """One loss, and the step as it ends if nothing else dies in it."""

    loss: Loss
    layout: Layout  # of the step in which it happens
    lost: tuple[Role, ...]
    promoted: tuple[Holding, ...]  # the spares that are admitted, as they were
    decision: PolicyDecision
    next: Layout  # of the steps that follow


@dataclass(frozen=True)
class Growth:
    """Replicas have joined, between two steps."""

    count: int
    next: Layout  # of the steps that follow


@dataclass(frozen=True)
class Rehearsal:
    policy: str
    global_batch: int
    start: Layout
    outcomes: tuple[Outcome | Growth, ...]

    @property
    def losses(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Outcome)]

    @property
    def joined(self) -> int:
        return sum(outcome.count for outcome in self.outcomes if isinstance(outcome, Growth))

    @property
    def extra_rounds(self) -> int:
        return sum(outcome.decision.rounds for outcome in self.losses)

    @property
    def spare_work(self) -> int:
        """Microbatches of spares that were not used, in the steps with a loss."""
        steps = (outcome.layout for outcome in self.losses if not outcome.loss.extra_round)
        used = sum(len(spare.slots) for outcome in self.losses for spare in outcome.promoted)
        return sum(layout.spare_work for layout in steps) - used


def rehearse(
    policy: Policy,
    replicas: int,
    accum: int,
    events: Iterable[Loss | Join],
    until: int | None = None,
    global_batch: int | None = None,
) -> Rehearsal:
    """Simulate `events` on `policy`, one step per loss.

    Replicas die after all of them have run the slots that they were dealt, unless the loss names
    an extra round. A replica that joins gets a number that no replica had before.

    With `until`, single losses follow the events until that many replicas are left.
    `global_batch` is for a job whose replicas do not all begin with the same share.
    """
    if replicas < 1:
        raise ValueError(f"{replicas} replicas cannot run a job; give at least 1")
    if accum < 1:
        raise ValueError(f"an accumulation of {accum} runs nothing; give at least 1 microbatch per replica")
    global_batch = global_batch or replicas * accum
    start = policy.layout(range(replicas), global_batch)
    outcomes: list[Outcome | Growth] = []
    numbers = replicas
    for event in events:
        if isinstance(event, Join):
            layout = outcomes[-1].next if outcomes else start
            living = (*layout.replicas, *range(numbers, numbers + event.count))
            outcomes.append(Growth(event.count, policy.layout(living, global_batch)))
            numbers += event.count
        else:
            outcomes.append(_lose(policy, global_batch, event, start, outcomes))
    left = len(outcomes[-1].next.replicas if outcomes else start.replicas)
    if until is not None and not 1 <= until <= left:
        raise ValueError(
            f"cannot lose replicas until {until} are left when there are {left}; give 1 to {left}"
        )
    for _ in range(left - (until or left)):
        outcomes.append(_lose(policy, global_batch, Loss.parse("1"), start, outcomes))
    return Rehearsal(policy.name, global_batch, start, tuple(outcomes))


def _lose(
    policy: Policy, global_batch: int, loss: Loss, start: Layout, before: list[Outcome | Growth]
) -> Outcome:
    layout = before[-1].next if before else start
    census = layout.holdings()
    if loss.extra_round:
        last = _loss_with_round(loss, before)
        # A survivor finishes the slots that it was dealt before it votes, so the census is the
        # same whichever round the death was in.
        layout, census = last.layout, last.decision.holdings()
    dead = loss.choose(census)
    gone = {holding.replica for holding in dead}
    survivors = tuple(holding for holding in census if holding.replica not in gone)
    decision = policy.respond(FailureEvent(survivors, global_batch))
    shares = ((holding, decision.share(holding.replica)) for holding in survivors)
    promoted = tuple(h for h, share in shares if not h.counts and share.counts and share.kept)
    lost = tuple(holding.role for holding in dead)
    return Outcome(loss, layout, lost, promoted, decision, policy.layout(decision.replicas, global_batch))


def _loss_with_round(loss: Loss, before: list[Outcome | Growth]) -> Outcome:
    """The loss before this one, if it has the extra round that this one means."""
    last = before[-1] if before else None
    if not isinstance(last, Outcome):
        what = "comes after a join" if before else "is the first one"
        raise ValueError(f"loss {loss.text!r} {what}; put the loss whose extra round it means before it")
    rounds = last.decision.rounds
    if loss.extra_round > rounds:
        remedy = (
            f"its last extra round is extra{rounds}"
            if rounds
            else "it takes no extra round, so leave out the @"
        )
        raise ValueError(f"loss {loss.text!r} does not fit the loss before it, {last.loss.text!r}: {remedy}")
    return last


def promotions(outcome: Outcome) -> Counter[Role]:
    """How many spares stepped in, by the role that they stepped into."""
    return Counter(spare.role.promoted for spare in outcome.promoted)
