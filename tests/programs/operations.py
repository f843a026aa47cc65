"""Every operation of the cross group on every type, with NumPy arrays and torch tensors, in place and out of place."""

from __future__ import annotations

import os
import sys

import numpy as np
import torch

import recover

device = os.environ.get("TEST_DEVICE", "cpu")
world = recover.init(carrier=sys.argv[1])
group, ranks = world.cross, world.grid.ranks
total = sum(range(1, ranks + 1))
for dtype in (
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
):
    mine = torch.full((3, 5), world.rank + 1, dtype=dtype, device=device)
    out = torch.empty_like(mine)
    assert group.all_reduce(mine, out).wait()
    assert (out == total).all(), (dtype, out)
    assert (mine == world.rank + 1).all(), "out of place, and the source has changed"
    strided = torch.full((5, 3), world.rank + 1, dtype=dtype, device=device).t()
    assert group.all_reduce(strided).wait()
    assert (strided == total).all(), dtype
    assert group.broadcast(mine, root=1).wait()
    assert (mine == 2).all(), dtype
    rows = torch.empty((ranks, 2), dtype=dtype, device=device)
    assert group.all_gather(torch.full((2,), world.rank, dtype=dtype, device=device), rows).wait()
    assert rows[:, 0].tolist() == list(range(ranks)), dtype
for codes in (
    np.array([world.rank, -world.rank, -(2**30), 2**30], np.int32),
    torch.tensor([world.rank, -world.rank, -(2**30), 2**30], dtype=torch.int32, device=device),
):
    assert group.all_max(codes).wait()
    assert codes.tolist() == [ranks - 1, 0, -(2**30), 2**30]
for large in (  # several pieces
    np.full(5_000_000, world.rank + 1, np.float32),
    torch.full((20_000_001,), world.rank + 1, dtype=torch.float32, device=device),
):
    assert group.all_reduce(large).wait()
    assert (large == total).all()
big = torch.full((4,), 2**40 + world.rank, dtype=torch.int64, device=device)
assert group.broadcast(big).wait()
assert big[0].item() == 2**40
assert group.barrier().wait()
try:
    group.all_gather(torch.ones(2), torch.ones(ranks + 1, 2))
    raise SystemExit("a wrong number of rows was accepted")
except ValueError as refusal:
    print(refusal)
try:
    group.all_reduce(torch.ones(2, dtype=torch.complex64))
    raise SystemExit("complex numbers were accepted")
except TypeError as refusal:
    print(refusal)
assert world.agree(0b111) == 0b111
assert world.agree(0b101 if world.rank else 0b011) == 0b001
try:
    world.agree(1 << 27)
    raise SystemExit("a word that does not fit was accepted")
except ValueError as refusal:
    print(refusal)
