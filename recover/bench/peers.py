"""`recover bench peers`: the same kill on other systems that go on after one."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import venv
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from recover.bench.events import read_events
from recover.bench.measure import PACKAGE, PROGRAMS, begin, place, write
from recover.bench.metrics import failures, step_seconds
from recover.bench.runs import configure, run_ours, scratch
from recover.bench.scene import VOCAB, Scene
from recover.bench.tables import rows_of, show
from recover.faults.locations import IN_FLIGHT
from recover.records.kinds import Event
from recover.train.model_shape import shape_of

CONTROL = "DistributedDataParallel"
WAYS = (CONTROL, "Manager.allreduce")
UNHARMED = f"torchft {CONTROL}, nobody is killed"
STEPS, KILL = 10, 6
TORCHFT = "torchft==0.2.0"
PATIENCE = 120.0  # seconds: its timeouts add up to less
SCENE = Scene(replicas=4, accum=1, pace=0.4, steps=STEPS, kills=((KILL, 3),))


class Absent(Exception):
    """This peer cannot be run here."""


def bench_peers(environment: Path | None, output: Path | None) -> dict[str, Any]:
    """From SIGKILL inside the gradient reduction to the next committed step: ours, and torchft where it installs."""
    console = begin(output)
    console.print("ours ...", style="dim")
    with scratch() as directory:
        systems: dict[str, Any] = {"ours": judge(run_ours(SCENE, directory))}
    try:
        python = install_torchft(environment or Path.home() / ".cache" / "recover" / "torchft", console)
        for way in WAYS:
            console.print(f"torchft, {way} ...", style="dim")
            with scratch() as directory:
                systems[f"torchft {way}"] = judge(run_torchft(python, way, directory, SCENE))
        console.print(f"torchft, {CONTROL}, nobody is killed ...", style="dim")
        with scratch() as directory:
            systems[UNHARMED] = committed(run_torchft(python, CONTROL, directory, SCENE.but(kills=())))
    except Absent as reason:
        console.print(f"torchft: {reason}")
        systems["torchft"] = {"seconds": f"not measured: {reason}"}
    results = {"scene": SCENE.to_json(), "systems": systems}
    write(output, {"peers": results})
    show(console, f"4 replicas, {SCENE.pace:g} s steps, one killed in step {KILL}", rows_of("peers", results))
    console.print(place())
    return results


def judge(events: list[Event]) -> dict[str, Any]:
    """From the kill to the first step that all survivors have committed after it."""
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
    """Of a run without a kill: is it the kill that it does not survive?"""
    done = [
        {e["step"] for e in events if e["what"] == "step-end" and e["rank"] == n}
        for n in range(SCENE.replicas)
    ]
    took = step_seconds(events)
    each = f", {median(took.values()):.2f} s each" if took else ""
    return {"seconds": f"{len(set.intersection(*done))} of {STEPS} steps committed by all{each}"}


def install_torchft(directory: Path, console: Console) -> Path:
    """A virtual environment of its own, which takes torch from ours."""
    python = directory / "bin" / "python"
    if platform.machine() != "x86_64":
        raise Absent(f"it has no wheel for {platform.machine()}")
    if not python.exists():
        console.print(f"installing torchft into {directory} ...", style="dim")
        venv.create(directory, with_pip=True)
        own = next(directory.glob("lib/python3*/site-packages"))
        (own / "torch_from_recover.pth").write_text(
            "\n".join(p for p in sys.path if p.endswith("-packages")) + "\n"
        )
    if _run(python, "-c", "import torchft"):
        command = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", TORCHFT]
        if said := _run(python, *command) or _run(python, "-c", "import torchft"):
            raise Absent(f"it could not be installed ({said.splitlines()[-1]}); try again with --venv")
    return python


def _run(python: Path, *arguments: str) -> str:
    """What it said, if it failed."""
    try:
        done = subprocess.run([python, *arguments], capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return "no answer within 300 s"
    return (done.stderr.strip() or "it failed") if done.returncode else ""


def run_torchft(python: Path, way: str, directory: Path, scene: Scene) -> list[Event]:
    config = configure(scene, directory)
    kill, victim = scene.kills[0] if scene.kills else (0, 0)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    lighthouse = [python.with_name("torchft_lighthouse"), "--min_replicas", "1", "--quorum_tick_ms", "100"]
    lighthouse += ["--join_timeout_ms", "10000", "--bind", f"[::]:{port}"]
    environment = {
        **os.environ,
        "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}",
        "PYTHONPATH": str(PACKAGE.parent),
        "OMP_NUM_THREADS": "1",
    }
    job = {
        "place": str(directory),
        "way": way,
        "replicas": scene.replicas,
        "steps": STEPS,
        "kill": kill,
        "victim": victim,
        "pace": scene.pace,
        "in_flight": IN_FLIGHT,
        "seed": scene.seed,
        "seq_len": scene.seq_len,
        "data": config.data.path,
        "shape": asdict(shape_of(config, VOCAB)),
    }
    processes: list[subprocess.Popen[bytes]] = []
    with (directory / "log").open("wb") as log:

        def start(command: list[Any]) -> None:
            processes.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            )

        try:
            start(lighthouse)
            for replica in range(scene.replicas):
                start([python, PROGRAMS / "torchft_peer.py", json.dumps({**job, "replica": replica})])
            for process in processes[1:]:
                process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pass  # what was written until then tells enough
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    events = read_events(directory)
    if not events or (scene.kills and not failures(events)):
        text = (directory / "log").read_text(errors="replace").strip().splitlines()
        raise Absent(f"it did not come to the kill ({text[-1] if text else 'no output'})")
    return events
