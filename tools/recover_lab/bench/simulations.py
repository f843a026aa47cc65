"""`recover bench simulate`: failures per second and memory as the simulated cluster grows."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recover_lab.bench.measure import begin, machine_line, write
from recover_lab.publish.figure import Figure, Results, Rows, show
from recover_lab.simulate.race import SystemRunner, race
from recover_lab.simulate.scenario import Scenario, parse_scenario
from recover_lab.simulate.scenario_keys import DAY, SYSTEMS

_FAILURES = 4000  # of each measurement, for every size of the cluster
_GPUS, _REPLICA = 600_000, 1000  # of the whole study


def cluster(gpus: int, days: float, seeds: int, replica: int = 0) -> Scenario:
    """A cluster with the failure rate of the largest published case: a failure every 5 minutes on 600,000 GPUs."""
    replica = replica or max(8, gpus // 128 // 8 * 8)
    nodes = gpus // replica * replica // 8
    return parse_scenario(
        {
            "cluster.nodes": nodes,
            "cluster.spares": max(1, nodes // 50),
            "job.replica_gpus": replica,
            "job.parameters": 3e9 * replica,
            "failures.per_node_day": 288 / 75000,
            "run.days": days,
            "run.seeds": seeds,
        }
    )


def bench_simulate(sizes: Sequence[int], output: Path | None) -> dict[str, Any]:
    console = begin(output)
    rows = []
    for gpus in sizes:
        scenario = cluster(gpus, 1.0, 1)
        days = _FAILURES * scenario.between_failures / DAY
        rows.append({"gpus": gpus, **_measure(scenario.but(run__days=days))})
    whole = cluster(_GPUS, 30.0, 32, _REPLICA)
    began, computed = time.perf_counter(), _cpu_seconds()
    race(whole)
    results = {
        "rows": rows,
        "whole": {"gpus": _GPUS, "days": 30, "seeds": 32, "systems": len(SYSTEMS)},
        "whole_seconds": time.perf_counter() - began,
        "whole_cpu_seconds": _cpu_seconds() - computed,
    }
    write(output, {"simulate": results})
    show(
        console,
        "Failures simulated per second of one core, with a filled plan cache",
        FIGURE.rows(results),
    )
    console.print(machine_line())
    return results


def _cpu_seconds() -> float:
    """CPU seconds of this process and its children: not changed by other load on the machine."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in spent)


def _measure(scenario: Scenario) -> dict[str, Any]:
    track = SystemRunner(scenario)
    found = {}
    for name in ("restart", "recover-return"):
        track.run(name, 0)  # fills the plan cache
        began = time.process_time()
        account = track.run(name, 1)
        found[name] = account.failures / (time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"failures_per_second": found, "peak_mib": peak, "asked": track.shares.asked}


def _values(results: Results) -> dict[str, Any]:
    largest = results["rows"][-1]
    return {
        "whole": f"{results['whole_seconds']:.0f} s",
        "computing": f"{results['whole_cpu_seconds']:.0f} s",
        "speed": f"{largest['failures_per_second']['recover-return']:,.0f}",
    }


def _rows(results: Results) -> Rows:
    rows: Rows = [["GPUs", "checkpoint-restart", "ReCoVer, replicas rejoin", "policy calls", "memory, MiB"]]
    for row in results["rows"]:
        speeds = (f"{row['failures_per_second'][name]:,.0f}" for name in ("restart", "recover-return"))
        rows.append([f"{row['gpus']:,}", *speeds, row["asked"], f"{row['peak_mib']:.0f}"])
    whole = results["whole"]
    name = f"{whole['gpus']:,} GPUs, {whole['days']} days, {whole['seeds']} seeds, {whole['systems']} systems"
    spent = f"{results['whole_seconds']:.0f} s, {results['whole_cpu_seconds']:.0f} s of computing"
    return [*rows, [name, spent, "", "", ""]]


FIGURE = Figure(
    name="simulate",
    text="Failures simulated per second of one core, as the cluster grows, and a whole study of the largest one.",
    values=_values,
    rows=_rows,
)
