"""Reports about runs, and the narration of `recover plan`, for people and for programs."""

from __future__ import annotations

from pathlib import Path


def build(run_dirs: list[Path], output: Path) -> Path:
    """Write one self-contained HTML page about these runs, and its pictures. Returns the path of the page."""
    from recover.runs.report.page import build as build_page  # not needed by `recover plan`

    return build_page(run_dirs, output)


def compare(run_dirs: list[Path]) -> list[str]:
    """One line for every run but the first: whether it equals the first, where they differ, and their goodput."""
    from recover.runs.report.comparison import compare as compare_two
    from recover.runs.report.comparison import compare_goodput
    from recover.runs.report.recorded_runs import read_runs

    if len(run_dirs) < 2:
        raise ValueError("there is nothing to compare with; name two run directories or more")
    first, *others = read_runs(run_dirs)
    return [f"{compare_two(first, other)}; {compare_goodput(first, other)}" for other in others]
