"""`recover bisect`: the first step in which two runs differ, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recover.cli.errors import refusals


def bisect(
    one: Annotated[Path, typer.Argument(metavar="RUN_A", help="Run directory.")],
    two: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another one.")],
) -> None:
    """Find the first step in which two runs differ, from their records, and say what differs: samples, parameters,
    learning rate or environment, and the keys that do.

    Exit code 0: no step differs; 1: a step differs.
    """
    from recover.runs.report.bisection import bisect as find
    from recover.runs.report.recorded_runs import read_runs

    with refusals("recover bisect"):
        found = find(*read_runs([one, two]))
    if not found.step:
        typer.echo(found.text)
        return
    typer.echo(f"first difference in step {found.step} ({found.what}): {found.text}")
    for cause in found.causes:
        typer.echo(f"  differs, too: {cause}")
    raise typer.Exit(1)
