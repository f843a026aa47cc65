"""Starts torchft on a scene, in a virtual environment of its own."""

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
from typing import Any

from rich.console import Console

from recover.faults.locations import IN_FLIGHT
from recover.peers.events import read_events
from recover.peers.metrics import failures
from recover.peers.runs import PROGRAMS, configure
from recover.peers.scene import VOCAB, Scene
from recover.records.kinds import Event
from recover.train.model_shape import shape_of

TORCHFT = "torchft==0.2.0"
PATIENCE = 120.0  # seconds: its timeouts add up to less
SOURCES = Path(__file__).parents[2]  # where `recover` itself is imported from


class Absent(Exception):
    """This peer cannot be run here."""


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
        "PYTHONPATH": str(SOURCES),
        "OMP_NUM_THREADS": "1",
    }
    job = {
        "place": str(directory),
        "way": way,
        "replicas": scene.replicas,
        "steps": scene.steps,
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
