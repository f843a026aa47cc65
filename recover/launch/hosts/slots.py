"""The places of one host: which are free, which rest, and which are not tried again.

A slot is a place for one rank. A rank that was lost because of another one (its replica's, or the others went on
without it) leaves a good place; so does one that was refused for the code that it runs, but that place rests. One that
was lost by itself, or with which no carrier could be built, strikes its place: a place that is struck twice is set
aside, and so is at once one whose process died as of broken hardware. Where a rank has worked for long enough, earlier
strikes are forgotten.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field

from recover.world.rank_exit import UNFIT, End

INNOCENT = (End.DONE, End.ORPHAN, End.EXCLUDED, End.UNNEEDED)
SETTLE = 0.1  # seconds that any place rests: mates leave theirs a moment later, and are placed together again
REFUSED = 600.0  # seconds that a place rests whose rank was refused for the code that it runs
NOT_STARTED = 10.0  # seconds that a place rests at which the host could start no process
STRIKES = 2  # after which a place is not tried again
BROKEN = ("CUDA error", "uncorrectable", "ECC error", "Bus error", "Input/output error")  # in what it said


@dataclass
class Slot:
    rests_until: float | None = None  # None: taken
    began: float = 0.0
    lost_before: bool = False
    strikes: list[str] = field(default_factory=list)
    aside: str = ""  # why it is not tried again
    refused: bool = False  # its last rank was, for its code


class HostSlots:
    """`delay`: seconds that a place rests, from the second loss on it. `forgive`: seconds of work after which earlier
    strikes do not count."""

    def __init__(self, slots: int, delay: float, forgive: float) -> None:
        self._delay, self._forgive = delay, forgive
        self._slots = {slot: Slot(rests_until=float("-inf")) for slot in range(slots)}
        self.held = ""  # why no place is free now, whatever its own state

    def take(self, slot: int, now: float) -> None:
        place = self._slots[slot]
        place.rests_until, place.began, place.refused = None, now, False

    def hold(self, why: str) -> None:
        """No place is free while there is a reason. When it is gone, those whose ranks were refused are."""
        self.held = why
        for place in self._slots.values():
            if place.refused and place.rests_until is not None and not why:
                place.rests_until = float("-inf")

    def give_back(self, slot: int, now: float) -> None:
        """Nothing was started there, and it is not the place's fault."""
        self._slots[slot].rests_until = now + max(self._delay, NOT_STARTED)

    def leave(self, slot: int, marker: str, code: int, now: float) -> str:
        """Its process has ended. What is to be said about the place, if anything."""
        place = self._slots[slot]
        rest = self._delay if place.lost_before else 0.0
        place.rests_until, place.lost_before = now + max(rest, SETTLE), True
        for other in self._slots.values():
            if other.rests_until is not None and now < other.rests_until:
                other.rests_until = max(other.rests_until, now + SETTLE)
        if now - place.began >= self._forgive:
            place.strikes.clear()
        told = json.loads(marker) if marker else {"end": "", "detail": ""}
        if told["end"] == End.REFUSED:
            place.rests_until, place.refused = now + REFUSED, True
            return ""
        if told["end"] in INNOCENT and UNFIT not in told["detail"]:
            return ""
        how = f"{told['end']}: {told['detail']}" if told["end"] else _killed(code)
        place.strikes.append(how)
        if code == -signal.SIGBUS or any(word in told["detail"] for word in BROKEN):
            place.aside = f"its rank died as of broken hardware ({how})"
        elif len(place.strikes) >= STRIKES:
            place.aside = (
                f"{len(place.strikes)} ranks have died there ({'; '.join(place.strikes)}): a bad device, or a sample "
                "that kills"
            )
        return place.aside

    def next_free_in(self, now: float) -> float:
        """Seconds until the next place that rests is free; infinity if none rests."""
        until = [place.rests_until for place in self._slots.values() if place.rests_until is not None]
        return min((at - now for at in until if at > now), default=float("inf"))

    def free(self, now: float) -> list[int]:
        return [
            slot
            for slot, place in self._slots.items()
            if not self.held
            and not place.aside
            and place.rests_until is not None
            and place.rests_until <= now
        ]


def _killed(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
