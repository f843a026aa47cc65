"""Imports of much that stays, without the garbage collector; afterwards it is as the process had it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from recover.job.imports import importing


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_rests_inside_and_is_as_it_was_afterwards_also_after_a_failure(on: bool) -> None:
    if not on:
        gc.disable()
    for error in (ImportError, None):
        try:
            with importing():
                assert not gc.isenabled()
                if error:
                    raise error
        except ImportError:
            pass
        assert gc.isenabled() is on


def test_what_was_made_inside_is_not_looked_at_again_and_what_comes_later_is() -> None:
    class Node:
        other: object

    with importing():
        kept = Node()
    assert not any(each is kept for each in gc.get_objects())
    later = Node()
    assert any(each is later for each in gc.get_objects())
