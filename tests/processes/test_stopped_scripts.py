"""Ctrl-C to a script of one's own that looks at `step.stop_agreed`: it ends after its step, with a checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from launching import OWN_STEP, Job, state_of
from patience import wait_until

from recover.checkpoint import directory
from recover.runs.records.job_state import last_step

SCRIPT = f"""{OWN_STEP}
place = os.path.dirname(__file__)
recover.resume(step, place)
while not step.stop_agreed:
    for batch in step.microbatches(Data()):
        step.backward(model(batch).sum())
recover.save(step, place)
"""


@pytest.mark.guarantee(
    "The launcher",
    "The first Ctrl-C stops a job after its step if it heeds that (step.stop_agreed; `recover train` does), and the "
    "second one ends it at once.",
)
def test_ctrl_c_stops_a_script_that_heeds_it_with_a_checkpoint(tmp_path: Path) -> None:
    """All processes that share the terminal get the signal, and no rank is lost."""
    job = Job(tmp_path, SCRIPT, "-n", "2", "--return")
    assert wait_until(lambda: last_step(job.run_dir) >= 3), job.process.poll()
    assert state_of(job.run_dir) == "running"
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.finish() == 128 + signal.SIGINT, job.stderr
    found, stopped = directory.latest(tmp_path), last_step(job.run_dir)
    assert found is not None
    assert found.step == stopped
    assert "SIGINT: the script is asked to stop after its step (step.stop_agreed)" in job.stderr
    goes_on = f"stopped by SIGINT after step {stopped}; the same command goes on from step {stopped + 1} ({found.path})"
    assert goes_on in job.stderr
    assert "lost" not in job.stderr
    assert state_of(job.run_dir) == f"stopped by SIGINT after step {stopped}"
    assert not (job.run_dir / "page.url").exists()
    assert job.leftovers() == []
