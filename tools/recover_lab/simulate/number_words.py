"""Numbers as people write them: 50,000 instead of 5e+04, 4.19M, 1 round."""

from __future__ import annotations

_SIZES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_ROUNDED_UP = 0.9995  # of a size: three digits make it 1 of that size


def figure(value: float) -> str:
    """The value with three digits, all of those before the point, and no exponent."""
    return f"{value:,.0f}" if value >= _ROUNDED_UP * 1000 else f"{value:.3g}"


def quantity(number: float, gap: str = "") -> str:
    """The number with three digits and a letter: 4.19M."""
    for size, letter in _SIZES:
        if number >= _ROUNDED_UP * size:
            return f"{figure(number / size)}{gap}{letter}"
    return f"{number:,.0f}"


def many(number: float, thing: str) -> str:
    """1 round, 2 rounds, 2 microbatches."""
    told = figure(number)
    ending = "" if told == "1" else "es" if thing.endswith("ch") else "s"
    return f"{number:,} {thing}{ending}" if isinstance(number, int) else f"{told} {thing}{ending}"
