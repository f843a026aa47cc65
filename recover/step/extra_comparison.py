"""Compares `extra=` over the replicas when it is saved: ordinary votes compare parameters and
settings only."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from recover.step.errors import StateDivergedError
from recover.step.totals import MODULUS, all_equal, on_the_wire
from recover.world import rank_exit
from recover.world.world import World


class ExtraComparison:
    """Compares digests over replicas, and names the entries that differ.

    An entry that differs in its first comparison is updated by the user's code on some replicas
    only: no majority is right, and all replicas raise. An entry that was equal before has been
    damaged: its digest enters the fingerprint of the next vote, which evicts the minority.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.known: set[str] = set()  # entries that were equal in an earlier comparison
        self.fingerprint = b""  # added to the fingerprint of the next vote

    def state_dict(self) -> dict[str, list[str]]:
        """For a joining replica: it must decide as the members do."""
        return {"known": sorted(self.known)}

    def load_state_dict(self, state: dict[str, list[str]]) -> None:
        self.known = set(state["known"])

    def compare(self, index: int, digests: Mapping[str, int]) -> None:
        """Compare the digests of all entries. Called by all replicas after step `index`."""
        names, total = sorted(digests), zlib.crc32(repr(sorted(digests.items())).encode())
        sums = self._reduced([*on_the_wire(zlib.crc32(repr(names).encode())), *on_the_wire(total)])
        if sums is None:
            return  # a replica has died: all replicas repeat the comparison
        replicas = self._world.replicas
        if not all_equal(sums[0], sums[1], len(replicas)):
            self._raise(
                f"after step {index} replicas save other entries of extra= ({', '.join(map(repr, names))} here); give "
                "the same to recover.save on all replicas"
            )
        if all_equal(sums[2], sums[3], len(replicas)):
            self.known.update(names)
            return
        place, size = replicas.index(self._world.replica), len(replicas)
        table = [0.0] * (size * len(names))
        table[place::size] = [float(digests[name] % MODULUS) for name in names]
        reduced = self._reduced(table)
        if reduced is None:
            return
        rows = {name: reduced[number * size : (number + 1) * size] for number, name in enumerate(names)}
        other = [name for name in names if len(set(rows[name])) > 1]
        said = "; ".join(f"{name!r} {_groups(rows[name], replicas)}" for name in other)
        text = f"after step {index} the state of extra= is not the same on all replicas: {said}"
        rank_exit.log(text)
        if self.known.issuperset(other):
            self.fingerprint = repr(sorted(digests.items())).encode()
            if place == 0:
                print(f"recover: {text}; a minority is evicted", flush=True)
        else:
            self._raise(f"{text}; update it on every replica after each step, not on the first rank alone")

    def _reduced(self, numbers: list[float]) -> list[float] | None:
        """The sums over all replicas; None if a replica has died."""
        sums = torch.tensor(numbers, dtype=torch.float64)
        if not self._world.cross.all_reduce(sums).wait():
            return None
        return [float(each) for each in sums]

    def _raise(self, text: str) -> None:
        self._world.linger()
        raise StateDivergedError(text)


def _groups(row: list[float], replicas: tuple[int, ...]) -> str:
    """Which replicas agree with each other."""
    groups: dict[float, list[int]] = {}
    for replica, value in zip(replicas, row, strict=True):
        groups.setdefault(value, []).append(replica)
    return " against ".join(f"(replica {', '.join(map(str, group))})" for group in groups.values())
