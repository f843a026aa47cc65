"""`recover bench hosts`: what it costs to agree in etcd instead of in one host's MPI."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from recover.bench.measure import PROGRAMS, begin, place, summary, write
from recover.etcd.etcd_server import EtcdServer
from recover.peers.ended import check

WORK = 0.3  # seconds between two agreements at the most: replicas do not come all at once


def bench_hosts(replicas: Sequence[int], agreements: int, output: Path | None) -> None:
    """From the last vote to the last one who holds the result, for every number of replicas, one etcd in memory."""
    console = begin(output)
    latencies, own = {}, {}
    for count in replicas:
        console.print(f"{count} replicas ...", style="dim")
        rounds = [zip(*round, strict=True) for round in zip(*_times(count, agreements), strict=True)]
        waits = [(max(held) - max(came), held[came.index(max(came))] - max(came)) for came, held in rounds]
        latencies[str(count)], own[str(count)] = (
            summary([1e3 * wait for wait in kind]) for kind in zip(*waits, strict=True)
        )
    write(output, {"hosts": {"agreement_ms": latencies, "agreement_own_ms": own}})
    table = Table(title="one agreement in etcd (one member, in memory): ms, median (middle half)")
    for column in ("replicas", "last vote to last one told", "last vote to its own result", "agreements"):
        table.add_column(column, justify="right")
    for size, facts in latencies.items():
        cells = [
            f"{part['median']:.1f} ({part['low']:.1f} .. {part['high']:.1f})" for part in (facts, own[size])
        ]
        table.add_row(size, *cells, str(facts["n"]))
    console.print(table)
    console.print(place())


def _times(replicas: int, agreements: int) -> list[list[list[float]]]:
    """By rank and agreement: when it came, when it held the result."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="recover-bench-") as directory:
        warnings.simplefilter("ignore")  # which etcd it is does not matter to its speed
        with EtcdServer() as server:
            arguments = [
                server.endpoint,
                f"/recover/bench-{replicas}/",
                str(replicas),
                str(agreements),
                str(WORK),
            ]
            command = [sys.executable, str(PROGRAMS / "agreements.py"), *arguments, directory]
            code = subprocess.run(command, timeout=60 + agreements * (WORK + 1)).returncode
        check(code, f"{replicas} replicas that agree in etcd ended with code {code}")
        return [json.loads(Path(directory, f"times-{rank}.json").read_text()) for rank in range(replicas)]
