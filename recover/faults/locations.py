"""The places of a step at which a rank can be made to die, one name each: the same in code, logs and docs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

LOCATIONS: dict[str, str] = {
    "forward": "before the forward pass of a microbatch",
    "backward": "before the backward pass of a microbatch",
    "bucket": "before a gradient bucket is handed to the reduction (bucket:K for the K-th)",
    "in-reduce": "while a bucket's reduction is in flight: posted, not yet waited for (in-reduce:K)",
    "vote": "after the last reduction, before the vote on the step",
    "repair": "inside the repair (repair:members, repair:census, repair:carrier, repair:closing)",
    "extra": "before an extra microbatch that replaces lost work",
    "update": "after the verdict, before the optimizer changes the parameters",
    "after-update": "after the parameters have changed, before the step is counted",
    "advance": "between two steps, while the next layout is installed",
    "checkpoint": "while a checkpoint is being written",
}

_QUALIFIED = {"bucket", "in-reduce", "repair"}
_SHAPE = re.compile(
    r"(?P<step>\d+):(?P<replica>\d+)(\.(?P<local>\d+))?:(?P<location>[a-z-]+)(:(?P<detail>\w+))?"
)


@dataclass(frozen=True)
class Kill:
    """One scheduled death. `local` is the rank's position inside its replica, `detail` narrows the location."""

    step: int
    replica: int
    location: str
    local: int = 0
    detail: str | None = None

    def __str__(self) -> str:
        detail = f":{self.detail}" if self.detail is not None else ""
        return f"{self.step}:{self.replica}.{self.local}:{self.location}{detail}"


def parse_kill(text: str) -> Kill:
    """Read `STEP:REPLICA[.LOCAL]:LOCATION`, for example `3:1:in-reduce` or `6:2.1:bucket:0`."""
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"kill {text!r} is not of the form STEP:REPLICA[.LOCAL]:LOCATION; for example 3:1:in-reduce"
        )
    location, detail = match["location"], match["detail"]
    if location not in LOCATIONS:
        near = difflib.get_close_matches(location, LOCATIONS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it must be one of {', '.join(LOCATIONS)}"
        raise ValueError(f"kill {text!r}: there is no location {location!r}; {hint}")
    if detail is not None and location not in _QUALIFIED:
        raise ValueError(f"kill {text!r}: location {location!r} takes no ':{detail}'; leave it out")
    if int(match["step"]) < 1:
        raise ValueError(f"kill {text!r}: steps count from 1; write 1:{match['replica']}:{location}")
    return Kill(int(match["step"]), int(match["replica"]), location, int(match["local"] or 0), detail)


def parse_kills(texts: Iterable[str]) -> tuple[Kill, ...]:
    return tuple(parse_kill(text) for text in texts)
