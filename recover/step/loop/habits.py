"""Finds left-overs of a plain training loop: calls that Step makes itself. Each kind is reported once,
with the remedy.

Torch is unchanged except for thin wrappers that look at a call and pass it on: around its two
clipping functions and around the methods of GradScaler.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from recover.gradients.optimizers import optimizers_of, parameters_of

NO_SCALER = (
    "recover.Step has no gradient scaler, and would apply scaled gradients as they are; leave GradScaler out, and "
    "use bf16 autocast, which needs none"
)


class Habits:
    """Calls of the user's loop that concern one Step."""

    _all: ClassVar[weakref.WeakSet[Habits]] = weakref.WeakSet()
    _updating = False  # some Step is calling its optimizer
    _backward = False  # some Step is running its backward
    _scaled = 0  # backward passes of scaled losses outside of `Step.backward`

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        self._model, self.optimizers = model, optimizers_of(optimizer)
        self._said: set[str] = set()
        self._scheduler_at: int | None = None
        self._scaled_before = 0
        for each in self.optimizers:
            if hasattr(each, "register_step_pre_hook"):
                each.register_step_pre_hook(self._optimizer_steps)
        _watch_torch()
        Habits._all.add(self)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """A context in which Step calls the optimizer."""
        Habits._updating = True
        try:
            yield
        finally:
            Habits._updating = False

    def handed_out(self) -> None:
        self._scaled_before = Habits._scaled

    @contextmanager
    def backward(self, loss: torch.Tensor, counts: Iterable[int]) -> Iterator[None]:
        """A context of Step's own backward. Warns if `loss` was divided by one of `counts`: Step
        does that itself."""
        if not loss.requires_grad and Habits._scaled != self._scaled_before:
            raise RuntimeError(f"the loss of a round was scaled: {NO_SCALER}")
        count = _divisor(loss)
        if count > 1 and any(math.isclose(count, each, rel_tol=1e-6) for each in counts):
            self._say(
                f"the loss is divided by {count:g}, the number of microbatches; step.backward takes the loss of one "
                "microbatch as it is, and Step takes the mean: leave the division out"
            )
        Habits._backward = True
        try:
            yield
        finally:
            Habits._backward = False

    def step_scheduler(self, scheduler: Any) -> None:
        at = getattr(scheduler, "last_epoch", None)
        if self._scheduler_at is not None and at is not None and at > self._scheduler_at:
            self._say(
                "scheduler.step() was called since the last step, and Step calls it once per step; leave the call out, "
                'or write extra={"scheduler": scheduler} instead of scheduler='
            )
        scheduler.step()
        self._scheduler_at = getattr(scheduler, "last_epoch", None)

    def _optimizer_steps(self, *_: object) -> None:
        if Habits._updating:
            return
        gradients = [p.grad for p in parameters_of(self.optimizers)]
        present = [g for g in gradients if g is not None]
        if present and not any(g.count_nonzero() for g in present):
            return  # torch's checkpoints create optimizer state in this way
        self._say(
            "optimizer.step() was called outside of a step: Step calls it when a step commits, and what moves "
            "parameters beside it makes replicas differ; leave the call out"
        )

    def _clips(self, parameters: Iterable[Any]) -> None:
        mine = {id(p) for p in self._model.parameters()}
        if not Habits._updating and any(id(p) in mine for p in parameters):
            self._say(
                "clip_grad_norm_ or clip_grad_value_ was called on the model's parameters, whose gradients Step holds: "
                "it has no effect; give Step clip= instead"
            )

    def _say(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            warnings.warn(sentence, stacklevel=4)


def _divisor(loss: torch.Tensor) -> float:
    """The number by which a loss was divided last; 1 if there is none, or if a sum was divided, which
    gives its mean."""
    node: Any = loss.grad_fn
    kind = type(node).__name__
    if kind not in ("DivBackward0", "MulBackward0"):
        return 1.0
    by = node._saved_other
    if by is None or by.numel() != 1 or by.device.type != "cpu" or by.is_complex() or by.requires_grad:
        return 1.0
    divided = node.next_functions[0][0]
    if (
        divided is None
        or type(divided).__name__.startswith("Sum")
        or getattr(divided, "_saved_reduction", 1) == 2
    ):
        return 1.0
    value = float(by)
    return value if kind == "DivBackward0" else 1 / value if value else 1.0


@functools.cache
def _watch_torch() -> None:
    for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
        # Scripts have already imported the functions by name, so the function inside torch's
        # no_grad wrapper is replaced.
        inner: Any = getattr(clip, "__wrapped__", None)
        for cell in clip.__closure__ or ():
            if cell.cell_contents is inner:
                cell.cell_contents = _telling(inner)
    scalers: list[Any] = [torch.amp.GradScaler]
    for scaler in scalers:
        scalers += scaler.__subclasses__()
        for name, watch in (("scale", _noting), ("unscale_", _refusing), ("step", _refusing)):
            if name in vars(scaler):
                setattr(scaler, name, watch(vars(scaler)[name]))


def _telling(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def told(parameters: Any, *arguments: Any, **named: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for habits in list(Habits._all):
            habits._clips(parameters)
        return clip(parameters, *arguments, **named)

    return told


def _noting(scale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scale)
    def noted(self: Any, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        return _note(scaled) if self.is_enabled() else scaled

    return noted


def _note(scaled: Any) -> Any:
    if not isinstance(scaled, torch.Tensor):
        return type(scaled)(map(_note, scaled)) if isinstance(scaled, list | tuple) else map(_note, scaled)
    if scaled.requires_grad:
        scaled.register_hook(_scaled_backward)
    return scaled


def _scaled_backward(_: torch.Tensor) -> None:
    if Habits._backward:
        raise RuntimeError(f"the loss was scaled: {NO_SCALER}")
    Habits._scaled += 1


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def refused(self: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
        if self.is_enabled() and any(
            each is optimizer for habits in list(Habits._all) for each in habits.optimizers
        ):
            raise RuntimeError(f"GradScaler was given the optimizer of a Step: {NO_SCALER}")
        return method(self, optimizer, *arguments, **named)

    return refused
