"""How a replica is built inside: plain, sharded, a grid. It names the local gradients and combines a few numbers."""

from recover.replica.blocks import plain_name, recompute_blocks
from recover.replica.group import init_replica_world
from recover.replica.rows import rows

__all__ = ["init_replica_world", "plain_name", "recompute_blocks", "rows"]
