"""`recover status`: the state of a run, in the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from recover.cli.errors import refusals


def status(
    run_dir: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN_DIR]", help="Run directory.  [default: the newest one in runs/]"),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Update until the run ends, or Ctrl-C.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show the state of a run: step, loss, batch, replicas, goodput, the activity of each rank, and every loss."""
    from recover.runs.live.server import status as everything
    from recover.runs.live.terminal import follow as go_on
    from recover.runs.live.terminal import newest, once
    from recover.runs.live.view import RunView

    with refusals("recover status"):
        view = RunView(run_dir if run_dir is not None else newest(Path("runs")))
        if not view.run_dir.is_dir():
            raise ValueError(f"{view.run_dir} is not a directory; name a run directory")
        view.refresh()
        if as_json:
            typer.echo(json.dumps(everything(view), indent=2))
        elif follow:
            go_on(view)
        else:
            once(view)
