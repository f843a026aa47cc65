"""What is to be done once, by whoever is first among the living: a line of a log, a picture, an evaluation.

All replicas hold what was asked for until they know that it was done. Each vote tells: a replica that still has
something to do, or knows of a call whose owner is gone, does not say "quiet". So a call is lost with nobody; it may be
begun twice, by one who died over it and by its successor.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from recover.step.randomness import Randomness
from recover.world import rank_exit
from recover.world.liveness.board import ENDED
from recover.world.world import World


@dataclass
class _Call:
    step: int
    act: Callable[[], Any]
    name: str
    background: bool
    holders: tuple[int, ...]  # who knows of it: the members when it was asked for; who joins later does not
    owner: int  # the rank that is to do it: the first of them that lives


class OnFirst:
    """The calls of one Step, on one rank."""

    def __init__(self, world: World, randomness: Randomness) -> None:
        self._world, self._randomness = world, randomness
        self._held: list[_Call] = []  # nobody has told yet that they are done
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None  # what the thread does last
        world.closing.append(self.finish)

    def call(self, step: int, act: Callable[[], Any], name: str, background: bool) -> None:
        """Called by all replicas after the same step."""
        if self._world.outside:
            return  # the others have come to it long ago
        self.take_over()
        members = self._world.members
        self._held.append(call := _Call(step, act, name, background, members, members[0]))
        self._do(call)

    def take_over(self) -> None:
        """Between steps: what a rank had to do that is gone is done by its successor."""
        for call in self._held:
            if call.owner not in self._world.members:
                was_done = self._has_done(call)
                call.owner = next(rank for rank in call.holders if rank in self._world.members)
                if not was_done:
                    self._do(call)

    def is_quiet(self) -> bool:
        """Whether nothing of what was asked for before this step is left to do, as far as this rank knows."""
        idle = self._last is None or self._last.done()
        return idle and all(call.owner in self._world.members for call in self._held)

    def committed(self, all_quiet: bool) -> None:
        """A step is committed, in whose vote all were quiet, or not."""
        if all_quiet:
            self._held.clear()

    def finish(self) -> None:
        """The script has ended: nobody leaves before what it asked for is done."""
        self.take_over()
        if self._last is not None:
            self._last.result()

    def _has_done(self, call: _Call) -> bool:
        """Whether a rank that is gone is known to have come to the end of it: it had gone on to a later step, as the
        board of this host shows. Of a rank of another host, or of its thread, nobody knows."""
        reached = self._world.board.step(call.owner)
        return reached == ENDED or (reached > call.step and not call.background)

    def _do(self, call: _Call) -> None:
        if call.owner != self._world.rank:
            return
        if not call.background:
            with self._randomness.apart():  # the draws of one replica must not run ahead of the others'
                self._try(call)
            return
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="recover-on-first")
        self._last = self._thread.submit(self._try, call)

    def _try(self, call: _Call) -> None:
        """Training is worth more than what is told of it."""
        try:
            call.act()
        except Exception as error:
            said = f"{call.name} after step {call.step} raised {type(error).__name__}: {error}"
            rank_exit.log(f"{said}\n{traceback.format_exc()}")
            print(f"recover: {said}; training goes on (the traceback is in the rank's log)", flush=True)
