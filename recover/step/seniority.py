"""How long this replica has been in the run: one that has joined takes its state from others, so it must not outvote
them before it has been found equal for a while.

Every replica says this of itself in its census record, so what follows from it is the same on all members, and on those
that are about to join. A resumed run begins with equals: all of its replicas have loaded the same checkpoint.
"""

from __future__ import annotations

STEPS = 100  # votes that have found a joined replica equal, after which it counts


class Seniority:
    """Of this rank's replica; the same on all of its ranks."""

    def __init__(self) -> None:
        self.since = 0  # the step before which it joined; 0: it was there when the run began
        self.compares = False  # the next vote compares all state, because the state is being saved
        self._confirmed = True

    def join(self, step: int) -> None:
        """It has joined before this step, and holds the state that the others gave it."""
        self.since, self._confirmed = step, False

    def counts(self, step: int) -> bool:
        """Whether it has a say in which state is right, in the vote of this step."""
        return self._confirmed or step - self.since >= STEPS

    def found_equal(self, step: int) -> None:
        """The vote of this step has found it equal to the others."""
        self._confirmed |= self.compares and self.since < step
        self.compares = False
