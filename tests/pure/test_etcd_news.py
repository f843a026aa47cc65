"""What a rank hears of its own end: whether it was given up itself, or is lost with a mate."""

from __future__ import annotations

import json

import pytest

from recover.world.fabrics.etcd.agreement import DEAD, DECISION, Decision, key_of
from recover.world.fabrics.etcd.client import KeyValue
from recover.world.fabrics.etcd.membership_cache import WITH_REPLICA, News


def decided(dead: list[int]) -> KeyValue:
    content = {"number": 7, "word": None, "dead": dead, "joined": [], "participants": "4-5", "by": 4}
    return KeyValue(DECISION, json.dumps(content).encode(), version=7, modified=20)


def declared(rank: int) -> KeyValue:
    return KeyValue(key_of(DEAD, rank), b"it hung", version=1, modified=10)


@pytest.mark.parametrize(
    ("replica", "heard", "with_mates"),
    [
        (range(2, 4), [decided([2, 3])], True),
        (range(2, 4), [declared(3), decided([2, 3])], True),
        (range(2, 4), [declared(2), decided([2, 3])], False),
        (range(2, 3), [decided([2, 3])], False),  # of another replica
    ],
)
def test_one_that_is_lost_with_a_mate_is_not_taken_for_one_that_was_given_up(
    replica: range, heard: list[KeyValue], with_mates: bool
) -> None:
    """So its place is not struck, and it is no first cause."""
    news = News(2, Decision.before_all(6), True, replica)
    news.hear(heard)
    assert news.over.startswith(WITH_REPLICA) == with_mates
    assert news.over
