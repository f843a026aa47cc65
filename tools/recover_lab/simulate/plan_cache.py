"""Cached plans of the production policy; replicas in the same role are counted, not listed.

The policy is not reimplemented here: layouts and responses are computed by it, with real replicas and slots, and only
the rounds and the counts of the roles are kept. Above `LISTED` replicas, not every number is computed: where the policy
gives the same accumulation for a smaller and for a larger number, it gives it in between, too
(`tests/pure/test_simulate_policy.py` checks it for every policy), and losses are computed at the smallest of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from recover.policy import FailureEvent, Holding, Role, get_policy

LISTED = 256
Kind = tuple[Role, int, bool]  # role, microbatches held, whether they count
Losses = tuple[tuple[int, ...], ...]  # per repair of a step: the kinds of the lost replicas, as indices


@dataclass(frozen=True)
class StepPlan:
    """An undisturbed step."""

    accum: int
    committed: int


@dataclass(frozen=True)
class Response:
    """How a step continues after a repair, and the kinds of replicas then."""

    rounds: int
    committed: int
    survivors: int
    kinds: tuple[int, ...]  # replicas of each kind


class PlanCache:
    def __init__(self, policy: str, initial: int, global_batch: int) -> None:
        self.policy, self.global_batch, self.initial = policy, global_batch, initial
        self.asked = 0  # calls of the policy itself
        self._policy = get_policy(policy, initial)
        self._plans: dict[int, StepPlan] = {}
        self._listed: list[int] = []  # the large ones among them, in order
        self._bands: dict[int, int] = {}
        self._standing: dict[tuple[int, Losses], Response] = {}
        self._census = lru_cache(maxsize=4)(self._census_after)

    def plan(self, replicas: int) -> StepPlan:
        found = self._plans.get(replicas)
        if found is None:
            found = self._ask(replicas) if replicas <= LISTED else self._ask(self._band(replicas))
            self._plans[replicas] = found
        return found

    def standing(self, replicas: int, losses: Losses = ()) -> Response:
        """The step that began with so many replicas, after these losses."""
        place = replicas if replicas <= LISTED else self._band(replicas)
        key = (place, losses)
        found = self._standing.get(key)
        if found is None:
            census, rounds = self._census(place, losses)
            kinds = tuple(Counter(map(_kind, census)).values())
            committed = sum(len(h.slots) for h in census if h.counts)
            found = self._standing[key] = Response(rounds, committed, len(census), kinds)
        if place == replicas:
            return found
        gone = sum(map(len, losses))
        first, *rest = found.kinds
        grown = (first + replicas - place, *rest)
        return Response(found.rounds, found.committed, replicas - gone, grown)

    def victims(self, replicas: int, losses: Losses, chance: float, number: int) -> tuple[int, ...]:
        """The kinds of `number` neighbours, the first of them selected by `chance`."""
        counts = self.standing(replicas, losses).kinds
        alive = sum(counts)
        start, chosen = int(chance * alive), []
        for step in range(min(number, alive - 1)):
            at, kind = (start + step) % alive, 0
            while at >= counts[kind]:
                at -= counts[kind]
                kind += 1
            chosen.append(kind)
        return tuple(sorted(chosen))

    def _census_after(self, replicas: int, losses: Losses) -> tuple[tuple[Holding, ...], int]:
        if not losses:
            self.asked += 1
            layout = self._policy.layout(range(replicas), self.global_batch)
            return layout.holdings(), layout.accum
        before, _ = self._census(replicas, losses[:-1])
        self.asked += 1
        decision = self._policy.respond(FailureEvent(_without(before, losses[-1]), self.global_batch))
        return decision.holdings(), decision.rounds

    def _ask(self, replicas: int) -> StepPlan:
        if replicas not in self._plans:
            self.asked += 1
            layout = self._policy.layout(range(replicas), self.global_batch)
            self._plans[replicas] = StepPlan(layout.accum, layout.committed)
        return self._plans[replicas]

    def _band(self, replicas: int) -> int:
        """The smallest number of replicas above `LISTED` with the same plan."""
        known = self._bands.get(replicas)
        if known is not None:
            return known
        place = bisect_left(self._listed, replicas)
        if place < len(self._listed) and self._bands[self._listed[place]] <= replicas:
            self._bands[replicas] = self._bands[self._listed[place]]
            return self._bands[replicas]
        plan, low, high = self._ask(replicas), LISTED, replicas
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._ask(middle) == plan else (middle, high)
        self._listed.insert(place, replicas)
        self._bands[replicas] = high
        return high


def _kind(holding: Holding) -> Kind:
    return holding.role, len(holding.slots), holding.counts


def _without(census: Sequence[Holding], kinds: tuple[int, ...]) -> list[Holding]:
    """The census without a replica of each of these kinds; replicas of one kind are equal."""
    names = list(dict.fromkeys(map(_kind, census)))
    gone = Counter(names[kind] for kind in kinds)
    left = []
    for holding in reversed(census):
        if gone[_kind(holding)] > 0:
            gone[_kind(holding)] -= 1
        else:
            left.append(holding)
    return left
