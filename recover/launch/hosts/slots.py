"""The slots of one host, each a place for one rank: which are free, which rest, and which are not
used again.

The end of a rank says something about its slot:

    lost because of another rank, evicted, left the slot is good
    evicted for a wrong gradient                the slot is set aside, until its mark is removed
    refused for its code                        the slot is good, and rests for `REFUSED` seconds
    evicted because of a broken link            the slot is good, and rests for `UNREACHED` seconds
    lost by itself, or unfit for a carrier      a strike; the second one sets the slot aside
    died as of broken hardware                  the slot is set aside at once

A rank that has worked for long enough clears the strikes of its slot.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from pathlib import Path

from recover.job.process import signal_name
from recover.runs.records.kinds import WRONG_RESULTS
from recover.world.census import BROKEN_LINK
from recover.world.rank_exit import UNFIT, End

SET_ASIDE = "set-aside"  # in the run directory: marks of slots that computed wrong gradients
INNOCENT = (End.DONE, End.ORPHAN, End.EXCLUDED, End.UNNEEDED, End.LEFT)
SETTLE = 0.1  # seconds that any slot rests: the ranks of a replica end one after the other, and are placed together
REFUSED = 600.0  # seconds that a slot rests whose rank was refused for its code
UNREACHED = 30.0  # seconds that a slot rests whose rank did not reach others: they would wait for it again
NOT_STARTED = 10.0  # seconds that a slot rests on which no process could be started
STRIKES = 2  # after which a slot is set aside
# In the marker of a rank: the hardware under its slot is broken.
BROKEN = ("CUDA error", "uncorrectable", "ECC error", "Bus error", "Input/output error")


@dataclass
class Slot:
    rests_until: float | None = None  # None: taken
    began: float = 0.0
    lost_before: bool = False
    strikes: list[str] = field(default_factory=list)
    aside: str = ""  # why it is not used again
    mark: Path | None = None  # the file that an operator removes to clear it
    refused: bool = False  # its last rank was refused for its code


class HostSlots:
    """The slots of one host. `delay`: seconds that a slot rests, from its second loss on.
    `forgive`: seconds of work that clear strikes. `marks`: the path of a slot's mark without its
    number; marks of earlier launches of the run count."""

    def __init__(self, slots: int, delay: float, forgive: float, marks: Path | None = None) -> None:
        self._delay, self._forgive, self._marks = delay, forgive, marks
        self._slots = {slot: Slot(rests_until=float("-inf")) for slot in range(slots)}
        for slot, place in self._slots.items():
            if (mark := self._mark_of(slot)) is not None and mark.exists():
                place.aside, place.mark = mark.read_text().strip(), mark
        self.held = ""  # why no slot is free now, whatever its own state
        self._is_closed = False

    def take(self, slot: int, now: float) -> str:
        """Take a slot. Returns a warning if it is set aside: a launch begins on all slots."""
        place = self._slots[slot]
        place.rests_until, place.began, place.refused = None, now, False
        if not place.aside:
            return ""
        return (
            f"it was set aside in an earlier launch ({place.aside}), and this launch begins on it; stop the run and "
            f"resume it with fewer replicas or without that device, or remove {place.mark} if it was repaired"
        )

    def close(self) -> None:
        """Offer no free slot any more: this host leaves."""
        self._is_closed = True

    def hold(self, why: str) -> None:
        """Offer no free slot while there is a reason `why`. With "", slots whose ranks were refused
        are free at once."""
        self.held = why
        for place in self._slots.values():
            if place.refused and place.rests_until is not None and not why:
                place.rests_until = float("-inf")

    def give_back(self, slot: int, now: float) -> None:
        """Give back a slot on which no process could be started, for a reason that is not the slot's."""
        self._slots[slot].rests_until = now + max(self._delay, NOT_STARTED)

    def leave(self, slot: int, marker: str, code: int, now: float) -> str:
        """Note that the process on a slot has ended. Returns why the slot is set aside, or ""."""
        place = self._slots[slot]
        rest = self._delay if place.lost_before else 0.0
        place.rests_until, place.lost_before = now + max(rest, SETTLE), True
        for other in self._slots.values():
            if other.rests_until is not None and now < other.rests_until:
                other.rests_until = max(other.rests_until, now + SETTLE)
        if now - place.began >= self._forgive:
            place.strikes.clear()
        left = json.loads(marker) if marker else {"end": "", "detail": ""}
        if left["end"] == End.REFUSED:
            place.rests_until, place.refused = now + REFUSED, True
            return ""
        if BROKEN_LINK in left["detail"]:
            place.rests_until = now + max(rest, UNREACHED)
        if left["end"] == End.EXCLUDED and any(wrong in left["detail"] for wrong in WRONG_RESULTS):
            place.aside, place.mark = left["detail"], self._mark_of(slot)
            return self._set_mark(place)
        if left["end"] in INNOCENT and UNFIT not in left["detail"]:
            return ""
        how = f"{left['end']}: {left['detail']}" if left["end"] else _killed(code)
        place.strikes.append(how)
        if code == -signal.SIGBUS or any(word in left["detail"] for word in BROKEN):
            place.aside = f"its rank died as of broken hardware ({how})"
        elif len(place.strikes) >= STRIKES:
            place.aside = (
                f"{len(place.strikes)} ranks have died there ({'; '.join(place.strikes)}): a bad device, or a sample "
                "that kills"
            )
        return place.aside

    def _mark_of(self, slot: int) -> Path | None:
        return None if self._marks is None else self._marks.with_name(f"{self._marks.name}-{slot}")

    def _set_mark(self, place: Slot) -> str:
        """Write the mark of a slot. Returns why the slot is set aside, and how an operator clears it."""
        if place.mark is None:
            return place.aside
        try:
            place.mark.parent.mkdir(parents=True, exist_ok=True)
            place.mark.write_text(f"{place.aside}\n")
        except OSError as error:  # it stays aside as long as this job runs
            place.mark = None
            return f"{place.aside} (and its mark cannot be written: {error})"
        return f"{place.aside}. Remove {place.mark} to use it again"

    def _clear_marks(self) -> None:
        for place in self._slots.values():
            if place.mark is not None and not place.mark.exists():
                place.aside, place.mark = "", None

    def next_free_in(self, now: float) -> float:
        """Seconds until the next resting slot is free; infinity if none rests."""
        until = [place.rests_until for place in self._slots.values() if place.rests_until is not None]
        return min((at - now for at in until if at > now), default=float("inf"))

    def free(self, now: float) -> list[int]:
        self._clear_marks()
        return [
            slot
            for slot, place in self._slots.items()
            if not self.held
            and not self._is_closed
            and not place.aside
            and place.rests_until is not None
            and place.rests_until <= now
        ]


def _killed(code: int) -> str:
    return f"killed by {signal_name(-code)}" if code < 0 else f"ended with {code}"
