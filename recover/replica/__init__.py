"""How a replica is built inside: plain, sharded. All they do is name the local gradients and combine a few numbers."""

from recover.replica.group import init_replica_world
from recover.replica.rows import rows

__all__ = ["init_replica_world", "rows"]
