"""`recover bench data`: what reading costs, against torch's DataLoader under stock DDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from recover_lab.bench.measure import begin, launched, paired_ratio, place, summary, write

PAIRS = {  # by name: how many times faster the second is than the first
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
) -> None:
    """Tokens per second with workers that read ahead, turn by turn in one run; a slow dataset, hidden or not."""
    console = begin(output)
    console.print(
        f"{replicas} replicas, model {model}, {workers} workers each, {turns} turns ...", style="dim"
    )
    numbers = (seq_len, sequences, accum, workers, turns, slow_ms)
    with launched("reading.py", replicas, [model, *map(str, numbers)], timeout=600) as run_dir:
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
    table = Table(title=f"{replicas} replicas, {workers} workers each, {turns} turns", title_justify="left")
    for column in ("", "tokens/s"):
        table.add_column(column, justify="right")
    for name, values in results["tokens_per_second"].items():
        table.add_row(name, f"{values['median']:.1f}")
    console.print(table)
    for name, (value, low, high) in ratios.items():
        one, other = PAIRS[name]
        console.print(f"{other} / {one}: {value:.3f}x, 95% interval {low:.3f} to {high:.3f}")
    console.print(
        f"an item of the slow dataset takes {slow_ms:g} ms, a microbatch of it {slow_ms * sequences:g} ms"
    )
    console.print(place())
