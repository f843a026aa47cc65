"""Tensors of which a rank may hold only a part (torch's DTensor), and their memory layout."""

from __future__ import annotations

import torch


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a sharded tensor; a plain tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of real numbers, which carriers can sum; any other tensor
    itself."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def on_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy values of the host to the device without waiting for the copy."""
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def in_order_of(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, which is contiguous, in the memory order of `like`.

    Autograd creates gradients in that order, and fused kernels assume that a parameter, its
    gradient and its moments have the same layout. Where `like` has gaps or overlaps, autograd
    creates contiguous gradients, and so does this.
    """
    if like.is_contiguous() or not is_dense(like):
        return value
    return torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has neither gaps nor overlaps, in any order of its dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def own_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's part of the gradient, with the placements of the parameter.

    Autograd may leave other placements: the gradient of a norm with sharded inputs is a partial
    sum.
    """
    gradient = parameter.grad
    assert gradient is not None
    placements = getattr(parameter, "placements", None)
    if placements is not None and gradient.placements != placements:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    return local_part(gradient)


def as_gradient(parameter: torch.nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """`value` as the gradient of `parameter`: with its dtype, memory order and placements."""
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
