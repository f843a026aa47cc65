"""The reason that a rank gets for its own end: declared dead itself, or lost with its replica."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from recover.job.grid import Grid
from recover.world.deaths import KnownDeaths
from recover.world.fabrics.base import DeclaredDeadError
from recover.world.fabrics.etcd.agreement import DEAD, DECISION, Decision, key_of
from recover.world.fabrics.etcd.client import KeyValue
from recover.world.fabrics.etcd.membership_cache import WITH_REPLICA, MembershipCache
from recover.world.rank_exit import End
from recover.world.watcher import Watcher


def decided(dead: list[int]) -> KeyValue:
    content = {"number": 7, "word": None, "dead": dead, "joined": [], "participants": "4-5", "by": 4}
    return KeyValue(DECISION, json.dumps(content).encode(), version=7, modified=20)


def declared(rank: int) -> KeyValue:
    return KeyValue(key_of(DEAD, rank), b"it hung", version=1, modified=10)


@pytest.mark.guarantee(
    "Rejoining replicas", "A rank lost with a peer is no first cause, and its slot stays good."
)
@pytest.mark.parametrize(
    ("replica", "heard", "with_peers"),
    [
        (range(2, 4), [decided([2, 3])], True),
        (range(2, 4), [declared(3), decided([2, 3])], True),
        (range(2, 4), [declared(2), decided([2, 3])], False),
        (range(2, 3), [decided([2, 3])], False),  # a rank of another replica
    ],
)
def test_rank_lost_with_a_peer_is_not_reported_as_evicted(
    replica: range, heard: list[KeyValue], with_peers: bool
) -> None:
    """Therefore its slot is not struck, and the rank is no first cause."""
    cache = MembershipCache(2, Decision.before_all(6), True, replica)
    cache.apply(heard)
    assert cache.fatal.startswith(WITH_REPLICA) == with_peers
    assert cache.fatal


@pytest.mark.parametrize(("orphan", "end"), [(False, End.FENCED), (True, End.ORPHAN)])
def test_watcher_ends_a_rank_that_was_declared_dead(orphan: bool, end: End) -> None:
    """The main thread is computing, and would learn of it only at its next agreement."""

    def failed() -> frozenset[int]:
        raise DeclaredDeadError("rank 2 was declared dead: it hung", orphan)

    ends: list[tuple[End, str]] = []
    fabric = SimpleNamespace(
        rank=2,
        failed=failed,
        lock=threading.RLock(),
        waiting_in=None,
        look_for_exits=lambda now: None,
        now=lambda: 0.0,
    )
    own = SimpleNamespace(die=lambda how, text: ends.append((how, text)))
    parts: Any = SimpleNamespace(fabric=fabric, liveness=None, own=own, notes=None)
    hangs: Any = SimpleNamespace(hushed=[])
    watcher = Watcher(
        parts, Grid(4), hangs, KnownDeaths(cast(Any, fabric)), lambda dead: None, lambda: False, print, print
    )
    watcher._looked = float("inf")  # the watcher looks only for deaths
    watcher.look(0.0)
    assert ends == [(end, "rank 2 was declared dead: it hung")]
    watcher.ignore_deaths()
    watcher.look(0.0)
    assert len(ends) == 1, "all have agreed to end, so no death matters any more"


def test_calls_of_a_rank_that_was_declared_dead_raise() -> None:
    cache = MembershipCache(2, Decision.before_all(6), True, range(2, 4))
    cache.check()
    cache.apply([declared(2)])
    with pytest.raises(DeclaredDeadError, match="rank 2 was declared dead: it hung") as raised:
        cache.check()
    assert not raised.value.orphan
    cache = MembershipCache(2, Decision.before_all(6), True, range(2, 4))
    cache.apply([decided([2, 3])])
    with pytest.raises(DeclaredDeadError) as raised:
        cache.check()
    assert raised.value.orphan
