"""State that a joining replica needs: handed over, or named before a replica joins."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lone_world import BATCH, World, torch_world_of_one
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import recover
from recover.job.spec import JobSpec
from recover.policy import BalancedWorldPolicy, FailureEvent, Holding, Role, SlotSet
from recover.policy.response import complete_batch
from recover.step.errors import StateDivergedError
from recover.step.extra_comparison import ExtraComparison
from recover.step.joining import joinable
from recover.step.joining.joinable import undeclared_schedulers
from recover.step.joining.parcel import OtherStateError, Parcel, refusal
from recover.step.randomness import generators, set_generators


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Tempered(torch.nn.Linear):
    """A module with extra state, as torch's modules may have it."""

    temperature = 1.0

    def get_extra_state(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "seen": torch.full((2,), self.temperature)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["seen"], torch.full((2,), state["temperature"]))
        self.temperature = state["temperature"]


def pass_on(giver: Parcel, taker: Parcel, position: dict[str, Any]) -> dict[str, Any]:
    head, parts = giver.pack(position)
    for mine, theirs in zip(taker.open(head), parts, strict=True):
        mine.copy_(theirs)
    return taker.install()


@pytest.mark.guarantee(
    "Joining",
    "A joining replica receives training flags, extra state, generators, schedulers, averages, `extra=` and "
    "nested optimizer state.",
)
def test_handover_brings_flags_extra_state_averages_and_dicts() -> None:
    """All of it travels in one parcel, whose header is JSON: received data are never unpickled."""
    state = []
    for number in (1, 2):
        model = torch.nn.Sequential(Tempered(4, 4), torch.nn.BatchNorm1d(4))
        optimizer = optimizer_of(model)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
        notes: dict[str, Any] = {"best": number, "rows": np.full(3, number), 3: [torch.ones(number)]}
        extra = {"average": AveragedModel(model), "plateau": plateau, "notes": notes}
        state.append((model, optimizer, None, extra))
    (model, _, _, extra), (other, _, _, others) = state
    model[0].temperature = 0.25
    model[1].eval()
    extra["average"].update_parameters(model)
    for loss in (1.0, 2.0, 3.0):
        extra["plateau"].step(loss)
    held = others["notes"]
    json.loads(Parcel(*state[0]).pack({})[0])
    pass_on(Parcel(*state[0]), Parcel(*state[1]), {})
    assert [module.training for module in other.modules()] == [True, True, False]
    assert other[0].temperature == 0.25
    assert int(others["average"].n_averaged) == 1
    assert others["plateau"].state_dict() == extra["plateau"].state_dict()
    assert others["plateau"].num_bad_epochs == 2
    assert held["best"] == 1  # in place: the user's code holds this dict
    assert held[3][0].tolist() == [1.0]
    assert held["rows"].tolist() == [1, 1, 1]


@pytest.mark.guarantee(
    "Joining",
    "A joining replica receives training flags, extra state, generators, schedulers, averages, `extra=` and "
    "nested optimizer state.",
)
def test_handover_brings_the_generators_between_steps() -> None:
    device = torch.device("cpu")

    def draw() -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))

    def seed(number: int) -> None:
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        seed(1)
        draw()
        model = torch.nn.Linear(1, 1)
        parcels = [Parcel(model, optimizer_of(model), None, {}) for _ in range(2)]
        head, parts = parcels[0].pack({"generators": generators(device)})
        expected = draw()
        seed(2)
        for mine, theirs in zip(parcels[1].open(head), parts, strict=True):
            mine.copy_(theirs)
        set_generators(parcels[1].install()["generators"], device)
        assert draw() == expected
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def test_handover_of_sharded_tensors_keeps_mesh_and_placement() -> None:
    """Sharded tensors of the model, of the moments and of the user's extra."""

    def build(steps: int) -> tuple[Any, ...]:
        torch.manual_seed(steps)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("inside",)))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
        return model, optimizer, None, {"copies": {"all": [p.detach().clone() for p in model.parameters()]}}

    with torch_world_of_one():
        there, here = build(2), build(0)
        pass_on(Parcel(*there), Parcel(*here), {})
        for mine, theirs in (
            *zip(here[0].parameters(), there[0].parameters(), strict=True),
            *zip(here[3]["copies"]["all"], there[3]["copies"]["all"], strict=True),
            *(
                (here[1].state[p]["exp_avg_sq"], there[1].state[q]["exp_avg_sq"])
                for p, q in zip(here[0].parameters(), there[0].parameters(), strict=True)
            ),
        ):
            assert (mine.placements, mine.shape, mine.stride()) == (
                theirs.placements,
                theirs.shape,
                theirs.stride(),
            )
            assert mine.device_mesh.mesh_dim_names == ("inside",)
            assert torch.equal(mine.to_local(), theirs.to_local())


