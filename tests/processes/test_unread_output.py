"""A job whose output is not read, as behind a pager, or after Ctrl-S."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import OWN_STEP, Job
from patience import wait_until

from recover.runs.records.json_lines import read

STEPS = 24
SCRIPT = f"""{OWN_STEP}
while step.index < {STEPS}:
    for batch in step.microbatches(Data()):
        if step.index == 8 * world.rank and world.rank in (1, 2):
            os.kill(os.getpid(), 9)
        step.backward(model(batch).sum())
    print("x" * 20_000)
"""


@pytest.mark.guarantee(
    "Rejoining replicas",
    "A job whose output is not read survives deaths and loses output only beyond 4 MiB, the oldest first.",
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["-n", "3"], id="openmpi", marks=pytest.mark.soak),
        pytest.param(["-n", "3", "--return"], id="etcd"),
    ],
)
def test_job_survives_deaths_although_its_output_is_not_read(tmp_path: Path, options: list[str]) -> None:
    job = Job(tmp_path, SCRIPT, *options)
    steps = job.run_dir / "steps.jsonl"
    assert wait_until(lambda: steps.exists() and len(read(steps).whole) == STEPS)
    assert job.finish() == 0, job.stderr
    assert {line["microbatches"] for line in read(steps).whole} == {6}
    assert job.stdout.count("x" * 20_000) >= STEPS + 8, (
        "rank 0 has said that in every step, and rank 1 in some"
    )
    assert "unread bytes were dropped" not in job.stdout + job.stderr
