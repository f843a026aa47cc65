"""Checks that a model, its optimizer and the source of its gradients belong together.

A parameter that the optimizer updates and the step does not sum drifts apart between replicas. A
parameter that the step sums and the optimizer does not hold is never trained. Without these
checks, both would end in a run that reports success.
"""

from __future__ import annotations

import inspect
import operator
import sys
import zlib
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from recover.gradients.module_gradients import Gradients
from recover.gradients.optimizers import groups_of, optimizers_of, parameters_of
from recover.gradients.parts import local_part
from recover.gradients.replica_interface import is_marked, replica_of
from recover.parallel.blocks import plain_name
from recover.step.totals import all_equal, on_the_wire
from recover.world.world import World

SHOWN = 3  # names in a message
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"


class ModelAndOptimizer:
    """A model and its optimizer, or optimizers, as of the last look at them. `by_group`: buckets
    follow the parameter groups, too."""

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, adapter: Gradients | None, by_group: bool = False
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
        for each in optimizers_of(optimizer):
            if not hasattr(each, "param_groups"):
                raise TypeError(
                    f"optimizer is a {type(each).__name__}, which has no param_groups; give a torch.optim.Optimizer"
                )
            if _needs(each.step, "closure"):
                raise ValueError(
                    f"{type(each).__name__} calls the model again inside of its step (a closure), on gradients that "
                    "are not summed over replicas; use an optimizer whose step() takes none"
                )
        self._model, self._optimizer, self._adapter, self._by_group = model, optimizer, adapter, by_group
        # A wrapper may show other parameters while it computes; it was created with these.
        self._wrapped = None if adapter is None else list(model.parameters())
        self._modules: list[torch.nn.Module] = []
        self._contents: list[object] = []
        self._parameters: list[torch.nn.Parameter] = []
        self._check()
        self._seen = self._look()

    def parameters(self) -> list[torch.nn.Parameter]:
        """The current parameters of the model. Torch's own walk takes long: it is repeated only
        if the contents of a module have changed."""
        contents = self._look_into(self._modules)
        if not self._modules or not _same(contents, self._contents):
            self._modules, self._parameters = list(self._model.modules()), list(self._model.parameters())
            self._contents = self._look_into(self._modules)
        return self._parameters

    @property
    def trained(self) -> bytes:
        """Which parameters are trained, one byte for each, as of the last look."""
        return bytes(self._seen[1])

    def changed(self) -> bool:
        """Whether parameters were frozen, unfrozen, added or replaced, or, where that counts, moved
        to other groups. Raises if they no longer belong to the optimizer.

        The answer stays the same, and so does the error, until `settle` is called after the
        buckets have followed.
        """
        parameters, trained, held, sizes = self._look()
        before, trained_before, held_before, sizes_before = self._seen
        changed = trained != trained_before or not _same(parameters, before)
        regrouped = sizes != sizes_before or not _same(held, held_before)
        if changed or regrouped:
            self._check()
        if self._by_group:
            return changed or regrouped
        self._seen = before, trained_before, held, sizes
        return changed

    def settle(self) -> None:
        self._seen = self._look()

    def names(self) -> dict[torch.nn.Parameter, str]:
        """Names of all parameters of the model and of the optimizer."""
        others = [*self.parameters(), *parameters_of(self._optimizer)]
        known = {parameter: plain_name(name) for name, parameter in self._model.named_parameters()}
        return {p: f"of shape {tuple(p.shape)}" for p in others} | known

    def name(self, parameter: torch.nn.Parameter) -> str:
        names = (name for name, p in self._model.named_parameters() if p is parameter)
        return next(names, f"of shape {tuple(parameter.shape)}")

    def refuse_left_over_gradients(self, number: int) -> None:
        """Raise if gradients of a backward outside of a step are left: they would enter the
        step's sum."""
        left = [p for p in parameters_of(self._optimizer) if p.grad is not None]
        if stray := [self.name(p) for p in left if _count(p.grad)]:
            raise RuntimeError(
                f"step {number}: {_few('parameter', stray)} hold gradients of a backward() outside of a step, which "
                "would enter its sum; call optimizer.zero_grad() after it, or use torch.autograd.grad"
            )
        for parameter in left:
            parameter.grad = None

    def _look(self) -> tuple[list[torch.nn.Parameter], list[bool], list[torch.nn.Parameter], list[int]]:
        """The parameters, whether each is trained, those that the optimizer holds, and how many of
        them each of its groups has."""
        parameters = self.parameters() if self._wrapped is None else self._wrapped
        sizes = [len(group["params"]) for group in groups_of(self._optimizer)]
        return parameters, [p.requires_grad for p in parameters], parameters_of(self._optimizer), sizes

    @staticmethod
    def _look_into(modules: list[torch.nn.Module]) -> list[object]:
        kinds = operator.attrgetter("_parameters"), operator.attrgetter("_modules")
        return [each for kind in kinds for each in chain.from_iterable(map(dict.values, map(kind, modules)))]

    def _check(self) -> None:
        _refuse_wrappers(self._model, self._adapter)
        named = dict(self._model.named_parameters())
        if self._adapter is not None and self._wrapped is not None:
            named |= {self.name(p): p for p in self._wrapped if not any(p is q for q in named.values())}
        _refuse_unknown_shards(self._model, named, self._adapter)
        _refuse_types(self._model, named, self._adapter)
        _refuse_others(self._model, named, self._optimizer)
        if self._adapter is not None:
            covered = set(self._adapter.parameters)
            if left_out := [name for name, p in named.items() if p.requires_grad and p not in covered]:
                raise ValueError(
                    f"{_few('parameter', left_out)} of the model would be trained and are not in gradients=, so they "
                    "would not be summed over replicas; wrap the whole model, and give Step that"
                )


