"""`recover run`: a script on several ranks that survive each other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from recover.cli.looking_on import OnIncident, Page, PageBind
from recover.cli.refusals import refusals


def run(
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="How many processes.")],
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The Python file that every rank runs.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Handed to the script as they are.")
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module, as for python -m.")
    ] = False,
    replica_size: Annotated[int, typer.Option(help="Ranks that hold one copy of the model.")] = 1,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where logs and results go.  [default: runs/SCRIPT-TIME]")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="End a job that shows no progress for so many seconds; 0: never.")
    ] = 1800,
    mpirun: Annotated[
        str | None, typer.Option(help="Open MPI's mpirun.  [default: the one beside this Python, then PATH]")
    ] = None,
    hang_limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="A rank that hangs for so long while others wait is taken for dead.  [default: 10 if its process "
            "does not run, 60 or ten steps if it does]",
        ),
    ] = None,
    carrier: Annotated[
        str, typer.Option(help="What moves the data between replicas: auto, mpi, gloo or nccl.")
    ] = "auto",
    kill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STEP:REPLICA[.LOCAL]:LOCATION[=ACTION]",
            help="A fault on schedule, as 3:1:in-reduce; may be repeated.  [default: what RECOVER_KILL says]",
        ),
    ] = None,
    page: Page = "auto",
    page_bind: PageBind = "127.0.0.1",
    on_incident: OnIncident = None,
) -> None:
    """Start SCRIPT on several ranks that survive each other. Options go before SCRIPT."""
    from recover.launch.launcher import launch
    from recover.monitor.beside import onlookers

    # What the script says is its own: where nobody sits in front of it, the address is in the run directory alone.
    tell = sys.stderr.isatty() or page not in ("auto", "off") or page_bind != "127.0.0.1"
    with refusals("recover run"):
        beside = onlookers(
            page,
            page_bind,
            on_incident,
            lambda text: typer.echo(f"recover: {text}", err=True) if tell else None,
        )
    code = launch(
        ranks,
        script,
        args or [],
        replica_size=replica_size,
        run_dir=run_dir,
        timeout=timeout,
        mpirun=mpirun,
        hang_limit=hang_limit,
        carrier=carrier,
        faults=kill,
        module=module,
        own=True,
        beside=beside,
    )
    raise typer.Exit(code)
