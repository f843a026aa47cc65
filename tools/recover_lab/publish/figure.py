"""The published part of a benchmark, declared once, next to the benchmark: `Figure`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

Results = dict[str, Any]  # of one benchmark, as its file holds them
Rows = list[list[Any]]  # of a table; the first row is its head
Headline = tuple[str, str, str]  # what was measured, our value, the paper's

STALL_SHARE = "the time that the steps between failures take"  # the whole that a stall is a share of


def _no_headlines(kind: str, results: Results) -> Iterable[Headline]:
    return ()


@dataclass(frozen=True)
class Figure:
    """The published form of a benchmark's results.

    `values` are quoted by documents, by key. `rows` are one table: on the screen, on the page of all benchmarks and in
    documents. `headlines` take the kind of replica ("hsdp" of `breakdown-hsdp.json`, "" where the file has none), too.
    """

    name: str  # of the file: NAME.json or NAME-KIND.json
    text: str  # what was measured, in front of the table on the page
    values: Callable[[Results], dict[str, Any]]
    rows: Callable[[Results], Rows]
    headlines: Callable[[str, Results], Iterable[Headline]] = _no_headlines
    picture: Callable[[Results], Any] | None = None
    paper: str = ""  # what the paper reports about it

    def results(self, content: dict[str, Any]) -> Results:
        """The results in the content of a benchmark's file."""
        found: Results = content.get(self.name, content)
        return found


def split_name(stem: str) -> tuple[str, str]:
    """Figure and kind of replica, from the name of a benchmark's file."""
    name, _, kind = stem.partition("-")
    return name, kind


def show(console: Console, title: str, rows: Rows) -> None:
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(str(column), justify="right")
    for row in rows[1:]:
        table.add_row(*map(str, row))
    console.print(table)


def milliseconds(facts: dict[str, float]) -> str:
    """Median and middle half."""
    return f"{facts['median']:.1f} ms ({facts['low']:.1f} to {facts['high']:.1f})"


def ratio_and_interval(facts: dict[str, float]) -> str:
    return f"{facts['value']:.2f}x, {facts['low']:.2f} to {facts['high']:.2f}"


def percent(share: float | None, never: str, before: str = "", after: str = "") -> str:
    """A share that a search has found, or `never`; below 0.1% the search does not resolve it."""
    return never if share is None else f"{before}{max(share, 0.001):.1%}{after}"


def describe_grid(scene: dict[str, Any]) -> str:
    size, tp, pp = scene["replica_size"], scene["tp"], scene["pp"]
    inside = (
        f"{size} ranks"
        if tp * pp == 1
        else " x ".join(f"{n} {v}" for n, v in (("tp", tp), ("pp", pp)) if v > 1)
    )
    return f"{scene['replicas']} replicas" + (f" of {inside}" if size > 1 else "")


def unpaced_warning(scene: dict[str, Any], step: float) -> str:
    """A warning where computing did not fit into the pace: then a rank that dies frees cores for the others."""
    floor = scene["pace"] * scene["accum"]
    return "" if step < 1.15 * floor else f" (not paced: a step takes {step:.2f} s, not {floor:.2f} s)"
