"""The interface under the protocol: what membership needs of a message-passing library that
survives deaths.

Implementations: `openmpi.py` (mpi4py on Open MPI's ULFM), `etcd/` (keys in etcd, for jobs that must
survive the loss of whole hosts) and `recover_lab.simulated_world` (many virtual ranks in one
process, under a scheduler that can kill any of them at any call). The contract is as weak as Open
MPI was measured to be, and the protocol may rely on nothing stronger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

WORD_BITS = 31  # an agreement carries one non-negative C int


class FabricError(Exception):
    """A point-to-point operation failed.

    Which error the library names is chance, so kinds are not distinguished.
    """


class WorldLostError(Exception):
    """The world is lost: no rank can commit any more.

    Each replica holds the state of its last commit.
    """


class DeclaredDeadError(Exception):
    """The others continue without this rank, which must not act any more: the world ends it.

    `orphan`: it was lost with another rank of its replica.
    """

    def __init__(self, why: str, orphan: bool = False) -> None:
        super().__init__(why)
        self.orphan = orphan


class Transfer(Protocol):
    """A message that was sent, or is expected."""

    def done(self) -> bool:
        """Whether it has arrived. Raises FabricError if it never will."""

    @property
    def data(self) -> bytes:
        """The received bytes, once done."""


class Lock(Protocol):
    """Held by the thread that is in a phase of the protocol: no other thread may use the fabric
    meanwhile."""

    def acquire(self, blocking: bool = True) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> object: ...

    def __exit__(self, *_: Any) -> object: ...


@dataclass(frozen=True)
class Admission:
    """Membership snapshot for a joining rank.

    All read it from the same decision, so it is the same on all.
    """

    number: int  # of the agreement that has admitted it; it takes part from the next one on
    participants: frozenset[int]  # of the next agreement


class NotAdmittedError(Exception):
    """There is no job to join: it has ended, or all its ranks have."""


class Fabric(Protocol):
    """The fabric of one rank.

    Numbers of ranks are never used twice: a rank that joins later gets a new one.
    """

    rank: int
    size: int  # of the job at its start
    waiting_in: int | None  # the agreement that this rank waits in, for its watcher

    @property
    def lock(self) -> Lock: ...

    @property
    def agreements(self) -> int:
        """The number of agreements that the job has completed and this rank has been through.

        It is the same on all ranks.
        """

    @property
    def participants(self) -> frozenset[int]:
        """The ranks whose votes the next agreement needs, except the dead.

        It changes by agreements only.

        An agreement that returns a word adds admitted ranks, and may remove dead ranks that all
        have acknowledged.
        """

    def agree(self, word: int, admit: frozenset[int] = frozenset()) -> int | None:
        """The bitwise AND of the words of all participants, the same on every survivor.

        None on every survivor if a participant has died and not all ranks have acknowledged it. The
        words are then lost. The word of a rank that died after it contributed may be counted. All
        living participants must take part.

        Ranks that are in `admit` of all counted ranks, and live, are participants from the next
        agreement on. With a result of None no rank is admitted.
        """

    def asking(self) -> frozenset[int]:
        """The ranks that ask to join, in whole replicas. It may lag, and differ between ranks."""

    def ask(self) -> Admission:
        """For a joining rank: ask, and wait until it is admitted.

        It is then a participant like any other.

        Raises NotAdmittedError when there is no job to join any more.
        """

    def failed(self) -> frozenset[int]:
        """The ranks that this rank knows to be dead.

        It may lag behind other ranks, and never shrinks.
        """

    def look_for_exits(self, now: float) -> None:
        """Look for ranks of this host whose processes are exiting, and report them to the library, which may
        learn of them later otherwise.

        Needs no lock: the watcher calls it, also while the main thread waits in an agreement.
        """

    def heartbeats(self) -> Mapping[int, int]:
        """The heartbeats of the ranks of this host, as far as they can be read."""

    def acknowledge(self, only: frozenset[int] | None = None) -> frozenset[int]:
        """Acknowledge known deaths, in the order of their notices, up to the first that is not in
        `only`.

        Returns all acknowledged deaths. Only these no longer fail an agreement.
        """

    def send(self, data: bytes, to: int, tag: int) -> Transfer: ...

    def receive(self, source: int, tag: int) -> Transfer: ...

    def send_to_all(self, data: bytes, to: Sequence[int], tag: int) -> Sequence[Transfer]:
        """Send the same message to all other members, which receive it by `receive_as_all`."""

    def receive_as_all(self, source: int, tag: int) -> Transfer: ...

    def linger(self, seconds: float) -> None:
        """Wait until the others hold the result of the last agreement, for `seconds` at the most.

        A rank that ends counts as dead: ranks without the result would have to decide the agreement
        again.
        """

    def fence(self, rank: int) -> None:
        """Kill `rank`, as far as this host can."""

    def now(self) -> float: ...

    def pause(self, seconds: float) -> None:
        """Sleep, so that other ranks run and notices of deaths arrive."""
