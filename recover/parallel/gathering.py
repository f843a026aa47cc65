"""Gathers values as JSON: torch's `all_gather_object` unpickles what it receives."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_json(word: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks of the group, in the order of their ranks. Tuples arrive as lists."""
    size = dist.get_world_size(group)
    data = torch.frombuffer(bytearray(json.dumps(word).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    # Gloo needs rows of one length.
    room = max(int(length) for length in lengths)
    mine = torch.zeros(room, dtype=torch.uint8)
    mine[: len(data)] = data
    rows = [torch.zeros(room, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(rows, mine, group=group)
    return [
        json.loads(row[: int(length)].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)
    ]
