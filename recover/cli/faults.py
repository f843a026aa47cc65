"""`recover faults`: makes and checks schedules of faults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recover.cli import plugins
from recover.cli.errors import refusals

app = typer.Typer(
    no_args_is_help=True,
    help="Schedules of faults: make or check one, or inject random faults into training jobs.",
)


@app.command("make")
def make(
    replicas: Annotated[int, typer.Option(help="Replicas of the job.")],
    replica_size: Annotated[int, typer.Option(help="Ranks that hold one copy of the model.")] = 1,
    count: Annotated[int | None, typer.Option(help="Number of faults.")] = None,
    mtbf: Annotated[
        str | None,
        typer.Option(help="Instead of --count: mean time between failures, in steps (12) or seconds (30s)."),
    ] = None,
    steps: Annotated[
        str, typer.Option(metavar="FIRST:LAST", help="Steps in which faults may strike.")
    ] = "1:60",
    seed: Annotated[int, typer.Option(help="The same seed gives the same schedule.")] = 0,
    locations: Annotated[
        str | None,
        typer.Option(help="Locations with weights, for example in-reduce=3,vote.  [default: all, equally]"),
    ] = None,
    actions: Annotated[
        str | None,
        typer.Option(help="Actions with weights, for example kill=5,pause:1,stop.  [default: kill]"),
    ] = None,
) -> None:
    """Draw a schedule from a seed and print it as YAML, for `recover train faults=FILE`."""
    from recover.faults import command

    with refusals("recover faults make"):
        text = command.make(replicas, replica_size, seed, count, steps, mtbf, locations, actions)
    typer.echo(text, nl=False)


@app.command("check")
def check(
    schedule: Annotated[Path, typer.Argument(metavar="FILE.yaml")],
    replicas: Annotated[int | None, typer.Option(help="Replicas of the job.")] = None,
    replica_size: Annotated[int | None, typer.Option(help="Ranks that hold one copy of the model.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the job.")] = None,
) -> None:
    """List the faults of a schedule that can never strike, and why."""
    from recover.faults import command

    with refusals("recover faults check"):
        found, problems = command.check(schedule, replicas, replica_size, steps)
    typer.echo("\n".join(problems or [f"{len(found)} faults, each of which can strike"]))
    raise typer.Exit(1 if problems else 0)


plugins.add_commands(app, "faults")
