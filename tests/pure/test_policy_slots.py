"""Slot sets behave as the sets of integers they stand for."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover.policy import Holding, Role, SlotSet
from recover.policy.slots import even

integers = st.sets(st.integers(0, 40))


def slots(numbers: set[int]) -> SlotSet:
    return SlotSet([(n, n + 1) for n in numbers])


@given(integers, integers)
def test_slot_set_operations_equal_those_on_sets_of_integers(a: set[int], b: set[int]) -> None:
    x, y = slots(a), slots(b)
    assert set(x) == a
    assert len(x) == len(a)
    assert set(x | y) == a | b
    assert set(x - y) == a - b
    assert set(x & y) == a & b
    assert SlotSet.union([x, y]) == x | y
    assert all((n in x) == (n in a) for n in range(42))


@given(integers)
def test_slot_sets_that_are_equal_have_one_form(a: set[int]) -> None:
    x = slots(a)
    assert x == SlotSet(reversed(x.ranges))
    assert hash(x) == hash(slots(set(x)))
    assert all(stop < start for (_, stop), (start, _) in zip(x.ranges, x.ranges[1:], strict=False))


@given(integers, st.data())
def test_slot_set_deals_every_slot_once_lowest_first(a: set[int], data: st.DataObject) -> None:
    x = slots(a)
    count = data.draw(st.integers(0, len(a)))
    first, rest = x.take(count)
    assert list(first) + list(rest) == sorted(a)
    assert len(first) == count
    counts = data.draw(st.lists(st.integers(0, len(a)), max_size=4).filter(lambda c: sum(c) <= len(a)))
    hands = x.deal(counts)
    assert [len(hand) for hand in hands] == counts
    assert [slot for hand in hands for slot in hand] == sorted(a)[: sum(counts)]


@given(integers, st.sampled_from(Role), st.booleans())
def test_holding_survives_serialization(a: set[int], role: Role, counts: bool) -> None:
    holding = Holding(7, role, slots(a), counts)
    assert Holding.from_bytes(holding.to_bytes()) == holding
    assert SlotSet(json.loads(json.dumps(holding.slots.ranges))) == holding.slots


@given(st.integers(0, 1000), st.integers(1, 50))
def test_slot_set_parts_differ_by_one_at_most(total: int, parts: int) -> None:
    sizes = even(total, parts)
    assert sum(sizes) == total
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_large_contiguous_slot_set_is_small_on_the_wire() -> None:
    assert len(Holding(3, Role.MAJOR, SlotSet.span(0, 65536), True).to_bytes()) <= 16


def test_slot_set_formats_readably() -> None:
    assert str(SlotSet([(0, 8), (12, 13)])) == "0-7,12"
    assert str(SlotSet()) == "none"


@pytest.mark.parametrize("data", [b"", b"abc", b"\x00\x00\x00\x00\x99\x01", b"\x00" * 11])
def test_damaged_holding_is_refused_with_the_remedy(data: bytes) -> None:
    with pytest.raises(ValueError, match="same version"):
        Holding.from_bytes(data)


@pytest.mark.parametrize("pair", [(-1, 2), (3, 2)])
def test_impossible_slot_range_is_refused(pair: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no range of slots"):
        SlotSet([pair])


@pytest.mark.parametrize("count", [-1, 5])
def test_slot_set_refuses_to_take_more_than_it_has(count: int) -> None:
    with pytest.raises(ValueError, match="cannot take"):
        SlotSet.span(0, 4).take(count)