class Warmup:
    """A scheduler that is not torch's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Wrapper(Warmup):
    """A wrapper of the optimizer, which is no scheduler."""

    def zero_grad(self) -> None: ...


class Own(lr_scheduler.LRScheduler):
    def get_lr(self) -> list[Any]:
        return self.base_lrs


MAKERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "own class": Own,
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
    ),
    "not torch's": Warmup,
}


@pytest.mark.guarantee(
    "Joining",
    "State that only the user's code knows is named before a join, and the join is refused by name.",
)
@pytest.mark.parametrize("kind", MAKERS)
def test_schedulers_are_found_unless_they_were_given(kind: str) -> None:
    optimizer, other = (optimizer_of(torch.nn.Linear(2, 2)) for _ in range(2))
    assert undeclared_schedulers(optimizer, []) == []
    scheduler = MAKERS[kind](optimizer)
    unrelated = MAKERS[kind](other), Wrapper(optimizer)
    assert scheduler in undeclared_schedulers(optimizer, [None])
    assert undeclared_schedulers(optimizer, [scheduler]) == []
    assert undeclared_schedulers(optimizer, [{"inside": [scheduler]}]) == []
    holder = type("Holder", (), {})()
    holder.scheduler = scheduler
    assert undeclared_schedulers(optimizer, [holder]) == []
    del scheduler, holder
    assert undeclared_schedulers(optimizer, []) == []
    assert unrelated


def made(room: int = 10, **options: Any) -> tuple[recover.Step, torch.nn.Module, torch.optim.Optimizer]:
    world: Any = World()
    world.job = replace(JobSpec(1), room=room)
    model = torch.nn.Linear(2, 1)
    optimizer = optimizer_of(model)
    return recover.Step(world, model, optimizer, BATCH, **options), model, optimizer


def take(step: recover.Step, model: torch.nn.Module, weight: float | None = None) -> None:
    for sample in step.microbatches([torch.ones(1, 2) * (n % 3) for n in range(100)]):
        step.backward(model(sample).square().sum(), weight=weight)


@pytest.mark.guarantee(
    "Joining",
    "State that only the user's code knows is named before a join, and the join is refused by name.",
)
def test_undeclared_scheduler_is_reported_once_in_jobs_with_joins(capsys: Any) -> None:
    for room in (10, 0):
        step, model, optimizer = made(room)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer)  # after Step, as scripts may do
        for _ in range(3):
            take(step, model)
        said = capsys.readouterr().out
        remedy = 'ReduceLROnPlateau that Step was not given; write recover.Step(..., extra={"scheduler": scheduler})'
        assert said.count(remedy) == (1 if room else 0), said
        step.extra["scheduler"] = scheduler
        assert step._engine.joinable.obstacle() is None


@pytest.mark.guarantee(
    "Joining",
    "State that only the user's code knows is named before a join, and the join is refused by name.",
)
def test_unjoinable_state_refuses_a_join_by_name_on_both_sides() -> None:
    step, model, optimizer = made()
    lr_scheduler_held = lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(
        OtherStateError, match=r"this replica cannot join: the learning rate is set by a StepLR"
    ):
        step._engine.handover.join()
    head, parts = step._engine.handover._packed()
    assert parts == []
    with pytest.raises(OtherStateError, match=r"this replica cannot join: .*StepLR that Step was not given"):
        Parcel(model, optimizer, None, {}).open(head)
    assert lr_scheduler_held
    with pytest.raises(OtherStateError, match="this replica cannot join: because"):
        Parcel(model, optimizer, None, {}).open(refusal("because"))


@pytest.mark.guarantee(
    "Joining",
    "State that only the user's code knows is named before a join, and the join is refused by name.",
)
@pytest.mark.parametrize("kind", MAKERS)
def test_schedulers_are_searched_for_again_only_after_a_change(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search takes long, and the members wait for it in a join."""
    searched: list[int] = []

    def search(*arguments: Any) -> list[Any]:
        searched.append(len(arguments))  # they would be references to the optimizer
        return undeclared_schedulers(*arguments)

    monkeypatch.setattr(joinable, "undeclared_schedulers", search)
    step, model, optimizer = made()
    for _ in range(3):
        take(step, model)
    assert searched
    searched.clear()
    asked = step._engine.handover.giver._obstacle  # as in a join, from another place than before
    assert (asked(), asked(), step._engine.joinable.obstacle()) == (None, None, None)
    assert not searched, "a join would wait for it"
    scheduler = MAKERS[kind](optimizer)
    for _ in range(2):
        assert "that Step was not given" in str(step._engine.joinable.obstacle())
    step.extra["scheduler"] = scheduler
    assert step._engine.joinable.obstacle() is None
    del step.extra["scheduler"]
    assert "that Step was not given" in str(step._engine.joinable.obstacle())


