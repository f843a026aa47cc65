"""`recover demo`: the same training twice, undisturbed and losing half of its replicas, which come back; one page."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recover.cli.looking_on import Page
from recover.cli.refusals import refusals

if TYPE_CHECKING:
    from recover.launch.launcher import Beside

STEPS, STEPS_BACK = 24, 36  # those who come back take as long as some steps to get ready
WORDS = (
    "replicas=4",
    "accum=4",
    "warmup_steps=6",
    "checkpoint.every=0",
    "log.tensorboard=false",
)
KILLS = (f"{STEPS // 3}:1:in-reduce", f"{STEPS * 2 // 3}:0:update")  # 0 is the one that writes the log
KILLS_BACK = ("5:1:in-reduce", "9:0:update")


def demo(
    output: Annotated[
        Path | None, typer.Option(help="Where runs and page go.  [default: runs/demo-TIME]")
    ] = None,
    page: Page = "auto",
    hosts: Annotated[
        int,
        typer.Option(
            help="On so many emulated hosts (3 or more; needs root), of which the first loses its power."
        ),
    ] = 0,
    returns: Annotated[
        bool | None,
        typer.Option(
            "--return/--no-return", help="Start the lost replicas again.  [default: where there is an etcd]"
        ),
    ] = None,
) -> None:
    """Train twice, undisturbed and losing half of the replicas, which come back, and show both curves: a minute or
    two."""
    if hosts:
        raise typer.Exit(_on_hosts(hosts, output or Path("runs", f"demo-{datetime.now():%Y%m%d-%H%M%S}")))
    from recover.etcd.etcd_server import NoEtcdError, find_binary
    from recover.job.hosts_asked import HostOptions
    from recover.records.lines import read_lines
    from recover.report import build
    from recover.train.supervision import train

    if returns is None:
        try:
            returns = bool(find_binary())
        except NoEtcdError:
            returns = False
    place = output or Path("runs", f"demo-{datetime.now().strftime('%Y%m%d-%H%M%S')}")
    calm, rough = place / "failure-free", place / ("lost-and-back" if returns else "two-replicas-lost")
    kills, words = KILLS_BACK if returns else KILLS, [*WORDS, f"steps={STEPS_BACK if returns else STEPS}"]
    print("A run in which nothing fails:", flush=True)
    if code := train(words, calm, beside=_page(page)):
        raise typer.Exit(code)
    back = " and started again" if returns else ""
    print(f"\nThe same run, in which two of four replicas are killed{back} ({', '.join(kills)}):", flush=True)
    again = HostOptions(returns=True, return_delay=0.0) if returns else None
    if code := train(words, rough, kills, beside=_page(page), returns=again):
        raise typer.Exit(code)
    picture = build([calm, rough], place / "report")
    undisturbed, survived = (list(read_lines(run / "steps.jsonl")) for run in (calm, rough))
    apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(undisturbed, survived, strict=True))
    batches = {line["microbatches"] for line in (*undisturbed, *survived)}
    same = [line["data_digest"] for line in undisturbed] == [line["data_digest"] for line in survived]
    print(
        f"\nShown: {len(survived)} steps went on through the loss of 2 of 4 replicas, one of them inside a gradient "
        f"reduction and one the writer of the log, between verdict and update.\n"
        f"{_came_back(list(read_lines(rough / 'incidents.jsonl'))) if returns else ''}"
        f"Every step of both runs was committed on {' or '.join(map(str, sorted(batches)))} microbatches, "
        f"{'on the same samples' if same else 'BUT NOT ON THE SAME SAMPLES'}; the losses are never more than "
        f"{apart:.2g} apart.\n"
        f"Both curves: {picture}"
    )


def _came_back(incidents: list[dict[str, Any]]) -> str:
    came = [
        f"{len(line['joined_replicas'])} before step {line['step']}"
        for line in incidents
        if line.get("joined_replicas")
    ]
    told = " and ".join(came) if came else "none: the run was over before they were ready"
    return f"Replicas that came back, and were given the state of the others: {told}.\n"


def _page(page: str) -> Beside:
    from recover.monitor.beside import LOOPBACK, onlookers

    with refusals("recover demo"):
        return onlookers(page, LOOPBACK, None, typer.echo)


def _on_hosts(count: int, place: Path) -> int:
    """One run on emulated hosts, in which the first of them loses its power in the middle."""
    import os
    import subprocess
    import sys
    import time

    from recover.job.authentication import make_token_file
    from recover.lab.hosts import Lab, unavailable
    from recover.records.lines import read
    from recover.report import reasons
    from recover.report.recorded_runs import read_runs

    if count < 3:
        typer.echo(
            "recover demo: --hosts must be 3 or more: etcd goes on after the loss of one of three", err=True
        )
        return 2
    if reason := unavailable():
        typer.echo(f"recover demo: {reason}", err=True)
        return 2
    place = place.absolute()
    place.mkdir(parents=True)
    endpoints = ",".join(f"h{number}:2379" for number in (1, 2, 3))
    words = [
        "--nnodes",
        str(count),
        "--nproc-per-node",
        "1",
        "--rdzv-endpoint",
        endpoints,
        "--rdzv-id",
        "demo",
        "--lease",
        "4",  # all hosts share one machine
        "--token-file",
        str(make_token_file(place / "token")),
    ]
    keys = [f"steps={STEPS}", *(word for word in WORDS if not word.startswith("replicas"))]
    steps = place / "h2" / "steps.jsonl"
    with Lab(hosts=count, shared=[place]) as lab:
        print(
            f"{count} hosts, a replica on each; they share no directory. Their output: {place}/h*.out",
            flush=True,
        )
        agents = {}
        for host in lab:
            command = [sys.executable, "-P", "-m", "recover.cli", "train", *words, *keys]
            with open(place / f"{host.name}.out", "wb") as out:
                agents[host.name] = host.start(
                    [*command, "--run-dir", str(place / host.name)],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"TMPDIR": "/tmp"},
                )
        told, cut_at = 0, 0.0
        while agents["h2"].poll() is None:
            time.sleep(0.1)
            lines = read(steps).whole
            for line in lines[told:]:
                facts = f"loss {line['loss']:.4f}, {line['microbatches']} microbatches, {line['replicas']} replicas"
                print(f"step {line['step']:3}: {facts}, {line['seconds']:.2f} s", flush=True)
            told = len(lines)
            if lab["h1"].up and told >= STEPS // 2:
                print("h1 loses its power: it, its replica and its member of etcd are gone", flush=True)
                lab["h1"].power_cut()
                cut_at = time.time()
        codes = {name: agent.wait() for name, agent in agents.items() if name != "h1"}
    after = [line for line in read(steps).whole if cut_at and line["replicas"] == count - 1]
    if not after or any(codes.values()):
        typer.echo(f"recover demo: the run has failed; {place}/h*.out tell why", err=True)
        return 1
    sizes = " or ".join(map(str, sorted({line["microbatches"] for line in read(steps).whole})))
    print(f"\nWhat `recover why {place / 'h2'}` says:")
    print("\n".join(reasons.tell(read_runs([place / "h2"])[0])))
    print(
        f"\nShown: {len(read(steps).whole)} steps on {sizes} microbatches each, through the loss of the host that came "
        f"first: {after[0]['at'] - cut_at:.1f} s after the cut step {after[0]['step']} was committed without it.\n"
        f"The records are on every host that is left: `recover report {place / 'h2'}`"
    )
    return 0
