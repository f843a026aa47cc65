"""Runs one torchtitan job on ReCoVer, under torchrun with restarts, and on torchft: for `recover bench titan`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recover.runs.records.json_lines import read
from recover_lab.locations import LAB, PYTHONPATH
from recover_lab.peers.ended import BenchmarkError
from recover_lab.peers.torchft_runs import lighthouse

PROGRAMS = LAB / "peers" / "programs" / "titan"
PROGRAM = PROGRAMS / "titan_bench.py"
OURS, RESTART, TORCHFT = "ours", "torchtitan, restart", "torchft"
ENDLESS = 1_000_000  # steps of a job that the benchmark ends
Line = dict[str, Any]


@dataclass(frozen=True)
class TitanJob:
    """`batch`: sequences of a step; `local`: of a microbatch; `every`: steps between two log lines."""

    model: str
    device: str
    replicas: int
    batch: int
    local: int
    length: int  # tokens of a sequence
    assets: Path
    steps: int = ENDLESS
    every: int = 1
    save_every: int = 0
    arguments: tuple[str, ...] = ()
    attention: str = "flex"  # on GPUs
    carrier: str = "auto"  # of ReCoVer

    def but(self, **changes: Any) -> TitanJob:
        return replace(self, **changes)

    def words(self, out: Path) -> list[str]:
        """Arguments of torchtitan that all systems share."""
        saving = ["--checkpoint.enable", "--checkpoint.interval", str(self.save_every)]
        return [
            *("--training.steps", str(self.steps), "--training.global-batch-size", str(self.batch)),
            *("--training.local-batch-size", str(self.local), "--training.seq-len", str(self.length)),
            *("--metrics.log-freq", str(self.every), "--dump-folder", str(out / "dump")),
            *(saving if self.save_every else ()),
            *self.arguments,
        ]

    def commands(self, system: str, out: Path, torchft: Path | None, port: int) -> dict[int, list[str]]:
        """Processes to start, by replica; -1 is one for all."""
        words, replicas = self.words(out), str(self.replicas)
        if system == OURS:
            command = ["-m", "recover.cli", "run", "-n", replicas, "--page", "off", "--return"]
            command += [
                "--carrier",
                self.carrier,
                "--run-dir",
                str(out / "run"),
                "--timeout",
                "600",
                str(PROGRAM),
            ]
            command += ["--module", "recover.integrations.titan", "--config", "titan_bench.job", *words]
            return {-1: [sys.executable, *command]}
        if system == RESTART:
            command = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
            command += ["--nproc-per-node", replicas, str(PROGRAM), "--module", "titan_bench"]
            degrees = ["--parallelism.data-parallel-replicate-degree", replicas]
            degrees += ["--parallelism.data-parallel-shard-degree", "1"]
            return {-1: [sys.executable, *command, "--config", "job", *degrees, *words]}
        assert torchft is not None
        found = {-1: [str(word) for word in lighthouse(torchft, port)]}
        for replica in range(self.replicas):
            command = [str(torchft), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
            command += [str(PROGRAM), "--module", "titan_bench", "--config", "torchft"]
            own = ["--fault-tolerance.replica-id", str(replica), "--fault-tolerance.group-size", replicas]
            found[replica] = [*command, *words, *own]
        return found


class TitanRun:
    """A running job; `end` ends all of its processes."""

    def __init__(self, job: TitanJob, system: str, out: Path, torchft: Path | None = None) -> None:
        self.job, self.system, self.out = job, system, out
        out.mkdir(parents=True)
        port = 29000 + os.getpid() % 1000
        self._environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("RECOVER_")},
            "PYTHONPATH": os.pathsep.join((str(PROGRAMS), PYTHONPATH, os.environ.get("PYTHONPATH", ""))),
            "TITAN_MODEL": job.model,
            "TITAN_DEVICE": job.device,
            "TITAN_ATTENTION": job.attention,
            "TITAN_ASSETS": str(job.assets),
            "TITAN_OUT": str(out),
            "HF_HUB_OFFLINE": "1",
            "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}",
            "OMP_NUM_THREADS": "1",
        }
        self._commands = job.commands(system, out, torchft, port)
        self._log = (out / "log").open("wb")
        self.processes = {replica: self._start(replica) for replica in self._commands}

    def _start(self, replica: int) -> subprocess.Popen[bytes]:
        own = {"TITAN_REPLICA": str(replica)} if replica >= 0 else {}
        return subprocess.Popen(
            self._commands[replica],
            env=self._environment | own,
            cwd=self.out,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def lines(self) -> list[Line]:
        """The lines of all processes by step, then by time: a step that was run again is there twice."""
        found = [line for path in self.out.glob("steps-*.jsonl") for line in read(path, key="step").whole]
        return sorted(found, key=lambda line: (line["step"], line["at"]))

    def wait_for(self, what: Any, seconds: float) -> Any:
        """Wait until `what(lines)` is true, and return it. Raises BenchmarkError when the job ends before or lasts
        too long."""
        deadline = time.monotonic() + seconds
        while True:
            replicas = [number for number in self.processes if number >= 0] or [
                -1
            ]  # not torchft's lighthouse
            ended = all(self.processes[number].poll() is not None for number in replicas)
            if found := what(self.lines()):
                return found
            if ended or time.monotonic() > deadline:
                why = "ended" if ended else f"took more than {seconds:.0f} s"
                raise BenchmarkError(f"{self.system}: the job {why} too early ({self.last_words()})")
            time.sleep(0.02)

    def kill(self, replica: int) -> float:
        """Send SIGKILL to the process of a replica. Returns the time."""
        victim = int((self.out / f"pid-{replica}").read_text())
        os.kill(victim, signal.SIGKILL)
        at = time.time()
        if self.system == TORCHFT:  # users of torchft run a supervisor for each replica
            self.processes[replica].wait(60)
            self.processes[replica] = self._start(replica)
        return at

    def last_words(self) -> str:
        text = (self.out / "log").read_text(errors="replace").strip().splitlines()
        return text[-1][-300:] if text else "no output"

    def end(self) -> None:
        """Send SIGTERM, which each of the launchers passes on, and SIGKILL to the processes that are left."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + 30
        for process in self.processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        for path in self.out.glob("pid-*"):  # ranks have a process group of their own
            try:
                os.kill(int(path.read_text()), signal.SIGKILL)
            except (ProcessLookupError, ValueError):
                pass
        self._log.close()


