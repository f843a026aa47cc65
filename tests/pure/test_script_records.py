"""The records of a user's own script: every step of every Step is recorded, whatever else the script does."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lone_world import torch_world_of_one
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recover.job.grid import Grid
from recover.job.spec import JobSpec
from recover.policy import RestoreMode
from recover.runs.writing.script_records import records_of


class OfWorld:
    """The part of a world that the records of a rank use."""

    def __init__(self, run_dir: Path, rank: int = 0, ranks: int = 3, records: bool = True) -> None:
        self.job = JobSpec(ranks, run_dir=str(run_dir), records=records)
        self.grid, self.rank, self.epoch = Grid.of(ranks), rank, 1
        self.members: tuple[int, ...] = tuple(range(ranks))
        self.closing: list[Any] = []
        self.last_census = SimpleNamespace(seconds=0.25)
        self.evicted: dict[int, str] = {}

    @property
    def replicas(self) -> tuple[int, ...]:
        return self.members

    def end(self) -> None:
        for act in self.closing:
            act()


class OfStep:
    """A Step of `world` that commits when the test says so."""

    def __init__(self, world: OfWorld, index: int = 0) -> None:
        model = torch.nn.Linear(2, 1)
        self.index, self.loss, self.grad_norm, self.weight = index, 2.0, 1.0, 4.0
        self.samples, self.all_samples = [0, 1], [0, 1, 2, 3]
        self.stragglers: dict[int, float] = {}
        self.policy, self.numerics = "balanced", {"reduction": "fast"}
        self.reruns = self.verified = self.unverified = self.corrupt = self.wrong_sums = 0
        self.busy: dict[int, float] = {}
        self.incidents: list[Any] = []
        self.result = SimpleNamespace(skipped=False, parameters_before="", contents="", joining={})
        self.layout = SimpleNamespace(accum=2, roles=dict)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        self._records = records_of(world, self, model, optimizer, exact=True)  # type: ignore[arg-type]

    def commit(self, lost: tuple[int, ...] = (), joined: tuple[int, ...] = ()) -> None:
        with self._records:
            self.index += 1
            self.incidents = [incident(self.index, lost, joined)] if lost or joined else []

    def admit(self, newcomer: OfStep) -> None:
        newcomer._records.load_state_dict(self._records.state_dict())
        newcomer.index = self.index

    def leave(self) -> None:
        with pytest.raises(KeyError), self._records:
            raise KeyError("in the middle of a step")


def incident(step: int, dead: tuple[int, ...], joined: tuple[int, ...]) -> Any:
    times = "detect_ms", "repair_ms", "restore_ms", "redo_ms", "warm_up_ms", "transfer_ms", "stall_ms"
    numbers = dict.fromkeys(times, 1.0)
    return SimpleNamespace(
        step=step, epoch=2, dead_ranks=dead, dead_replicas=dead, boundary=True, restore=RestoreMode.SKIP,
        extra_microbatches=2, noticed_at=1.0, noticed_in="vote", **numbers,
        left_ranks=(), left_replicas=(), joined_ranks=joined, joined_replicas=joined, hosts=(), transfer_bytes=0,
        kind="joined", reasons={}, wrong_sums=(), joining_steps=0,
    )  # fmt: skip


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def numbers(run_dir: Path) -> list[int]:
    return [line["step"] for line in lines(run_dir / "steps.jsonl")]


@pytest.mark.guarantee(
    "User code", "A user's own script is monitored, recorded by any survivor and reported."
)
@settings(max_examples=40, deadline=None)
@given(order=st.lists(st.integers(0, 2), min_size=1, max_size=30), first=st.integers(0, 40))
def test_records_of_several_steps_are_all_written_with_growing_numbers(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], first: int
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    world = OfWorld(run_dir)
    steps = [OfStep(world, first) for _ in range(3)]
    for which in order:
        steps[which].leave()
        steps[which].commit()
    world.end()
    written = lines(run_dir / "steps.jsonl")
    assert [line["step"] for line in written] == list(range(first + 1, first + 1 + len(order)))
    own = [line.get("own_step", line["step"]) for line in written]
    assert own == [first + 1 + order[:place].count(which) for place, which in enumerate(order)]
    assert [line.get("part", 1) - 1 for line in written if line.get("part", 1) > 1] == [w for w in order if w]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == first + len(order)
    assert "parameters_digest" not in summary  # it would be unclear of which model
    assert "tokens" not in summary


@pytest.mark.parametrize("sharded", [False, True])
def test_record_of_a_script_with_one_step_has_its_numbers_and_a_digest(sharded: bool, tmp_path: Path) -> None:
    """The same holds where the model is sharded over the one rank of its replica."""
    world = OfWorld(tmp_path)
    step = OfStep(world)
    model = step._records.model  # type: ignore[union-attr]
    if sharded:
        with torch_world_of_one():
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    for _ in range(3):
        step.commit()
    world.end()
    assert numbers(tmp_path) == [1, 2, 3]
    assert not {"own_step", "part"} & set(lines(tmp_path / "steps.jsonl")[0])
    assert lines(tmp_path / "steps.jsonl")[0]["lr"] == 0.5
    assert len(json.loads((tmp_path / "summary.json").read_text())["parameters_digest"]) == 64


def test_record_of_a_script_has_the_heldout_loss_and_the_memory_of_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that is evaluated after a step is in the next line, with the number of its step, or in the summary."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 * 2**20)
    world = OfWorld(tmp_path)
    step = OfStep(world)
    step.commit()
    step._records.heldout(3.5)
    step._records.device = torch.device("cuda", 0)  # type: ignore[union-attr]
    step.commit()
    step.commit()
    step._records.heldout(3.25)
    world.end()
    first, second, third = lines(tmp_path / "steps.jsonl")
    assert not {"heldout_loss", "heldout_step", "gpu_peak_mib"} & set(first)
    assert (second["heldout_loss"], second["heldout_step"], second["gpu_peak_mib"]) == (3.5, 1, 5)
    assert "heldout_loss" not in third
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["heldout_loss"], summary["heldout_step"], summary["gpu_peak_mib"]) == (3.25, 3, 5)


def test_record_of_a_script_has_the_time_that_it_spent_between_two_steps(tmp_path: Path) -> None:
    now = [1000.0]
    world = OfWorld(tmp_path)
    step = OfStep(world)
    step._records._records.time._clock = lambda: now[0]  # type: ignore[union-attr]
    now[0] += 9  # start-up
    step.commit()
    now[0] += 2
    with step._records.spending("checkpoint_ms"):
        now[0] += 3
    now[0] += 4
    step._records.heldout(3.5)
    step.leave()
    step.commit()
    step.commit()
    world.end()
    first, second, third = (
        {name: line[name] for name in ("checkpoint_ms", "evaluation_ms", "outside_ms") if name in line}
        for line in lines(tmp_path / "steps.jsonl")
    )
    assert (first, third) == ({}, {})
    assert second == {"checkpoint_ms": 3000.0, "evaluation_ms": 4000.0, "outside_ms": 2000.0}


@pytest.mark.guarantee(
    "User code",
    "A reused directory holds earlier records and the new job, and a foreign file under a record name is "
    "left unchanged.",
)
@pytest.mark.parametrize("resumed_at", [0, 2, 5])
def test_reused_directory_holds_earlier_records_and_this_job(tmp_path: Path, resumed_at: int) -> None:
    earlier = OfWorld(tmp_path)
    step = OfStep(earlier)
    for number in range(1, 6):
        step.loss = 9.0
        step.commit(lost=(2,) if number == 4 else ())
    earlier.end()
    later = OfWorld(tmp_path)
    step = OfStep(later, index=resumed_at)
    step.commit()
    step.commit(lost=(1,))
    later.end()
    assert numbers(tmp_path) == list(range(1, resumed_at + 3))
    losses = [line["loss"] for line in lines(tmp_path / "steps.jsonl")]
    assert losses == [9.0] * resumed_at + [2.0] * 2
    kept = [4] if resumed_at >= 4 else []
    assert [line["step"] for line in lines(tmp_path / "incidents.jsonl")] == [*kept, resumed_at + 2]


@pytest.mark.guarantee(
    "User code", "A user's own script is monitored, recorded by any survivor and reported."
)
def test_successor_writes_pending_records_and_losses_outside_of_steps(
    tmp_path: Path,
) -> None:
    first, second = OfWorld(tmp_path, rank=0), OfWorld(tmp_path, rank=1)
    one, two = OfStep(first), OfStep(second)
    one.commit()
    two.commit()
    two.commit(lost=())  # rank 0 has died before it wrote this step
    assert numbers(tmp_path) == [1]
    second.members = (1, 2)
    two.commit(lost=(0,))
    assert numbers(tmp_path) == [1, 2, 3]
    second.members, second.epoch = (1,), 3  # rank 2 has died after the last step
    second.end()
    told = lines(tmp_path / "incidents.jsonl")
    assert [(line["step"], line["dead_ranks"]) for line in told] == [(3, [0]), (3, [2])]
    assert told[1]["extra_microbatches"] == 0
    assert json.loads((tmp_path / "summary.json").read_text())["failures"] == 2


def test_losses_in_one_step_and_epoch_are_one_line(tmp_path: Path) -> None:
    """The step's incident has rank 2; rank 1 was lost while the script repaired the world itself."""
    world = OfWorld(tmp_path)
    step = OfStep(world)
    world.members, world.epoch = (0,), 2
    step.commit(lost=(2,))
    world.end()
    (line,) = lines(tmp_path / "incidents.jsonl")
    assert (line["dead_ranks"], line["dead_replicas"], line["extra_microbatches"]) == ([1, 2], [1, 2], 2)
    assert json.loads((tmp_path / "summary.json").read_text())["failures"] == 2


