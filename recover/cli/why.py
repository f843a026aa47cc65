"""`recover why`: the root cause of every loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from recover.cli.errors import refusals


def why(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory, finished or not.")],
    incident: Annotated[
        int | None,
        typer.Argument(metavar="[INCIDENT]", help="Number of the incident, from 1 on.  [default: all]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how the job ended, which ranks were lost first and why, which followed because of them, and what to do."""
    from recover.checkpoint.way_on import how_it_ended
    from recover.runs.report import explanation
    from recover.runs.report.recorded_runs import read_runs

    with refusals("recover why"):
        (run,) = read_runs([run_dir])
        if as_json:
            typer.echo(json.dumps(explanation.as_json(run, incident), indent=2))
        else:
            typer.echo("\n".join(explanation.tell(run, incident)))
            if incident is None and not (state := run.state).is_complete and state.name != "running":
                typer.echo(f"the job: {how_it_ended(run_dir, state)}")
