"""Properties of the policies over any world, any losses, any progress."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recover.policy import (
    AdaptiveWorldPolicy,
    BalancedWorldPolicy,
    FailureEvent,
    Holding,
    Layout,
    Policy,
    PolicyDecision,
    RestoreMode,
    Role,
    Share,
    SlotSet,
    StaticWorldPolicy,
)
from recover.policy.response import complete_batch

keeping = pytest.mark.parametrize(
    "policy", [StaticWorldPolicy(), BalancedWorldPolicy()], ids=lambda p: p.name
)
worlds = st.tuples(st.integers(1, 256), st.integers(1, 256))


def progress(share: Share, chance: random.Random, complete: bool) -> Holding:
    """Slots that a replica holds when the census is taken: all of its share, or any part of it."""
    done = len(share.run) if complete else chance.randint(0, len(share.run))
    return share.holding(share.run.take(done)[0])


def check_layout(layout: Layout, replicas: list[int], batch: int) -> None:
    assert layout.replicas == tuple(sorted(replicas))
    counted = [share.run for share in layout.shares if share.counts]
    assert sum(map(len, counted)) == batch
    assert SlotSet.union(counted) == SlotSet.span(0, batch)
    everything = [share.run for share in layout.shares]
    assert len(SlotSet.union(everything)) == sum(map(len, everything))


def check_decision(census: list[Holding], batch: int, decision: PolicyDecision) -> None:
    assert decision.replicas == tuple(sorted(holding.replica for holding in census))
    assert decision.committed == batch

    # Every slot that counts is dealt once.
    counted = [part for share in decision.shares if share.counts for part in (share.kept, share.run)]
    assert len(SlotSet.union(counted)) == batch

    wanted = batch - sum(len(holding.slots) for holding in census if holding.counts)
    rounds = decision.rounds
    for holding in census:
        share = decision.share(holding.replica)
        # No contributed microbatch is discarded, and a sum is kept as a whole or not at all.
        assert share.kept in ((holding.slots,) if holding.counts else (holding.slots, SlotSet()))
        assert share.counts or not holding.counts
        # Replicas are dealt only slots of this step, and a spare in reserve is dealt none.
        assert not share.run - SlotSet.span(0, batch)
        assert share.counts or not share.run
        assert share.role.is_spare == (not share.counts)
        assert rounds - 1 <= len(share.run) <= rounds

    assert decision.boundary == any(share.run for share in decision.shares)
    if wanted == 0:
        assert decision.restore is RestoreMode.SKIP
        assert decision.holdings() == tuple(sorted(census, key=lambda holding: holding.replica))
    else:
        assert decision.restore is (RestoreMode.NON_BLOCKING if decision.boundary else RestoreMode.BLOCKING)


@pytest.mark.guarantee(
    "The batch",
    "The policy plans exactly B microbatches for any world up to 256 x 256 and any set of deaths.",
)
@keeping
@settings(deadline=None, max_examples=300)
@given(world=worlds, seed=st.integers(0, 2**32), sizes=st.lists(st.integers(1, 40), max_size=10))
def test_plan_commits_exactly_B_microbatches_for_any_deaths(
    policy: Policy, world: tuple[int, int], seed: int, sizes: list[int]
) -> None:
    """Deaths occur in sets, down to one survivor, in steps of their own and inside extra rounds, at any progress."""
    replicas, accum = world
    batch = replicas * accum
    chance = random.Random(seed)
    living = list(range(replicas))
    layout = policy.layout(living, batch)
    check_layout(layout, living, batch)
    plan: Layout | PolicyDecision = layout
    while len(living) > 1:
        size = min(sizes.pop() if sizes else len(living), len(living) - 1)
        dead = set(chance.sample(living, size))
        living = [replica for replica in living if replica not in dead]
        complete = chance.random() < 0.5
        census = [progress(plan.share(replica), chance, complete) for replica in living]
        chance.shuffle(census)
        decision = policy.respond(FailureEvent(census, batch))
        check_decision(census, batch, decision)
        if policy.name == "balanced":
            parts = [part for share in decision.shares for part in (share.kept, share.run)]
            assert SlotSet.union(parts) == SlotSet.span(0, batch)
            assert decision.discarded == 0
        plan = decision
        if chance.random() < 0.5:  # the step commits; the next loss hits a later one
            plan = policy.layout(living, batch)
            check_layout(plan, living, batch)


@pytest.mark.guarantee("The batch", "All survivors compute the same plan.")
@keeping
@settings(deadline=None, max_examples=60)
@given(world=worlds, seed=st.integers(0, 2**32))
def test_plan_does_not_depend_on_the_order_of_the_census(
    policy: Policy, world: tuple[int, int], seed: int
) -> None:
    replicas, accum = world
    chance = random.Random(seed)
    layout = policy.layout(chance.sample(range(replicas), replicas), replicas * accum)
    assert layout == policy.layout(range(replicas), replicas * accum)
    survivors = chance.sample(layout.shares, chance.randint(1, replicas))
    census = [progress(share, chance, complete=False) for share in survivors]
    decision = policy.respond(FailureEvent(census, replicas * accum))
    chance.shuffle(census)
    assert policy.respond(FailureEvent(census, replicas * accum)) == decision


@settings(deadline=None, max_examples=200)
@given(world=worlds, living=st.integers(1, 300))
def test_steady_static_layout_has_at_most_one_minor_and_least_accumulation(
    world: tuple[int, int], living: int
) -> None:
    batch = world[0] * world[1]
    layout = StaticWorldPolicy().layout(range(living), batch)
    roles = layout.roles()
    assert roles[Role.MINOR] <= 1
    assert roles[Role.MINOR_SPARE] <= roles[Role.MINOR]
    assert (layout.accum - 1) * living < batch <= layout.accum * living
    assert roles[Role.MAJOR] * layout.accum + layout.remainder == batch
    assert layout.remainder < layout.accum
    check_layout(layout, list(range(living)), batch)


@settings(deadline=None, max_examples=200)
@given(world=worlds, living=st.integers(1, 300))
def test_balanced_layout_has_no_spares_and_differs_by_one_at_most(
    world: tuple[int, int], living: int
) -> None:
    batch = world[0] * world[1]
    layout = BalancedWorldPolicy().layout(range(living), batch)
    sizes = [len(share.run) for share in layout.shares]
    assert max(sizes) - min(sizes) <= 1
    assert all(share.counts for share in layout.shares)
    assert [share.role for share in layout.shares] == [
        Role.MAJOR if size == max(sizes) else Role.MINOR for size in sizes
    ]
    check_layout(layout, list(range(living)), batch)


@pytest.mark.guarantee(
    "The batch", "The plan has the fewest extra rounds and discards the fewest microbatches of all plans."
)
@settings(deadline=None, max_examples=300)
@given(
    counted=st.lists(st.integers(0, 6), max_size=4),
    spares=st.lists(st.integers(0, 7), max_size=6),
    missing=st.integers(0, 25),
    seed=st.integers(0, 2**32),
)
def test_plan_has_the_fewest_extra_rounds_and_discarded_microbatches(
    counted: list[int], spares: list[int], missing: int, seed: int
) -> None:
    """Compared with all choices of spares, tried one by one."""
    if not counted and not spares:
        counted = [0]
    batch = max(1, sum(counted) + missing)
    missing = batch - sum(counted)
    ids = random.Random(seed).sample(range(20), len(counted) + len(spares))
    hands = SlotSet.span(0, batch).deal(counted) + SlotSet.span(batch, batch + sum(spares)).deal(spares)
    census = [
        Holding(replica, Role.MAJOR if place < len(counted) else Role.MAJOR_SPARE, hand, place < len(counted))
        for place, (replica, hand) in enumerate(zip(ids, hands, strict=True))
    ]
    decision = complete_batch(FailureEvent(census, batch))
    check_decision(census, batch, decision)

    choices = itertools.product([0, 1], repeat=len(spares))
    sums = (sum(itertools.compress(spares, choice)) for choice in choices)
    rounds, left_out = min(
        (-(-(missing - used) // len(census)), sum(spares) - used) for used in sums if used <= missing
    )
    kept = sum(len(share.kept) for share in decision.shares if share.counts)
    assert decision.rounds == rounds
    assert sum(counted) + sum(spares) - kept == left_out
    assert decision.discarded == (left_out if rounds else 0)


@given(kept=st.integers(0, 9), dealt=st.integers(0, 9), data=st.data())
def test_holding_is_what_was_kept_and_what_was_finished(kept: int, dealt: int, data: st.DataObject) -> None:
    """At a later loss in the step, a slot of the local sum that is missing in the holding would be dealt and summed
    again."""
    share = Share(3, Role.MAJOR, True, SlotSet.span(0, kept), SlotSet.span(20, 20 + dealt))
    finished = SlotSet.span(20, 20 + data.draw(st.integers(0, dealt)))
    assert share.holding(finished) == Holding(3, Role.MAJOR, share.kept | finished, True)
    assert share.holding() == Holding(3, Role.MAJOR, share.kept | share.run, True)
    with pytest.raises(ValueError, match=f"cannot have run slots {20 + dealt}: it was dealt {share.run}"):
        share.holding(SlotSet.span(20, 21 + dealt))


@settings(deadline=None, max_examples=60)
@given(world=worlds, seed=st.integers(0, 2**32))
def test_adaptive_policy_never_exceeds_the_batch_and_never_adds_work(
    world: tuple[int, int], seed: int
) -> None:
    replicas, accum = world
    chance = random.Random(seed)
    policy = AdaptiveWorldPolicy(replicas)
    layout = policy.layout(range(replicas), replicas * accum)
    survivors = chance.sample(layout.shares, chance.randint(1, replicas))
    decision = policy.respond(FailureEvent([share.holding() for share in survivors], replicas * accum))
    assert decision.committed == len(survivors) * accum
    assert decision.rounds == 0


@keeping
def test_plan_64x128_survives_losses_one_at_a_time(policy: Policy) -> None:
    batch = 64 * 128
    for living in range(64, 1, -1):
        census = policy.layout(range(living), batch).holdings()
        assert policy.respond(FailureEvent(census[1:], batch)).committed == batch
