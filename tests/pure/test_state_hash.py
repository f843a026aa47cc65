"""The fingerprint of a state: what changes it, what it costs a device, and how replicas compare theirs."""

from __future__ import annotations

from itertools import product

import torch
from test_gradients import Dispatches

from recover.step.totals import MODULUS, all_equal, on_the_wire
from recover.sums.state_hash import StateHash, fingerprint


def test_replicas_that_train_different_parameters_have_different_fingerprints() -> None:
    values = [torch.randn(3) for _ in range(3)]
    seen = {
        on_the_wire(fingerprint(values, 1, bytes(trained)).value) for trained in product((0, 1), repeat=3)
    }
    assert len(seen) == 8


def test_a_device_is_told_once_of_each_parameter_whose_bits_are_looked_at() -> None:
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((4, 6), (8,), (2, 3, 5), (0,))]
    with Dispatches() as device:
        fingerprint(parameters, 1).begin()
    assert device.told == {"sum.default": 3, "stack.default": 1}


def test_a_step_is_known_by_its_buffers_as_they_were_and_its_parameters_as_they_are_when_it_is_asked() -> (
    None
):
    buffer, parameter = torch.zeros(4), torch.zeros(4)
    whole = StateHash(3)
    whole.add([buffer])
    with Dispatches() as device:
        value = whole.value(lambda: [parameter])
    assert not device.told  # before the vote, there is nothing to do for it
    buffer.add_(1)
    parameter.add_(1)
    assert value.value == fingerprint([torch.zeros(4), torch.ones(4)], 3).value


def test_any_flipped_bit_changes_the_fingerprint() -> None:
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


def test_a_parameter_that_is_a_view_at_an_odd_place_has_a_fingerprint() -> None:
    flat = torch.randn(9)
    assert fingerprint([flat[1:]], 0).value == fingerprint([flat[1:].clone()], 0).value


def test_hashes_on_the_wire_tell_whether_all_are_equal() -> None:
    for others in ([5, 5, 5], [5, 5, 6], [MODULUS - 1] * 2 + [0]):
        wires = [on_the_wire(value) for value in (others[0], *others)]
        total, squares = (sum(column) for column in zip(*wires, strict=True))
        assert all_equal(total, squares, len(wires)) == (len(set(others)) == 1)
