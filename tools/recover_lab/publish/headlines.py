"""The few figures that decide, drawn from the files of all parts: on top of the page, and as a table for a document."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

Content = dict[str, Any]
SHARE = "the time that the steps between failures take"  # of which the stall is a share
Line = tuple[str, str, str]  # what, our figure, the paper's


def headlines(parts: dict[str, Content]) -> list[Line]:
    """`parts` by the names of their files."""
    tellers: dict[str, Callable[[str, Content], Iterator[Line]]] = {
        "trajectory": _trajectory,
        "breakdown": _breakdown,
        "multi": _multi,
        "sweep": _sweep,
        "peers": _peers,
    }
    return [
        line
        for name, content in parts.items()
        for part, tell in tellers.items()
        if part in content
        for line in tell(name.partition("-")[2], content[part])
    ]


def to_markdown(lines: list[Line]) -> str:
    rows = ["| what | measured | in the paper |", "|---|---|---|"]
    return "\n".join([*rows, *(f"| {' | '.join(line)} |" for line in lines)]) + "\n"


def told(share: float | None, always: str, before: str = "", after: str = "") -> str:
    if share is None:
        return always
    return f"{before}{f'{share:.1%}' if share >= 0.001 else '0.1%'}{after}"


def _grid(scene: Content) -> str:
    size, tp, pp = scene["replica_size"], scene["tp"], scene["pp"]
    inside = (
        f"{size} ranks"
        if tp * pp == 1
        else " x ".join(f"{n} {v}" for n, v in (("tp", tp), ("pp", pp)) if v > 1)
    )
    return f"{scene['replicas']} replicas" + (f" of {inside}" if size > 1 else "")


def _trajectory(kind: str, results: Content) -> Iterator[Line]:
    runs, scene = results["runs"], results["scene"]
    lost = f"{len(scene['kills'])} of {_grid(scene)} lost in {scene['steps']} steps"
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
        f"tokens/s, against stock torch in which nobody dies, {lost}",
        f"{ratio:.2f} times per living rank; {whole:.2f} times per rank at the start; ours without failures "
        f"{calm:.2f} times{_unpaced(scene, median(step['seconds'] for step in runs['stock']['steps']))}",
        "per living rank: drops, climbs, exceeds it",
    )


def _unpaced(scene: Content, took: float) -> str:
    """A warning, where computing did not fit into the pace: then ranks that die free cores for the others."""
    floor = scene["pace"] * scene["accum"]
    return "" if took < 1.15 * floor else f" (not paced: a step takes {took:.2f} s, not {floor:.2f} s)"


def _breakdown(kind: str, results: Content) -> Iterator[Line]:
    rows = results["rows"]
    ours = [row["ours_cost"] for row in rows]
    best = min(rows, key=lambda row: row["baseline_cost"])
    range_of = f"N from {rows[0]['N']} to {rows[-1]['N']}"
    yield (
        f"one failure, {kind.upper()} ({_grid(results['scene'])}), from the kill until the step is complete, "
        f"{range_of}",
        f"{min(ours):.2f} to {max(ours):.2f} s; checkpoint-restart at its best (N = {best['N']}): "
        f"{best['baseline_cost']:.1f} s, at N = {rows[-1]['N']}: {rows[-1]['baseline_cost']:.1f} s"
        f"{_unpaced(results['scene'], median(row['step_seconds'] for row in rows))}",
        "flat; lower even at N = 2",
    )


def _multi(kind: str, results: Content) -> Iterator[Line]:
    # The baseline that does better, by each measure: with a checkpoint at every failure, or as often as is best.
    ratio = min(baseline["ratios"][-1] for baseline in results["baselines"])
    best = min(results["baselines"], key=lambda baseline: baseline["advantage"]["more"])
    rate = f"a failure every {results['interval']} steps, {_grid(results['scene'])}, half of them lost"
    full = results["ours"]["steps_of"]
    unpaced = _unpaced(results["scene"], max(full.items(), key=lambda item: int(item[0]))[1])
    yield (
        f"tokens/s per living rank after the last failure, {kind.upper()}, {rate}",
        f"{ratio:.2f} times checkpoint-restart's{unpaced}",
        "2.23 times (3D)",
    )
    yield (
        f"tokens at equal rank-hours, {kind.upper()}, {rate}",
        f"{best['advantage']['more']:+.0%}; restarting takes {best['advantage']['rank_seconds_ratio']:.2f} times the "
        "rank-hours for the same tokens",
        "+74.9% (3D), +47.4% (HSDP)",
    )


def _sweep(kind: str, results: Content) -> Iterator[Line]:
    for curve in results["curves"]:
        effective, wall = (
            told(share, "always", "while a restart's stall is above ", f" of {SHARE}")
            for share in (curve["crossing_effective"], curve["crossing_wall"])
        )
        yield (
            f"ahead of checkpoint-restart with {curve['alive']} of {results['scene']['replicas']} replicas left",
            f"per living rank {effective}; per hour {wall}",
            "",
        )
    half = results["curves"][-1]
    reached = ", ".join(f"{name} at {told(share, 'any rate')}" for name, share in half["paper"].items())
    yield (
        f"where the paper's figures are reached per living rank, {half['alive']} of {results['scene']['replicas']} "
        "replicas left",
        f"stall / time of the steps between failures: {reached}",
        "2.23 times, +74.9% (3D), +47.4% (HSDP)",
    )


def _peers(kind: str, results: Content) -> Iterator[Line]:
    for name, facts in results["systems"].items():
        seconds = facts["seconds"]
        if isinstance(seconds, float):
            told = f"{seconds:.2f} s, on {facts['microbatches']} microbatches, {facts['discarded']} discarded"
        else:
            told = str(seconds)
        what = "steps" if "nobody is killed" in name else "kill to the next committed step"
        yield f"{what} of {results['scene']['pace']:g} s, {name}", told, ""
