"""`recover report`: what runs did, as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recover.cli.errors import refusals


def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", help="Run directories; several are laid over each other."),
    ],
    compare: Annotated[
        bool, typer.Option("--compare", help="Say in one line whether runs did the same; draw nothing.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Where page and pictures go.  [default: RUN_DIR/report]")
    ] = None,
) -> None:
    """Show what runs did: one page with loss, batch, replicas, throughput and every incident."""
    from recover.runs.report import build
    from recover.runs.report import compare as compare_runs

    with refusals("recover report"):
        if compare:
            typer.echo("\n".join(compare_runs(run_dirs)))
        else:
            typer.echo(f"page: {build(run_dirs, output or run_dirs[0] / 'report')}")
