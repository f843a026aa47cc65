"""Calls that only some replicas make, and code that is edited while a job runs: as users do it, on real ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Job
from rank_pids import ranks_of_run

from recover.runs.records.job_log import job_lines
from recover.runs.records.json_lines import read
from recover.runs.report import explanation
from recover.runs.report.recorded_runs import read_runs

PATIENCE = 600.0  # seconds; far above what anything here takes

SCRIPT = """
import hashlib, os, sys, time
import torch
import recover

class Data:
    def __getitem__(self, i): return torch.ones(2, 8) * (i % 5)

torch.set_num_threads(1)
world = recover.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
if world.grid.replica_size > 1:
    model = recover.hsdp(model, world, blocks=list(model))
step = recover.Step(world, model, torch.optim.SGD(model.parameters(), lr=0.001), global_batch=4)

def take_step():
    for rows in step.microbatches(Data()):
        step.backward(model(rows).pow(2).mean())
"""

SAVED_ON_ONE_RANK = """
def digest():
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:12]

try:
    while step.index < 5:
        take_step()
        after = digest() if world.grid.replica_size == 1 else ""
        if world.rank == 0 and step.index == 2:
            recover.save(step, sys.argv[1])
finally:
    if world.grid.replica_size == 1:
        print("ended after", step.index, "as committed" if digest() == after else "changed")
"""

# The value gets worse with every step. Only a replica that has seen no other value takes it for the best, so a
# replica that joins saves alone, whichever step it joins in.
SAVED_IF_BEST = """
import mine
best = float("inf")
while True:
    take_step()
    value = step.index
    if mine.better(value, best):
        best = value
        recover.save(step, sys.argv[1])
    time.sleep(0.02)
"""


def wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def finish(job: Job) -> tuple[int, str]:
    said = "".join(job.process.communicate(timeout=PATIENCE))
    return job.process.returncode, said


def details(job: Job) -> dict[int, tuple[str, str]]:
    """How each rank has ended, and what it said."""
    ends = {int(path.stem): json.loads(path.read_text()) for path in (job.run_dir / "ranks").glob("*.end")}
    return {rank: (end["end"], end["detail"]) for rank, end in sorted(ends.items())}


@pytest.mark.guarantee(
    "Membership",
    "All replicas name a collective call that only some of them make, without losses, and never accuse a "
    "slow replica.",
)
def test_save_called_on_one_rank_ends_all_replicas_with_the_same_error(tmp_path: Path) -> None:
    """On mpi this used to hang silently. No rank is lost as dead, and the parameters are those of the last step."""
    options = ("-n", "3", "--page", "off", "--timeout", "600", "--carrier", "mpi")
    job = Job(tmp_path, SCRIPT + SAVED_ON_ONE_RANK, *options, args=(str(tmp_path / "saved"),))
    code, said = finish(job)
    told = "recover.save must be called by all replicas; replicas 1, 2 did not (they are in step 3)"
    assert code == 1, said
    assert details(job) == dict.fromkeys(range(3), ("raised", f"CollectiveCallError: {told}")), said
    assert re.findall(r"ended after (.*)", said) == ["2 as committed"] * 3, said
    assert f"failed, no rank finished; ranks 0-2 raised: CollectiveCallError: {told}" in said
    assert not list(tmp_path.glob("saved/checkpoints/step-*"))


@pytest.mark.guarantee(
    "Membership",
    "All replicas name a collective call that only some of them make, without losses, and never accuse a "
    "slow replica.",
)
@pytest.mark.soak
def test_save_called_on_one_rank_of_a_sharded_replica_ends_all_ranks(tmp_path: Path) -> None:
    """The ranks of its replica wait for it inside of torch, where they cannot raise."""
    options = ("-n", "4", "--replica-size", "2", "--page", "off", "--timeout", "600")
    job = Job(tmp_path, SCRIPT + SAVED_ON_ONE_RANK, *options, args=(str(tmp_path / "saved"),))
    code, said = finish(job)
    assert code == 1, said
    told = "CollectiveCallError: recover.save must be called by all ranks; ranks 1, 2, 3 did not (they are in step 3)"
    assert details(job) == dict.fromkeys(range(4), ("raised", told)), said


@pytest.mark.guarantee(
    "Rejoining replicas",
    "A rejoining replica runs the code of the job or is refused by name before it asks, and a host with "
    "edited files starts none.",
)
def test_edited_code_blocks_a_rejoin_and_divergent_conditions_are_named(tmp_path: Path) -> None:
    """A module is edited, a replica dies and is not started again until the module is restored. Then it joins, and
    saves by a condition of its own: on etcd and gloo, where that used to abort the process."""
    module = tmp_path / "mine.py"
    module.write_text("def better(value, best): return value < best\n")
    options = ("-n", "3", "--return", "--page", "off", "--timeout", "600")
    job = Job(tmp_path, SCRIPT + SAVED_IF_BEST, *options, args=(str(tmp_path / "saved"),))

    def replicas() -> list[int]:
        path = job.run_dir / "steps.jsonl"
        return [line["replicas"] for line in read(path).whole] if path.exists() else []

    def held() -> list[str]:
        return [line["why"] for line in job_lines(job.run_dir) if line["what"] == "held"]

    wait(lambda: replicas()[5:], "steps")
    module.write_text("def better(value, best): return value > best\n")
    wait(held, "the edited module is noticed")
    os.kill(ranks_of_run(job.run_dir)[1][0], signal.SIGKILL)
    wait(lambda: replicas()[-1:] == [2], "steps without the lost replica")
    count = len(replicas())
    wait(lambda: len(replicas()) > count + 20, "more steps without it")
    assert set(replicas()[count:]) == {2}
    module.write_text("def better(value, best): return value < best\n")
    code, said = finish(job)
    assert code == 1, said
    (edited, restored) = held()
    assert re.fullmatch(
        r"module mine \(\S*mine.py\) differs from the version this job was started with "
        r"\(sha256 \w{12} vs \w{12}\); restore it or restart the job",
        edited,
    )
    assert restored == ""
    assert said.count(f"no replica is started again here: {edited}") == 1
    assert any(edited in line for line in explanation.tell(read_runs([job.run_dir])[0]))
    told = r"recover.save must be called by all replicas; replicas 0, 2 did not \(they are in step \d+\)"
    ended = details(job)
    for rank in (0, 2, 3):
        assert re.fullmatch(f"CollectiveCallError: {told}", ended[rank][1]), (ended, said)
    assert "such as the best loss so far, belongs in extra= of recover.Step" in said
