"""The time of microbatches by the clock of a device: read later, from events that are reused in the next step."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from recover.gradients.deferred import now
from recover.step.loop.clock import DeviceClock


class Mark:
    """An event that knows the moment of its last record."""

    ticks = count()
    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Mark.made += 1

    def record(self, stream: object) -> None:
        self.at = next(Mark.ticks)

    def synchronize(self) -> None: ...

    def elapsed_time(self, until: Mark) -> float:
        return 1e3 * (until.at - self.at)


def test_device_clock_reuses_events_once_their_times_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock, made = DeviceClock(torch.device("cuda")), []
    for _ in range(3):
        told = []
        for length in (1, 4, 2):
            clock.start()
            for _ in range(length - 1):
                next(Mark.ticks)
            told.append(clock.took())
        assert [now(each) for each in told] == [1, 4, 2]
        clock.forget()
        made.append(Mark.made)
    assert made[0] == made[1] == made[2], "a step makes none anew"
