"""`recover run`: a script on several ranks that survive each other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from recover.cli import host_words
from recover.cli.looking_on import OnIncident, Otel, Page, PageBind
from recover.cli.refusals import refusals
from recover.cli.run_command import MISSING


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
            metavar="FILE", help="Several hosts by Open MPI, as NAME slots=K; the loss of one ends the job."
        ),
    ] = None,
    nnodes: host_words.Nnodes = None,
    nproc_per_node: host_words.NprocPerNode = None,
    rdzv_endpoint: host_words.RdzvEndpoint = None,
    rdzv_id: host_words.RdzvId = None,
    rdzv_backend: host_words.RdzvBackend = None,
    rdzv_patience: host_words.RdzvPatience = 30.0,
    join_timeout: host_words.JoinTimeout = 600.0,
    lease: host_words.Lease = 2.0,
    interface: host_words.Interface = None,
    host_name: host_words.HostName = None,
    token_file: host_words.TokenFile = None,
    etcd_dir: host_words.EtcdDir = None,
    etcd_prefix: host_words.EtcdPrefix = "/recover",
    etcd_user: host_words.EtcdUser = None,
    etcd_password_file: host_words.EtcdPasswordFile = None,
    etcd_ca: host_words.EtcdCa = None,
    etcd_cert: host_words.EtcdCert = None,
    etcd_key: host_words.EtcdKey = None,
    returns: host_words.Return = False,
    return_delay: host_words.ReturnDelay = 1.0,
    forgive: host_words.Forgive = 600.0,
    standby: host_words.Standby = 0,
    otel: Otel = False,
) -> None:
    """Start SCRIPT on several ranks that survive each other: on this host (-n), or on several (--nnodes). Options go
    before SCRIPT."""
    from recover.agent.host_options import HostOptions
    from recover.monitor.beside import onlookers

    several = HostOptions(
        nnodes=nnodes,
        nproc_per_node=nproc_per_node,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_id=rdzv_id,
        rdzv_backend=rdzv_backend,
        rdzv_patience=rdzv_patience,
        join_timeout=join_timeout,
        lease=lease,
        interface=interface,
        host_name=host_name,
        token_file=token_file,
        etcd_dir=etcd_dir,
        etcd_prefix=etcd_prefix,
        etcd_user=etcd_user,
        etcd_password_file=etcd_password_file,
        etcd_ca=etcd_ca,
        etcd_cert=etcd_cert,
        etcd_key=etcd_key,
        returns=returns or standby > 0,
        return_delay=return_delay,
        forgive=forgive,
        standby=standby,
    )
    if several.asked and ranks is not None:
        typer.echo("recover run: -n is for one host; with --nnodes give --nproc-per-node", err=True)
        raise typer.Exit(2)
    if not several.asked and ranks is None:
        typer.echo(f"recover run: {MISSING}", err=True)
        raise typer.Exit(2)
    if several.returns and hostfile is not None:
        typer.echo("recover run: --return is not for Open MPI's --hostfile; give --nnodes", err=True)
        raise typer.Exit(2)
    # What the script says is its own: where nobody sits in front of it, the address is in the run directory alone.
    tell = sys.stderr.isatty() or page not in ("auto", "off") or page_bind != "127.0.0.1"
    with refusals("recover run"):
        say = lambda text: typer.echo(f"recover: {text}", err=True)  # noqa: E731
        beside = onlookers(page, page_bind, on_incident, say, otel, tell)
    told: dict[str, Any] = {
        "replica_size": replica_size,
        "run_dir": run_dir,
        "timeout": timeout,
        "hang_limit": hang_limit,
        "carrier": carrier,
        "faults": kill,
        "module": module,
        "own": True,
        "beside": beside,
    }
    if ranks is None or several.returns:
        from recover.agent.agent import launch_alone, launch_host

        if ranks is not None:
            raise typer.Exit(launch_alone(ranks, several, script, args or [], **told))
        raise typer.Exit(launch_host(several, script, args or [], **told))
    from recover.launch.launcher import launch

    raise typer.Exit(launch(ranks, script, args or [], mpirun=mpirun, hosts=hostfile, **told))
