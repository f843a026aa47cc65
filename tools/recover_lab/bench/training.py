"""`recover bench overhead` and `recover bench recovery`: the cost of fault tolerance, and the cost of a death."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recover_lab.bench.kills import measure_kills
from recover_lab.bench.measure import (
    BenchmarkError,
    begin,
    launch_program,
    machine_line,
    paired_ratio,
    summary,
    write,
)
from recover_lab.publish.figure import Figure, Results, Rows, milliseconds, show

RECOVERY_LAUNCHES = 5
EXACT = {
    "reproducible": "reproducible",
    "reproducible_32": "reproducible with reduction_bits=32",
}


def bench_overhead(
    model: str, replicas: int, shard: int, seq_len: int, accum: int, turns: int, output: Path | None
) -> None:
    """Failure-free speed and memory against stock torch on gloo, turn by turn in one run.

    Stock torch is DDP, or with several ranks to a replica HSDP: `fully_shard` on a mesh of replicas x shards.
    """
    console = begin(output)
    peer = "stock DDP" if shard == 1 else "stock HSDP"
    launch: dict[str, Any] = {"ranks": replicas * shard, "replica_size": shard, "timeout": 600}
    arguments = [model, str(seq_len), str(accum), str(turns)]
    grid = f"{replicas} replicas" + (f" of {shard} ranks" if shard > 1 else "")
    console.print(f"{grid}, model {model}, {turns} turns each ...", style="dim")
    with launch_program("overhead.py", arguments=[*arguments, "both"], **launch) as run_dir:
        ranks = [json.loads(path.read_text()) for path in run_dir.glob("overhead-*.json")]
    seconds = {
        name: [max(each) for each in zip(*(r["seconds"][name] for r in ranks), strict=True)]
        for name in ("stock", "ours", *EXACT)
    }
    tokens = replicas * shard * accum * seq_len
    ratio, low, high = paired_ratio(seconds["stock"], seconds["ours"])
    exact = {name: paired_ratio(seconds["ours"], seconds[name]) for name in EXACT}
    memory = {}
    for name in ("stock", "ours"):
        with launch_program("overhead.py", arguments=[*arguments, name], **launch) as run_dir:
            memory[name] = max(
                json.loads(path.read_text())["peak_bytes"] for path in run_dir.glob("overhead-*.json")
            )
    parameters = ranks[0]["parameters"]
    results: dict[str, Any] = {
        "model": model,
        "parameters": parameters,
        "peer": peer,
        "replicas": replicas,
        "shard": shard,
        "microbatches": replicas * accum,
        "seq_len": seq_len,
        "tokens_per_second": {
            name: summary([tokens / s for s in values]) for name, values in seconds.items()
        },
        "ratio": {"value": ratio, "low": low, "high": high, "turns": turns},
        **{
            f"{name}_against_fast": dict(zip(("value", "low", "high"), each, strict=True))
            for name, each in exact.items()
        },
        "bytes_on_the_wire": ranks[0]["wire"],
        "peak_bytes": memory,
        "extra_bytes_per_parameter": (memory["ours"] - memory["stock"]) / parameters,
    }
    write(output, {"overhead": results})
    show(console, f"{grid}, {parameters / 1e6:.1f}M parameters, no failures", OVERHEAD.rows(results))
    console.print(
        f"ours / stock: {ratio:.3f}x, 95% interval {low:.3f} to {high:.3f} over {turns} pairs; "
        f"memory {results['extra_bytes_per_parameter']:+.2f} bytes per parameter"
    )
    megabytes = {name: size / 1e6 for name, size in results["bytes_on_the_wire"].items()}
    for name, (value, least, most) in exact.items():
        console.print(
            f"{EXACT[name]} / fast: {value:.3f}x, 95% interval {least:.3f} to {most:.3f}; "
            f"{megabytes[name]:.0f} MB instead of {megabytes['fast']:.0f} MB to a reduction"
        )
    console.print(machine_line())


def bench_recovery(replicas: int, output: Path | None) -> None:
    """From SIGKILL inside a reduction to the commit of that step, less the time of the microbatches run again."""
    console = begin(output)
    console.print(f"{RECOVERY_LAUNCHES} launches, {replicas - 1} deaths each ...", style="dim")
    facts = measure_kills("tiny", "auto", replicas, replicas - 1, RECOVERY_LAUNCHES, "cpu")
    if facts["broken"]:
        raise BenchmarkError("; ".join(facts["broken"]))
    results: dict[str, Any] = {
        "replicas": replicas,
        "recovery_ms": facts["less_redone_ms"],
        "step_ms": facts["step_ms"],
        "discarded": facts["discarded"],
    }
    write(output, {"recovery": results})
    show(console, f"{replicas} replicas, SIGKILL inside a reduction", RECOVERY.rows(results))
    console.print(machine_line())


def _overhead_values(results: Results) -> dict[str, Any]:
    ratio, exact = results["ratio"], results["reproducible_against_fast"]
    more = results["extra_bytes_per_parameter"]
    inside = f" of {results['shard']} ranks" if results["shard"] > 1 else ""
    values = {
        "setting": f"{results['replicas']} replicas{inside}, {results['parameters'] / 1e6:.0f}M parameters",
        "ratio": f"{ratio['value']:.2f}x",
        "interval": f"{ratio['low']:.2f} to {ratio['high']:.2f}",
        "memory": "no more memory" if more < 0.05 else f"{more:.1f} bytes per parameter more",
        "reproducible": f"{exact['value']:.2f}x",
    }
    if small := results.get("reproducible_32_against_fast"):  # results of earlier versions have none
        values["reproducible-32"] = f"{small['value']:.2f}x"
    return values


def _overhead_rows(results: Results) -> Rows:
    rows: Rows = [["", "tokens/s", "peak memory per rank"]]
    for name, label in (
        ("stock", f"{results['peer']} on gloo"),
        ("ours", "recover.Step"),
        ("reproducible", "... reduction=reproducible"),
        ("reproducible_32", "... reduction=reproducible reduction_bits=32"),
    ):
        if name in results["tokens_per_second"]:  # results of earlier versions have no words of 32 bits
            speed, peak = results["tokens_per_second"][name]["median"], results["peak_bytes"].get(name)
            rows.append([label, f"{speed:.1f}", "" if peak is None else f"{peak / 2**20:.0f} MiB"])
    return rows


OVERHEAD = Figure(
    name="overhead",
    text="Without failures, against stock torch, turn by turn.",
    paper="Close to the NCCL reference.",
    values=_overhead_values,
    rows=_overhead_rows,
)


def _recovery_values(results: Results) -> dict[str, Any]:
    took = results["recovery_ms"]
    return {
        "setting": f"{results['replicas']} replicas",
        "median": f"{took['median']:.0f} ms",
        "middle": f"{took['low']:.0f} to {took['high']:.0f}",
        "discarded": results["discarded"],
    }


def _recovery_rows(results: Results) -> Rows:
    took, step = results["recovery_ms"], results["step_ms"]
    return [
        ["deaths", "SIGKILL to commit, less microbatches run again", "discarded microbatches", "a step"],
        [took["n"], milliseconds(took), results["discarded"], milliseconds(step)],
    ]


RECOVERY = Figure(
    name="recovery",
    text="From SIGKILL inside a reduction to the commit of that step.",
    values=_recovery_values,
    rows=_recovery_rows,
)
