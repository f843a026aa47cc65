"""Processes that are ready become ranks as if they had been started as such, but for what they have imported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from patience import PATIENCE, wait_until

from recover.job import process
from recover.job.environment import write_changes
from recover.job.spec import VARIABLE, JobSpec
from recover.launch.guardian import clean
from recover.launch.prewarmed import PrewarmedProcesses

SCRIPT = """
import json, os, sys
before = "torch._dynamo" in sys.modules
import torch
names = "OMP_NUM_THREADS", "ADDED", "LOCAL_RANK", "AWAY", "TORCHINDUCTOR_CACHE_DIR"
environment = {name: os.environ[name] for name in names if name in os.environ}
told = sys.argv, __name__, sys.stdin.read(), before, torch.get_num_threads(), environment
print(json.dumps(told))
"""


@pytest.mark.guarantee(
    "User code",
    "Every rank has `LOCAL_RANK`, its index on its host, under every launcher and after a restart.",
)
@pytest.mark.guarantee(
    "Rejoining replicas",
    "A prewarmed process runs the script in the environment of its rank, and one that was ended is not used "
    "and none is left.",
)
def test_ready_process_runs_the_script_in_the_environment_of_its_rank(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    given = {**os.environ, "OMP_NUM_THREADS": "2", "AWAY": "1"}
    given.pop("TORCHINDUCTOR_CACHE_DIR", None)  # set by torch when another test made an optimizer
    ready = PrewarmedProcesses(1, [str(script), "word"], given, tmp_path)
    try:
        ready.fill()
        assert ready.take(given) is None, "nobody has said yet what the script does to its environment"
        changes = {"OMP_NUM_THREADS": "1", "ADDED": "1", "AWAY": None}
        (tmp_path / "environment.json").write_text(json.dumps(changes))
        ready.fill()
        ready.fill()  # no more than wanted
        job = JobSpec(1, 1, session=str(tmp_path))
        rank = {VARIABLE: str(job.write()), process.RANK: "0", process.RANK_ON_HOST: "3"}
        started = ready.take(given | rank)
        assert started is not None
        assert ready.take(given) is None
        out, err = started.communicate(timeout=PATIENCE)
        assert started.returncode == 0, err.decode()
        environment = {"OMP_NUM_THREADS": "2", "LOCAL_RANK": "3", "AWAY": "1"}
        assert json.loads(out) == [[str(script), "word"], "__main__", "", True, 1, environment]
    finally:
        ready.end()


@pytest.mark.guarantee(
    "Rejoining replicas", "Processes started by a rank end with the job, also those of a joined rank."
)
@pytest.mark.parametrize("told", ["job.json", "join-3.json"])
def test_processes_started_by_a_rank_end_with_the_job(told: str, tmp_path: Path) -> None:
    session = str(tmp_path / "session")
    Path(session).mkdir()
    child = subprocess.Popen(["sleep", "600"], env={"RECOVER_JOB": f"{session}/{told}"})
    try:
        clean(session, [session])
        assert child.wait(PATIENCE) == -signal.SIGKILL
    finally:
        child.kill()


@pytest.mark.guarantee(
    "Rejoining replicas",
    "A prewarmed process runs the script in the environment of its rank, and one that was ended is not used "
    "and none is left.",
)
def test_ready_process_that_was_ended_is_not_used_and_none_is_left(tmp_path: Path) -> None:
    write_changes(tmp_path, os.environ)
    assert json.loads((tmp_path / "environment.json").read_text()) == {}
    ready = PrewarmedProcesses(2, ["nothing.py"], dict(os.environ), tmp_path)
    try:
        ready.fill()
        ready.fill()
        first, second = ready._waiting
        first.kill()
        first.wait()
        assert first.stdin is not None
        first.stdin.close()
        # A pipe that accepts a write does not prove that its reader still lives.
        reader, writer = os.pipe()
        first.stdin = os.fdopen(writer, "wb")
        assert ready.take(os.environ) is second
        os.close(reader)
        second.kill()
        second.communicate()
        ready.fill()
        (third,) = ready._waiting
    finally:
        ready.end()
    assert third.returncode is not None
    assert wait_until(lambda: subprocess.run(["ps", "-p", str(third.pid)], capture_output=True).returncode)
