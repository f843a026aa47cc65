"""The replicas that a partial partition costs: the fewest, and the same on all members."""

from __future__ import annotations

import random
from itertools import chain, combinations

import pytest

from recover.policy.cover import EXACT, smallest_cover

Pair = tuple[int, int]


def covers(links: list[Pair], replicas: range) -> list[set[int]]:
    """All sets of replicas whose removal leaves no broken link."""
    sets = chain.from_iterable(combinations(replicas, size) for size in range(len(replicas) + 1))
    return [set(one) for one in sets if all(low in one or high in one for low, high in links)]


@pytest.mark.guarantee(
    "Membership",
    "Where members do not reach each other, the fewest ranks are excluded, joining replicas before members, and all "
    "members choose the same.",
)
@pytest.mark.parametrize("joining", [(), (0,), (1, 3)])
@pytest.mark.parametrize("weights", [(1, 1, 1, 1, 1), (1, 3, 1, 2, 2)])
def test_cover_is_the_smallest_for_every_set_of_broken_links(
    weights: tuple[int, ...], joining: tuple[int, ...]
) -> None:
    """Compares all 1,024 sets of links between five replicas with all 32 sets of replicas."""
    replicas = range(5)
    pairs = list(combinations(replicas, 2))
    by_number = dict(enumerate(weights))

    def cost(cover: set[int]) -> tuple[int, int, tuple[int, ...]]:
        members = sum(weights[replica] for replica in cover if replica not in joining)
        return members, sum(weights[replica] for replica in cover), tuple(sorted(-r for r in cover))

    for chosen in range(1 << len(pairs)):
        links = [pair for number, pair in enumerate(pairs) if chosen >> number & 1]
        best = min(covers(links, replicas), key=cost)
        told = smallest_cover(((high, low) for low, high in reversed(links)), by_number, joining)
        assert told == best, links


def test_cover_of_links_inside_a_replica_is_that_replica() -> None:
    assert smallest_cover([(2, 2), (0, 1)], dict.fromkeys(range(3), 1)) == {1, 2}


def test_cover_of_two_hosts_is_the_smaller_one() -> None:
    """Ten replicas on one host do not reach ten on another, one of which has died: 19, the most that the exact search
    covers."""
    links = [(low, high) for low in range(10) for high in range(10, 19)]
    assert smallest_cover(links, dict.fromkeys(range(19), 1)) == set(range(10, 19))
    assert EXACT >= 19


def test_large_cover_leaves_no_broken_link_and_nothing_to_spare() -> None:
    """Beyond the exact search: no replica of the cover could stay, and all members find the same cover."""
    rng = random.Random(0)
    for _ in range(20):
        pairs = list(combinations(range(40), 2))
        links = rng.sample(pairs, 60)
        weights = {replica: rng.randint(1, 3) for replica in range(40)}
        cover = smallest_cover(links, weights, joining=range(35, 40))
        assert len({replica for link in links for replica in link}) > EXACT
        assert all(low in cover or high in cover for low, high in links)
        for replica in cover:
            assert any(not {low, high} & (cover - {replica}) for low, high in links)
        rng.shuffle(links)
        assert smallest_cover(links, weights, joining=range(35, 40)) == cover
    star = [(0, other) for other in range(1, 30)]
    assert smallest_cover(star, dict.fromkeys(range(30), 1)) == {0}
