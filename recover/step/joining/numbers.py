"""Sets of numbers as text, for census records and commands."""

from __future__ import annotations

from collections.abc import Iterable


def to_bits(numbers: Iterable[int]) -> str:
    """The set as a hexadecimal number with one bit for each of its numbers."""
    return f"{sum(1 << number for number in numbers):x}"


def from_bits(text: str) -> frozenset[int]:
    bits = int(text or "0", 16)
    return frozenset(number for number in range(bits.bit_length()) if bits >> number & 1)
