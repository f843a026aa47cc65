"""Seniority: since when a replica is in the run. A joined replica has its state from others, so it
must not outvote them before votes have found it equal for a while.

Each replica sends its seniority in its census record, so all members, and replicas that are
joining, decide alike. In a resumed run all replicas are equals: they have loaded the same
checkpoint.
"""

from __future__ import annotations

STEPS = 100  # votes that found a joined replica equal, after which it counts


class Seniority:
    """The seniority of this rank's replica; the same on all of its ranks."""

    def __init__(self) -> None:
        self.since = 0  # the step before which it joined; 0: at the beginning of the run
        self.compares = False  # the next vote compares all state, because the state is being saved
        self._confirmed = True

    def join(self, step: int) -> None:
        """Note that the replica joined before this step, and holds the state that it received."""
        self.since, self._confirmed = step, False

    def counts(self, step: int) -> bool:
        """Whether the replica counts in this step when a majority decides which state is right."""
        return self._confirmed or step - self.since >= STEPS

    def found_equal(self, step: int) -> None:
        """Note that the vote of this step has found the replica equal to the others."""
        self._confirmed |= self.compares and self.since < step
        self.compares = False
