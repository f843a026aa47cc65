"""Runs torchft on a scene, in a virtual environment of its own."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import venv
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from recover.faults.locations import IN_FLIGHT
from recover.runs.records.kinds import Event
from recover.train.model_shape import shape_of
from recover_lab.locations import PYTHONPATH
from recover_lab.peers.events import read_events
from recover_lab.peers.metrics import failures
from recover_lab.peers.runs import PROGRAMS, configure
from recover_lab.peers.scene import VOCAB, Scene

TORCHFT = "torchft==0.2.0"
PATIENCE = 120.0  # seconds: more than its timeouts together


class TorchftUnavailable(Exception):
    """torchft cannot run here."""


def torchft_home() -> Path:
    """Default directory of its virtual environment."""
    return Path.home() / ".cache" / "recover" / "torchft"


def install_torchft(directory: Path, console: Console) -> Path:
    """Make its virtual environment, which takes torch from ours; returns its Python."""
    python = directory / "bin" / "python"
    if platform.machine() != "x86_64":
        raise TorchftUnavailable(f"it has no wheel for {platform.machine()}")
    if not python.exists():
        console.print(f"installing torchft into {directory} ...", style="dim")
        venv.create(directory, with_pip=True)
    own = next(directory.glob("lib/python3*/site-packages"))
    # Each time: the environment may have been made from another one with torch elsewhere.
    (own / "torch_from_recover.pth").write_text(
        "\n".join(p for p in sys.path if p.endswith("-packages")) + "\n"
    )
    if _run(python, "-c", "import torchft"):
        command = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", TORCHFT]
        if said := _run(python, *command) or _run(python, "-c", "import torchft"):
            raise TorchftUnavailable(
                f"it could not be installed ({said.splitlines()[-1]}); try again with --venv"
            )
    return python


def _run(python: Path, *arguments: str) -> str:
    """Run a Python program. Returns its error output if it failed, otherwise nothing."""
    try:
        done = subprocess.run([python, *arguments], capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return "no answer within 300 s"
    return (done.stderr.strip() or "it failed") if done.returncode else ""


def run_torchft(python: Path, way: str, directory: Path, scene: Scene, returns: bool = False) -> list[Event]:
    """Run torchft on this machine. `returns`: a dead replica is restarted at once, and the run goes on until all
    are in it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    job = torchft_job(way, directory, scene) | {"returns": returns}
    environment = torchft_environment("localhost", port)
    processes: dict[int, subprocess.Popen[bytes]] = {}
    with (directory / "log").open("wb") as log:

        def start(replica: int, command: list[Any]) -> None:
            processes[replica] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

        try:
            start(-1, lighthouse(python, port))
            for replica in range(scene.replicas):
                start(replica, replica_command(python, job, replica))
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline:
                ended = [replica for replica, each in processes.items() if each.poll() is not None]
                died = [replica for replica in ended if processes[replica].returncode == -signal.SIGKILL]
                if returns and died:
                    start(died[0], replica_command(python, job | {"kill": 0}, died[0]))
                elif len(ended) >= scene.replicas:
                    break
                time.sleep(0.01)
        finally:
            for process in processes.values():
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return checked_events(directory, scene)


def lighthouse(python: Path, port: int) -> list[Any]:
    command = [python.with_name("torchft_lighthouse"), "--min_replicas", "1", "--quorum_tick_ms", "100"]
    return [*command, "--join_timeout_ms", "10000", "--bind", f"[::]:{port}"]


def replica_command(python: Path, job: dict[str, Any], replica: int) -> list[Any]:
    return [python, PROGRAMS / "torchft_peer.py", json.dumps({**job, "replica": replica})]


def torchft_environment(address: str, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "TORCHFT_LIGHTHOUSE": f"http://{address}:{port}",
        "PYTHONPATH": PYTHONPATH,
        "OMP_NUM_THREADS": "1",
    }


def torchft_job(way: str, directory: Path, scene: Scene) -> dict[str, Any]:
    config = configure(scene, directory)
    kill, victim = scene.kills[0] if scene.kills else (0, 0)
    return {
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


def checked_events(directory: Path, scene: Scene) -> list[Event]:
    """Events of a run. Raises TorchftUnavailable if it ended before the kill."""
    events = read_events(directory)
    if not events or (scene.kills and not failures(events)):
        text = (directory / "log").read_text(errors="replace").strip().splitlines()
        raise TorchftUnavailable(f"it ended before the kill ({text[-1] if text else 'no output'})")
    return events
