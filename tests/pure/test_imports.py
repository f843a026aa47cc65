"""Large imports run without the garbage collector; afterwards it is enabled as the process had it."""

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
def test_garbage_collector_is_paused_during_imports_and_restored(on: bool) -> None:
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


def test_imported_objects_are_frozen_and_later_ones_are_collected() -> None:
    class Node:
        other: object

    with importing():
        kept = Node()
    assert not any(each is kept for each in gc.get_objects())
    later = Node()
    assert any(each is later for each in gc.get_objects())
