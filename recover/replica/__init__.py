"""How a replica is built inside: plain, sharded, a grid. It names the local gradients and combines a few numbers."""

from recover.replica.blocks import blocks_of, compile_blocks, plain_name, recompute_blocks
from recover.replica.rows import rows
from recover.replica.torch_world import init_replica_world

__all__ = ["blocks_of", "compile_blocks", "init_replica_world", "plain_name", "recompute_blocks", "rows"]
