"""The interfaces that a world is built on: the same world runs on real hosts and in a simulation.

The fabric, the carriers and injected faults have interfaces of their own
(`recover.world.fabrics.base`, `recover.world.carriers.contract`, `recover.world.hooks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from recover.world.carriers.base import DataCarriers
from recover.world.carriers.worker import Worker
from recover.world.fabrics.base import Fabric
from recover.world.hooks import Hooks
from recover.world.liveness.board import Board
from recover.world.slot_notes import Notes

if TYPE_CHECKING:
    from recover.world.rank_exit import End


class Own(Protocol):
    """This rank's process: its log, its marker and its end.

    Implemented by `recover.world.rank_exit.RankExit`.
    """

    def log(self, text: str) -> None: ...

    def die(
        self, how: End | str, text: str, detail: str | None = None, more: Mapping[str, object] | None = None
    ) -> NoReturn: ...

    def leave(self, detail: str) -> NoReturn: ...

    def record(self, how: End | str, detail: str = "", rank: int | None = None) -> object: ...

    def on_success(self, callback: Callable[[], object]) -> None: ...

    def on_raise(self, callback: Callable[[BaseException], object]) -> None: ...

    def in_step(self, inside: bool) -> None: ...


class Code(Protocol):
    """The code of a job that replicas may join, compared before they do."""

    def differs(self) -> str:
        """For a rank that is about to join: what differs from the code of the job, or ""."""

    def publish(self, first: bool) -> None:
        """For members: publish modules loaded since the last call.

        `first`: this rank publishes to other hosts, too.
        """


class Looks(Protocol):
    """A watcher, as its driver sees it."""

    def start(self) -> None:
        """Run passes on a thread of its own."""

    def look(self, now: float) -> None:
        """Run one pass."""


@dataclass(frozen=True)
class WorldParts:
    fabric: Fabric
    liveness: Board  # signs of life of the ranks of this host, and the means to kill them
    hooks: Hooks
    worker: Worker
    carriers: DataCarriers
    own: Own
    notes: Notes
    watch: Callable[[Looks], None]  # starts the watcher
    # With other hosts: the rows of their ranks, as on the board, a moment ago.
    remote_rows: Callable[[], Mapping[int, Sequence[int]]] | None = None
    code: Code | None = None  # where replicas may join
    # Empties a list of objects that are no longer used. Destroying a group of gloo takes a while.
    drop: Callable[[list[Any]], object] = list.clear
