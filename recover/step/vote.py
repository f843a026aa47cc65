"""The vote word: what each rank contributes to the agreement that commits a step.

The agreement is a bitwise AND over all living ranks, so a bit is set in the result only if every
rank has set it. A bit must therefore be a statement that all ranks have to confirm: "no rank was
asked to stop", not "a rank was asked to stop".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntFlag

from recover.world.membership import WORD_BITS

# Bits for replicas that ask to join. Replicas whose numbers are equal modulo this share a bit: at
# worst a repair is entered for a replica that not all ranks have seen, and admits no replica.
ASKED_BITS = 16


class VoteWord(IntFlag):
    """Bits of the vote word. The bits from `ASKED` to `READY` stand for replicas that ask to join."""

    COMPLETE = 1  # all buckets were reduced under the current epoch, and hold the planned samples
    FINITE = 2  # complete, and the sum is finite
    SAME_STATE = 4  # complete, and the hashes in the sum show that all replicas began with the same state
    GO_ON = 8  # this rank was not asked to stop after the step
    IN_RANGE = 16  # complete, and summed with the exponents that its largest values require
    QUIET = 32  # no call of `step.on_first` is left to run
    ASKED = 64  # the first of ASKED_BITS bits
    READY = 64 << ASKED_BITS  # a joining rank sets it once it holds all that is handed over in instalments

    @property
    def join_asked(self) -> bool:
        """Whether a bit of a joining replica is left: all ranks have seen a replica ask."""
        return bool(self & VoteWord.ASKED * ((1 << ASKED_BITS) - 1))


def word_of(statements: Mapping[VoteWord, bool], asking: int = 0) -> VoteWord:
    """The word with the bits whose statement is true; `asking`: from `asking_bits`."""
    word = VoteWord(VoteWord.ASKED * asking)
    for bit, is_true in statements.items():
        if is_true:
            word |= bit
    return word


def asking_bits(replicas: Iterable[int]) -> int:
    """The replicas that ask to join as bits, as a census record holds them."""
    bits = 0
    for replica in replicas:
        bits |= 1 << replica % ASKED_BITS
    return bits


def word_of_joining_rank(ready: bool, leaves: bool = False) -> int:
    """The word of a joining rank, which decides nothing: all bits, but `READY` only if it is. Without
    `COMPLETE` if its host was asked to leave: all go to a repair, whose census tells why."""
    without = VoteWord(0)
    if not ready:
        without |= VoteWord.READY
    if leaves:
        without |= VoteWord.COMPLETE
    return ((1 << WORD_BITS) - 1) & ~int(without)
