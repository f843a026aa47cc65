"""`recover bench sums`: loss curves of a training with fast and reproducible sums, in words of 64 and of 32 bits."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from recover.runs.records.json_lines import read_lines
from recover_lab.bench.measure import begin, machine_line, write
from recover_lab.peers.ended import BenchmarkError
from recover_lab.peers.runs import scratch
from recover_lab.publish.figure import Results, Rows, show

LIMIT = 7200.0  # seconds of one run
LAST = 100  # steps whose losses are averaged
MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
# By name: keys, and the number of replicas. The sums of two replicas have another order: what that alone does to a
# curve is the measure for the others.
RUNS = {
    "reproducible, 64 bits": (["reduction=reproducible"], 1),
    "reproducible, 32 bits": (["reduction=reproducible", "reduction_bits=32"], 1),
    "fast": (["reduction=fast"], 1),
    "fast, 2 replicas": (["reduction=fast"], 2),
}


def bench_sums(steps: int, batch: int, lr: float, seed: int, output: Path | None) -> dict[str, Any]:
    """The same training from the same seed with each kind of sums."""
    console, runs = begin(output), {}
    for name, (words, replicas) in RUNS.items():
        console.print(f"{name}, {steps} steps ...", style="dim")
        keys = [
            *words,
            f"replicas={replicas}",
            f"global_batch={batch}",
            f"steps={steps}",
            f"lr={lr}",
            f"seed={seed}",
        ]
        runs[name] = _train(keys, max(1, steps // 4))
    reference = runs["reproducible, 64 bits"]["losses"]
    for run in runs.values():
        gaps = [one - other for one, other in zip(smooth(run["losses"]), smooth(reference), strict=True)]
        run["largest_gap"] = max(map(abs, gaps))
    results = {"steps": steps, "batch": batch, "lr": lr, "seed": seed, "runs": runs}
    write(output, {"sums": results})
    show(console, f"{steps} steps of {batch} microbatches, lr {lr:g}, seed {seed}", rows_of(results))
    console.print(machine_line())
    return results


def _train(words: list[str], every: int) -> dict[str, Any]:
    with scratch() as directory:
        (directory / "model.json").write_text(json.dumps(MODEL))
        keys = [
            f"model={directory / 'model.json'}",
            "seq_len=64",
            "device=cpu",
            "checkpoint.every=0",
            "log.tensorboard=false",
            f"eval.every={every}",
            "eval.batches=64",
            *words,
        ]
        place = ["--run-dir", str(directory / "run"), "--page", "off"]
        command = [sys.executable, "-m", "recover.cli", "train", *keys, *place]
        ended = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT
        )
        if ended.returncode:
            raise BenchmarkError(
                f"{' '.join(command)} has ended with {ended.returncode}:\n{ended.stdout[-2000:]}"
            )
        lines = list(read_lines(directory / "run" / "steps.jsonl"))
    heldout = [line["heldout_loss"] for line in lines if line.get("heldout_loss") is not None]
    losses = [line["loss"] for line in lines]
    return {
        "losses": losses,
        "last": statistics.fmean(losses[-LAST:]),
        "heldout": heldout[-1],
        "reruns": sum(line.get("reruns", 0) for line in lines),
    }


def smooth(losses: list[float]) -> list[float]:
    """Means over windows of `LAST` steps, one after another."""
    return [statistics.fmean(losses[at : at + LAST]) for at in range(0, len(losses), LAST)]


def rows_of(results: Results) -> Rows:
    rows: Rows = [
        ["sums", f"loss, last {LAST} steps", "held-out loss", "largest gap to 64 bits", "steps run again"]
    ]
    for name, run in results["runs"].items():
        rows.append(
            [name, f"{run['last']:.4f}", f"{run['heldout']:.4f}", f"{run['largest_gap']:.4f}", run["reruns"]]
        )
    return rows
