"""A model, its optimizer and the trained parameters: as in plain PyTorch, or refused with the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from recover.gradients.replica_interface import Replica, mark
from recover.step.model_checks import ModelAndOptimizer


class Sharded(Replica):
    """The part of the mark of `recover.hsdp` on a model that matters here."""

    size = 2

    def combine(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def knows(self, parameter: torch.nn.Parameter) -> bool:
        return hasattr(parameter, "_local_tensor")


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))


def sgd(*modules: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


class Adapter:
    """A minimal adapter for `gradients=`, with the parameters of a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.parameters = list(module.parameters())


def refused(model: Any, optimizer: Any, adapter: Any = None) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        ModelAndOptimizer(model, optimizer, adapter)
    return str(caught.value)


@pytest.mark.guarantee(
    "Trained parameters",
    "An optimizer of other parameters is refused with names and remedy, also after `add_param_group`.",
)
def test_foreign_optimizer_is_refused_with_names_and_remedy() -> None:
    model = net()
    ModelAndOptimizer(model, sgd(model), None)
    temperature = torch.nn.Parameter(torch.ones(()))
    foreign = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    assert "parameter 8 of group 0 (shape ())" in (said := refused(model, foreign))
    assert "a module that holds all" in said
    partly = refused(model, sgd(model[0], model[1]))
    assert "4 parameters (2.weight, 2.bias, 3.weight, ...)" in partly
    assert "requires_grad_(False)" in partly
    assert "none of the model's parameters" in refused(model, sgd(net()))
    for parameter in [*model[2].parameters(), *model[3].parameters()]:
        parameter.requires_grad_(False)
    ModelAndOptimizer(model, sgd(model[0], model[1]), None)
    assert "param_groups" in refused(model, object())
    assert "torch.nn.Module" in refused(lambda x: x, sgd(model))


@pytest.mark.guarantee(
    "Trained parameters",
    "An optimizer of other parameters is refused with names and remedy, also after `add_param_group`.",
)
def test_optimizer_made_before_sharding_is_recognised(group: None) -> None:
    model = net()
    optimizer = sgd(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    mark(model, Sharded())
    assert "make the optimizer after" in refused(model, optimizer)
    ModelAndOptimizer(model, sgd(model), None)


@pytest.mark.guarantee(
    "Trained parameters",
    "Foreign shards and wrappers without their adapter are refused wherever they are in the model.",
)
def test_foreign_shards_are_refused_wherever_they_are(group: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = net()
    fully_shard(model, mesh=mesh)
    assert "8 parameters (0.weight, 0.bias, 1.weight, ...) are sharded" in refused(model, sgd(model))
    assert "recover.hsdp" in refused(model, sgd(model))
    ours, theirs = net(), net()
    for part in (ours, theirs):
        fully_shard(part, mesh=mesh)
    mark(ours, Sharded())
    both = torch.nn.ModuleList([ours, theirs])
    assert "(1.0.weight" in refused(both, sgd(both))
    mixed = torch.nn.ModuleList(
        [ours, net()]
    )  # a plain head beside a sharded body: each peer would train its own
    assert "not part of what was sharded over the 2 ranks" in refused(mixed, sgd(mixed))
    ours.head = torch.nn.Linear(2, 2)  # added after sharding
    assert "2 parameters (head.weight, head.bias)" in refused(ours, sgd(ours))
    ours.head.requires_grad_(False)
    ModelAndOptimizer(ours, sgd(ours), None)


@pytest.mark.guarantee(
    "Trained parameters",
    "Foreign shards and wrappers without their adapter are refused wherever they are in the model.",
)
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(
    ("wrap", "mends"),
    [
        (DistributedDataParallel, ["DDPGradients", "plain module"]),
        (
            lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu")),
            ["FSDPGradients", "recover.hsdp"],
        ),
    ],
)
def test_wrapper_without_its_adapter_is_refused_also_inside_the_model(
    group: None, wrap: Callable[[torch.nn.Module], torch.nn.Module], mends: list[str], depth: int
) -> None:
    wrapped = model = wrap(net())
    for _ in range(depth):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), model)
    said = refused(model, sgd(model))
    assert all(mend in said for mend in mends), said
    if depth:  # the wrapper's adapter covers only a part of the trained parameters
        assert "1.0.weight" in (said := refused(model, sgd(model), Adapter(wrapped)))
        assert "not in gradients=" in said
    else:
        ModelAndOptimizer(model, sgd(model), Adapter(wrapped))


