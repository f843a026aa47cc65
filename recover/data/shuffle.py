"""A shuffled order that is computed, not stored: a keyed bijection of 0..n-1, O(1) in time and memory.

A permutation in memory costs 8 bytes per sequence on every rank, and building it delays a resumed job in proportion
to the corpus. This is a Feistel network instead: the index is written as two digits in base ceil(sqrt(n)), and each
round adds a hash of one digit to the other. The few values outside 0..n-1 go through the network again until they are
inside, which keeps it a bijection.
"""

from __future__ import annotations

import math
from hashlib import blake2b

_ROUNDS = 6


class Shuffle:
    def __init__(self, n: int, key: str) -> None:
        self._n = n
        self._base = math.isqrt(n - 1) + 1 if n else 0  # smallest base whose square holds n
        self._keys = [blake2b(f"{key}/{i}".encode(), digest_size=32).digest() for i in range(_ROUNDS)]

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._n:
            raise IndexError(f"index {index} is outside 0..{self._n - 1}")
        index = self._rounds(index)
        while index >= self._n:
            index = self._rounds(index)
        return index

    def _rounds(self, index: int) -> int:
        high, low = divmod(index, self._base)
        for key in self._keys:
            mixed = blake2b(low.to_bytes(8, "little"), key=key, digest_size=8).digest()
            high, low = low, (high + int.from_bytes(mixed, "little")) % self._base
        return high * self._base + low
