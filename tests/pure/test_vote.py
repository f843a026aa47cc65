"""The vote word: the bits that are set after the AND of all ranks' words."""

from __future__ import annotations

from functools import reduce
from operator import and_

from recover.step.vote import ASKED_BITS, VoteWord, asking_bits, word_of


def test_vote_word_holds_the_bits_whose_statement_is_true() -> None:
    word = word_of(
        {VoteWord.COMPLETE: True, VoteWord.FINITE: False, VoteWord.QUIET: True}, asking_bits((1, 3))
    )
    assert int(word) == 1 | 32 | 64 << 1 | 64 << 3
    assert VoteWord.COMPLETE in word
    assert VoteWord.FINITE not in word


def test_join_is_asked_only_if_all_ranks_see_the_same_replica() -> None:
    """A word travels as an integer, and the bits of joining replicas have no names of their own."""
    for seen, asked in (((3,), (3, 7)), True), (((3,), (7,)), False), (((), (3,)), False):
        words = [int(word_of({VoteWord.COMPLETE: True}, asking_bits(replicas))) for replicas in seen]
        assert VoteWord(reduce(and_, words)).join_asked is asked
    assert asking_bits([ASKED_BITS + 3]) == asking_bits([3])
