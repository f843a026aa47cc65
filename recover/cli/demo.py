"""`recover demo`: the same training run without failures and with the loss of half of its replicas, and one report."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recover.cli import plugins
from recover.cli.errors import refusals
from recover.cli.monitor_options import Page

if TYPE_CHECKING:
    from recover.job.spec import Monitors

STEPS, STEPS_BACK = 24, 36  # a restarted replica takes as long as some steps to get ready
WORDS = (
    "replicas=4",
    "accum=4",
    "warmup_steps=6",
    "checkpoint.every=0",
    "log.tensorboard=false",
)
KILLS = (f"{STEPS // 3}:1:in-reduce", f"{STEPS * 2 // 3}:0:update")  # rank 0 writes the log
KILLS_BACK = ("5:1:in-reduce", "9:0:update")


def demo(
    output: Annotated[
        Path | None, typer.Option(help="Directory for the runs and the report.  [default: runs/demo-TIME]")
    ] = None,
    page: Page = "auto",
    hosts: Annotated[
        int,
        typer.Option(
            help="Run on this many emulated hosts (3 or more; needs root); the first of them loses its power."
        ),
    ] = 0,
    returns: Annotated[
        bool | None,
        typer.Option(
            "--return/--no-return", help="Restart lost replicas.  [default: on, if there is an etcd]"
        ),
    ] = None,
) -> None:
    """Train twice, without failures and with the loss of half of the replicas, and plot both losses. Takes one to two
    minutes."""
    place = output or Path("runs", f"demo-{datetime.now():%Y%m%d-%H%M%S}")
    if hosts:
        demo_on_hosts = plugins.load("demo.hosts")
        if demo_on_hosts is None:
            typer.echo(f"recover demo: {plugins.needs_lab('demo --hosts')}", err=True)
            raise typer.Exit(2)
        raise typer.Exit(demo_on_hosts(hosts, place, [f"steps={STEPS}", *WORDS], STEPS // 2))
    from recover.job.host_options import HostOptions
    from recover.runs.report import build
    from recover.train.supervision import train

    returns = _has_etcd() if returns is None else returns
    calm, rough = place / "failure-free", place / ("lost-and-back" if returns else "two-replicas-lost")
    kills, words = KILLS_BACK if returns else KILLS, [*WORDS, f"steps={STEPS_BACK if returns else STEPS}"]
    print("A run in which nothing fails:", flush=True)
    if code := train(words, calm, monitors=_page(page)):
        raise typer.Exit(code)
    back = " and started again" if returns else ""
    print(f"\nThe same run, in which two of four replicas are killed{back} ({', '.join(kills)}):", flush=True)
    again = HostOptions(returns=True, return_delay=0.0) if returns else None
    if code := train(words, rough, kills, monitors=_page(page), returns=again):
        raise typer.Exit(code)
    print(_result(calm, rough, returns, build([calm, rough], place / "report")))


def _has_etcd() -> bool:
    from recover.world.fabrics.etcd.server import NoEtcdError, find_binary

    try:
        return bool(find_binary())
    except NoEtcdError:
        return False


def _result(calm: Path, rough: Path, returns: bool, report: Path) -> str:
    """Summary of the two runs: steps, losses, batch and samples."""
    from recover.runs.records.json_lines import read_lines

    undisturbed, survived = (list(read_lines(run / "steps.jsonl")) for run in (calm, rough))
    apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(undisturbed, survived, strict=True))
    batches = {line["microbatches"] for line in (*undisturbed, *survived)}
    same = [line["data_digest"] for line in undisturbed] == [line["data_digest"] for line in survived]
    return (
        f"\nShown: {len(survived)} steps went on through the loss of 2 of 4 replicas, one of them inside a gradient "
        f"reduction and one the writer of the log, between verdict and update.\n"
        f"{_joins(list(read_lines(rough / 'incidents.jsonl'))) if returns else ''}"
        f"Every step of both runs was committed on {' or '.join(map(str, sorted(batches)))} microbatches, "
        f"{'on the same samples' if same else 'BUT NOT ON THE SAME SAMPLES'}; the losses are never more than "
        f"{apart:.2g} apart.\n"
        f"Both curves: {report}"
    )


def _joins(incidents: list[dict[str, Any]]) -> str:
    joined = [
        f"{len(line['joined_replicas'])} before step {line['step']}"
        for line in incidents
        if line.get("joined_replicas")
    ]
    text = " and ".join(joined) or "none: the run was over before they were ready"
    return f"Replicas that rejoined, and received the state of the others: {text}.\n"


def _page(page: str) -> Monitors:
    from recover.runs.live.monitors import LOOPBACK, make_monitors

    with refusals("recover demo"):
        return make_monitors(page, LOOPBACK, None, typer.echo)