@pytest.mark.guarantee(
    "Trained parameters",
    "An optimizer of other parameters is refused with names and remedy, also after `add_param_group`.",
)
def test_optimizer_changed_later_is_checked_again() -> None:
    model = net()
    optimizer = sgd(model)
    belonging = ModelAndOptimizer(model, optimizer, None)
    trained = belonging.trained
    assert not belonging.changed()
    model[1].requires_grad_(False)
    assert belonging.changed()
    assert belonging.changed(), "nobody has followed yet"
    assert belonging.trained == trained
    belonging.settle()
    assert not belonging.changed()
    assert belonging.trained != trained
    model[3] = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="that the model does not have"):
        belonging.changed()
    del optimizer.param_groups[0]["params"][-2:]
    optimizer.add_param_group({"params": list(model[3].parameters())})
    assert belonging.changed()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    with pytest.raises(ValueError, match=r"parameter 0 of group 2 \(shape \(3,\)\)"):
        belonging.changed()


@pytest.mark.guarantee(
    "Trained parameters", "Modules added to or removed from the model between steps are detected."
)
def test_model_changes_between_steps_are_detected() -> None:
    model = torch.nn.Sequential(net(), torch.nn.ModuleDict({"deep": net()}))
    belonging = ModelAndOptimizer(model, sgd(model), None)
    deep = model[1]["deep"]

    def tie() -> None:
        deep[1].weight = model[0][0].weight

    changes: list[Callable[[], object]] = [
        lambda: deep[2].register_parameter("bias", None),
        lambda: setattr(deep[2], "bias", torch.nn.Parameter(torch.ones(2))),
        lambda: setattr(deep[0], "weight", torch.nn.Parameter(torch.ones(2, 2))),
        lambda: deep.append(net()),
        lambda: deep[4].append(torch.nn.Linear(2, 2)),
        lambda: deep[4].register_parameter("scale", torch.nn.Parameter(torch.ones(1))),
        tie,
        lambda: torch.nn.utils.parametrizations.weight_norm(deep[3]),
        lambda: model.__setitem__(0, torch.nn.Identity()),
        lambda: model[1].pop("deep"),
    ]
    seen = belonging.parameters()
    assert belonging.parameters() is seen, "it was walked through again"
    for number, change in enumerate(changes):
        change()
        now = belonging.parameters()
        assert [id(p) for p in now] == [id(p) for p in model.parameters()], number
        assert [id(p) for p in now] != [id(p) for p in seen], number
        seen = now
    assert seen == []


@pytest.mark.guarantee("Trained parameters", "Gradients of a `backward()` outside a step do not enter it.")
@pytest.mark.parametrize("sparse", [False, True])
def test_leftover_gradients_are_refused_by_name_and_zeros_are_dropped(sparse: bool) -> None:
    model = torch.nn.ModuleDict(
        {"words": torch.nn.Embedding(4, 2, sparse=sparse), "out": torch.nn.Linear(2, 2)}
    )
    belonging = ModelAndOptimizer(model, optimizer := sgd(model), None) if not sparse else None
    model["words"](torch.tensor([1])).sum().backward()
    if belonging is None:  # sparse gradients are refused earlier, but are left over like others
        model["words"].sparse = False
        belonging = ModelAndOptimizer(model, optimizer := sgd(model), None)
    with pytest.raises(RuntimeError, match=r"step 7: parameter words.weight hold.*zero_grad"):
        belonging.refuse_left_over_gradients(7)
    optimizer.zero_grad(set_to_none=False)
    belonging.refuse_left_over_gradients(7)
    assert model["words"].weight.grad is None


def test_unsupported_gradients_are_refused_at_the_start() -> None:
    bag = torch.nn.Sequential(torch.nn.EmbeddingBag(4, 2, sparse=True))
    assert "sparse=False" in refused(bag, sgd(bag))
    bag.requires_grad_(False)
    ModelAndOptimizer(bag, sgd(bag), None)
    model = torch.nn.ParameterList([torch.randn(3, dtype=torch.complex64)])
    ModelAndOptimizer(model, sgd(model), None)
    assert "view_as_complex" in refused(model, sgd(model), Adapter(model))
