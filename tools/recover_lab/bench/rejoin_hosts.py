"""`recover bench return`: a replica dies and rejoins, by the size of its state; ours, torchrun and torchft."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from recover_lab.bench.measure import begin, machine_line, summary, write
from recover_lab.peers.ended import BenchmarkError
from recover_lab.peers.metrics import restarts
from recover_lab.peers.rejoin import joins, rejoin_times, stages
from recover_lab.peers.runs import run_baseline, run_ours_rejoining, scratch
from recover_lab.peers.scene import Scene, hidden_for
from recover_lab.peers.torchft_runs import TorchftUnavailable, install_torchft, run_torchft, torchft_home
from recover_lab.publish.figure import Figure, Results, Rows, show

KILL = 36  # the step of the death: late enough for prewarmed processes to be ready
# Allowed stall of the others: seconds that are always allowed, or so many times the transfer by the link's bandwidth.
LEAST, SLACK = 0.15, 1.3
PROBED = 64 << 20  # bytes of a bandwidth measurement, at least


def bench_return(
    replicas: int,
    pace: float,
    megabytes: Sequence[float],
    rounds: int,
    environment: Path | None,
    output: Path | None,
) -> dict[str, Any]:
    """Time from the death of a replica until it is in a step again, and how long the others wait.

    One of the replicas dies inside a reduction, and its process is restarted at once: by us, by torchrun together with
    all others, and for torchft by this benchmark. Theirs are new processes. Ours are prewarmed by default, and measured
    without prewarming, too (`cold`). Ours get the state in one pause, and are measured with `join=instalments`, too.
    """
    console = begin(output)
    python, absent = _torchft(environment, console)
    sizes: list[dict[str, Any]] = []
    results: dict[str, Any] = {"replicas": replicas, "pace": pace, "sizes": sizes}
    for size in megabytes:
        kills = ((KILL, replicas - 1),)
        scene = Scene(replicas=replicas, accum=1, pace=pace, kills=kills, steps=KILL + 1, seq_len=16).but(
            hidden=hidden_for(size)
        )
        console.print(f"{size:g} MB of state: ours ...", style="dim")
        ours = [_ours(scene) for _ in range(rounds)]
        console.print(f"{size:g} MB of state: ours, without prewarmed processes ...", style="dim")
        cold = [_ours(scene, ready=False) for _ in range(rounds)]
        console.print(f"{size:g} MB of state: ours, in instalments ...", style="dim")
        in_instalments = [_ours(scene.but(join="instalments")) for _ in range(rounds)]
        console.print(f"{size:g} MB of state: checkpoint-restart ...", style="dim")
        systems: dict[str, Any] = {"instalments": _summaries(in_instalments), "restart": _restart(scene)}
        systems["torchft"] = {"not_measured": absent}
        if python is not None:
            console.print(f"{size:g} MB of state: torchft ...", style="dim")
            systems["torchft"] = _torchft_returns(python, scene)
        sizes.append(_account(scene, ours, cold, systems))
        write(output, {"return": results})  # also if a larger size fails
    show(
        console,
        f"One of {replicas} replicas dies and rejoins, steps of {pace:g} s",
        FIGURE.rows(results),
    )
    console.print(machine_line())
    return results


def _account(
    scene: Scene,
    ours: Sequence[dict[str, float]],
    cold: Sequence[dict[str, float]],
    systems: dict[str, Any],
) -> dict[str, Any]:
    nbytes = ours[0]["bytes"]
    link = link_bandwidth(int(nbytes))
    return {
        "scene": scene.to_json(),
        "bytes": nbytes,
        "link_bytes_per_second": link,
        "bound": max(LEAST, SLACK * nbytes / link),
        "ours": _summaries(ours),
        "cold": _summaries(cold),
        **systems,
    }


def _summaries(rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    return {name: summary([each[name] for each in rounds]) for name in rounds[0] if name != "bytes"}


def _ours(scene: Scene, ready: bool = True) -> dict[str, float]:
    with scratch() as directory:
        events = run_ours_rejoining(scene, directory, awaited=1, ready=ready)
    (join,) = joins(events)
    back = rejoin_times(events, lambda event: event["replicas"] == scene.replicas)
    parts = {name: join[name] for name in ("stall", "repair", "transfer", "warm_up", "bytes")}
    parts["rest"] = join["stall"] - join["repair"] - join["transfer"]
    return {**back.to_json(), **parts, **stages(events)}


def _restart(scene: Scene) -> dict[str, float]:
    with scratch() as directory:
        events = run_baseline(scene.but(steps=KILL + 4, save_every=2), directory)
    (restart,) = restarts(events)
    # Steps that some ranks have committed in the life that ended are run again.
    back = rejoin_times([e for e in events if e["life"] or e["at"] <= restart.C], lambda event: True)
    return {**back.to_json(), "wait": restart.stall}


def _torchft_returns(python: Path, scene: Scene) -> dict[str, Any]:
    try:
        with scratch() as directory:
            events = run_torchft(python, "Manager.allreduce", directory, scene, returns=True)
        return rejoin_times(events, lambda event: event["microbatches"] == scene.replicas).to_json()
    except (TorchftUnavailable, BenchmarkError) as reason:
        return {"not_measured": str(reason)}


def _torchft(environment: Path | None, console: Console) -> tuple[Path | None, str]:
    """The Python of torchft's environment, or the reason why torchft cannot run."""
    try:
        return install_torchft(environment or torchft_home(), console), ""
    except TorchftUnavailable as reason:
        console.print(f"torchft: {reason}")
        return None, str(reason)


