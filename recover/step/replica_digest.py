"""The digest of a replica's parameters: 128 bits, from those of its ranks.

Each rank hashes its own digest together with its place in the replica; the sum modulo 2^128 is
that of the replica. It is sent in limbs of 16 bits, whose sums are exact in float64 in any order.
It finds accidental differences, and does not resist attacks: since the digests of tensors are sums,
two sets of parameters with the same digest can be constructed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

LIMBS, BITS = 8, 16


def limbs_of(digest: bytes, shard: int) -> list[float]:
    """The contribution of this rank to the digest of its replica."""
    mixed = hashlib.blake2b(digest + shard.to_bytes(4, "little"), digest_size=LIMBS * BITS // 8).digest()
    number = int.from_bytes(mixed, "little")
    return [float(number >> BITS * place & (1 << BITS) - 1) for place in range(LIMBS)]


def digest_of_replica(limbs: Sequence[float]) -> str:
    """The digest as hexadecimal digits. `limbs`: sums over the ranks of the replica."""
    number = sum(int(limb) << BITS * place for place, limb in enumerate(limbs))
    return f"{number % (1 << LIMBS * BITS):032x}"
