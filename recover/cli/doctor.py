"""`recover doctor`: checks of this machine, or of several hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from recover.cli.host_options import with_host_options
from recover.job.host_options import HostOptions


@with_host_options(
    *("nnodes", "rdzv_endpoint", "rdzv_id", "join_timeout", "interface", "host_name", "token_file"),
    *("etcd_prefix", "etcd_user", "etcd_password_file", "etcd_ca", "etcd_cert", "etcd_key"),
)
def doctor(
    mpirun: Annotated[
        str | None, typer.Option(help="Open MPI's mpirun.  [default: the one beside this Python, then PATH]")
    ] = None,
    hosts: Annotated[
        bool,
        typer.Option(
            "--hosts", help="Check the network between hosts: run the same command on each, with --nnodes."
        ),
    ] = False,
    etcd: Annotated[
        bool,
        typer.Option(
            "--etcd", help="Check the etcd at --rdzv-endpoint: version, latency, space, compaction."
        ),
    ] = False,
    *,
    several: HostOptions,
) -> None:
    """Check this machine: versions, fault tolerance, memory, cores, and three real processes, one of which is killed.
    With --hosts, check several hosts: versions, clocks, names, ports, MTU, and the bandwidth of every pair. With
    --etcd, check the etcd that jobs on several hosts would use."""
    if etcd:
        from recover.launch.doctor.etcd import examine_etcd

        raise typer.Exit(examine_etcd(several))
    if hosts:
        from recover.launch.doctor.hosts import examine_hosts

        raise typer.Exit(examine_hosts(replace(several, rdzv_id=several.rdzv_id or "doctor")))
    from recover.launch.doctor.checks import examine

    raise typer.Exit(examine(mpirun))