def refuse_scheduler(scheduler: Any) -> None:
    """Raise for a scheduler, or one of a list, that Step cannot call: one whose step() takes a
    metric is called by the user."""
    if isinstance(scheduler, list | tuple):
        for each in scheduler:
            refuse_scheduler(each)
        return
    if isinstance(scheduler, type) or (scheduler is not None and not hasattr(scheduler, "step")):
        what = f"the class {scheduler.__name__}" if isinstance(scheduler, type) else type(scheduler).__name__
        raise TypeError(
            f"scheduler is {what}; give one that was made for the optimizer, with a step() to call"
        )
    if scheduler is not None and _needs(scheduler.step, "metrics"):
        raise ValueError(
            f'{type(scheduler).__name__}.step() takes a metric; write extra={{"scheduler": scheduler}} instead of '
            "scheduler=, and call scheduler.step(step.loss) after each step (step.loss is the same on all replicas)"
        )


def refuse_overlapping(model: torch.nn.Module) -> None:
    """Raise for a tensor whose elements share memory: no state can be copied into it."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            part = local_part(tensor)
            sizes = [(size, step) for size, step in zip(part.shape, part.stride(), strict=True) if size > 1]
            reach = 1 + sum((size - 1) * step for size, step in sizes)
            if part.numel() and (any(step == 0 for _, step in sizes) or reach < part.numel()):
                raise ValueError(
                    f"{kind} {name!r}, of shape {tuple(part.shape)}, is an expanded view: several of its elements are "
                    "the same memory, so a state cannot be copied into it; make it a tensor of its own, by .clone() "
                    "or .contiguous(), before it is given to the model"
                )


def _needs(method: Any, argument: str) -> bool:
    try:
        given = inspect.signature(method).parameters.get(argument)
    except (TypeError, ValueError):  # not written in Python
        return False
    return given is not None and given.default is inspect.Parameter.empty


def refuse_different_models(world: World, model: torch.nn.Module) -> None:
    """Raise if replicas have different models: values are copied, but buckets of different sizes
    must not be reduced together."""
    kinds = [(p.shape, p.dtype, p.requires_grad) for p in model.parameters()]
    kinds += [(b.shape, b.dtype, False) for b in model.buffers()]
    sums = torch.tensor(on_the_wire(zlib.crc32(repr(kinds).encode())), dtype=torch.float64)
    reduced = world.cross.all_reduce(
        sums
    ).wait()  # otherwise a replica has died, and all replicas repeat this
    total, squares = sums.tolist()
    if reduced and not all_equal(total, squares, len(world.replicas)):
        raise ValueError(
            "replicas have made different models: parameters or buffers of other shapes or types, or others that are "
            "frozen; make the same on every replica"
        )


def _refuse_wrappers(model: torch.nn.Module, adapter: Gradients | None) -> None:
    fsdp1 = getattr(sys.modules.get(FSDP1[0]), FSDP1[1], ())
    for name, module in model.named_modules():
        where = f"{name} is" if name else "the model is"
        if adapter is None and isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"{where} wrapped in DistributedDataParallel, which reduces gradients itself; give Step the plain "
                "module, or gradients=recover.dropin.DDPGradients(model)"
            )
        if adapter is None and isinstance(module, fsdp1):
            raise ValueError(
                f"{where} wrapped in FullyShardedDataParallel, which reduces gradients itself; use recover.hsdp, or "
                "gradients=recover.dropin.FSDPGradients(model, world)"
            )


def _refuse_unknown_shards(
    model: torch.nn.Module, named: dict[str, torch.nn.Parameter], adapter: Gradients | None
) -> None:
    """Raise for shards that recover did not make, and for trained parameters that a replica of
    several ranks does not shard."""
    inside = {p for module in model.modules() if is_marked(module) for p in module.parameters()}
    foreign = [n for n, p in named.items() if hasattr(p, "_local_tensor") and p not in inside]
    if foreign:
        raise ValueError(
            f"{_few('parameter', foreign)} are sharded (DTensors), and not by recover: their ranks may be of different "
            "replicas; leave out fully_shard and parallelize_module, and use recover.hsdp or recover.threed"
        )
    replica = replica_of(model)
    if replica.size == 1 or adapter is not None:
        return
    whole = [n for n, p in named.items() if p.requires_grad and not (p in inside and replica.knows(p))]
    if whole:
        raise ValueError(
            f"{_few('parameter', whole)} are not part of what was sharded over the {replica.size} ranks of a replica: "
            "their gradients would differ between them; put all into one module before recover.hsdp or "
            "recover.threed, or freeze these with requires_grad_(False)"
        )


def _refuse_types(
    model: torch.nn.Module, named: dict[str, torch.nn.Parameter], adapter: Gradients | None
) -> None:
    for name, module in model.named_modules():
        if (
            isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
            and module.sparse
            and module.weight.requires_grad
        ):
            raise ValueError(
                f"{name or 'the model'} makes sparse gradients, and buckets are dense; use sparse=False"
            )
    alone = replica_of(model).size == 1 and adapter is None
    stuck = [
        n for n, p in named.items() if p.is_complex() and not (alone and not hasattr(p, "_local_tensor"))
    ]
    if stuck:
        raise ValueError(
            f"{_few('parameter', stuck)} are complex, which works in plain replicas of one rank only; hold real and "
            "imaginary parts in a real parameter, and use torch.view_as_complex in forward"
        )


def _refuse_others(model: torch.nn.Module, named: dict[str, torch.nn.Parameter], optimizer: Any) -> None:
    mine, held = set(named.values()), set(parameters_of(optimizer))
    _refuse_shared(named, optimizers_of(optimizer))
    missing = [name for name, p in named.items() if p.requires_grad and p not in held]
    foreign = [
        f"{number} of group {index} (shape {tuple(p.shape)})"
        for index, group in enumerate(groups_of(optimizer))
        for number, p in enumerate(group["params"])
        if p not in mine
    ]
    if foreign and any(is_marked(module) for module in model.modules()):
        raise ValueError(
            f"the optimizer holds {_few('parameter', foreign)} that the model does not have: it was made before "
            "recover.hsdp or recover.threed, or over another model; make the optimizer after, of model.parameters()"
        )
    if foreign and mine.isdisjoint(held):
        raise ValueError(
            f"the optimizer holds none of the model's parameters, but {_few('parameter', foreign)} of another; make it "
            "of model.parameters(), after the model is complete"
        )
    if foreign:
        raise ValueError(
            f"the optimizer holds {_few('parameter', foreign)} that the model does not have: their gradients would not "
            "be summed over replicas; give Step a module that holds all, for instance a torch.nn.ModuleDict"
        )
    if missing:
        raise ValueError(
            f"{_few('parameter', missing)} of the model would be trained, and the optimizer does not hold them; add "
            "them to it, or freeze them with requires_grad_(False)"
        )


def _refuse_shared(named: dict[str, torch.nn.Parameter], optimizers: Sequence[Any]) -> None:
    """Raise for a parameter that several optimizers hold: each of them would update it."""
    names = {parameter: name for name, parameter in named.items()}
    holders: dict[torch.nn.Parameter, int] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in parameters_of(optimizer):
            first = holders.setdefault(parameter, number)
            if first != number:
                raise ValueError(
                    f"parameter {names.get(parameter, f'of shape {tuple(parameter.shape)}')} is held by optimizer "
                    f"{first} ({type(optimizers[first]).__name__}) and by optimizer {number} "
                    f"({type(optimizer).__name__}), and both would update it; give each parameter to one of them"
                )


def _same(these: Sequence[object], those: Sequence[object]) -> bool:
    """Whether they are the same objects. Both are kept alive, so that no new object can have the
    address of an old one."""
    return len(these) == len(those) and all(map(operator.is_, these, those))


def _count(gradient: Any) -> int:
    """Number of elements that are not zero."""
    part = local_part(gradient)
    return int((part.coalesce().values() if part.is_sparse else part).count_nonzero())


def _few(noun: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return (
        f"{noun} {shown}"
        if len(names) == 1
        else f"{len(names)} {noun}s ({shown}{', ...' * (len(names) > SHOWN)})"
    )
