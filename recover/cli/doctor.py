"""`recover doctor`: is this machine fit? Are these hosts?"""

from __future__ import annotations

from typing import Annotated

import typer

from recover.cli import host_words as several


def doctor(
    mpirun: Annotated[
        str | None, typer.Option(help="Open MPI's mpirun.  [default: the one beside this Python, then PATH]")
    ] = None,
    hosts: Annotated[
        bool,
        typer.Option(
            "--hosts", help="Check what is between several hosts: the same command on each, with --nnodes."
        ),
    ] = False,
    nnodes: several.Nnodes = None,
    rdzv_endpoint: several.RdzvEndpoint = None,
    rdzv_id: several.RdzvId = None,
    join_timeout: several.JoinTimeout = 600.0,
    interface: several.Interface = None,
    host_name: several.HostName = None,
) -> None:
    """Check this machine: versions, fault tolerance, memory, cores, and three real processes, one killed. Or, with
    --hosts, what is between several: versions, clocks, names, ports, MTU, and the bandwidth of every pair."""
    if hosts:
        from recover.agent.doctor_hosts import examine_hosts
        from recover.agent.host_options import HostOptions

        options = HostOptions(
            nnodes=nnodes,
            rdzv_endpoint=rdzv_endpoint,
            rdzv_id=rdzv_id or "doctor",
            join_timeout=join_timeout,
            interface=interface,
            host_name=host_name,
        )
        raise typer.Exit(examine_hosts(options))
    from recover.launch.doctor import examine

    raise typer.Exit(examine(mpirun))
