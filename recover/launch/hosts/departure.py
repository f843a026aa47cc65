"""Leaving on notice: one host leaves a running job, which continues on the others.

A host is asked by SIGTERM to its agent, or by an operator (`recover leave`), through a file in the run
directory that its agent answers. The agent passes the request on to its ranks, which leave together with
their replicas after a committed step (`recover.step.transaction`), so nothing is computed again. A host
that is asked twice, or whose step takes longer than its grace period, leaves at once, as if it had died.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from recover.job.leave_request import LEFT, AllLeaveRequest, LeaveRequest, OperatorRequest
from recover.job.output import say
from recover.world.rank_exit import ON_NOTICE

_LOOK = 0.5  # seconds between two looks for the request of an operator


class Departure:
    """The departure of this host. States, in order: not asked; asked; leaving, or stopping the
    whole job; left.

    grace:     seconds that the ranks may take until they have agreed to leave, or all to stop, after a step
    obstacle:  why this host cannot leave while the job goes on; "" if it can
    """

    def __init__(
        self, session: Path, run_dir: Path, host: str, grace: float, obstacle: Callable[[], str]
    ) -> None:
        self._ranks, self._operator = LeaveRequest(session), OperatorRequest(run_dir, host)
        self._all = AllLeaveRequest(session)
        self._host, self._grace, self._obstacle = host, grace, obstacle
        self._deadline = float("inf")
        self._looked = 0.0
        self._signals = 0  # notices by signal
        self._by_operator = False
        self.stop: Callable[[], object] = lambda: None  # stops the whole job, where this host cannot leave
        self.is_leaving = False  # the ranks of this host were asked to leave
        self.at_once = ""  # why it leaves as if it had died; "": after a committed step
        self.has_left = False
        self._cannot = False

    def notice(self) -> str:
        """Note that a signal asks this host to leave. Returns what the host does; "" if it cannot
        leave, and the signal is to stop the job. For a signal handler: only sets a flag."""
        if self._cannot:
            return ""
        self._signals += 1
        if self._signals > 1:
            return f"host {self._host} leaves at once"
        limit = f"in {self._grace:g} s at most (--grace)"
        return f"host {self._host} leaves after its step, {limit}, if the others can go on"

    def clear_request(self) -> None:
        """Remove what an operator has asked an earlier agent of this host."""
        self._operator.withdraw()

    def note_end(self) -> None:
        """Note that this agent ends: the next request of an operator is answered at once if the
        host has left."""
        if self.has_left:
            self._operator.answer(LEFT)
        else:
            self._operator.withdraw()

    def look(self) -> bool:
        """Called in every pass of the supervisor. Returns whether this host leaves."""
        asked = self._is_asked()
        if self._by_operator and self.is_leaving:  # asked once more
            self._operator.answer("leaves")
        elif self._by_operator and self._cannot:
            self._operator.answer("refused: the whole job is asked to stop")
        elif asked and not self.is_leaving and not self._cannot:
            self._begin()
        if self.is_leaving and not self.at_once:
            if self._signals > 1:
                self.at_once = "it was asked twice"
            # Ranks that have agreed cost the others nothing any more: they save and upload the last
            # checkpoint, for as long as the scheduler lets them.
            elif time.monotonic() > self._deadline and not self._ranks.is_agreed:
                self.at_once = f"its step took longer than its grace period of {self._grace:g} s"
        return self.is_leaving

    def _is_asked(self) -> bool:
        now = time.monotonic()
        if now - self._looked > _LOOK:
            self._looked, self._by_operator = now, self._operator.is_asked
        return self._signals > 0 or self._by_operator

    def _begin(self) -> None:
        if why := self._obstacle():
            if self._by_operator:
                say(f"host {self._host} was asked to leave, and stays: {why}")
                self._operator.answer(f"refused: {why}")
                self._by_operator = False
            if self._signals:
                say(f"host {self._host} cannot leave: {why}; the whole job is asked to stop")
                self._cannot = True
                self.stop()
            return
        self._ranks.ask()
        self._deadline = time.monotonic() + self._grace
        self.is_leaving = True
        if self._by_operator:
            say(
                f"host {self._host} was asked to leave, and leaves after its step, in {self._grace:g} s at most"
            )
            self._operator.answer("leaves")

    @property
    def was_asked(self) -> bool:
        """Whether this host was asked to leave: it leaves, or the whole job stops instead."""
        return self.is_leaving or self._cannot

    def tell_all_were_asked(self) -> None:
        """Tell the ranks that all hosts were asked to leave, so the job ends. A step that is under
        way may outlast all grace periods: the ranks save the state before it."""
        self._all.ask()

    @property
    def was_signalled(self) -> bool:
        return self._signals > 0

    @property
    def words(self) -> str:
        """The reason that is recorded for the ranks that leave with this host."""
        return f"{ON_NOTICE} at once, because {self.at_once}" if self.at_once else ON_NOTICE