def link_bandwidth(nbytes: int, turns: int = 3) -> float:
    """Bytes per second of one plain connection over the loopback, as a joining replica receives its state here."""
    size = max(nbytes, PROBED)
    return size / median(_one_transfer(size) for _ in range(turns))


def _one_transfer(size: int) -> float:
    data, room = memoryview(bytearray(1 << 20)), memoryview(bytearray(1 << 20))
    with socket.create_server(("127.0.0.1", 0)) as door:

        def send() -> None:
            with socket.create_connection(door.getsockname()) as line:
                for at in range(0, size, len(data)):
                    line.sendall(data[: min(len(data), size - at)])

        sender = threading.Thread(target=send)
        sender.start()
        line, _ = door.accept()
        with line:
            began, left = time.perf_counter(), size
            while left:
                left -= line.recv_into(room, min(len(room), left))
            took = time.perf_counter() - began
        sender.join()
    return took


def _values(results: Results) -> dict[str, Any]:
    values: dict[str, Any] = {"replicas": results["replicas"]}
    for size in results["sizes"]:
        mb = f"{size['bytes'] / 1e6:.0f}"
        values[f"stall-{mb}"] = f"{size['ours']['stall']['median'] * 1e3:.0f} ms"
        values[f"whole-{mb}"] = f"{size['ours']['whole']['median']:.1f} s"
        values[f"cold-{mb}"] = f"{size['cold']['whole']['median']:.1f} s"
        if "instalments" in size:  # results of earlier versions have none
            values[f"instalments-{mb}"] = f"{size['instalments']['wait']['median'] * 1e3:.0f} ms"
        for name in ("restart", "torchft"):
            facts = size[name]
            absent = "not_measured" in facts
            values[f"{name}-{mb}"] = "not measured" if absent else f"{facts['whole']:.1f} s"
            values[f"{name}-wait-{mb}"] = "not measured" if absent else f"{facts['wait']:.1f} s"
    return values


def _rows(results: Results) -> Rows:
    heads = [
        "state",
        "",
        "next step after",
        "full strength after",
        "pauses",
        "allowed",
        "longest step longer by",
    ]
    rows: Rows = [[*heads, "parts of the pause"]]
    for size in results["sizes"]:
        for name in ("ours", "cold", "instalments", "restart", "torchft"):
            if name not in size:  # results of earlier versions
                continue
            facts = size[name]
            if "not_measured" in facts:
                rows.append([f"{size['bytes'] / 1e6:.0f} MB", name, facts["not_measured"], *[""] * 5])
                continue
            middle = {key: each["median"] if isinstance(each, dict) else each for key, each in facts.items()}
            parts = allowed = longer = ""
            if name in ("ours", "cold"):
                allowed = f"{size['bound'] * 1e3:.0f} ms"
                pieces = {key: middle[key] for key in ("repair", "transfer", "rest")}
                parts = ", ".join(f"{key} {seconds * 1e3:.0f} ms" for key, seconds in pieces.items())
            if name in ("ours", "cold", "instalments"):
                longer = f"{middle['wait'] * 1e3:.0f} ms"
            rows.append(
                [
                    f"{size['bytes'] / 1e6:.0f} MB",
                    {
                        "cold": "ours, without prewarmed processes",
                        "instalments": "ours, join=instalments",
                    }.get(name, name),
                    *(f"{middle[key]:.2f} s" for key in ("again", "whole")),
                    f"{middle.get('stall', middle['wait']) * 1e3:.0f} ms",
                    allowed,
                    longer,
                    parts,
                ]
            )
    return rows


FIGURE = Figure(
    name="return",
    text="A replica dies inside a reduction and its process is started again at once: until the next step, until all "
    "replicas are in a step again, and how long the others wait, by the size of the state.",
    values=_values,
    rows=_rows,
)
