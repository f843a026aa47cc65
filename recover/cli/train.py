"""`recover train`: the reference trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from recover.cli import host_words
from recover.cli.looking_on import OnIncident, Otel, Page, PageBind
from recover.cli.refusals import refusals


class TrainCommand(TyperCommand):
    """Its help ends with all keys; they are looked up only when somebody asks for it."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from recover.train.config import describe

        rows = [(key, f"{meaning}  [default: {_as_yaml(default)}]") for key, default, meaning in describe()]
        with formatter.section("Keys, in CONFIG.yaml or as key=value"):
            formatter.write_dl(rows)


def _as_yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.yaml] [KEY=VALUE]...", help="What to train and how; the keys are below."
        ),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run is written.  [default: runs/train-TIME]")
    ] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STEP:REPLICA[.LOCAL]:LOCATION[=ACTION]",
            help="A fault on schedule, as 3:1:in-reduce, or 5:2:vote=stop (kill is the default); may be repeated.",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Go on from the last checkpoint of this run, with as many replicas as you like.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show grid, memory and plan; start nothing.")
    ] = False,
    page: Page = "auto",
    page_bind: PageBind = "127.0.0.1",
    on_incident: OnIncident = None,
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
    """Pre-train a LLaMA. Replicas may die at any moment; every step has exactly B = replicas x accum microbatches."""
    from recover.agent.host_options import HostOptions
    from recover.monitor.beside import onlookers
    from recover.train.supervision import train as start

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
    with refusals("recover train"):
        beside = onlookers("off" if dry_run else page, page_bind, on_incident, typer.echo, otel)
    hosts_asked = several if several.asked else None
    returning = several if several.returns else None
    raise typer.Exit(start(words or [], run_dir, kill or [], resume, dry_run, beside, hosts_asked, returning))
