"""Small exchanges between replicas, outside of steps."""

from __future__ import annotations

import torch

from recover.world.calls import Call
from recover.world.world import World


def gather(world: World, mine: bytes, call: Call = Call.SAVE) -> list[bytes]:
    """Returns the bytes of every replica that is alive at the end, in the order of replicas. All ranks
    call it: each rank exchanges with the ranks of the same shard in other replicas."""
    with world.call(call):
        while True:
            sizes = torch.zeros(world.cross.size, 1, dtype=torch.int64)
            complete = world.cross.all_gather(torch.tensor([len(mine)]), sizes).wait()
            if complete:
                words = torch.zeros(-(-max(int(sizes.max()), 1) // 8), dtype=torch.int64)
                rows = torch.zeros(len(sizes), len(words), dtype=torch.int64)
                words.view(torch.uint8)[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
                complete = world.cross.all_gather(words, rows).wait()
            if world.agree(int(complete)) == 1:
                # Joining replicas take part, but have no row: they do not hold the state yet.
                every = zip(world.cross.peers, rows, sizes.flatten().tolist(), strict=True)
                return [
                    row.view(torch.uint8)[:size].numpy().tobytes()
                    for rank, row, size in every
                    if rank in world.members
                ]
            world.repair()
