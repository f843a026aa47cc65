"""Deaths that ranks notice before mpirun or the agent has reaped the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launching import OWN_STEP, Job
from patience import wait_until

from recover.job.process import rank_of
from recover.runs.records.json_lines import read
from recover.world.liveness.exiting import exit_code, is_exiting

# The main thread ends alone: the process goes on in the other thread.
WITHOUT_MAIN_THREAD = """
import ctypes, threading, time

libc = ctypes.CDLL(None)
threading.Thread(target=lambda: (print("goes on", flush=True), time.sleep(1000))).start()
libc.syscall({"x86_64": 60, "aarch64": 93}[__import__("platform").machine()], 0)
"""


def fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat, from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@contextmanager
def running(script: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has printed a line, and when it started."""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process, int(fields(process.pid)[19])
        finally:
            process.kill()


@pytest.mark.guarantee(
    "Membership",
    "A death on the same host is noticed when no thread of the process can execute anything any more.",
)
def test_killed_process_is_exiting_before_it_is_reaped() -> None:
    with running("print(flush=True); import time; time.sleep(1000)") as (process, started):
        assert not is_exiting(process.pid, started)
        process.kill()
        assert wait_until(lambda: fields(process.pid)[0] == "Z")
        assert is_exiting(process.pid, started)
        assert exit_code(process.pid) == -signal.SIGKILL
        assert not is_exiting(process.pid, started + 1), "another process had this pid before"


@pytest.mark.guarantee(
    "Membership",
    "A death on the same host is noticed when no thread of the process can execute anything any more.",
)
def test_process_without_main_thread_is_not_exiting() -> None:
    with running(WITHOUT_MAIN_THREAD) as (process, started):
        assert wait_until(lambda: fields(process.pid)[0] == "Z"), "the main thread does not end"
        assert not is_exiting(process.pid, started)
        process.kill()
        assert wait_until(lambda: len(os.listdir(f"/proc/{process.pid}/task")) == 1)
        assert is_exiting(process.pid, started)


@pytest.mark.guarantee("Membership", "Ranks of one host notice a death without mpirun.")
def test_survivors_repair_while_mpirun_is_stopped(tmp_path: Path) -> None:
    """A stopped mpirun reaps no process and reports no death."""
    loop = """
    while step.index < 60:
        for batch in step.microbatches(Data()):
            step.backward(model(batch).square().mean())
        time.sleep(0.02)
    """
    job = Job(tmp_path, OWN_STEP + "\n".join(line[4:] for line in loop.splitlines()), "-n", "3")

    def steps() -> list[int]:
        return [line["replicas"] for line in read(job.run_dir / "steps.jsonl").whole]

    mpirun = None
    try:
        assert wait_until(lambda: len(steps()) > 2 or job.process.poll() is not None)
        (mpirun,) = [
            pid for pid, line in job.processes().items() if "bin/prterun" in line or "bin/mpirun" in line
        ]
        os.kill(mpirun, signal.SIGSTOP)
        (victim,) = [pid for pid in job.processes() if rank_of(pid) == 1]
        os.kill(victim, signal.SIGKILL)
        assert wait_until(lambda: steps().count(2) > 3)
    finally:
        if mpirun is not None:
            os.kill(mpirun, signal.SIGCONT)
        job.finish()
    assert job.process.returncode == 0, job.stderr
    assert steps()[-1] == 2
    assert len(steps()) == 60
