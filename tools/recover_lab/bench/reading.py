"""`recover bench data`: the cost of reading, against torch's DataLoader under stock DDP.

It publishes no figure: a soak test runs it with bounds, and the command prints its numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recover_lab.bench.measure import begin, launch_program, machine_line, paired_ratio, summary, write
from recover_lab.publish.figure import show

# How many times faster the second way is than the first, by name.
PAIRS = {
    "in memory": ("stock", "ours"),
    "slow": ("stock slow", "ours slow"),
    "slow against not reading": ("ours unread", "ours slow"),
}


def bench_data(
    model: str,
    replicas: int,
    seq_len: int,
    sequences: int,
    accum: int,
    workers: int,
    turns: int,
    slow_ms: float,
    output: Path | None,
) -> dict[str, Any]:
    """Tokens per second with workers that read ahead, turn by turn in one run, in memory and from a slow dataset."""
    console = begin(output)
    console.print(
        f"{replicas} replicas, model {model}, {workers} workers each, {turns} turns ...", style="dim"
    )
    numbers = (seq_len, sequences, accum, workers, turns, slow_ms)
    with launch_program("reading.py", replicas, [model, *map(str, numbers)], timeout=600) as run_dir:
        ranks = [json.loads(path.read_text()) for path in run_dir.glob("reading-*.json")]
    seconds = {
        name: [max(each) for each in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]
    }
    tokens = replicas * accum * sequences * seq_len
    ratios = {name: paired_ratio(seconds[one], seconds[other]) for name, (one, other) in PAIRS.items()}
    results: dict[str, Any] = {
        "model": model,
        "replicas": replicas,
        "workers": workers,
        "microbatches": replicas * accum,
        "sequences": sequences,
        "seq_len": seq_len,
        "slow_ms": slow_ms,
        "tokens_per_second": {
            name: summary([tokens / s for s in values]) for name, values in seconds.items()
        },
        "ratios": {name: {"value": v, "low": low, "high": high} for name, (v, low, high) in ratios.items()},
    }
    write(output, {"data": results})
    rows = [["", "tokens/s"]]
    rows += [[name, f"{speed['median']:.1f}"] for name, speed in results["tokens_per_second"].items()]
    show(console, f"{replicas} replicas, {workers} workers each, {turns} turns", rows)
    for name, (value, low, high) in ratios.items():
        one, other = PAIRS[name]
        console.print(f"{other} / {one}: {value:.3f}x, 95% interval {low:.3f} to {high:.3f}")
    console.print(
        f"an item of the slow dataset takes {slow_ms:g} ms, a microbatch of it {slow_ms * sequences:g} ms"
    )
    console.print(machine_line())
    return results
