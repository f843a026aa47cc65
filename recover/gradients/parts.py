"""Tensors of which a rank may hold only a part: torch's DTensor, as far as a step has to know of it."""

from __future__ import annotations

import torch


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a sharded tensor that lives here; a plain tensor is its own."""
    return getattr(tensor, "_local_tensor", tensor)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of real numbers, which can be summed and can travel; any other is its own."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def on_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Values that the host has made, on the device; the host does not wait until they have arrived there."""
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def in_order_of(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, whose numbers follow each other by rows, with its numbers in memory as those of `like` are.

    Autograd makes gradients so, and kernels that walk through memory take a parameter, its gradient and its moments for
    laid out alike. Where `like` has gaps or overlaps, autograd does as it is here: by rows.
    """
    if like.is_contiguous() or not is_dense(like):
        return value
    return torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether it has neither gaps nor overlaps, in whatever order its numbers are."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def own_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's part of the gradient, placed as the parameter is.

    Autograd may leave it otherwise: of a norm whose inputs are sharded, the gradient is a sum still to be made.
    """
    gradient = parameter.grad
    assert gradient is not None
    placements = getattr(parameter, "placements", None)
    if placements is not None and gradient.placements != placements:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    return local_part(gradient)


def as_gradient(parameter: torch.nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """`value` as the gradient of `parameter`: in its dtype and its order in memory, and sharded as it is."""
    if parameter.is_complex():
        value = torch.complex(value[..., 0], value[..., 1])
    value = in_order_of(local_part(parameter), value.to(local_part(parameter).dtype))
    if not hasattr(parameter, "_local_tensor"):
        return value
    from torch.distributed.tensor import DTensor

    sharded: DTensor = parameter  # type: ignore[assignment]
    return DTensor.from_local(  # shape and stride: shards may be of unequal size
        value,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )
