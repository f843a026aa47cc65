"""Tensors on their way to a joining rank: of each, its bytes, and its place as JSON: number, type,
layout, and placements if it is sharded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from recover.gradients.parts import in_order_of, local_part
from recover.step.joining.packing import NotPackableError

Place = dict[str, Any]  # reference of a tensor: its number among those taken out, and its layout


class TensorPlaces:
    """Takes tensors out of packed state, and puts them back on the other side.

    tensors:  the parameters and buffers of the model, for its device and its meshes
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._device = local_part(tensors[0]).device

    def take_out(self, name: str, tensor: torch.Tensor, found: list[torch.Tensor]) -> Place:
        """Append the local part of a tensor to `found`. Returns its place."""
        part = local_part(tensor.detach())
        found.append(part)
        place = {
            "number": len(found) - 1,
            "dtype": str(part.dtype).removeprefix("torch."),
            "shape": list(part.shape),
            "stride": list(part.stride()),
            "on_device": part.device == self._device,  # where the model is; otherwise on the host
        }
        if part is not tensor and hasattr(tensor, "device_mesh"):
            its: Any = tensor
            place["sharded"] = {
                "mesh": _mesh_key(its.device_mesh),
                "placements": [_placement_as_json(name, each) for each in its.placements],
                "shape": list(its.shape),
                "stride": list(its.stride()),
            }
        return place

    def room_for(self, place: Place) -> torch.Tensor:
        device = self._device if place["on_device"] else torch.device("cpu")
        return torch.empty(place["shape"], dtype=getattr(torch, place["dtype"]), device=device)

    def put_back(self, place: Place, filled: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor that belongs to a place. `filled`: the tensors that were taken out, by their numbers."""
        theirs = torch.empty_strided(
            place["shape"], place["stride"], dtype=getattr(torch, place["dtype"]), device="meta"
        )
        tensor = in_order_of(theirs, filled[place["number"]])  # all are sent row by row
        if "sharded" not in place:
            return tensor
        from torch.distributed.tensor import DTensor

        sharded = place["sharded"]
        meshes = {
            json.dumps(_mesh_key(each.device_mesh)): each.device_mesh
            for each in self._tensors
            if hasattr(each, "device_mesh")
        }
        return DTensor.from_local(
            tensor,
            meshes[json.dumps(sharded["mesh"])],
            [_placement(each) for each in sharded["placements"]],
            run_check=False,
            shape=torch.Size(sharded["shape"]),
            stride=tuple(sharded["stride"]),
        )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as a row of bytes."""
    return tensor.view(-1).view(torch.uint8)


def row_for(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its memory can be received into, otherwise a contiguous tensor like it."""
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor).contiguous()


def buffers_like(tensors: Sequence[torch.Tensor]) -> Callable[[int], torch.Tensor]:
    """Creates buffers of 8-byte words on the device of these tensors."""
    device = tensors[0].device

    def make(words: int) -> torch.Tensor:
        return torch.empty(words, dtype=torch.int64, device=device)

    return make


def _mesh_key(mesh: Any) -> list[Any]:
    """Distinguishes the meshes of one model."""
    return [list(mesh.mesh_dim_names or ()), list(mesh.shape)]


def _placement_as_json(name: str, placement: Any) -> list[Any]:
    kind = type(placement).__name__
    if kind == "Replicate":
        return [kind]
    if kind == "Shard":
        return [kind, placement.dim]
    if kind == "_StridedShard":
        return [kind, placement.dim, placement.split_factor]
    if kind == "Partial":
        return [kind, placement.reduce_op]
    raise NotPackableError(f"{name} is sharded as {placement}, which a joining replica cannot be told")


def _placement(told: list[Any]) -> Any:
    from torch.distributed.tensor import placement_types

    kind, *arguments = told
    if kind == "_StridedShard":
        return placement_types._StridedShard(arguments[0], split_factor=arguments[1])
    kinds: dict[str, Any] = {
        "Replicate": placement_types.Replicate,
        "Shard": placement_types.Shard,
        "Partial": placement_types.Partial,
    }
    return kinds[kind](*arguments)
