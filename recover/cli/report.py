"""`recover report`: an HTML report about one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recover.cli.errors import refusals


def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", help="Run directories; several are plotted together."),
    ],
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Print in one line whether the runs are equal; write no report. The exit code is 0 also if they "
            "differ.",
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Directory for the report.  [default: RUN_DIR/report]")
    ] = None,
) -> None:
    """Write a report about runs: loss, batch, replicas, throughput and every incident."""
    from recover.runs.report import build
    from recover.runs.report import compare as compare_runs

    with refusals("recover report"):
        if compare:
            typer.echo("\n".join(compare_runs(run_dirs)))
        else:
            typer.echo(f"page: {build(run_dirs, output or run_dirs[0] / 'report')}")
