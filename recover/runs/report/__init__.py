"""Pages and pictures: what a run did, or would do, in a form that people and programs can read."""

from __future__ import annotations

from pathlib import Path


def build(run_dirs: list[Path], output: Path) -> Path:
    """One self-contained HTML page about these runs, its pictures beside it; the path of the page."""
    from recover.runs.report.page import build as build_page  # `recover plan` needs none of it

    return build_page(run_dirs, output)


def compare(run_dirs: list[Path]) -> list[str]:
    """For every run but the first, one line: does it equal the first, if not, where do they part; and their goodput."""
    from recover.runs.report.comparison import compare as compare_two
    from recover.runs.report.comparison import compare_goodput
    from recover.runs.report.recorded_runs import read_runs

    if len(run_dirs) < 2:
        raise ValueError("there is nothing to compare with; name two run directories or more")
    first, *others = read_runs(run_dirs)
    return [f"{compare_two(first, other)}; {compare_goodput(first, other)}" for other in others]
