"""Runs ours and checkpoint-restart on the same scene, and returns their events."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recover.faults.locations import IN_FLIGHT
from recover.job.config_keys import read_words
from recover.job.host_options import HostOptions
from recover.launch import preflight
from recover.launch.hosts.agent import launch_alone
from recover.launch.launcher import launch
from recover.launch.request import LaunchRequest
from recover.runs.records.kinds import Event
from recover.train.config import Config, parse
from recover.train.learning_rate import lr_factor
from recover.train.model_shape import shape_of
from recover_lab.peers.ended import BenchmarkError, check
from recover_lab.peers.events import read_events
from recover_lab.peers.scene import VOCAB, Scene

PROGRAMS = Path(__file__).parent / "programs"
PR_SET_PDEATHSIG = 1
PATIENCE = 900.0  # seconds after which a run counts as hung
MONITOR_INTERVAL = 0.1  # seconds between two polls of torchrun; its default
TORCHRUN = {
    "OMP_NUM_THREADS": "1",
    # A separate store for every life: in a shared one, gloo finds the addresses of processes that have ended.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def run_ours(scene: Scene, place: Path) -> list[Event]:
    """Ours: replicas die and the others continue."""
    config = configure(scene, place)
    code = launch(
        scene.ranks,
        LaunchRequest(
            PROGRAMS / "forward.py",
            [config.model_dump_json(), "0", *scene.kill_words()],
            scene.replica_size,
            place,
            timeout=120,
        ),
    )
    check(code, f"our run ended with code {code}; what its ranks said stands above")
    return read_events(place)


def run_ours_rejoining(scene: Scene, place: Path, awaited: int = 0, ready: bool = True) -> list[Event]:
    """Ours, where a lost replica is restarted at once, and joins.

    The run goes on until `awaited` replicas have joined. `ready`: with prewarmed processes.
    """
    config = configure(scene, place)
    code = launch_alone(
        scene.ranks,
        HostOptions(returns=True, return_delay=0.0, ready=ready),
        LaunchRequest(
            PROGRAMS / "forward.py",
            [config.model_dump_json(), str(awaited), *scene.kill_words()],
            scene.replica_size,
            place,
            timeout=120,
        ),
    )
    check(code, f"our run ended with code {code}; what its ranks said stands above")
    return read_events(place)


def run_baseline(scene: Scene, place: Path) -> list[Event]:
    """Checkpoint-restart: torchrun restarts all ranks from the last checkpoint."""
    job = restart_job(scene, place)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(scene.ranks), "--max-restarts", str(len(scene.kills))]
    command += ["--monitor-interval", str(MONITOR_INTERVAL), "--log-dir", str(place / "torchrun")]
    command += [str(PROGRAMS / "restart.py"), json.dumps(job)]
    log = place / "torchrun.log"
    if code := supervised(command, log, TORCHRUN):
        raise BenchmarkError(f"the baseline ended with code {code}:\n{log.read_text()[-2000:]}")
    return read_events(place)


def restart_job(scene: Scene, place: Path) -> dict[str, Any]:
    """The argument of the ranks of the baseline."""
    config = configure(scene, place)
    return {
        "place": str(place),
        "shard": scene.shard,
        "tp": scene.tp,
        "pp": scene.pp,
        "accum": scene.accum,
        "global_batch": scene.global_batch,
        "pace": scene.pace,
        "steps": scene.steps,
        "kills": [(step, scene.victim(step, replica)) for step, replica in scene.kills],
        "save_every": scene.save_every or scene.steps,
        "in_flight": IN_FLIGHT,
        "seed": scene.seed,
        "seq_len": scene.seq_len,
        "data": config.data.path,
        "clip": config.clip,
        "lrs": [config.lr * lr_factor(config, done) for done in range(scene.steps)],
        "shape": asdict(shape_of(config, VOCAB)),
    }


def configure(scene: Scene, place: Path) -> Config:
    place.mkdir(parents=True, exist_ok=True)
    return parse(read_words(scene.words(place)))


def supervised(command: list[str], log: Path, environment: Mapping[str, str]) -> int:
    """Run a launcher that is not ours; it and its processes end with this process."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**preflight.clean_environment(), **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            return process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(
                f"{command[2]} has not ended after {PATIENCE:g} s; its output is in {log}"
            ) from None
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # torchrun ends its workers first
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)


def _end_with_parent() -> None:
    """Send SIGTERM to the child when this process dies: torchrun then ends its workers."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory in memory, so that checkpoints cost the baseline as little as possible."""
    memory = Path("/dev/shm")
    directory = tempfile.mkdtemp(prefix="recover-bench-", dir=memory if memory.is_dir() else None)
    try:
        yield Path(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
