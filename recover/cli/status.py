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
        typer.Argument(
            metavar="[RUN_DIR]",
            help="Run directory, or a directory of runs, which are listed.  [default: the newest run in runs/]",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Update until the run ends, or Ctrl-C.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show the state of a run: step, loss, batch, replicas, goodput, the activity of each rank, and every loss. Show
    each run of a directory of runs in one line, the newest last."""
    from recover.checkpoint.way_on import how_it_ended
    from recover.runs.live import terminal
    from recover.runs.live.server import status as everything
    from recover.runs.live.view import RunView

    with refusals("recover status"):
        place = run_dir if run_dir is not None else terminal.newest(Path("runs"))
        if not place.is_dir():
            raise ValueError(f"{place} is not a directory; name a run directory")
        runs = [] if terminal.is_run(place) else terminal.runs_in(place)
        if not runs and not terminal.is_run(place):
            raise ValueError(
                f"{place} is no run directory (it has neither steps.jsonl nor job.jsonl), and none of the directories "
                "in it is one; name a directory that `recover train` or `recover run` made, or one that holds several"
            )
        views = [RunView(path) for path in runs or [place]]
        for view in views:
            view.refresh()
        if as_json:
            found = [everything(view) for view in views]
            typer.echo(json.dumps(found if runs else found[0], indent=2))
        elif runs:
            terminal.show_list(views)
        elif follow:
            terminal.follow(views[0])
            terminal.show(how_it_ended(views[0].run_dir, views[0].job()))
        else:
            terminal.once(views[0], how_it_ended(views[0].run_dir, views[0].job()))
