"""`recover run`: a user's script on several fault-tolerant ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from recover.cli.errors import refusals
from recover.cli.host_options import with_host_options
from recover.cli.monitor_options import OnIncident, Otel, Page, PageBind
from recover.cli.run_command import MISSING
from recover.job.host_options import HostOptions


@with_host_options()
def run(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="Python file that every rank runs.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-n", help="Number of ranks, all on this host.")
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")
    ] = False,
    replica_size: Annotated[int, typer.Option(help="Ranks that hold one copy of the model.")] = 1,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory for logs and records.  [default: runs/SCRIPT-TIME]")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds without progress after which the job is ended; 0: never.")
    ] = 1800,
    mpirun: Annotated[
        str | None, typer.Option(help="Open MPI's mpirun.  [default: the one beside this Python, then PATH]")
    ] = None,
    hang_limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="A rank that hangs for this long while others wait is declared dead.  [default: 10 if its process "
            "does not run, 60 or ten steps if it does]",
        ),
    ] = None,
    link_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="A reduction that moves no data for this long while all ranks wait in it is aborted, as over a "
            "broken link.  [default: 60]",
        ),
    ] = None,
    carrier: Annotated[
        str, typer.Option(help="Transport between replicas: auto, mpi, gloo or nccl.")
    ] = "auto",
    kill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STEP:REPLICA[.LOCAL]:LOCATION[=ACTION]",
            help="Inject a fault, for example 3:1:in-reduce; may be repeated.  [default: RECOVER_KILL]",
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
    """Run SCRIPT on several fault-tolerant ranks: on this host (-n), or on several hosts (--nnodes). Options go before
    SCRIPT."""
    from recover.runs.live.monitors import make_monitors

    # The output belongs to the script. Without a person at the terminal, the address of the page is in the run
    # directory only.
    tell = sys.stderr.isatty() or page not in ("auto", "off") or page_bind != "127.0.0.1"
    with refusals("recover run"):
        _check_options(ranks, several, hostfile, mpirun)
        several.check_use()
        say = lambda text: typer.echo(f"recover: {text}", err=True)  # noqa: E731
        monitors = make_monitors(page, page_bind, on_incident, say, otel, tell)
    from recover.checkpoint.way_on import way_on_of_script
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
        way_on=way_on_of_script,
    )
    if ranks is None or several.restarts:
        from recover.launch.hosts.agent import launch_alone, launch_host

        if ranks is not None:
            raise typer.Exit(launch_alone(ranks, several, request))
        raise typer.Exit(launch_host(several, request))
    from recover.launch.launcher import launch

    raise typer.Exit(launch(ranks, request, mpirun=mpirun, hostfile=hostfile))


def _check_options(
    ranks: int | None, several: HostOptions, hostfile: Path | None, mpirun: str | None
) -> None:
    """Raises ValueError for options that contradict each other."""
    if several.asked and ranks is not None:
        raise ValueError("-n is for one host; with --nnodes give --nproc-per-node")
    if not several.asked and ranks is None:
        raise ValueError(MISSING)
    if several.restarts and hostfile is not None:
        raise ValueError("--return is not for Open MPI's --hostfile; give --nnodes")
    if ranks is None or several.restarts:
        for name, value in (("--hostfile", hostfile), ("--mpirun", mpirun)):
            if value is not None:
                raise ValueError(f"{name} is Open MPI's, and would have no effect here; leave it out")
