"""`recover audit`: compute random segments of a run again, and write a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recover.cli.errors import refusals


def audit(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory of a `recover train`, or of a script.")
    ],
    segments: Annotated[int, typer.Option(help="Number of segments.", min=1)] = 5,
    seed: Annotated[int, typer.Option(help="Which segments: the same for the same seed.", min=0)] = 0,
) -> None:
    """Compute random segments of a run again, and write RUN/audit-SEED.json with its SHA-256.

    Exit code 0: all bits are equal; 1: they differ; 2: the run cannot be computed again here; 130: ended by Ctrl-C.
    """
    from recover.train.replay import audit as check

    with refusals("recover audit"):
        report = check(run_dir, segments, seed)
    for segment in report["segments"]:
        verdict = "bitwise equal" if segment["equal"] else f"differs: {segment['differences'][0]}"
        typer.echo(f"steps {segment['first']} to {segment['last']}: {verdict}")
    typer.echo(f"report: {report['path']}, SHA-256 {report['sha256']}")
    if not report["equal"]:
        raise typer.Exit(1)