def test_joined_rank_continues_the_records_of_dead_ranks(tmp_path: Path) -> None:
    members, newcomer = OfWorld(tmp_path), OfWorld(tmp_path, rank=3)
    newcomer.members = (3,)  # it has not joined yet
    old, new = OfStep(members), OfStep(newcomer)
    newcomer.end()
    assert list(tmp_path.iterdir()) == []
    old.commit()
    old.commit(lost=(2,))
    old.admit(new)
    for step, world in ((old, members), (new, newcomer)):
        world.members, world.epoch = (0, 1, 3), 3
        step.commit(joined=(3,))
    assert numbers(tmp_path) == [1, 2, 3]
    new.commit()  # rank 0 has died before it wrote this step
    newcomer.members, newcomer.epoch = (3,), 4
    new.commit(lost=(0, 1))
    newcomer.end()
    assert numbers(tmp_path) == [1, 2, 3, 4, 5]
    told = lines(tmp_path / "incidents.jsonl")
    assert [(line["step"], line["dead_ranks"]) for line in told] == [(2, [2]), (3, []), (5, [0, 1])]
    facts = json.loads((tmp_path / "summary.json").read_text())
    assert (facts["failures"], facts["joined"]) == (3, 1)


@pytest.mark.guarantee(
    "User code",
    "A reused directory holds earlier records and the new job, and a foreign file under a record name is "
    "left unchanged.",
)
@pytest.mark.parametrize("content", ["step,loss\n1,2.5\n", '{"iteration": 1}\n', "[1, 2]\n", "\0\xff\n"])
def test_foreign_file_under_a_record_name_is_left_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "steps.jsonl").write_text(content, encoding="latin-1")
    world = OfWorld(tmp_path)
    step = OfStep(world)
    for _ in range(3):
        step.commit()
    world.end()
    assert (tmp_path / "steps.jsonl").read_text(encoding="latin-1") == content
    assert capsys.readouterr().out.count("no more records are written") == 1


def test_job_without_records_writes_none(tmp_path: Path) -> None:
    world = OfWorld(tmp_path, records=False)
    OfStep(world).commit()
    world.end()
    assert list(tmp_path.iterdir()) == []
