"""Checkpoints on disk: they are loaded as saved, on any grid; foreign ones execute no code; drafts are not offered."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from training import small_world

from recover.checkpoint import directory
from recover.checkpoint import saver as saving
from recover.checkpoint.directory import FACTS, CheckpointError, Found
from recover.checkpoint.saver import Saver
from recover.checkpoint.tensors import Part, Stored, Tensors
from recover.gradients.state_hash import parameters_digest
from recover.train.preparation import prepare_run


def trained(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with tied weights, and an optimizer that has been used."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 3), torch.nn.Linear(3, 5))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed, betas=(0.8, 0.9))
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def digest(model: torch.nn.Module) -> str:
    return parameters_digest((name, p.detach()) for name, p in sorted(model.named_parameters()))


def saver(run_dir: Path, replica: int = 0, keep: int = 1, every: int = 1) -> Saver:
    return Saver(run_dir, every, keep, replica)


def save(one: Saver, step: int, seed: int = 0) -> None:
    one.save(step, Tensors(*trained(seed), 1), {"step": step})
    one.finish()


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def saved_twice(run_dir: Path) -> Found:
    """Save two good checkpoints, and return the newer one."""
    one = saver(run_dir, keep=2)
    for step in (1, 2):
        save(one, step)
        one.found_equal(step + 1, [0])
    one.finish()
    found = directory.latest(run_dir)
    assert found
    return found


@pytest.mark.guarantee(
    "The trainer",
    "A checkpoint loads unchanged on any grid, and a flipped bit in a file is refused with both digests.",
)
def test_checkpoint_loads_what_was_saved(tmp_path: Path) -> None:
    found = saved_twice(tmp_path)
    found.verify()
    model, optimizer = trained(seed=1)
    Tensors(model, optimizer, 1).load(found.path, found.facts()["files"])
    before, optimizer_before = trained()
    assert digest(model) == digest(before) == found.facts()["parameters_digest"]
    assert model[2].weight is model[0].weight
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    for mine, theirs in zip(optimizer.state.values(), optimizer_before.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_parameters_without_elements_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    """The checkpoint is written, gets its name, and is resumed."""

    class Empty(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing, self.some = (torch.nn.Parameter(torch.ones(n, 4)) for n in (0, 2))
            self.register_buffer("cache", torch.empty(0))

    model = Empty()
    one, tensors = saver(tmp_path), Tensors(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    one.save(1, tensors, {"step": 1})
    one.found_equal(2, [0])
    one.finish()
    found = directory.latest(tmp_path)
    assert found
    found.verify()
    model.some.data.zero_()
    tensors.load(found.path, found.facts()["files"])
    assert model.some.sum() == 8


@pytest.mark.guarantee(
    "The trainer",
    "A checkpoint loads unchanged on any grid, and a flipped bit in a file is refused with both digests.",
)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_checkpoint_of_any_grid_loads_on_any_other(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A tensor cut into blocks along every dimension, spread over files in any order; any block of it is read back."""
    directory = tmp_path_factory.mktemp("grid")
    shape = data.draw(st.lists(st.integers(1, 6), max_size=3))
    tensor = torch.randn(shape)
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    blocks = list(product(*[list(pairwise(c)) for c in cuts]))
    for number, block in enumerate(data.draw(st.permutations(blocks))):
        where = {"x": (shape, [low for low, _ in block])}
        piece = tensor[tuple(slice(low, high) for low, high in block)].contiguous()
        save_file(
            {"x": piece}, directory / f"{number}", metadata={"parts": json.dumps(where), "values": "{}"}
        )
    lows = [data.draw(st.integers(0, n - 1)) for n in shape]
    highs = [data.draw(st.integers(low + 1, n)) for low, n in zip(lows, shape, strict=True)]
    expected = tensor[tuple(slice(low, high) for low, high in zip(lows, highs, strict=True))]
    wanted = Part(tuple(shape), tuple(lows), torch.zeros_like(expected))
    files = list(map(str, range(len(blocks))))
    with Stored(directory, files) as stored:
        stored.fill("x", wanted)
        assert torch.equal(wanted.tensor, expected)
        assert torch.equal(stored.whole("x"), tensor)
    whole = Part(tuple(shape), (0,) * len(shape), torch.zeros(shape))
    if len(files) > 1:
        with pytest.raises(CheckpointError, match=r"lacks \d+ numbers of x"):
            Stored(directory, files[1:]).fill("x", whole)


