"""Which replicas a partial partition costs: the smallest set without which every two that are left reach each
other.

That is a minimum vertex cover of the broken links. All members compute it from the same census, so ties are broken
by numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

EXACT = 20  # replicas with a broken link up to which the smallest set is searched; beyond, it is approximated

Links = frozenset[frozenset[int]]
Cost = tuple[int, int, tuple[int, ...]]  # ranks of members, all ranks, and numbers for ties


def smallest_cover(
    links: Iterable[tuple[int, int]], weights: Mapping[int, int], joining: Collection[int] = ()
) -> frozenset[int]:
    """The replicas to go on without.

    links:    pairs of replicas of which one does not reach the other
    weights:  ranks of each replica
    joining:  replicas that hold no state yet: they go before any member does

    Of several sets that cost the same, the one with the highest numbers.
    """
    every = frozenset(frozenset(pair) for pair in links)
    # If a link inside of a replica is broken, that replica goes in any case.
    parted = frozenset[int]().union(*(link for link in every if len(link) == 1))
    broken = _without(every, parted)
    ends = frozenset[int]().union(*broken)
    joins = frozenset(joining)

    def cost(cover: frozenset[int]) -> Cost:
        ranks = sum(weights[replica] for replica in cover)
        members = sum(weights[replica] for replica in cover - joins)
        # Compared last, and as small as possible: so the highest numbers go.
        return members, ranks, tuple(-replica for replica in sorted(cover, reverse=True))

    if len(ends) > EXACT:
        return parted | _greedy(broken, cost)
    best = ends

    def search(cover: frozenset[int], left: Links) -> None:
        nonlocal best
        if cost(cover)[:2] > cost(best)[:2]:
            return  # weights are positive: the cost only grows
        if not left:
            best = min(best, cover, key=cost)
            return
        busiest = _busiest(left)
        search(cover | {busiest}, _without(left, {busiest}))
        # Or the busiest replica stays: then all replicas that it does not reach go.
        others = frozenset[int]().union(*(link for link in left if busiest in link)) - {busiest}
        search(cover | others, _without(left, others))

    search(frozenset(), broken)
    return parted | best


def _greedy(left: Links, cost: Callable[[frozenset[int]], Cost]) -> frozenset[int]:
    """Take the replica with the most broken links until there are none, then keep the replicas that
    need not be taken."""
    broken, cover = left, frozenset[int]()
    while left:
        ends = frozenset[int]().union(*left)
        # The most links for its cost: joining replicas cost no member.
        chosen = max(
            ends,
            key=lambda replica: (
                sum(replica in link for link in left) / (1e-9 + cost(frozenset({replica}))[0]),
                replica,
            ),
        )
        cover |= {chosen}
        left = _without(left, {chosen})
    for replica in sorted(cover):
        if not _without(broken, cover - {replica}):
            cover -= {replica}
    return cover


def _busiest(left: Links) -> int:
    ends = frozenset[int]().union(*left)
    return max(ends, key=lambda replica: (sum(replica in link for link in left), replica))


def _without(links: Links, replicas: Collection[int]) -> Links:
    return frozenset(link for link in links if link.isdisjoint(replicas))
