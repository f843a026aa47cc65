"""The state of a joined replica in real runs: all of module, process and user, or a refusal by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import Job
from worlds import PROGRAMS

from recover.runs.records.json_lines import read

HANG = 240  # seconds; far above what anything here takes


def run(place: Path, ranks: int, steps: int, *options: str) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-P", "-m", "recover.cli", "run", "-n", str(ranks), "--page", "off"]
    command += ["--run-dir", str(place), "--timeout", str(HANG), *options]
    done = subprocess.run(
        [*command, str(PROGRAMS / "joined_state.py"), str(steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * HANG,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return json.loads((place / "digests.json").read_text()), done.stdout


@pytest.mark.guarantee(
    "Joining",
    "A joining replica receives training flags, extra state, generators, schedulers, averages, `extra=` and "
    "nested optimizer state.",
)
@pytest.mark.guarantee(
    "Joining",
    "A replica runs no microbatch in the step in which it joins, so its initial state enters no sum.",
)
@pytest.mark.guarantee(
    "Joining",
    "A joining replica receives the state of each of several optimizers and of their schedulers, to the bit.",
)
def test_joined_replicas_continue_with_the_state_of_the_lost_ones(tmp_path: Path) -> None:
    """Two of three replicas die, two join, then the last original replica dies: every kind of state is
    what it is in a calm run of as many steps."""
    struck, output = run(
        tmp_path / "struck", 3, 0, "--return", "--kill", "3:1:forward", "--kill", "4:2:forward"
    )
    joined = [
        line["joined_replicas"]
        for line in read(tmp_path / "struck" / "incidents.jsonl").whole
        if line.get("kind") == "joined"
    ]
    assert {3, 4} <= {replica for replicas in joined for replica in replicas}, output
    assert "no replica can join" not in output
    calm, _ = run(tmp_path / "calm", 1, struck["steps"])
    assert struck == calm


UNDECLARED = """
import os, time, torch, recover
from pathlib import Path
here = Path(os.environ["RECOVER_RUN_DIR"])
world = recover.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99 ** step)
step = recover.Step(world, model, optimizer, global_batch=6, reduction="reproducible")
while not step.stop_agreed:
    for x in step.microbatches([torch.ones(2, 4)] * 10**6):
        time.sleep(0.01)
        step.backward(model(x).square().mean())
    scheduler.step()
    if (here / "ranks" / "2.end").exists():
        step.request_stop()
"""


@pytest.mark.guarantee(
    "Joining",
    "State that only the user's code knows is named before a join, and the join is refused by name.",
)
@pytest.mark.soak
def test_replica_that_would_lack_a_scheduler_does_not_join(tmp_path: Path) -> None:
    """The reason is reported at the start of the job and when the replica ends, and the job goes on without it."""
    job = Job(tmp_path, UNDECLARED, "-n", "2", "--return", "--kill", "3:1:forward")
    job.stdout, job.stderr = job.process.communicate(timeout=HANG)
    assert job.process.returncode == 0, job.stderr
    said = job.stdout + job.stderr
    assert "no replica can join this job: the learning rate is set by a LambdaLR" in said, said
    assert "this replica cannot join: the learning rate is set by a LambdaLR" in said, said
    incidents = read(job.run_dir / "incidents.jsonl").whole
    assert [line.get("kind", "lost") for line in incidents] == ["lost"]
