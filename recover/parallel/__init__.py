"""How the ranks of a replica share a model: HSDP, tensor, pipeline and expert parallel."""

from recover.parallel.blocks import blocks_of, compile_blocks, plain_name, recompute_blocks
from recover.parallel.rows import rows
from recover.parallel.torch_world import init_replica_world

__all__ = ["blocks_of", "compile_blocks", "init_replica_world", "plain_name", "recompute_blocks", "rows"]
