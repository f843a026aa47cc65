"""`recover run`: a script on several ranks that survive each other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from recover.cli.errors import refusals
from recover.cli.host_options import about_hosts
from recover.cli.monitor_options import OnIncident, Otel, Page, PageBind
from recover.cli.run_command import MISSING
from recover.job.host_options import HostOptions


@about_hosts()
def run(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The Python file that every rank runs.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Handed to the script as they are.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-n", help="How many processes, all on this host.")
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
    link_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="A reduction that all ranks wait in, and that moves nothing for so long, is given up: a link is "
            "broken.  [default: 60]",
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
    hostfile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Deprecated, use --nnodes: hosts for Open MPI, as NAME slots=K; the loss of one ends the job.",
        ),
    ] = None,
    otel: Otel = False,
    *,
    several: HostOptions,
) -> None:
    """Start SCRIPT on several ranks that survive each other: on this host (-n), or on several (--nnodes). Options go
    before SCRIPT."""
    from recover.runs.live.monitors import onlookers

    if several.asked and ranks is not None:
        typer.echo("recover run: -n is for one host; with --nnodes give --nproc-per-node", err=True)
        raise typer.Exit(2)
    if not several.asked and ranks is None:
        typer.echo(f"recover run: {MISSING}", err=True)
        raise typer.Exit(2)
    if several.restarts and hostfile is not None:
        typer.echo("recover run: --return is not for Open MPI's --hostfile; give --nnodes", err=True)
        raise typer.Exit(2)
    if ranks is None or several.restarts:
        for name, value in (("--hostfile", hostfile), ("--mpirun", mpirun)):
            if value is not None:
                typer.echo(
                    f"recover run: {name} is Open MPI's, and would have no effect here; leave it out",
                    err=True,
                )
                raise typer.Exit(2)
    # What the script says is its own: where nobody sits in front of it, the address is in the run directory alone.
    tell = sys.stderr.isatty() or page not in ("auto", "off") or page_bind != "127.0.0.1"
    with refusals("recover run"):
        several.check_use()
        say = lambda text: typer.echo(f"recover: {text}", err=True)  # noqa: E731
        monitors = onlookers(page, page_bind, on_incident, say, otel, tell)
    from recover.launch.request import LaunchRequest

    request = LaunchRequest(
        script,
        args or (),
        replica_size,
        run_dir,
        timeout,
        hang_limit,
        link_timeout,
        carrier,
        kill,
        module,
        is_user_script=True,
        monitors=monitors,
    )
    if ranks is None or several.restarts:
        from recover.launch.hosts.agent import launch_alone, launch_host

        if ranks is not None:
            raise typer.Exit(launch_alone(ranks, several, request))
        raise typer.Exit(launch_host(several, request))
    from recover.launch.launcher import launch

    raise typer.Exit(launch(ranks, request, mpirun=mpirun, hostfile=hostfile))
