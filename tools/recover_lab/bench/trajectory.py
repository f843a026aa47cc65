"""`recover bench trajectory`: loss curves and speed of runs that lose half of their replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from recover.runs.records.json_lines import read_lines
from recover.runs.records.kinds import Event, Line
from recover.train.supervision import train
from recover_lab.bench.measure import BenchmarkError, begin, machine_line, write
from recover_lab.peers.metrics import step_seconds
from recover_lab.peers.runs import run_baseline, scratch
from recover_lab.peers.scene import Scene
from recover_lab.publish import pictures
from recover_lab.publish.figure import Figure, Headline, Results, Rows, describe_grid, show, unpaced_warning

RUNS = {  # by name: policy, and whether replicas are killed
    "failure-free": ("balanced", False),
    "ours": ("balanced", True),
    "adaptive": ("adaptive", True),  # the paper's strawman: the batch shrinks with the world
}


def bench_trajectory(scene: Scene, every: int, output: Path | None) -> dict[str, Any]:
    """Stock torch and three runs of `recover train`, from one seed; in two a replica dies every `every` steps."""
    console = begin(output)
    victims = scene.victims()
    scene = scene.but(kills=tuple((every * n, victim) for n, victim in enumerate(victims, start=1)))
    if scene.kills[-1][0] > scene.steps:
        raise BenchmarkError(
            f"{len(victims)} deaths, one every {every} steps, need {scene.kills[-1][0]} steps, not {scene.steps}; "
            "give more --steps or a smaller --every"
        )
    console.print("stock torch, without failures ...", style="dim")
    with scratch() as directory:
        lines = lines_of(run_baseline(scene.but(kills=()), directory), scene)
        runs: dict[str, Any] = {"stock": follow(lines, scene)}
    with scratch() as directory:
        for name, (policy, deadly) in RUNS.items():
            console.print(f"\n{name}:")
            words = [*scene.words(directory), f"policy={policy}"]
            if train(words, directory / name, scene.kill_words() if deadly else ()):
                raise BenchmarkError(f"the run {name} failed")
            lines = list(read_lines(directory / name / "steps.jsonl"))
            if len(lines) < scene.steps:
                raise SystemExit(f"recover bench: stopped in step {len(lines)} of {scene.steps}")
            runs[name] = follow(lines, scene)
    for name in ("stock", "ours", "adaptive"):
        runs[name] |= distance(runs["failure-free"]["steps"], runs[name]["steps"])
    results = {"scene": scene.to_json(), "every": every, "runs": runs}
    write(output, {"trajectory": results})
    title = f"{scene.replicas} replicas, {scene.steps} steps, {len(victims)} lost, one every {every}"
    show(console, title, FIGURE.rows(results))
    console.print(machine_line())
    return results


def lines_of(events: Sequence[Event], scene: Scene) -> list[Line]:
    """The baseline's run as lines of `steps.jsonl`, with the durations that rank 0, its writer, has noted."""
    events = [event for event in events if event["rank"] == 0]
    losses = {e["step"]: e["loss"] for e in events if e["what"] == "step-end"}
    same = {
        "microbatches": scene.global_batch,
        "replicas": scene.replicas,
        "tokens": scene.tokens_per_step,
    }
    return [
        {"step": step, "loss": losses[step], "seconds": seconds, **same}
        for step, seconds in step_seconds(events).items()
    ]


def follow(lines: Sequence[Line], scene: Scene) -> dict[str, Any]:
    """Results of a run: every step, and the totals."""
    keys = ("step", "loss", "microbatches", "replicas", "seconds")
    steps = [{key: line[key] for key in keys} | throughput(line, scene) for line in lines]
    return {"steps": steps, **totals(lines, scene)}


def throughput(line: Line, scene: Scene) -> dict[str, float]:
    """Tokens per second and rank of one step: per living rank, the paper's metric, and per rank at the start."""
    alive = line["replicas"] * scene.replica_size
    return {
        "effective_throughput": line["tokens"] / (line["seconds"] * alive),
        "per_provisioned_rank": line["tokens"] / (line["seconds"] * scene.ranks),
    }


