"""Fingerprint of a replica's state, which finds a replica whose state differs within one step.

All replicas must hold the same bits. Each adds a small hash and its square to the totals: the
square of the sum equals the number of replicas times the sum of squares only if all hashes are
equal.

The words of a tensor are laid out as rows of a fixed width. Every row sum and every column sum
is mixed with its position before all of them are added up, so that the order of words counts:
swapping two words of different rows changes two row sums, swapping two words of one row two
column sums. Integer sums are the same in any order and on any device; a device reads each tensor
twice and returns one number, without a wait.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from recover.gradients import deferred
from recover.gradients.deferred import DeviceValue, Numbers
from recover.gradients.optimizers import groups_of, optimizers_of, parameters_of
from recover.gradients.parts import local_part

WIDTH = 4096  # words of 8 bytes in a row
BLOCK = 8  # rows that the host adds up in both directions while they are in its cache
_LOW = (1 << 32) - 1
_TENSOR, _PLACE, _FIRST, _SECOND = (  # odd constants of 64 bits, as signed numbers
    value - (1 << 64) if value >> 63 else value
    for value in (0xD1B54A32D192ED03, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_PLAIN = (bool, int, float)
_OF_GROUP = ("params", "param_names")  # the parameters themselves


class StateHash:
    """64 bits over the step number and the values of all tensors at the time they are added. Any
    flipped bit and any two swapped words change it.

    trained:  which parameters are trained: replicas that train different ones must not continue together
    values:   further state that must be equal and is not a tensor
    """

    def __init__(self, step: int, trained: bytes = b"", values: object = None) -> None:
        self._start = step + zlib.crc32(trained) + (0 if values is None else digest_of(values))
        self._added = 0
        self._sums: dict[torch.device, list[torch.Tensor]] = {}
        self._layout: dict[torch.device, list[tuple[int, int]]] = {}  # number of the tensor, and of its sums

    @torch.no_grad()
    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        self._added = _add(tensors, self._sums, self._layout, self._added)

    def value(
        self,
        when_asked: Callable[[], Iterable[torch.Tensor]] = lambda: (),
        digested: Callable[[], Iterable[torch.Tensor]] = lambda: (),
        learn: Callable[[bytes], None] = lambda digest: None,
    ) -> DeviceValue[int]:
        """The hash of everything added so far, and of the tensors of `when_asked` and `digested`
        when the value is read.

        `learn` is called with 128 bits over the tensors of `digested` alone. They are read once
        for both: the digest costs one more product of sums that are there already.
        """
        others = 0  # sums that are not of `digested`

        @torch.no_grad()
        def begin() -> Iterable[torch.Tensor]:
            nonlocal others
            self.add(when_asked())
            mixed = [
                _mixed(_whole(sums), _places(device, tuple(self._layout[device]))).sum()
                for device, sums in self._sums.items()
            ]
            others = len(mixed)
            # Numbered from 0: the digest must not depend on what else is compared in this step.
            sums, layout = (
                dict[torch.device, list[torch.Tensor]](),
                dict[torch.device, list[tuple[int, int]]](),
            )
            _add(digested(), sums, layout, 0)
            for device, parts in sums.items():
                places = _places(device, tuple(layout[device]))
                words = _mixed(_whole(parts), places)
                # The second half weights each word by its place. Words are mixed already: changes of several words
                # that cancel out in one half do not do so in the other.
                mixed += [words.sum(), words.mul_(places).sum()]
            return mixed

        def total(*values: Numbers) -> int:
            numbers = [int(value[0]) for value in values]
            halves = [sum(numbers[others + place :: 2]) % 2**64 for place in range(2)]
            learn(b"".join(half.to_bytes(8, "little") for half in halves))
            return (self._start + sum(numbers[:others]) + halves[0]) % 2**64

        return DeviceValue(total, when_asked=begin)


def fingerprint(tensors: Iterable[torch.Tensor], step: int, trained: bytes = b"") -> DeviceValue[int]:
    """The hash of these tensors, with their present values."""
    whole = StateHash(step, trained)
    whole.add(tensors)
    return whole.value()


def _sums(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Sums of rows, sums of columns, and the words and bytes behind the last whole row."""
    words, over = _words(tensor)
    rows = words.numel() // WIDTH
    whole = words[: rows * WIDTH].view(rows, WIDTH)
    if rows and words.device.type in deferred.NEAR:
        yield from map(torch.from_numpy, _sums_of_host(whole.numpy()))
    elif rows:
        yield whole.sum(1)
        yield whole.sum(0)
    yield words[rows * WIDTH :]
    if over.numel():
        yield over.to(torch.int64)


