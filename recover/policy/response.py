"""The in-step response: from a census and B to the plan that completes the step to exactly B
microbatches.

One rule for any number of deaths in any roles at any point, again and again within a step:

1. Local sums that count before the loss keep counting.
2. Spares are admitted, whole sums only: the set of spares whose slots come closest to the number
   of missing microbatches without exceeding it.
3. The microbatches that are still missing are run again, spread evenly over all survivors that
   are not resting.

Rule 2 admits as many microbatches as possible, so rule 3 has as few as possible to run: no plan
needs fewer extra rounds, and none discards fewer microbatches that were already computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recover.policy.census import FailureEvent, Holding
from recover.policy.plan import PolicyDecision, Share
from recover.policy.roles import RestoreMode, Role
from recover.policy.slots import SlotSet, even

# The number of slots for each of these replicas.
Deal = Callable[[int, list[int]], list[int]]


def complete_batch(event: FailureEvent, deal: Deal | None = None) -> PolicyDecision:
    """Assign the missing microbatches by the rules above, so that the step commits exactly B.

    `deal`: how rule 3 spreads microbatches over the survivors, if not evenly.
    """
    counting = [holding for holding in event.census if holding.counts]
    # Larger spares first: fewer are used up, and one of the lost replica's own size is taken before
    # a pair.
    spares = sorted(
        (holding for holding in event.census if not holding.counts), key=lambda h: (-len(h.slots), h.replica)
    )
    promoted = best_fit(spares, event.global_batch - sum(len(holding.slots) for holding in counting))
    counting += promoted
    admitted = {holding.replica for holding in counting}
    left_out = [spare for spare in spares if spare.replica not in admitted]

    counted = SlotSet.union(holding.slots for holding in counting)
    missing = event.global_batch - len(counted)
    # Slots that a promoted spare stands in for are free as well, so there may be more numbers than
    # work.
    fresh = SlotSet.span(0, event.global_batch) - counted
    # The extra work starts with the replicas that have least in hand. Spares that do not count come
    # last: a spare that gets no extra work keeps its sum, for the next loss in this step; a spare
    # that gets some has to give its sum up.
    workers = sorted(counting, key=_least_in_hand) + sorted(left_out, key=_least_in_hand)
    resting = [holding for holding in workers if holding.replica in event.resting]
    if len(resting) < len(workers):
        workers = [holding for holding in workers if holding not in resting]
    else:
        resting = []
    deal = deal or (lambda slots, replicas: even(slots, len(replicas)))
    amounts = deal(missing, [holding.replica for holding in workers]) + [0] * len(resting)
    shares = [
        _share(holding, holding.replica in admitted, run, rounds=max(amounts))
        for holding, run in zip([*workers, *resting], fresh.deal(amounts), strict=True)
    ]
    if missing:
        discarded = sum(len(spare.slots) for spare in left_out)
        return PolicyDecision(tuple(shares), RestoreMode.NON_BLOCKING, discarded)
    # Complete without a promotion: the dead had contributed nothing, and no reduction has to be
    # repeated.
    return PolicyDecision(tuple(shares), RestoreMode.BLOCKING if promoted else RestoreMode.SKIP)


def _least_in_hand(holding: Holding) -> tuple[int, int]:
    return len(holding.slots), holding.replica


def _share(holding: Holding, admitted: bool, run: SlotSet, rounds: int) -> Share:
    counts = admitted or bool(run)
    if not counts:
        role = holding.role
    elif rounds == 0:
        role = holding.role.promoted
    else:
        role = Role.MAJOR if len(run) == rounds else Role.BOUNDARY_MINOR
    kept = holding.slots if admitted or not counts else SlotSet()
    return Share(holding.replica, role, counts, kept, run)


def best_fit(spares: Sequence[Holding], room: int) -> list[Holding]:
    """The spares whose sums add up to as much as possible without exceeding `room`; earlier ones
    preferred.

    A subset sum over few and small numbers: bit n of `reach[i]` says that n is a sum of some of
    spares[i:].
    """
    sizes = [len(spare.slots) for spare in spares]
    within = (1 << (room + 1)) - 1
    reach = [1]
    for size in reversed(sizes):
        reach.append((reach[-1] | reach[-1] << size) & within)
    reach.reverse()

    left = reach[0].bit_length() - 1
    chosen: list[Holding] = []
    for spare, size, later in zip(spares, sizes, reach[1:], strict=True):
        if 0 < size <= left and later >> (left - size) & 1:
            chosen.append(spare)
            left -= size
    return chosen