@contextmanager
def titan_run(job: TitanJob, system: str, out: Path, torchft: Path | None = None) -> Iterator[TitanRun]:
    run = TitanRun(job, system, out, torchft)
    try:
        yield run
    finally:
        run.end()


def step_times(lines: list[Line], skip: int) -> list[float]:
    """Seconds of a step between two log lines, without the first `skip` lines, in which the job warms up."""
    pairs = list(zip(lines[skip:], lines[skip + 1 :], strict=False))
    return [
        (after["at"] - before["at"]) / (after["step"] - before["step"])
        for before, after in pairs
        if after["step"] > before["step"]
    ]


def judge_kill(lines: list[Line], killed_at: float, replicas: int) -> dict[str, Any]:
    """Seconds from the kill to the next new step, and to a step of all replicas; steps that were run again; and
    sequences of the new steps."""
    before = max((line["step"] for line in lines if line["at"] <= killed_at), default=0)
    after = [line for line in lines if line["at"] > killed_at]
    new = [line for line in after if line["step"] > before]
    if not new:
        raise BenchmarkError("no step was committed after the kill")
    first = min(new, key=lambda line: float(line["at"]))
    full = [line["at"] for line in new if line["replicas"] == replicas and _was_less(line, after, replicas)]
    return {
        "seconds_to_next_step": first["at"] - killed_at,
        **({"seconds_to_full_strength": min(full) - killed_at} if full else {}),
        "steps_run_again": len({line["step"] for line in after if line["step"] <= before}),
        "sequences": sorted({line["sequences"] for line in new}),
    }


def _was_less(line: Line, after: list[Line], replicas: int) -> bool:
    """Whether the step came after those with fewer replicas, if there were any."""
    last = max((each["at"] for each in after if each["replicas"] < replicas), default=0.0)
    return bool(line["at"] > last)
