"""Layouts of worlds that lose replicas and admit others: properties for any order of events."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_policy_guarantees import check_layout

from recover.policy import AdaptiveWorldPolicy, BalancedWorldPolicy, Role, StaticWorldPolicy
from recover.policy.losses import Join, Loss
from recover.policy.rehearsal import Growth, rehearse

keeping = pytest.mark.parametrize(
    "policy", [StaticWorldPolicy(), BalancedWorldPolicy()], ids=lambda p: p.name
)
worlds = st.tuples(st.integers(1, 64), st.integers(1, 64), st.integers(0, 2**32))
ORDER = (Role.MAJOR, Role.MINOR, Role.MAJOR_SPARE, Role.MINOR_SPARE)


def comings_and_goings(replicas: int, seed: int) -> list[list[int]]:
    """Living replicas after each event; a joining replica has a number that was never used."""
    chance, living, worlds = random.Random(seed), list(range(replicas)), []
    number = replicas
    for _ in range(chance.randint(1, 12)):
        if chance.random() < 0.5 and len(living) > 1:
            living = chance.sample(living, chance.randint(1, len(living) - 1))
        else:
            count = chance.randint(1, 4)
            living += range(number, number + count)
            number += count
        worlds.append(sorted(living))
    return worlds


@pytest.mark.guarantee(
    "The batch",
    "Layouts of a world that shrinks and grows deal B microbatches once, and a static world that is "
    "complete again has its first layout.",
)
@keeping
@settings(deadline=None, max_examples=200)
@given(world=worlds)
def test_layouts_of_a_shrinking_and_growing_world_deal_B_once(policy, world) -> None:  # type: ignore[no-untyped-def]
    replicas, accum, seed = world
    for living in comings_and_goings(replicas, seed):
        check_layout(policy.layout(living, replicas * accum), living, replicas * accum)


@pytest.mark.guarantee(
    "The batch",
    "Layouts of a world that shrinks and grows deal B microbatches once, and a static world that is "
    "complete again has its first layout.",
)
@keeping
@settings(deadline=None, max_examples=200)
@given(world=worlds)
def test_layout_depends_on_the_number_alive_and_roles_follow_replica_order(policy, world) -> None:  # type: ignore[no-untyped-def]
    """Therefore replicas that joined last are the first to be minors or spares, and a world that is complete again has
    its first layout."""
    replicas, accum, seed = world
    batch = replicas * accum
    for living in comings_and_goings(replicas, seed):
        layout = policy.layout(living, batch)
        fresh = policy.layout(range(len(living)), batch)
        assert [(s.role, s.run) for s in layout.shares] == [(s.role, s.run) for s in fresh.shares]
        places = [ORDER.index(share.role) for share in layout.shares]
        assert places == sorted(places)
        grown = policy.layout([*living, living[-1] + 1], batch)
        assert grown.accum <= layout.accum, "a replica more makes nobody run more"


@settings(deadline=None, max_examples=200)
@given(world=worlds)
def test_static_spares_of_a_grown_world_have_slots_beyond_the_batch(world) -> None:  # type: ignore[no-untyped-def]
    """Spares run fewer than B such slots, or one for each replica where B is that small: as many as the row of the
    totals has room for."""
    replicas, accum, seed = world
    batch = replicas * accum
    for living in comings_and_goings(replicas, seed):
        layout = StaticWorldPolicy().layout(living, batch)
        spares = [slot for share in layout.shares if not share.counts for slot in share.run]
        assert sorted(spares) == list(range(batch, batch + len(spares)))
        assert len(spares) <= max(batch, len(living))


@settings(deadline=None, max_examples=200)
@given(world=worlds)
def test_adaptive_batch_grows_with_the_world_up_to_B(world) -> None:  # type: ignore[no-untyped-def]
    replicas, accum, seed = world
    policy, batch = AdaptiveWorldPolicy(replicas), replicas * accum
    for living in comings_and_goings(replicas, seed):
        committed = policy.layout(living, batch).committed
        assert committed == min(batch, accum * len(living))


@keeping
def test_rehearsal_with_joins_commits_B_in_every_step(policy) -> None:  # type: ignore[no-untyped-def]
    events = [Loss.parse("2"), Join(1), Loss.parse("1"), Join(5), Loss.parse("3")]
    story = rehearse(policy, 6, 4, events)
    assert [len(outcome.next.shares) for outcome in story.outcomes] == [4, 5, 4, 9, 6]
    assert {outcome.next.committed for outcome in story.outcomes} == {24}
    assert {outcome.decision.committed for outcome in story.losses} == {24}
    assert story.joined == sum(o.count for o in story.outcomes if isinstance(o, Growth)) == 6
    numbers = {replica for outcome in story.outcomes for replica in outcome.next.replicas}
    assert max(numbers) == 11, "numbers are never used twice"
