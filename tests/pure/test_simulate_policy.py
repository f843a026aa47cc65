"""The simulation asks the production policy, caches its plans, and counts cases that it need not list."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recover_lab.simulate import plan_cache
from recover_lab.simulate.plan_cache import PlanCache

from recover.policy import FailureEvent, get_policy

POLICIES = ("balanced", "paced", "static", "adaptive")


@pytest.mark.parametrize("name", POLICIES)
@given(initial=st.integers(2, 60), accum=st.integers(1, 12))
@settings(max_examples=25, deadline=None)
def test_simulated_rounds_never_grow_with_more_replicas(name: str, initial: int, accum: int) -> None:
    """Therefore, if two numbers of replicas have the same plan, all numbers in between have it: large worlds need not
    be listed."""
    policy, batch = get_policy(name, initial), initial * accum
    layouts = [policy.layout(range(alive), batch) for alive in range(1, 2 * initial)]
    assert all(a.accum >= b.accum for a, b in itertools.pairwise(layouts))
    assert all(a.committed <= b.committed for a, b in itertools.pairwise(layouts))


@pytest.mark.guarantee(
    "Simulated clusters",
    "The simulation uses the production policy, and every simulated step of recover has exactly B "
    "microbatches.",
)
@pytest.mark.parametrize("name", POLICIES)
@given(initial=st.integers(12, 60), accum=st.integers(1, 9), order=st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_simulated_plans_are_those_of_the_policy(name: str, initial: int, accum: int, order: object) -> None:
    listed, plan_cache.LISTED = plan_cache.LISTED, 8  # larger worlds are counted by bands
    try:
        shares, policy = PlanCache(name, initial, initial * accum), get_policy(name, initial)
        sizes = list(range(1, initial + 1))
        order.shuffle(sizes)  # type: ignore[attr-defined]
        for alive in sizes:
            layout = policy.layout(range(alive), initial * accum)
            assert (shares.plan(alive).accum, shares.plan(alive).committed) == (
                layout.accum,
                layout.committed,
            )
    finally:
        plan_cache.LISTED = listed


@pytest.mark.guarantee(
    "Simulated clusters",
    "The simulation uses the production policy, and every simulated step of recover has exactly B "
    "microbatches.",
)
@pytest.mark.parametrize("name", ["balanced", "static"])
@given(
    initial=st.integers(3, 40),
    accum=st.integers(1, 9),
    strikes=st.lists(st.tuples(st.floats(0, 0.999), st.integers(1, 3)), min_size=1, max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_simulated_step_with_losses_follows_the_policy_and_commits_B(
    name: str, initial: int, accum: int, strikes: list[tuple[float, int]]
) -> None:
    """After several losses in one step, of any replicas, the simulated step has the rounds that follow from the
    census, and exactly B microbatches."""
    batch = initial * accum
    shares, policy = PlanCache(name, initial, batch), get_policy(name, initial)
    census = list(policy.layout(range(initial), batch).holdings())
    losses: plan_cache.Losses = ()
    for chance, number in strikes:
        if len(census) <= number:
            break
        dead = shares.victims(initial, losses, chance, number)
        assert len(dead) == number
        losses = (*losses, dead)
        kinds = list(dict.fromkeys((h.role, len(h.slots), h.counts) for h in census))
        for kind in dead:  # remove the last replica of that kind: all are equivalent
            census.remove(next(h for h in census[::-1] if (h.role, len(h.slots), h.counts) == kinds[kind]))
        decision = policy.respond(FailureEvent(census, batch))
        census = list(decision.holdings())
        found = shares.standing(initial, losses)
        assert (found.rounds, found.survivors) == (decision.rounds, len(census))
        assert found.committed == batch


def test_simulated_plans_are_cached() -> None:
    shares = PlanCache("balanced", 200, 3200)
    for _ in range(3):
        for alive in range(200, 180, -1):
            shares.plan(alive)
            shares.standing(alive, ((0,),))
    assert shares.asked <= 3 * 20
    big = PlanCache("balanced", 800, 12800)
    for alive in range(800, 500, -1):
        big.plan(alive)
    assert big.asked < 150
