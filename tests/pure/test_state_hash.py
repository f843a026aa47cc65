"""The fingerprint of a state: the changes that it detects, its cost on a device, and how replicas compare it."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from test_gradients import Dispatches

from recover.gradients import deferred
from recover.gradients.state_hash import WIDTH, StateHash, digest_of, fingerprint, leaves
from recover.step.totals import MODULUS, all_equal, on_the_wire


def test_fingerprints_differ_if_replicas_train_different_parameters() -> None:
    values = [torch.randn(3) for _ in range(3)]
    seen = {
        on_the_wire(fingerprint(values, 1, bytes(trained)).value) for trained in product((0, 1), repeat=3)
    }
    assert len(seen) == 8


def test_device_hashes_a_large_tensor_twice_and_mixes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors cost the device no operation of their own, and the host waits for nothing."""
    monkeypatch.setattr(deferred, "NEAR", ())
    small = [torch.nn.Parameter(torch.randn(shape)) for shape in ((4, 6), (8,), (2, 3, 6), (0,))]
    large = [torch.nn.Parameter(torch.randn(2 * WIDTH + 6)) for _ in range(3)]
    counts = []
    for parameters in (small, small + large):
        fingerprint(parameters, 1).begin()  # tensors of places are made once, here
        with Dispatches() as device:
            fingerprint(parameters, 1).begin()
        counts.append(device.told)
    assert counts[0]["cat.default"] == 1
    assert counts[0].total() < 15
    assert dict(counts[1] - counts[0]) == {"sum.dim_IntList": 6}


def test_state_hash_reads_buffers_at_once_and_parameters_at_the_vote() -> None:
    buffer, parameter = torch.zeros(4), torch.zeros(4)  # too small for sums: their words are kept
    whole = StateHash(3)
    whole.add([buffer])
    with Dispatches() as device:
        value = whole.value(lambda: [parameter])
    assert not device.told  # before the vote, the device runs no operation
    buffer.add_(1)
    parameter.add_(1)
    assert value.value == fingerprint([torch.zeros(4), torch.ones(4)], 3).value


@pytest.mark.guarantee("State and samples", "A flipped bit and a swap of two words change the fingerprint.")
def test_bit_flip_changes_the_fingerprint() -> None:
    torch.manual_seed(0)
    parameters = [torch.randn(7), torch.randn(3, 3), torch.randn(5).to(torch.bfloat16)]
    before = fingerprint(parameters, 1).value
    assert before == fingerprint([p.clone() for p in parameters], 1).value
    assert before != fingerprint(parameters, 2).value
    for parameter in parameters:
        raw = parameter.view(-1).view(torch.uint8)
        for byte in range(raw.numel()):
            for bit in range(8):
                raw[byte] ^= 1 << bit
                assert fingerprint(parameters, 1).value % MODULUS != before % MODULUS
                raw[byte] ^= 1 << bit


def test_view_with_an_odd_offset_has_a_fingerprint() -> None:
    flat = torch.randn(9)
    assert fingerprint([flat[1:]], 0).value == fingerprint([flat[1:].clone()], 0).value


def test_hashes_on_the_wire_show_whether_all_are_equal() -> None:
    for others in ([5, 5, 5], [5, 5, 6], [MODULUS - 1] * 2 + [0]):
        wires = [on_the_wire(value) for value in (others[0], *others)]
        total, squares = (sum(column) for column in zip(*wires, strict=True))
        assert all_equal(total, squares, len(wires)) == (len(set(others)) == 1)


def _of(words: list[int]) -> int:
    """The fingerprint of these words, computed on the host and as on a device, where sums have another order."""
    tensor = torch.from_numpy(np.array(words, np.int64))
    here = fingerprint([tensor], 0).value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred, "NEAR", ())
        there = fingerprint([tensor], 0).value
    assert here == there
    return here


@pytest.mark.guarantee("State and samples", "A flipped bit and a swap of two words change the fingerprint.")
@settings(max_examples=60, deadline=None)
@given(
    some.integers(2, 3 * WIDTH),
    some.data(),
    some.sampled_from([(0, 1 << 63), (0, 0x3F800000 << 32), (0, 1), (5, 6)]),
)
def test_swap_of_two_words_changes_the_fingerprint(
    size: int, data: some.DataObject, values: tuple[int, int]
) -> None:
    """This includes words that differ only in their highest bit, which an even weight would hide."""
    first, second = data.draw(some.lists(some.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    fill, other = (value - (1 << 64) if value >> 63 else value for value in values)
    words = [fill] * size
    words[first] = other
    before = _of(words)
    words[first], words[second] = fill, other
    assert _of(words) != before


@pytest.mark.parametrize("rows", [6, 300, 4096])
def test_permutation_of_rows_changes_the_fingerprint(rows: int) -> None:
    torch.manual_seed(1)
    tensor = torch.randn(rows, 64)
    for order in (torch.randperm(rows), torch.arange(rows).flip(0), torch.arange(rows).roll(1)):
        assert fingerprint([tensor[order]], 0).value != fingerprint([tensor], 0).value
    assert fingerprint([tensor.T.contiguous()], 0).value != fingerprint([tensor], 0).value


def test_fingerprint_depends_on_the_position_of_tensors() -> None:
    one, other = torch.zeros(3), torch.ones(3)
    seen = [[one, other], [other, one], [torch.zeros(0), one, other], [torch.cat([one, other])]]
    assert len({fingerprint(tensors, 0).value for tensors in seen}) == len(seen)


NEST = some.recursive(
    some.sampled_from([0, 1, 2.5, float("nan"), "a", None, True]),
    lambda inner: some.one_of(
        some.lists(inner, max_size=3),
        some.lists(inner, max_size=3).map(tuple),
        some.dictionaries(some.sampled_from([0, 1, "0", "m", "exp_avg"]), inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(NEST, some.data())
def test_nested_state_is_hashed_to_its_last_value_for_any_keys(nest: Any, data: some.DataObject) -> None:
    found = list(leaves(nest))
    assert digest_of(nest) == digest_of(_reordered(nest)), "the order in which keys were added does not count"
    if not found:
        return
    path, _ = data.draw(some.sampled_from(found))
    assert digest_of(_replaced(nest, path, "another")) != digest_of(nest)
    assert list(leaves(_replaced(nest, path, torch.ones(2))))[found.index((path, _))][0] == path


def _reordered(nest: Any) -> Any:
    if isinstance(nest, dict):
        return {key: _reordered(nest[key]) for key in reversed(nest)}
    return type(nest)(map(_reordered, nest)) if isinstance(nest, list | tuple) else nest


def _replaced(nest: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    if isinstance(nest, dict):
        return nest | {path[0]: _replaced(nest[path[0]], path[1:], value)}
    changed = list(nest)
    changed[path[0]] = _replaced(nest[path[0]], path[1:], value)
    return type(nest)(changed)