@pytest.mark.guarantee(
    "The trainer",
    "A checkpoint loads unchanged on any grid, and a flipped bit in a file is refused with both digests.",
)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.999])
def test_checkpoint_with_a_flipped_bit_is_refused_with_both_digests(tmp_path: Path, share: float) -> None:
    """The bit is in the header, in the parameters, or in the optimizer's moments."""
    found = saved_twice(tmp_path)
    path = found.path / "part-0.safetensors"
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as refusal:
        found.verify()
    assert found.facts()["files"][path.name] in str(refusal.value)
    assert directory.file_digest(path) in str(refusal.value)
    assert "move it away, and --resume (recover.resume) goes on from step-1" in str(refusal.value)


def planted(path: Path) -> bytes:
    """A pickle that creates this directory when it is loaded."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(path),)

    return pickle.dumps(Evil())


@pytest.mark.guarantee("The trainer", "A foreign checkpoint executes no code.")
def test_foreign_checkpoint_executes_no_code(tmp_path: Path) -> None:
    """Tested with the old format, with pickles; with the present format whose files are pickles; and with paths
    outside of the checkpoint."""
    mark = tmp_path / "mark"
    pickle.loads(planted(mark))  # the planted code works
    mark.rmdir()
    run_dir, old = tmp_path / "run", tmp_path / "run/checkpoints/step-7"
    old.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp", "part-0.safetensors"):
        (old / name).write_bytes(planted(mark))
    (old / FACTS).write_text(json.dumps({"step": 7, "config": {}}))
    with pytest.raises(CheckpointError, match=r"has format 1, and this version reads format 2 only.*pickles"):
        prepare_run(small_world(tmp_path), None, [], run_dir)

    def offer(files: dict[str, str]) -> Found:
        (old / FACTS).write_text(json.dumps({"format": 2, "files": files}))
        return Found(old, 7)

    digest = directory.file_digest(old / ".metadata")
    found = offer({"part-0.safetensors": digest, ".metadata": digest})
    found.verify()  # an attacker could write right digests
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tensors(*trained(), 1).load(old, found.facts()["files"])
    (tmp_path / "elsewhere").write_bytes(planted(mark))
    for refuse in (Found.verify, lambda f: Tensors(*trained(), 1).load(old, f.facts()["files"])):
        with pytest.raises(CheckpointError, match="outside of itself"):
            refuse(offer({"../../../elsewhere": directory.file_digest(tmp_path / "elsewhere")}))
    (old / FACTS).write_bytes(planted(mark))
    with pytest.raises(CheckpointError, match="cannot be read"):
        found.facts()
    assert not mark.exists()


@pytest.mark.guarantee(
    "The trainer",
    "A checkpoint is offered only after a later vote has found its writer sound, and the older one is kept "
    "until then.",
)
def test_draft_checkpoint_is_offered_only_after_a_later_vote(tmp_path: Path) -> None:
    """The only good checkpoint stays until the next one is good, also with keep=1."""
    one = saver(tmp_path, keep=1)
    save(one, 1)
    assert (names(tmp_path), directory.latest(tmp_path)) == (["draft-1"], None)
    one.found_equal(1, [0, 1])  # the vote of the step itself is about the state before it
    one.finish()
    assert names(tmp_path) == ["draft-1"]
    one.found_equal(2, [0, 1])
    one.finish()
    assert names(tmp_path) == ["step-1"]
    save(one, 2)
    assert names(tmp_path) == ["draft-2", "step-1"]
    one.found_equal(3, [0])
    one.finish()
    assert names(tmp_path) == ["step-2"]


@pytest.mark.guarantee(
    "Several hosts",
    "Concurrent renames of a draft checkpoint, one by an isolated host, leave one good checkpoint.",
)
def test_concurrent_renames_of_a_draft_leave_one_good_checkpoint(tmp_path: Path) -> None:
    """A host that is cut off, but sees the same directory, may still be renaming when its successor takes over."""
    one, successor = saver(tmp_path), saver(tmp_path, replica=1)
    save(one, 1)
    draft, path = (tmp_path / "checkpoints" / name for name in ("draft-1", "step-1"))
    shutil.copytree(draft, tmp_path / "copy")
    one.found_equal(2, [0, 1])
    one.finish()
    kept = path.stat().st_ino
    (tmp_path / "copy").rename(draft)  # the successor has seen the draft before its rename
    successor.found_equal(2, [0, 1])
    assert successor.newest() == 1
    assert (names(tmp_path), path.stat().st_ino) == (["step-1"], kept), "it was taken away for a moment"
    save(one, 1, seed=1)  # another state of that step, of a run that was begun again there
    one.found_equal(2, [0])
    one.finish()
    assert names(tmp_path) == ["step-1"]
    assert path.stat().st_ino != kept


@pytest.mark.guarantee(
    "State and samples",
    "A run without a majority stops, names both sides and saves both states, which are never offered "
    "without a person's decision.",
)
def test_undecided_states_are_never_offered(tmp_path: Path) -> None:
    """They are offered only after a person has renamed one of them, and deleted when the run has gone on beyond
    them."""
    good = saved_twice(tmp_path)
    made = saver(tmp_path), saver(tmp_path, replica=4)
    for seed, (one, replica) in enumerate(zip(made, (0, 4), strict=True)):
        tensors = Tensors(*trained(seed), 1)
        one.save_unconfirmed(9, tensors, {"step": 9, "mark": "f"}, f"unconfirmed-9-replica-{replica}")
    states = directory.undecided(tmp_path)
    assert sorted(found.path.name for found in states) == [
        "unconfirmed-9-replica-0",
        "unconfirmed-9-replica-4",
    ]
    assert len({found.identity() for found in states}) == 2
    assert directory.latest(tmp_path) == good
    right = tmp_path / "checkpoints" / "unconfirmed-9"
    (tmp_path / "checkpoints" / "unconfirmed-9-replica-4").rename(right)
    assert directory.latest(tmp_path) == directory.Found(right, 9)
    directory.Found(right, 9).verify()
    save(made[0], 10, seed=3)
    made[0].found_equal(11, [0])
    made[0].finish()
    assert names(tmp_path) == ["step-10"]


@pytest.mark.guarantee(
    "Several hosts",
    "A run that loses etcd for good resumes from the last commit, marked unconfirmed, with the bits of a "
    "failure-free run.",
)
def test_unconfirmed_state_is_offered_only_while_it_is_the_newest(tmp_path: Path) -> None:
    """One unconfirmed checkpoint of a step stays, whichever replica saved it; hosts hold equal ones; a confirmed one
    is preferred."""
    first, second = saved_twice(tmp_path), saver(tmp_path, replica=1)
    assert first.step == 2
    tensors = Tensors(*trained(3), 1)
    paths = [one.save_unconfirmed(3, tensors, {"step": 3}) for one in (saver(tmp_path), second)]
    assert paths == [tmp_path / "checkpoints" / "unconfirmed-3"] * 2
    assert names(tmp_path) == ["step-1", "step-2", "unconfirmed-3"], "no draft of either is left"
    found = directory.latest(tmp_path)
    assert found is not None
    assert (found.step, found.is_confirmed, first.is_confirmed) == (3, False, True)
    found.verify()
    elsewhere = saver(tmp_path / "another-host", replica=2)
    elsewhere.save_unconfirmed(3, tensors, {"step": 3})
    other = directory.latest(tmp_path / "another-host")
    assert other is not None
    assert other.identity() == found.identity()
    saver(tmp_path / "a-third", replica=2).save_unconfirmed(3, Tensors(*trained(4), 1), {"step": 3})
    different = directory.latest(tmp_path / "a-third")
    assert different is not None
    assert different.identity() != found.identity()
    for step in (3, 4):  # the run goes on from it
        save(second, step, seed=3)
        second.found_equal(step + 1, [1])
        second.finish()
        good = directory.latest(tmp_path)
        assert good is not None
        assert (good.step, good.is_confirmed, names(tmp_path)) == (step, True, [f"step-{step}"])


@pytest.mark.guarantee(
    "The trainer",
    "A checkpoint is offered only after a later vote has found its writer sound, and the older one is kept "
    "until then.",
)
@pytest.mark.parametrize(
    ("votes", "torn", "left"),
    [
        ([(3, [1, 2])], False, ["step-1"]),  # the writer was evicted in the next vote, or died before
        ([(3, [0, 1, 2]), (4, [1, 2])], False, ["step-1", "step-2"]),  # it voted, and died before the rename
        ([(3, [0, 1, 2]), (4, [1, 2])], True, ["step-1"]),  # it voted, but died while writing
    ],
)
def test_successor_of_a_lost_writer_confirms_its_draft_or_saves_again(
    tmp_path: Path, votes: list[tuple[int, list[int]]], torn: bool, left: list[str]
) -> None:
    lost, successor = saver(tmp_path, 0, keep=3), saver(tmp_path, 1, keep=3)
    save(lost, 1)
    for one in (lost, successor):
        one.found_equal(2, [0, 1, 2])
    lost.finish()
    save(lost, 2)
    if torn:
        (tmp_path / "checkpoints/draft-2" / FACTS).unlink()
    for step, replicas in votes:
        successor.found_equal(step, replicas)
    step = votes[-1][0]
    assert successor.comes(step, lost=True)
    assert successor.due(step)
    assert names(tmp_path) == left
    save(successor, step)
    successor.found_equal(step + 1, [1, 2])
    successor.finish()
    assert names(tmp_path) == [*left, f"step-{step}"]


@pytest.mark.guarantee(
    "The trainer",
    "A checkpoint is offered only after a later vote has found its writer sound, and the older one is kept "
    "until then.",
)
def test_drafts_of_an_earlier_run_are_never_confirmed(tmp_path: Path) -> None:
    save(saver(tmp_path), 4)
    later = saver(tmp_path)
    later.start()
    later.found_equal(9, [0, 1])  # its replica 0 is not the one that wrote the draft
    assert later.newest() == 0
    assert names(tmp_path) == []


@pytest.mark.guarantee(
    "The trainer", "An unwritable checkpoint and a failing metrics service cost no replica."
)
def test_unwritable_checkpoint_costs_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = saver(tmp_path, every=2)
    save(one, 2)
    one.found_equal(3, [0])
    one.finish()
    (tmp_path / "checkpoints/draft-4").write_text("in the way")
    save(one, 4)
    one.found_equal(5, [0])
    one.finish()
    assert "the checkpoint of step 4 could not be written" in capsys.readouterr().out
    found = directory.latest(tmp_path)
    assert found
    assert found.step == 2
    assert not one.due(5)
    assert one.comes(6, lost=False)
    assert one.due(6)


def test_second_draft_of_a_step_needs_a_vote_of_its_own(tmp_path: Path) -> None:
    """The vote on the first draft says nothing about the second one, whose writer was evicted."""
    one, successor = saver(tmp_path), saver(tmp_path, replica=1)
    save(one, 1)
    for each in (one, successor):
        each.found_equal(2, [0, 1])
        each.finish()
    before = (tmp_path / "checkpoints" / "step-1" / FACTS).read_text()
    for each in (one, successor):
        each.expect_vote(1)
    save(one, 1, seed=1)
    assert names(tmp_path) == ["draft-1", "step-1"]
    assert successor.newest() == 1
    assert names(tmp_path) == ["step-1"]
    assert (tmp_path / "checkpoints" / "step-1" / FACTS).read_text() == before


def test_replaced_checkpoint_is_deleted_after_the_new_one_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = saver(tmp_path)
    save(one, 1)
    one.found_equal(2, [0])
    one.finish()
    seen: list[list[str]] = []
    monkeypatch.setattr(saving.shutil, "rmtree", lambda *_, **__: seen.append(names(tmp_path)))
    one.expect_vote(1)
    save(one, 1, seed=1)
    one.found_equal(2, [0])
    one.finish()
    ((_, new),) = seen
    assert new == "step-1"
