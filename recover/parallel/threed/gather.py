"""Gathers the parameters of the whole model from the ranks of a replica."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from recover.parallel.blocks import plain_name
from recover.parallel.gathering import gather_json


def gather_parameters(part: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields whole parameters in the order of their names on the first rank. All ranks must exhaust
    it."""
    rank = dist.get_rank()
    mine = {plain_name(name): parameter.detach() for name, parameter in part.named_parameters()}
    parts = gather_json({name: (list(p.shape), str(p.dtype)) for name, p in mine.items()})
    holders: dict[str, int] = {}  # the first rank that has a part of it
    for holder, names in enumerate(parts):
        for name in names:
            holders.setdefault(name, holder)
    for name, holder in sorted(holders.items()):
        whole = mine.get(name)
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()  # a collective of all ranks that share it
        if rank == holder != 0:
            assert whole is not None
            dist.send(whole.contiguous(), dst=0)
        elif rank == 0 != holder:
            shape, dtype = parts[holder][name]
            whole = torch.empty(shape, dtype=_dtype(dtype), device=device)
            dist.recv(whole, src=holder)
        if rank == 0:
            assert whole is not None
            yield name, whole


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found