def test_state_that_cannot_be_sent_refuses_joins_by_name(capsys: Any) -> None:
    step, model, optimizer = made()
    take(step, model)
    optimizer.state[model.weight]["helper"] = object()
    take(step, model)
    assert "no replica can join this job: optimizer.state.0.helper is a object" in capsys.readouterr().out
    assert b"helper" in step._engine.handover._packed()[0]


@pytest.mark.guarantee(
    "Joining",
    "State that only the user's code knows is named before a join, and the join is refused by name.",
)
def test_extra_missing_from_step_is_named_at_save_and_not_at_resume(tmp_path: Path, capsys: Any) -> None:
    step, model, _ = made()
    average, other, notes = AveragedModel(model), AveragedModel(model), {"best": 1.0}
    assert recover.resume(step, tmp_path, extra={"average": average, "notes": notes}) is None
    assert step.extra == {"average": average, "notes": notes}
    take(step, model)
    recover.save(step, tmp_path, extra={"average": average, "again": average, "notes": notes})
    assert step._engine.joinable.obstacle() is None
    take(step, model)
    recover.save(step, tmp_path, extra={"other": other, "count": 3})
    assert (
        "recover.save was given extra 'count', 'other', which Step does not have" in capsys.readouterr().out
    )
    with pytest.raises(OtherStateError, match=r"recover.save was given extra 'count', 'other'"):
        Parcel(model, optimizer_of(model), None, {}).open(step._engine.handover._packed()[0])