def totals(lines: Sequence[Line], scene: Scene) -> dict[str, float]:
    """Throughput over a whole run, as in `throughput`, and its seconds."""
    tokens = sum(line["tokens"] for line in lines)
    # A replica that dies in a step counts as alive in it.
    before = [scene.replicas, *(line["replicas"] for line in lines)]
    alive = sum(
        line["seconds"] * living * scene.replica_size for line, living in zip(lines, before, strict=False)
    )
    seconds = sum(line["seconds"] for line in lines)
    return {
        "effective_throughput": tokens / alive,
        "per_provisioned_rank": tokens / (seconds * scene.ranks),
        "seconds": seconds,
    }


def distance(reference: Sequence[Line], run: Sequence[Line]) -> dict[str, float]:
    """Differences of the losses of two runs, step by step."""
    apart = [abs(a["loss"] - b["loss"]) for a, b in zip(reference, run, strict=True)]
    return {"largest_distance": max(apart), "mean_distance": sum(apart) / len(apart)}


def _values(results: Results) -> dict[str, Any]:
    runs = results["runs"]
    return {
        "apart": f"{runs['ours']['largest_distance']:.0e}".replace("e-0", "e-"),
        "shrinking": f"{runs['adaptive']['largest_distance']:.2g}",
        "living": f"{runs['ours']['effective_throughput'] / runs['stock']['effective_throughput']:.2f}x",
        "start": f"{runs['ours']['per_provisioned_rank'] / runs['stock']['per_provisioned_rank']:.2f}x",
    }


def _rows(results: Results) -> Rows:
    rows: Rows = [
        [
            "",
            "microbatches a step",
            "tokens/s per living rank",
            "per rank at the start",
            "final loss",
            "largest difference of the loss",
        ]
    ]
    for name, run in results["runs"].items():
        batches = sorted({step["microbatches"] for step in run["steps"]})
        apart = f"{run['largest_distance']:.2g}" if "largest_distance" in run else ""
        speeds = (f"{run[key]:.1f}" for key in ("effective_throughput", "per_provisioned_rank"))
        final = f"{run['steps'][-1]['loss']:.4f}"
        span = " to ".join(map(str, dict.fromkeys((batches[0], batches[-1]))))
        rows.append([name, span, *speeds, final, apart])
    return rows


def _headlines(kind: str, results: Results) -> Iterator[Headline]:
    runs, scene = results["runs"], results["scene"]
    lost = f"{len(scene['kills'])} of {describe_grid(scene)} lost in {scene['steps']} steps"
    batches = {step["microbatches"] for step in runs["ours"]["steps"]}
    yield (
        f"loss, against our own failure-free run, {lost}",
        f"at most {runs['ours']['largest_distance']:.2g} apart, every step on "
        f"{' or '.join(map(str, sorted(batches)))} microbatches; with a batch that shrinks: "
        f"{runs['adaptive']['largest_distance']:.2g} apart",
        "indistinguishable",
    )
    ratio, whole = (
        runs["ours"][key] / runs["stock"][key] for key in ("effective_throughput", "per_provisioned_rank")
    )
    calm = runs["failure-free"]["effective_throughput"] / runs["stock"]["effective_throughput"]
    yield (
        f"tokens/s, against stock torch without failures, {lost}",
        f"{ratio:.2f} times per living rank; {whole:.2f} times per rank at the start; ours without failures "
        f"{calm:.2f} times{unpaced_warning(scene, median(step['seconds'] for step in runs['stock']['steps']))}",
        "per living rank: drops, climbs, exceeds it",
    )


FIGURE = Figure(
    name="trajectory",
    text="The same training four times: stock torch and ours without failures; ours with half of the replicas killed "
    "one by one inside gradient reductions; the same deaths with a batch that shrinks (the paper's strawman).",
    paper="512 A100s, 256 of them lost over 260 steps: loss curves visually indistinguishable; throughput per living "
    "GPU drops at the first failure, climbs and exceeds the failure-free run's.",
    values=_values,
    rows=_rows,
    headlines=_headlines,
    picture=pictures.trajectory,
)
