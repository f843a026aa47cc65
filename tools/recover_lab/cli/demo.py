"""`recover demo --hosts`: a run on emulated hosts, one of which loses its power."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import typer


def demo_on_hosts(count: int, place: Path, words: list[str], cut_after: int) -> int:
    """Train once on emulated hosts; the first loses its power after `cut_after` steps. Returns the exit code."""
    from recover.job.authentication import make_token_file
    from recover.runs.records.json_lines import read
    from recover.runs.report import explanation
    from recover.runs.report.recorded_runs import read_runs
    from recover_lab.lab.hosts import Lab, unavailable

    if count < 3:
        typer.echo(
            f"recover demo: --hosts {count}: give 3 or more, so that etcd survives the loss of a host",
            err=True,
        )
        return 2
    if reason := unavailable():
        typer.echo(f"recover demo: {reason}", err=True)
        return 2
    place = place.absolute()
    place.mkdir(parents=True)
    endpoints = ",".join(f"h{number}:2379" for number in (1, 2, 3))
    options = [
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
    keys = [word for word in words if not word.startswith("replicas")]
    steps = place / "h2" / "steps.jsonl"
    with Lab(hosts=count, shared=[place]) as lab:
        print(
            f"{count} hosts with a replica each and no shared directory. Their output: {place}/h*.out",
            flush=True,
        )
        agents = {}
        for host in lab:
            command = [sys.executable, "-P", "-m", "recover.cli", "train", *options, *keys]
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
            if lab["h1"].up and told >= cut_after:
                print("h1 loses its power, with its replica and its member of etcd", flush=True)
                lab["h1"].power_cut()
                cut_at = time.time()
        codes = {name: agent.wait() for name, agent in agents.items() if name != "h1"}
    after = [line for line in read(steps).whole if cut_at and line["replicas"] == count - 1]
    if not after or any(codes.values()):
        typer.echo(f"recover demo: the run failed; see {place}/h*.out", err=True)
        return 1
    sizes = " or ".join(map(str, sorted({line["microbatches"] for line in read(steps).whole})))
    print(f"\nWhat `recover why {place / 'h2'}` says:")
    print("\n".join(explanation.tell(read_runs([place / "h2"])[0])))
    print(
        f"\nShown: {len(read(steps).whole)} steps on {sizes} microbatches each, through the loss of the first "
        f"host: {after[0]['at'] - cut_at:.1f} s after the cut step {after[0]['step']} was committed without it.\n"
        f"Every surviving host has the records: `recover report {place / 'h2'}`"
    )
    return 0
