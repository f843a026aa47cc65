"""`recover bench peers`: the same kill on other systems that continue after one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from recover.runs.records.kinds import Event
from recover_lab.bench.measure import begin, machine_line, write
from recover_lab.peers.metrics import failures, step_seconds
from recover_lab.peers.runs import run_ours, scratch
from recover_lab.peers.scene import Scene
from recover_lab.peers.torchft_runs import TorchftUnavailable, install_torchft, run_torchft, torchft_home
from recover_lab.publish.figure import Figure, Headline, Results, Rows, show

CONTROL = "DistributedDataParallel"
WAYS = (CONTROL, "Manager.allreduce")
UNHARMED = f"torchft {CONTROL}, nobody is killed"
STEPS, KILL = 10, 6
SCENE = Scene(replicas=4, accum=1, pace=0.4, steps=STEPS, kills=((KILL, 3),))


def bench_peers(environment: Path | None, output: Path | None) -> dict[str, Any]:
    """Time from SIGKILL inside the gradient reduction to the next committed step: ours, and torchft where it can be
    installed."""
    console = begin(output)
    console.print("ours ...", style="dim")
    with scratch() as directory:
        systems: dict[str, Any] = {"ours": judge(run_ours(SCENE, directory))}
    try:
        python = install_torchft(environment or torchft_home(), console)
        for way in WAYS:
            console.print(f"torchft, {way} ...", style="dim")
            with scratch() as directory:
                systems[f"torchft {way}"] = judge(run_torchft(python, way, directory, SCENE))
        console.print(f"torchft, {CONTROL}, nobody is killed ...", style="dim")
        with scratch() as directory:
            systems[UNHARMED] = committed(run_torchft(python, CONTROL, directory, SCENE.but(kills=())))
    except TorchftUnavailable as reason:
        console.print(f"torchft: {reason}")
        systems["torchft"] = {"seconds": f"not measured: {reason}"}
    results = {"scene": SCENE.to_json(), "systems": systems}
    write(output, {"peers": results})
    show(console, f"4 replicas, {SCENE.pace:g} s steps, one killed in step {KILL}", FIGURE.rows(results))
    console.print(machine_line())
    return results


def judge(events: list[Event]) -> dict[str, Any]:
    """Time from the kill to the first step that all survivors have committed after it."""
    killed = failures(events)[0]["at"]
    done = [event for event in events if event["what"] == "step-end" and event["at"] > killed]
    if not done:
        return {"seconds": "never: no survivor committed another step"}
    step = min(event["step"] for event in done)
    first = [event for event in done if event["step"] == step]
    discarded = [e for e in events if e["what"] == "discarded" and e["at"] > killed]
    return {
        "seconds": round(max(event["at"] for event in first) - killed, 3),
        "microbatches": first[0]["microbatches"],
        "discarded": len(discarded) + sum(i["discarded"] for e in first for i in e.get("incidents", ())),
    }


def committed(events: list[Event]) -> dict[str, Any]:
    """Steps of a run without a kill, to tell whether it is the kill that a system does not survive."""
    done = [
        {e["step"] for e in events if e["what"] == "step-end" and e["rank"] == n}
        for n in range(SCENE.replicas)
    ]
    took = step_seconds(events)
    each = f", {median(took.values()):.2f} s each" if took else ""
    return {"seconds": f"{len(set.intersection(*done))} of {STEPS} steps committed by all{each}"}


def _values(results: Results) -> dict[str, Any]:
    batch = results["scene"]["global_batch"]
    values: dict[str, Any] = {"step": f"{results['scene']['pace']:g} s"}
    for key, name in (("ours", "ours"), ("torchft", "torchft Manager.allreduce")):
        facts = results["systems"].get(name, {"seconds": "not measured"})
        seconds = facts["seconds"]
        values[key] = f"{seconds:.2f} s" if isinstance(seconds, float) else seconds
        values[f"{key}-batch"] = f"{facts.get('microbatches', '?')} of {batch}"
    return values


def _rows(results: Results) -> Rows:
    rows: Rows = [["", "seconds from SIGKILL to the next committed step", "its microbatches", "discarded"]]
    for name, peer in results["systems"].items():
        rows.append([name, *(peer.get(key, "") for key in ("seconds", "microbatches", "discarded"))])
    return rows


def _headlines(kind: str, results: Results) -> Iterator[Headline]:
    for name, facts in results["systems"].items():
        seconds = facts["seconds"]
        if isinstance(seconds, float):
            value = (
                f"{seconds:.2f} s, on {facts['microbatches']} microbatches, {facts['discarded']} discarded"
            )
        else:
            value = str(seconds)
        what = "steps" if name == UNHARMED else "kill to the next committed step"
        yield f"{what} of {results['scene']['pace']:g} s, {name}", value, ""


FIGURE = Figure(
    name="peers",
    text="The same kill on other systems that continue after one.",
    values=_values,
    rows=_rows,
    headlines=_headlines,
)
