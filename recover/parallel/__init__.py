"""How a replica is built inside: plain, sharded, a grid. It names the local gradients and combines a few numbers."""

from recover.parallel.blocks import blocks_of, compile_blocks, plain_name, recompute_blocks
from recover.parallel.rows import rows
from recover.parallel.torch_world import init_replica_world

__all__ = ["blocks_of", "compile_blocks", "init_replica_world", "plain_name", "recompute_blocks", "rows"]
