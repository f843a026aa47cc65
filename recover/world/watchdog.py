"""When a rank must give itself up although nothing has told it to.

Open MPI's agreement was seen to lose its result on one survivor: the others hold it and are in the next
agreement already, which then waits for the forgotten one for ever. Once anybody holds the result of an agreement, all
others get it within milliseconds; whoever still waits seconds later has been forgotten. It takes itself out, and
becomes an ordinary death. A rank that computes for long is never taken for this: it is in no agreement.
"""

from __future__ import annotations

FORGOTTEN_AFTER = 3.0


class AgreementWatchdog:
    """Fed with what the progress board shows; says when this rank has been forgotten."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._agreement = 0

    def forgotten(self, waiting_in: int | None, held: bool, now: float) -> bool:
        """`waiting_in`: the agreement this rank waits in, if any; `held`: a living rank holds its result already."""
        if waiting_in is None or not held:
            self._since = None
            return False
        if self._since is None or self._agreement != waiting_in:
            self._since, self._agreement = now, waiting_in
        return now - self._since > FORGOTTEN_AFTER
