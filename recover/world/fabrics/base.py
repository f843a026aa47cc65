"""The seam under the protocol: all that membership asks of a message-passing library that survives deaths.

Implementations: `openmpi.py` (mpi4py on Open MPI's ULFM), `etcd/` (keys in etcd, for jobs that must survive the
loss of whole hosts) and `recover_lab.simulated_world` (many virtual ranks in one
process, under a scheduler that can kill any of them at any call). The contract is as weak as
Open MPI was measured to be, and the protocol may rely on nothing stronger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

WORD_BITS = 31  # an agreement carries one non-negative C int


class FabricError(Exception):
    """A point-to-point operation failed. Which error the library named is chance, so it is not kept apart."""


class WorldLostError(Exception):
    """What the world stands on is gone: nobody can commit any more. Each replica holds the state of its last commit."""


class DeclaredDeadError(Exception):
    """The others continue without this rank, which must not act any more: the world ends it.

    `orphan`: it was lost with another rank of its replica.
    """

    def __init__(self, why: str, orphan: bool = False) -> None:
        super().__init__(why)
        self.orphan = orphan


class Transfer(Protocol):
    """A message under way."""

    def done(self) -> bool:
        """Whether it is complete. Raises FabricError if it never will be."""

    @property
    def data(self) -> bytes:
        """What was received, once done."""


class Lock(Protocol):
    """Held by whoever is in a phase of the protocol: nobody else of this process may use the fabric meanwhile."""

    def acquire(self, blocking: bool = True) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> object: ...

    def __exit__(self, *_: Any) -> object: ...


@dataclass(frozen=True)
class Admission:
    """What one that joins is told: the same on all, since all read it from the same decision."""

    number: int  # of the agreement that has admitted it; its own first one is the next
    participants: frozenset[int]  # from there on


class NotAdmittedError(Exception):
    """There is nothing to join any more: the job has ended, or all its ranks have."""


class Fabric(Protocol):
    """Ranks have ids that are never used twice: those from 0 on start the job, whoever joins later gets new ones."""

    rank: int
    size: int  # of the job at its start
    waiting_in: int | None  # the agreement that this rank is in now, for its watcher

    @property
    def lock(self) -> Lock: ...

    @property
    def agreements(self) -> int:
        """How many this rank has been through; for one that joined, those before it included. Alike on all."""

    @property
    def participants(self) -> frozenset[int]:
        """Whose votes the next agreement needs, less the dead among them. It changes by agreements alone, alike on all.

        An agreement that returns a word takes in who was admitted, and may leave out dead that all had acknowledged.
        """

    def agree(self, word: int, admit: frozenset[int] = frozenset()) -> int | None:
        """The bitwise AND of the words of all participants, the same on every survivor.

        None, on every survivor alike, if a death was met that somebody had not acknowledged. The word is then
        lost. A rank that contributed and then died may be counted in. All living participants must take part.

        Whoever is in `admit` of all who were counted, and not dead, is a participant from then on. With a lost word
        nobody is admitted.
        """

    def asking(self) -> frozenset[int]:
        """Who is ready and asks to join, in whole replicas. It may lag, and differ between ranks."""

    def ask(self) -> Admission:
        """For one that joins: ask, and wait until it is admitted. From then on it is a participant like any other.

        Raises NotAdmittedError when there is nothing to join any more.
        """

    def failed(self) -> frozenset[int]:
        """The ranks that this rank knows to be dead. It may lag behind what others know, and never shrinks."""

    def acknowledge(self, only: frozenset[int] | None = None) -> frozenset[int]:
        """Acknowledge known deaths, in the order of their notices, up to the first that is not in `only`.

        Returns all that is acknowledged so far: these deaths alone no longer fail an agreement.
        """

    def send(self, data: bytes, to: int, tag: int) -> Transfer: ...

    def receive(self, source: int, tag: int) -> Transfer: ...

    def send_to_all(self, data: bytes, to: Sequence[int], tag: int) -> Sequence[Transfer]:
        """The same to each of them, who must be all others that take part: they receive it by `receive_as_all`."""

    def receive_as_all(self, source: int, tag: int) -> Transfer: ...

    def linger(self, seconds: float) -> None:
        """Wait until the others hold the result of the last agreement, too; so long at the most.

        Who leaves is taken for dead: whoever has not got the result by then would have to decide it anew.
        """

    def fence(self, rank: int) -> None:
        """Make sure that `rank` is dead, as far as this host can."""

    def now(self) -> float: ...

    def pause(self, seconds: float) -> None:
        """Let others run (and notices of deaths arrive) for a moment."""
