"""`step.on_first`: calls that only the first living rank runs, such as writing a log line or an
evaluation.

All replicas keep a call until a vote shows that it was done: a rank that still has a call to
run, or knows of one whose owner died, does not set `VoteWord.QUIET`. So no death loses a call; it
may run twice, on a rank that died over it and on its successor.
"""

from __future__ import annotations

import threading
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
    holders: tuple[int, ...]  # ranks that know of it: the members at the time of the call
    owner: int  # the rank that runs it: the first living holder


class OnFirst:
    """Calls of one Step on one rank."""

    def __init__(self, world: World, randomness: Randomness) -> None:
        self._world, self._randomness = world, randomness
        self._held: list[_Call] = []  # not known to be done
        self._acting: dict[int, str] = {}  # by thread: the name of the call that it runs
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None  # the last call of the thread
        world.closing.append(self.finish)

    def refuse_inside(self, what: str) -> None:
        """Raise RuntimeError in a function that runs on one rank, where `what` needs all replicas."""
        if name := self._acting.get(threading.get_ident()):
            raise RuntimeError(
                f"{what} was called in {name}, which step.on_first runs on one replica, and all replicas must call "
                f"{what}; call it outside of step.on_first, on all of them (one replica writes)"
            )

    def call(self, step: int, act: Callable[[], Any], name: str, background: bool) -> None:
        """Keep a call, and run it if this is the first rank. Called by all replicas after the same step."""
        if self._world.outside:
            return  # a joining replica: the members made this call earlier
        self.take_over()
        members = self._world.members
        self._held.append(call := _Call(step, act, name, background, members, members[0]))
        self._do(call)

    def take_over(self) -> None:
        """Between steps: run the calls of dead owners whose successor is this rank."""
        for call in self._held:
            if call.owner not in self._world.members:
                was_done = self._has_done(call)
                call.owner = next(rank for rank in call.holders if rank in self._world.members)
                if not was_done:
                    self._do(call)

    def is_quiet(self) -> bool:
        """Whether no earlier call is left to run, as far as this rank knows."""
        idle = self._last is None or self._last.done()
        return idle and all(call.owner in self._world.members for call in self._held)

    def committed(self, all_quiet: bool) -> None:
        """Forget all calls, if the vote of a committed step showed that none is left on any rank
        (`all_quiet`)."""
        if all_quiet:
            self._held.clear()

    def finish(self) -> None:
        """The script has ended: run and wait for all calls before this rank leaves."""
        self.take_over()
        if self._last is not None:
            self._last.result()

    def _has_done(self, call: _Call) -> bool:
        """Whether a dead owner is known to have finished the call: the board of this host shows
        that it had reached a later step. Unknown for a rank on another host, and for a call in
        its background thread."""
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
        """Run the call. An exception is reported, and does not end the run."""
        thread = threading.get_ident()
        self._acting[thread] = call.name
        try:
            call.act()
        except Exception as error:
            said = f"{call.name} after step {call.step} raised {type(error).__name__}: {error}"
            rank_exit.log(f"{said}\n{traceback.format_exc()}")
            print(f"recover: {said}; training goes on (the traceback is in the rank's log)", flush=True)
        finally:
            del self._acting[thread]