def _sums_of_host(whole: Numbers) -> tuple[Numbers, Numbers]:
    """Sums of rows and columns, block by block, so that memory is read once. In one thread: on
    busy cores, torch's threads wait for each other longer than these sums take."""
    rows, columns = np.empty(len(whole), np.int64), np.zeros(WIDTH, np.int64)
    for start in range(0, len(whole), BLOCK):
        block = whole[start : start + BLOCK]
        np.add.reduce(block, axis=1, out=rows[start : start + BLOCK])
        columns += np.add.reduce(block, axis=0)
    return rows, columns


def _add(
    tensors: Iterable[torch.Tensor],
    sums: dict[torch.device, list[torch.Tensor]],
    layout: dict[torch.device, list[tuple[int, int]]],
    number: int,
) -> int:
    """Add the sums of these tensors, the first of which has this number; returns the next number."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        parts = [part for part in _sums(local_part(tensor)) if part.numel()]
        if parts:
            found.setdefault(parts[0].device, []).extend(parts)
            layout.setdefault(parts[0].device, []).append((number, sum(map(len, parts))))
        number += 1
    for device, parts in found.items():
        # A copy: the tensors may change afterwards.
        sums.setdefault(device, []).append(torch.cat(parts))
    return number


def _whole(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _mixed(sums: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The sums, each mixed with its position. Products wrap around, on every device alike."""
    mixed = (sums + places) * _FIRST
    mixed ^= (mixed >> 32) & _LOW
    mixed *= _SECOND
    mixed ^= (mixed >> 29) & _LOW
    return mixed


@lru_cache(maxsize=64)
def _places(device: torch.device, layout: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """A number for the position of each sum of each tensor; the same in every step."""
    numbers, lengths = torch.tensor(layout, dtype=torch.int64).unbind(1)
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    within = torch.arange(len(starts), dtype=torch.int64) - starts
    return (torch.repeat_interleave(numbers + 1, lengths) * _TENSOR + (within + 1) * _PLACE).to(device)


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The contents of a tensor as words of 8 bytes, and the remaining bytes."""
    flat = tensor.contiguous().view(-1)
    if flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()  # a view that is not aligned to 8 bytes
    raw = flat.view(torch.uint8)
    over = raw.numel() % 8
    return raw[: raw.numel() - over].view(torch.int64), raw[raw.numel() - over :]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All leaves of nested dictionaries, lists and tuples with their paths, in an order that
    does not depend on when a key was added; keys may be of several types."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=lambda key: (str(key), type(key).__name__)):
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from leaves(each, (*path, number))
    else:
        yield path, value


def digest_of(value: Any) -> int:
    """64 bits over all leaves but tensors. Of an object that is not a plain value, only its type
    counts."""
    digest = hashlib.blake2b(digest_size=8)
    for path, leaf in leaves(value):
        if not isinstance(leaf, torch.Tensor):
            digest.update(f"{path!r}={shown(leaf)};".encode(errors="replace"))
    return int.from_bytes(digest.digest(), "little")


def shown(leaf: Any) -> str:
    """A plain value as text, to the bit; the type of any other object."""
    if leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes):
        return repr(leaf)
    if hasattr(leaf, "tobytes"):  # numpy's
        return f"{type(leaf).__name__} {hashlib.sha256(leaf.tobytes()).hexdigest()[:16]}"
    return type(leaf).__name__


def settings(optimizer: Any) -> list[list[tuple[str, Any]]]:
    """Numbers and tensors of each parameter group: learning rate, betas, weight decay and so on."""
    return [
        [
            (name, group[name])
            for name in sorted(group)
            if name not in _OF_GROUP and (_is_plain(group[name]) or isinstance(group[name], torch.Tensor))
        ]
        for group in groups_of(optimizer)
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(each, _PLAIN) for each in value)
    return isinstance(value, _PLAIN)


def optimizer_tensors(optimizer: Any) -> list[torch.Tensor]:
    """All tensors in the state of one optimizer or several, at any depth, in the order of their
    parameters."""
    states = (each.state.get(p, {}) for each in optimizers_of(optimizer) for p in parameters_of(each))
    return [value for state in states for _, value in leaves(state) if isinstance(value, torch.Tensor)]


def parameters_digest(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over the bytes of these whole parameters, in this order."""
    digest = hashlib.sha256()
    for _, parameter in parameters:
        digest.update(parameter.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
