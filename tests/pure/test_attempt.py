"""An attempt of a step after a repair: it keeps the samples and checksums of the sums that it keeps."""

from __future__ import annotations

import pytest

from recover.policy import Role, Share, SlotSet
from recover.step.attempt import Attempt


@pytest.mark.parametrize("keeps", [True, False])
def test_contents_of_samples_go_with_the_sums_that_hold_them(keeps: bool) -> None:
    """A share keeps all local sums or none; the checksum of the batch covers exactly the samples in them."""
    first = Attempt(Share(0, Role.MAJOR, True, SlotSet(), SlotSet([(0, 2)])), 4)
    for slot, checksum in ((0, 5), (1, 7)):
        first.finish_slot(slot, 10 + slot, 1.0, 1.0, checksum)
    kept = SlotSet([(0, 2)]) if keeps else SlotSet()
    second = first.following(Share(0, Role.MAJOR, True, kept, SlotSet([(2, 3)])), 3)
    assert second.contents == (12 if keeps else 0)
    assert second.samples == ({0: 10, 1: 11} if keeps else {})
    second.finish_slot(2, 12, 1.0, 1.0, 3)
    assert second.contents == (15 if keeps else 3)
