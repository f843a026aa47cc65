"""The words of the policy: what a replica is in a step, and how a repair restores gradients."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    MAJOR = "major"  # runs the full accumulation of the step
    MINOR = "minor"  # runs less, so that the sum is B
    BOUNDARY_MINOR = "boundary-minor"  # for the rest of a boundary step: runs one extra microbatch less
    MAJOR_SPARE = "major-spare"  # runs as much as a major and contributes nothing, until it is promoted
    MINOR_SPARE = "minor-spare"  # runs as much as a minor and contributes nothing, until it is promoted

    @property
    def is_spare(self) -> bool:
        return self in (Role.MAJOR_SPARE, Role.MINOR_SPARE)

    @property
    def promoted(self) -> Role:
        """The role that a spare of this kind steps into; a role that is no spare stays what it
        is."""
        return {Role.MAJOR_SPARE: Role.MAJOR, Role.MINOR_SPARE: Role.MINOR}.get(self, self)


class RestoreMode(StrEnum):
    """Effect of one loss on gradients that were reduced before its repair.

    It covers this loss alone: a rewind that an earlier loss of the same step requires is still
    required.
    """

    SKIP = "skip"  # nothing that counted was lost: what every survivor has reduced stands
    BLOCKING = "blocking"  # rewind and reduce again, then commit
    NON_BLOCKING = "non-blocking"  # rewind while the extra microbatches already run; they end in a reduction
