"""Puts style and scripts into a page, so that it works from one file and without a network."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent
_STYLE, _SCRIPT = "/* SHARED STYLE */", "/* SHARED SCRIPT */"  # where they go in a page


@cache
def style() -> str:
    """Colours and elements of all pages, light and dark."""
    return _read("theme.css")


@cache
def chart_style() -> str:
    return f"{_read('vendor/uplot/uPlot.min.css')}\n{_read('charts.css')}"


@cache
def script() -> str:
    """uPlot and the charts. Neither contains `</script`."""
    # The licence asks to be in every copy.
    return f"/*\n{_read('vendor/uplot/LICENSE')}*/\n{_read('vendor/uplot/uPlot.iife.min.js')}\n{_read('charts.js')}"


def with_assets(page: str) -> str:
    """The page with style and scripts at the places that are marked for them."""
    return page.replace(_STYLE, style() + chart_style()).replace(_SCRIPT, script())


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
