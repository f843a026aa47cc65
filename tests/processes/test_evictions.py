"""An evicted replica and every monitor get the reason; joined replicas evict none that was there before."""

from __future__ import annotations

import json
from pathlib import Path

import launching
import pytest
from causes_told import why
from launching import Job

from recover.runs.live.view import RunView
from recover.runs.records.json_lines import read

LIMIT = 300.0  # seconds; a guard against hangs, far above what a launch takes

EVICTIONS = """
import torch, recover

torch.set_num_threads(1)
world = recover.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0024)
step = recover.Step(world, model, optimizer, global_batch=7)

class Stream:
    def __getitem__(self, index):
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(index))

def train(change=lambda: None, of=-1):
    if world.rank == of:
        change()
    for batch in step.microbatches(Stream()):
        step.backward(model(batch).square().mean())

train()
train(lambda: optimizer.param_groups[0].update(lr=0.0021), of=6)
train(lambda: model[0].weight.data.copy_(model[0].weight.data.flip(0)), of=5)
train(lambda: model[1].running_var.add_(1), of=4)
step.compare_optimizers()
train(lambda: optimizer.state[model[0].bias]["exp_avg"].add_(1), of=3)
train(lambda: model[0].bias.requires_grad_(False), of=2)
step.on_first(print, "left", world.replicas, "of", step.index)
"""

REASONS = {
    6: "learning rate 0.0021, the others have 0.0024",
    5: "its parameters differ from the majority, first in 0.weight",
    4: "its buffers differ from the majority, first in 1.running_var",
    3: "its optimizer state differs from the majority, first in exp_avg of 0.bias",
    2: "it trains other parameters than the majority, first in 0.bias",
}


@pytest.mark.guarantee(
    "State and samples",
    "The evicted replica, its peers, `recover why`, the page and `incidents.jsonl` name the entry that "
    "differs.",
)
def test_eviction_reason_is_shown_by_every_monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "PATIENCE", LIMIT)
    job = Job(tmp_path, EVICTIONS, "-n", "7")
    assert job.finish() == 0, job.stderr
    assert "left (0, 1) of 6" in job.stdout
    told = {death["rank"]: death for story in why(job.run_dir) for death in story["first"]}
    written = {
        rank: reason
        for line in read(job.run_dir / "incidents.jsonl").whole
        for rank, reason in line.get("evicted", {}).items()
    }
    page = RunView(job.run_dir)
    page.refresh()
    shown = json.dumps(page.incidents())
    survivor = job.rank_file("0.log").read_text()
    for rank, reason in REASONS.items():
        assert f"rank {rank} was evicted: {reason};" in job.stderr
        assert f"rank {rank} was evicted: {reason};" in job.rank_file(f"{rank}.log").read_text()
        assert f"rank {rank} is evicted: {reason}" in survivor
        assert told[rank]["short"] == f"was evicted: {reason}"
        assert written[str(rank)] == reason
        assert f"was evicted: {reason}" in shown


JUNIORS = """
import time
import torch, recover

torch.set_num_threads(1)
world = recover.init()
was_there = not world.outside  # what its own loop keeps, and hands to nobody
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = recover.Step(world, model, optimizer, global_batch=6, reduction="reproducible")
changed_at = None
while not step.stop_agreed:
    # A replica counts as junior for 100 steps after its join. So wait here: the next join must come sooner.
    while step.index >= 2 and not world.outside and len(world.replicas) < 3 and not world.asking:
        time.sleep(0.01)
    for batch in step.microbatches([torch.ones(1, 2)] * 10**6):
        time.sleep(0.01)
        step.backward(model(batch).square().mean())
    back = len(world.replicas) == 3 and max(world.replicas) > 3
    if was_there and back and changed_at is None:
        changed_at = step.index
        optimizer.param_groups[0]["lr"] = 0.01
    if changed_at is not None and step.index > changed_at:
        step.request_stop()
step.on_first(print, "went on", 0 in world.replicas, optimizer.param_groups[0]["lr"])
"""


@pytest.mark.guarantee(
    "Joining",
    "Joined replicas that lack part of the state are evicted, and never evict the replica that held it.",
)
@pytest.mark.soak  # tests/simulated shows that they never outvote the sender of their state
def test_joined_replicas_do_not_evict_the_original_replica_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The joined replicas are two of three, and lack state that only the loop of the original one has."""
    monkeypatch.setattr(launching, "PATIENCE", LIMIT)
    kills = ["--kill", "2:1:forward", "--kill", "2:2:forward"]
    job = Job(tmp_path, JUNIORS, "-n", "3", "--return", "--return-delay", "0", *kills)
    job.finish()
    assert "went on True 0.01" in job.stdout, job.stdout + job.stderr
    assert json.loads(job.rank_file("0.end").read_text())["end"] == "done"
    for rank in (3, 4):
        marker = json.loads(job.rank_file(f"{rank}.end").read_text())
        assert marker["end"] == "excluded", job.stderr
        assert "was evicted: learning rate 0.1, the others have 0.01" in marker["detail"]