def test_extra_of_step_is_saved_and_resumed_without_repeating_it(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        notes: dict[str, Any] = {"best": 0.0, "rows": np.zeros(2), "seen": []}
        step, model, _ = made(extra={"notes": notes})
        recover.resume(step, tmp_path)
        found.append((notes["best"], notes["rows"].tolist(), len(notes["seen"])))
        take(step, model)
        notes["best"], notes["rows"] = 2.5, np.arange(2)
        notes["seen"].append(torch.ones(3))
        recover.save(step, tmp_path)
    assert found == [(0.0, [0.0, 0.0], 0), (2.5, [0, 1], 1)]


@pytest.mark.guarantee(
    "State and samples", "A second save after the same step replaces the checkpoint if its contents differ."
)
def test_second_save_after_a_step_holds_the_newer_extra(tmp_path: Path) -> None:
    """A script saves its best state, then changes a count, then makes its regular save. A run that was begun again in
    the same directory saves after the same number of steps."""

    def resumed() -> tuple[dict[str, int], float]:
        again, model, _ = made(extra={"notes": (notes := {"count": 0})})
        recover.resume(again, tmp_path)
        return notes, model.weight.sum().item()

    step, model, _ = made(extra={"notes": (notes := {"count": 1})})
    take(step, model)
    recover.save(step, tmp_path)
    notes["count"] = 2
    recover.save(step, tmp_path)
    assert resumed()[0] == {"count": 2}
    kept = tmp_path / "checkpoints" / "step-1"
    written = kept.stat().st_ino
    recover.save(step, tmp_path)
    assert kept.stat().st_ino == written, "nothing has changed: it is not written again"
    other, model, _ = made(extra={"notes": {"count": 2}})
    torch.nn.init.ones_(model.weight)
    take(other, model)
    recover.save(other, tmp_path)
    assert resumed()[1] == model.weight.sum().item()


def test_extra_of_an_unsupported_type_is_refused_by_step() -> None:
    class Odd(Warmup):
        def state_dict(self) -> dict[str, Any]:
            return {"deep": [object()]}

    with pytest.raises(TypeError, match=r"extra\['odd'\].deep.0 is a object, which has no form"):
        made(extra={"odd": Odd(None)})


@pytest.mark.guarantee(
    "Joining",
    "Nested optimizer state is saved and resumed, and a value that no file can hold is refused by name.",
)
def test_nested_optimizer_state_is_saved_or_refused_by_name(tmp_path: Path) -> None:
    values: dict[Any, Any] = {
        0: torch.arange(3.0),
        "m": torch.ones(2, 1),
        "0": "text",
        "list": [torch.arange(2).double(), (torch.eye(2), 3), {"deep": torch.zeros(0)}],
        "digits": [torch.arange(2).double() / 3],
        "empty": {},
        "rows": np.arange(3),
    }
    step, model, optimizer = made()
    take(step, model)
    optimizer.state[model.weight].update(values)
    recover.save(step, tmp_path)
    resumed, again, loaded = made()
    recover.resume(resumed, tmp_path)
    found, held = (
        {repr(key): repr(value) for key, value in state.items()}
        for state in (loaded.state[again.weight], optimizer.state[model.weight])
    )
    assert found == held
    take(step, model)
    optimizer.state[model.weight]["helper"] = [object()]
    with pytest.raises(ValueError, match=r"optimizer.state.weight.helper.0 is a object, which has no form"):
        recover.save(step, tmp_path)


def compared(
    all_digests: list[dict[str, int]], known: set[str]
) -> list[ExtraComparison | StateDivergedError]:
    """The results of the comparison on all replicas, each in a thread."""
    count = len(all_digests)
    barrier, sums = threading.Barrier(count), list[torch.Tensor]()
    results: list[Any] = [None] * count

    class Cross:
        def all_reduce(self, tensor: torch.Tensor) -> Any:
            sums.append(tensor.clone())
            barrier.wait()
            total = torch.stack(sums).sum(0)
            if barrier.wait() == 0:
                sums.clear()
            barrier.wait()
            tensor.copy_(total)
            return type("Work", (), {"wait": staticmethod(lambda: True)})

    def run(replica: int) -> None:
        world: Any = World()
        world.cross, world.replicas, world.replica = Cross(), tuple(range(count)), replica
        comparison = ExtraComparison(world)
        comparison.known = set(known)
        try:
            comparison.compare(7, all_digests[replica])
            results[replica] = comparison
        except StateDivergedError as error:
            results[replica] = error

    threads = [threading.Thread(target=run, args=(replica,)) for replica in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.guarantee(
    "Joining", "Entries of `extra=` that differ between replicas are named at the next save."
)
def test_extras_that_differ_at_a_save_are_named() -> None:
    """All replicas raise for an entry that was never equal; an entry that was equal before is left to the vote, which
    evicts."""
    same = {"average": 3, "notes": 2**63}
    for comparison in compared([same] * 3, set()):
        assert isinstance(comparison, ExtraComparison)
        assert (comparison.known, comparison.fingerprint) == ({"average", "notes"}, b"")
    other = same | {"notes": 5}
    for error in compared([same, other, same], {"average"}):
        assert isinstance(error, StateDivergedError)
        assert "after step 7 the state of extra= is not the same on all replicas: 'notes' " in str(error)
        assert "(replica 0, 2) against (replica 1)" in str(error)
        assert "average" not in str(error)
    one, two, three = compared([same, other, same], {"average", "notes"})
    for comparison in (one, two, three):
        assert isinstance(comparison, ExtraComparison)
    assert one.fingerprint == three.fingerprint != two.fingerprint
    for error in compared([same, {"average": 3}], set()):
        assert "replicas save other entries of extra=" in str(error)


@pytest.mark.guarantee(
    "Joining",
    "A replica runs no microbatch in the step in which it joins, so its initial state enters no sum.",
)
def test_joined_replicas_run_nothing_in_their_first_step() -> None:
    layout = BalancedWorldPolicy().layout([0, 2], 6).with_resting([1, 5])
    assert [(share.replica, len(share.run)) for share in layout.shares] == [(0, 3), (1, 0), (2, 3), (5, 0)]
    assert layout.committed == 6
    census = [
        Holding(1, Role.MINOR, SlotSet(), True),
        Holding(2, Role.MAJOR, SlotSet.span(3, 6), True),
        Holding(5, Role.MINOR, SlotSet(), True),
    ]
    decision = complete_batch(FailureEvent(census, 6, resting=[1, 5]))
    assert {share.replica: len(share.run) for share in decision.shares} == {1: 0, 2: 3, 5: 0}
    alone = complete_batch(FailureEvent([census[0], census[2]], 6, resting=[1, 5]))
    assert {share.replica: len(share.run) for share in alone.shares} == {1: 3, 5: 3}


@pytest.mark.guarantee("The batch", "All replicas skip a step whose weights are all 0.")
@pytest.mark.parametrize("reduction", ["fast", "reproducible"])
def test_step_without_weight_is_skipped(reduction: str) -> None:
    step, model, optimizer = made(reduction=reduction)
    take(step, model)
    before = model.weight.detach().clone(), optimizer.state[model.weight]["momentum_buffer"].clone()
    take(step, model, weight=0)
    assert (step.index, step.skipped, step.result.skipped, step.weight) == (2, 1, True, 0.0)
    assert step.loss != step.loss
    assert torch.equal(model.weight, before[0])
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], before[1])
    take(step, model, weight=2)
    assert (step.index, step.skipped, step.result.skipped) == (3, 1, False)
    assert not torch.equal(model.weight, before[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(1, 3).expand(4, 3),
        lambda: torch.zeros(6).as_strided((4, 3), (1, 1)),
    ],
)
def test_expanded_buffer_or_parameter_is_refused_by_name(make: Callable[[], torch.Tensor]) -> None:
    for kind in ("buffer", "parameter"):
        model = torch.nn.Linear(2, 1)
        if kind == "buffer":
            model.register_buffer("mask", make())
        else:
            model.mask = torch.nn.Parameter(make())
        with pytest.raises(ValueError, match=rf"{kind} 'mask', of shape \(4, 3\), .* \.clone\(\) or"):
            recover.Step(World(), model, optimizer_of(model), BATCH)  # type: ignore[arg-type]
    model = torch.nn.Linear(2, 1)
    model.register_buffer("positions", torch.arange(4).expand(1, -1))
    model.register_buffer("turned", torch.zeros(2, 3).t())
    recover.Step(World(), model, optimizer_of(model), BATCH)  # type: ignore[arg-type]
