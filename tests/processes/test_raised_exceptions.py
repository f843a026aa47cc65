"""An exception is not a lost machine: what a rank raises outside of a step makes the job fail, at its end or before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import Job
from patience import PATIENCE
from training import small_world, start

from recover.launch.verdict import Verdict
from recover.world.rank_exit import place_of

TRAINING = """
import json, signal, time
import torch, recover
world = recover.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
step = recover.Step(world, model, optimizer, global_batch=10)

class Stream:
    def __getitem__(self, index):
        return torch.full((3, 4), index / 100)

def flip():
    # the lowest bit of a moment: too little to change a parameter in the next step
    optimizer.state[model.weight]["exp_avg"].view(-1).view(torch.int32)[0] ^= 1

def train(steps, forward=model, between=lambda: None):
    while step.index < steps:
        for batch in step.microbatches(Stream()):
            step.backward(forward(batch).square().mean())
        between()
"""


@pytest.mark.guarantee(
    "State and samples",
    "Damaged optimizer state is found by the vote after a checkpoint and after the last step.",
)
@pytest.mark.guarantee(
    "The launcher",
    "A rank that raises outside any step fails the job with its own exit code and the location.",
)
def test_writer_that_raises_after_the_last_step_fails_the_job(tmp_path: Path) -> None:
    """An exception inside of a step is an ordinary loss. Damaged moments are found by the vote after a checkpoint, and
    by the confirmation after the last step. A rank that has left a step early is not inside of one."""
    script = TRAINING + (
        "def forward(batch):\n"
        "    if world.rank == 4 and step.index == 1: raise ValueError('in a step')\n"
        "    return model(batch)\n"
        "train(2, forward)\n"
        "step.compare_optimizers()\n"
        "if world.rank == 3: flip()\n"
        "train(3)\n"
        "if world.rank == 1: print('evicted in', step.index, step.incidents[-1].evicted)\n"
        "if world.rank == 2: flip()\n"
        "print('confirmed', step.confirm()[0])\n"
        "for batch in step.microbatches(Stream()):\n"
        "    step.backward(model(batch).square().mean())\n"
        "    break  # time is up\n"
        "def save_model():\n"
        "    json.loads('{')\n"
        "if world.rank == 0: save_model()\n"
    )
    job = Job(tmp_path, script, "-n", "5")
    assert job.finish() == 4, job.stderr
    assert "evicted in 3 (3,)" in job.stdout
    assert job.stdout.count("confirmed (2,)") == 2
    ends = {rank: json.loads(job.rank_file(f"{rank}.end").read_text()) for rank in range(5)}
    assert [ends[rank]["end"] for rank in range(5)] == ["raised", "done", "excluded", "excluded", "raised"]
    assert (ends[0]["ordinary"], ends[4]["ordinary"]) == (False, True)
    assert (
        json.loads(job.rank_file("4.slot").read_text())["step"] == 2
    )  # what it raises may be the sample's fault
    verdict = job.stderr.splitlines()[-1]
    line = script.splitlines().index("    json.loads('{')") + 1
    expected = (
        f"rank 0 raised outside of any step: JSONDecodeError at {tmp_path}/script.py:{line}, in save_model"
    )
    assert expected in verdict
    assert "rank 4 raised outside" not in verdict
    assert job.leftovers() == []


@pytest.mark.guarantee(
    "The launcher", "The same exception at the same location on two replicas ends the job at once."
)
def test_same_exception_from_two_replicas_ends_the_job_at_once(tmp_path: Path) -> None:
    """As the client of a service would raise on every writer in turn."""
    script = TRAINING + (
        "def log():\n"
        "    if step.index > 1 and world.members[0] == world.rank:\n"
        "        if world.rank > 1: signal.pause()  # the job is ended, not used up\n"
        "        json.loads('{')\n"
        "train(100000, between=log)\n"
    )
    job = Job(tmp_path, script, "-n", "4")
    assert job.finish() == 4, job.stderr
    ends = [json.loads(path.read_text())["end"] for path in (job.run_dir / "ranks").glob("*.end")]
    assert ends == ["raised"] * 2
    assert "failed, replicas 0, 1" in job.stderr.splitlines()[-1]
    assert "raised the same outside of any step, and the next would, too: JSONDecodeError at" in job.stderr
    assert "script.py" in job.stderr.splitlines()[-1]
    assert job.leftovers() == []


@pytest.mark.guarantee(
    "Faults, hangs and stragglers",
    "The first skipped step is reported with its number, the reason and its samples; `skip_limit` skipped steps in "
    "a row end the run on all replicas in the same step.",
)
def test_nan_losses_end_the_job_on_all_replicas_in_the_same_step(tmp_path: Path) -> None:
    script = TRAINING.replace("global_batch=10", "global_batch=4, skip_limit=3") + (
        "train(100000, lambda batch: model(batch) * (float('nan') if batch[0, 0] > 0.085 else 1))\n"
    )
    job = Job(tmp_path, script, "-n", "2")
    assert job.finish() == 4, job.stderr
    assert "step 3 was skipped: the loss of samples 9, 10, 11 is not finite" in job.stdout
    ends = [json.loads(job.rank_file(f"{rank}.end").read_text()) for rank in (0, 1)]
    assert [end["kind"] for end in ends] == ["SkippedStepsError"] * 2
    for end in ends:
        assert "3 steps in a row were skipped, the last is step 5 (skip_limit=3)" in end["detail"]
        assert "step 3 was skipped: the loss of samples 9, 10, 11 is not finite" in end["detail"]
    lines = [json.loads(line) for line in (job.run_dir / "steps.jsonl").read_text().splitlines()]
    assert [line.get("skipped", False) for line in lines] == [False, False, True, True, True]


@pytest.mark.guarantee(
    "The launcher", "A run that ends on a full disk waits a limited time for space, and names what was lost."
)
def test_trainer_reports_a_summary_it_cannot_write(tmp_path: Path) -> None:
    """No rank is lost for it, and the last checkpoint is good."""
    run_dir = tmp_path / "run"
    (run_dir / "summary.json" / "x").mkdir(parents=True)  # in the way of any writer
    process = start(run_dir, *small_world(tmp_path), "replicas=3", "accum=1", "steps=2", "checkpoint.every=1")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1, output
    assert "summary.json, because the disk did not take it" in output
    assert "the ranks have finished, but" in output
    ends = {json.loads(path.read_text())["end"] for path in (run_dir / "ranks").glob("*.end")}
    assert ends == {"done"}
    assert (run_dir / "checkpoints" / "step-2").exists()


WAYS = {
    "raise ValueError('x')": False,
    "sys.exit(1)": False,
    "os._exit(1)": False,
    "threading.Thread(target=lambda: 1 / 0).start(); time.sleep(9)": False,
    "rank_exit.on_success(lambda: 1 / 0)": False,
    "raise KeyboardInterrupt": True,
    "raise ScheduledFault('x')": True,
    "rank_exit.in_step(True); raise ValueError('x')": True,
    "rank_exit.in_step(True); sys.exit(1)": True,
    "rank_exit.in_step(True); os._exit(1)": True,
    "rank_exit.in_step(True); threading.Thread(target=lambda: 1 / 0).start(); time.sleep(9)": False,
    "rank_exit.in_step(True); rank_exit.in_step(False); raise ValueError('x')": False,
}


@pytest.mark.guarantee(
    "The launcher",
    "A rank that raises outside any step fails the job with its own exit code and the location.",
)
@pytest.mark.parametrize("way", WAYS)
def test_end_marker_states_whether_the_job_is_at_fault(tmp_path: Path, way: str) -> None:
    text = "import os, sys, threading, time\nfrom recover.world import rank_exit\n"
    text += "from recover.faults.probe import ScheduledFault\nrank_exit.install_hooks(standalone=True)\n"
    (tmp_path / "script.py").write_text(text + way)
    environment = os.environ | {"OMPI_COMM_WORLD_RANK": "0", "RECOVER_RUN_DIR": str(tmp_path)}
    subprocess.run(
        [sys.executable, tmp_path / "script.py"], env=environment, capture_output=True, timeout=PATIENCE
    )
    marker = json.loads((tmp_path / "ranks/0.end").read_text())
    assert (marker["end"], marker["ordinary"]) == ("raised", WAYS[way])
    assert bool(Verdict(tmp_path, 1).raised) == (not WAYS[way])


def test_exception_location_is_in_user_code() -> None:
    """Whichever library raised in the end."""
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads("{")
    place = place_of(raised.tb)
    assert place.startswith(f"{__file__}:")
    assert place.endswith("in test_exception_location_is_in_user_code")
    assert "json" in place_of(raised.tb.tb_next)  # better than nothing


@pytest.mark.guarantee(
    "The launcher", "The same exception at the same location on two replicas ends the job at once."
)
def test_exception_is_repeated_only_at_the_same_location_on_two_replicas(tmp_path: Path) -> None:
    def verdict(replica_size: int, **ends: tuple[str, str, bool]) -> str:
        directory = tmp_path / "ranks"
        directory.mkdir(exist_ok=True)
        for rank, (kind, place, ordinary) in ends.items():
            marker = {"end": "raised", "detail": "", "kind": kind, "place": place, "ordinary": ordinary}
            (directory / f"{rank[1:]}.end").write_text(json.dumps(marker))
        return Verdict(tmp_path, 4).repeated(replica_size)

    assert not verdict(1, r0=("KeyError", "a.py:1", False), r1=("KeyError", "a.py:2", False))
    assert not verdict(1, r1=("OSError", "a.py:1", False))
    assert not verdict(1, r1=("KeyError", "a.py:1", True))
    assert not verdict(2, r1=("KeyError", "a.py:1", False))  # peers
    assert verdict(1, r1=("KeyError", "a.py:1", False)).startswith("replicas 0, 1 raised the same")
    assert verdict(2, r3=("KeyError", "a.py:1", False)).startswith("replicas 0, 1 raised the same")
