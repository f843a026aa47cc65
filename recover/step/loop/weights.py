"""Weights: how often each microbatch counts in the mean over the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from recover.gradients.deferred import DeviceValue
from recover.gradients.parts import on_device

LARGEST_EXACT = 2**32  # the sum over two million microbatches is still a whole number of float64
Weight = float | Sequence[float] | torch.Tensor | None


def weights_of(
    given: Weight,
    ran_with: list[float] | None,
    loss: torch.Tensor,
    count: int,
    exact: bool,
) -> list[float]:
    """The weight of each of `count` microbatches, from the argument of `step.backward` (`given`).

    ran_with:  weights with which a pipeline has already run its backward passes
    exact:     exact sums accept whole weights only
    """
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"the loss is a {type(loss).__name__}; give step.backward the tensor itself, as loss.backward()"
        )
    if isinstance(given, torch.Tensor):
        given = given.tolist()
    if given is None:
        weights = ran_with or [1.0] * count
    else:
        weights = [float(w) for w in given] if isinstance(given, Sequence) else [float(given)] * count
    if len(weights) != count:
        raise ValueError(f"{len(weights)} weights were given for {count} microbatch(es); give one for each")
    if not all(weight >= 0 and math.isfinite(weight) for weight in weights):
        raise ValueError(f"weight={given}: a microbatch counts a finite number of times, 0 or more")
    if ran_with is not None and weights != ran_with:
        raise ValueError(
            f"the round's backward passes have run with weights {ran_with}, and step.backward was given {weights}; "
            "give them to the pipeline alone: step.backward(pipeline(round, weights=[...]))"
        )
    if loss.numel() not in (1, count):
        raise ValueError(
            f"a loss of {loss.numel()} values was given for {count} microbatch(es); give their sum, "
            "or one value for each"
        )
    if loss.numel() < count and len(set(weights)) > 1:
        raise ValueError(
            f"the sum of the losses of {count} microbatches was given, and they have different weights; give one "
            "loss for each, as torch.stack([...])"
        )
    if exact and any(weight != int(weight) or weight >= LARGEST_EXACT for weight in weights):
        raise ValueError(
            f"weight={given}: reduction='reproducible' takes weights that are whole numbers below {LARGEST_EXACT}, "
            "whose sum is exact; give such weights, or use reduction='fast'"
        )
    if exact and loss.requires_grad and count > 1:
        raise ValueError(
            "reduction='reproducible' sums microbatch by microbatch, and one backward covers several of them here; use "
            "step.microbatches, or reduction='fast'"
        )
    return weights


def weighted(loss: torch.Tensor, weights: list[float]) -> torch.Tensor:
    """The scalar from which backward starts."""
    if len(set(weights)) > 1:
        loss = loss * on_device(torch.tensor(weights, dtype=loss.dtype), loss.device).view_as(loss)
    elif weights[0] != 1.0:
        loss = loss * weights[0]
    return loss if loss.numel() == 1 else loss.sum()


def losses_of(loss: torch.Tensor, count: int) -> list[DeviceValue[float]]:
    """The loss of each of `count` microbatches, from their sum or from one value for each; read
    at the vote."""
    values = loss.detach().clone()  # the code that computed them may reuse their memory
    if values.numel() == 1:
        return [DeviceValue(lambda total: float(total[0]) / count, values)] * count
    return [DeviceValue(lambda one: float(one[0]), value) for value in values.flatten().split(1)]


def refuse_other_backwards(loss: torch.Tensor, have_arrived: bool, by_rounds: bool) -> None:
    """Raise if a backward of this microbatch has run before. In a round it has: its pipeline runs
    backward.

    have_arrived:  whether gradients have arrived since the microbatch was handed out
    """
    if by_rounds:
        return
    refuse_earlier_gradients(have_arrived, "step.backward")
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no graph to go back through (was it detached, or made under no_grad?); only a round "
            "whose backward passes have run already may be recorded without one"
        )


def refuse_earlier_gradients(have_arrived: bool, before: str) -> None:
    if have_arrived:
        raise RuntimeError(
            f"the microbatch has gradients before {before}: somebody has called backward() on a loss of it, which "
            "would count beside this one; leave loss.backward() out, or give the sum of all losses to step.backward"
        )
