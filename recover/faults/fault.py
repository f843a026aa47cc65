"""One scheduled fault: when it strikes, which rank, at which location, and with which action.

As text: `STEP:REPLICA[.LOCAL]:LOCATION[:DETAIL][=ACTION]`; or, for a fault by the clock,
`SECONDSs:REPLICA[.LOCAL][=ACTION]`. The step in which a replica joins is not known in advance. So
in place of STEP `4asks` stands for the time in which replica 4 asks and is admitted, `4joined` for
its first step.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from recover.faults.locations import ANYTIME, JOIN_PHASES, LOCATIONS, NUMBERED, OUTSIDE, REPAIR_PHASES

ACTIONS: dict[str, str] = {
    "kill": "SIGKILL",
    "exit": "an exception that nobody catches",
    "stop": "SIGSTOP, for ever",
    "pause:S": "stopped for S seconds, then it goes on",
    "slow:F": "from there on every microbatch takes F times as long",
    "stall:S": "it waits for S seconds, as for data that does not come",
    "hold:S": "a call holds Python's lock for S seconds, so not even its heartbeat is heard",
    "sample:S": "the first sample that it is given in this step takes S seconds, whoever is given it afterwards",
    "corrupt:weights": "a bit of its parameters is flipped",
    "corrupt:activation": "its device errs in one microbatch: a bit of a layer's output is flipped in forward",
    "corrupt:gradient": "its device errs in one microbatch: a bit of a layer's gradient is flipped in backward; at "
    "bucket: a bit of its local sum is flipped, before it is reduced",
    "corrupt:sum": "a bit of its reduced sum is flipped, before the checksums of the sums are compared",
    "errs:P": "from there on its device errs in every microbatch with probability P: in forward, or at backward in "
    "backward",
    "nan": "a NaN gets into its local gradient, before it is reduced",
    "lab:power": "its host loses its power",
    "lab:cut": "the cable of its host is cut, until the others have given it up",
    "lab:deaf": "the same, for what comes in: it hears nothing, and is heard",
    "lab:mute": "the same, for what goes out: it hears, and is not heard",
    "lab:link": "its host and the next one do not reach each other, until replicas were evicted for it",
    "lab:link-mute": "the same, one way: the next host does not hear it",
    "lab:blink": "the cable of its host is cut for half a second",
    "lab:lossy": "the cable of its host loses one frame in five, for some seconds",
    "lab:slow": "the cable of its host takes 200 ms longer, for some seconds",
    "lab:agent-kill": "the agent of its host gets SIGKILL",
    "lab:agent-stop": "the agent of its host is stopped, until the others have given it up",
    "lab:agent-leave": "the agent of its host gets SIGTERM: the host leaves after a step",
    "lab:member-kill": "the member of etcd on its host gets SIGKILL",
    "lab:leader-kill": "the member of etcd that leads gets SIGKILL",
    "lab:leader-stop": "the member of etcd that leads is stopped, for longer than a lease",
    "lab:etcd-stop": "all members of etcd are stopped, for some seconds",
}
LAB = "lab"  # actions of the lab on a host, when a rank of the host reaches the location
CUT = ("lab:cut", "lab:deaf", "lab:mute")
LINKS = ("lab:link", "lab:link-mute")
# These actions cost all replicas with a rank on the host.
OF_HOST = ("lab:power", *CUT, "lab:agent-kill", "lab:agent-stop", "lab:agent-leave")
# These actions cost the replica; a corrupt one by eviction.
LETHAL = ("kill", "exit", "stop", "corrupt:weights", *OF_HOST)
BY_CLOCK = ("kill", "stop", "pause", LAB)  # signals strike anywhere; other actions need a location
IN_GRADIENT = ("nan",)
IN_RESULT = ("corrupt:sum",)
OF_DEVICE = ("corrupt:activation", "corrupt:gradient", "errs")  # a wrong result from a right state
IN_MICROBATCH = ("forward", "backward", "check", "extra")  # where the actions in OF_DEVICE strike
WITH_AMOUNT = {  # the meaning of an action's number
    "pause": "seconds, as pause:1.5",
    "slow": "a factor above 1, as slow:3",
    "stall": "seconds, as stall:5",
    "hold": "seconds, as hold:5",
    "sample": "seconds, as sample:5",
    "errs": "a probability, as errs:0.5",
}

_SHAPE = re.compile(
    r"(?P<when>\d+|\d+(\.\d+)?s|\d+asks|\d+joined):(?P<replica>\d+)(\.(?P<local>\d+))?"
    r"(:(?P<location>[a-z-]+)(:(?P<detail>[\w-]+))?)?(=(?P<action>.+))?"
)


@dataclass(frozen=True)
class Fault:
    """A scheduled fault. `local` is the rank's position inside its replica, `detail` narrows the location.

    `after` is set instead of `step` (then 0) for a fault by the clock: seconds from the rank's
    first step. `asks` or `joined` for a fault while the replica of this number asks and is
    admitted, or in its first step.
    """

    step: int
    replica: int
    location: str
    local: int = 0
    detail: str | None = None
    action: str = "kill"
    after: float | None = None
    asks: int | None = None
    joined: int | None = None

    @property
    def moment(self) -> tuple[int, int | None, int | None]:
        """When it strikes, for a fault that is not by the clock."""
        return self.step, self.asks, self.joined

    @property
    def joining_replica(self) -> int | None:
        """The joining replica that determines the moment, if any."""
        return self.asks if self.asks is not None else self.joined

    @property
    def over_a_join(self) -> bool:
        return self.joining_replica is not None

    @property
    def kind(self) -> str:
        """The action without its number: `pause`, not `pause:1.5`."""
        head = self.action.partition(":")[0]
        return head if head in WITH_AMOUNT else self.action

    @property
    def amount(self) -> float:
        """The number of the action: seconds, or a factor."""
        return float(self.action.partition(":")[2])

    @property
    def lethal(self) -> bool:
        return self.action in LETHAL

    @property
    def needs_lab(self) -> bool:
        """Whether a lab has to execute it."""
        return self.action.startswith(f"{LAB}:")

    def __str__(self) -> str:
        action = f"={self.action}" if self.action != "kill" else ""
        if self.after is not None:
            return f"{self.after:g}s:{self.replica}.{self.local}{action}"
        detail = f":{self.detail}" if self.detail is not None else ""
        when = str(self.step)
        if self.over_a_join:
            when = f"{self.joining_replica}{'joined' if self.asks is None else 'asks'}"
        return f"{when}:{self.replica}.{self.local}:{self.location}{detail}{action}"


def parse_fault(text: str) -> Fault:
    """Read one fault, for example `3:1:in-reduce`, `6:2.1:bucket:0`, `8:0:backward=pause:2` or
    `30s:1=stop`."""
    match = _SHAPE.fullmatch(text.strip())
    by_clock = match is not None and re.fullmatch(r"[\d.]+s", match["when"]) is not None
    if match is None or (match["location"] is None) != by_clock:
        raise ValueError(
            f"fault {text!r} is not of the form STEP:REPLICA[.LOCAL]:LOCATION[:DETAIL][=ACTION]; for example "
            "3:1:in-reduce, or 30s:1 for one that strikes 30 s after the first step began"
        )
    replica, local, action = int(match["replica"]), int(match["local"] or 0), match["action"] or "kill"
    _check_action(text, action)
    if match["location"] is None:
        after = float(match["when"][:-1])
        fault = Fault(0, replica, ANYTIME, local, action=action, after=after)
        if action.partition(":")[0] not in BY_CLOCK:
            raise ValueError(
                f"fault {text!r}: {action!r} needs a place to strike at; give a step and a location"
            )
        return fault
    _check_location(text, match["location"], match["detail"])
    number, over = re.fullmatch(r"(\d+)(asks|joined)?", match["when"]).groups()  # type: ignore[union-attr]
    if not over and int(number) < 1:
        raise ValueError(f"fault {text!r}: steps count from 1; write 1:{replica}:{match['location']}")
    if match["location"] in OUTSIDE and (over, int(number)) != ("asks", replica):
        raise ValueError(
            f"fault {text!r}: only a joining rank reaches this location; "
            f"write {replica}asks:{replica}:{match['location']}"
        )
    if match["location"] == "ask" and action.partition(":")[0] not in BY_CLOCK:
        raise ValueError(
            f"fault {text!r}: a rank that asks waits, so only a signal strikes it; use {', '.join(BY_CLOCK)}"
        )
    if action in IN_GRADIENT and match["location"] != "bucket":
        raise ValueError(
            f"fault {text!r}: {action!r} strikes a gradient that is about to be reduced; "
            f"write {match['when']}:{replica}:bucket={action}"
        )
    if action in IN_RESULT and match["location"] != "reduced":
        raise ValueError(
            f"fault {text!r}: {action!r} strikes a sum that was reduced; "
            f"write {match['when']}:{replica}:reduced={action}"
        )
    places = (*IN_MICROBATCH, "bucket") if action == "corrupt:gradient" else IN_MICROBATCH
    if action.partition(":")[0] in OF_DEVICE or action in OF_DEVICE:
        if match["location"] not in places:
            raise ValueError(
                f"fault {text!r}: a device errs where it computes; {action!r} takes one of the locations "
                f"{', '.join(places)}"
            )
        if (match["location"], action) == ("backward", "corrupt:activation"):
            raise ValueError(
                f"fault {text!r}: before the backward pass the forward pass is over; use forward, or corrupt:gradient"
            )
    if action.startswith("sample:") and match["location"] != "forward":
        raise ValueError(
            f"fault {text!r}: a sample is slow where it is handed out; write {match['when']}:{replica}:forward={action}"
        )
    asks, joined = (int(number) if over == word else None for word in ("asks", "joined"))
    step = 0 if over else int(number)
    return Fault(step, replica, match["location"], local, match["detail"], action, None, asks, joined)


def parse_faults(texts: Iterable[str]) -> tuple[Fault, ...]:
    return tuple(parse_fault(text) for text in texts)


def _check_location(text: str, location: str, detail: str | None) -> None:
    if location not in LOCATIONS:
        raise ValueError(f"fault {text!r}: there is no location {location!r}; {_near(location, LOCATIONS)}")
    if detail is None:
        return
    if location == "repair" and detail not in (phases := (*REPAIR_PHASES, *JOIN_PHASES)):
        raise ValueError(f"fault {text!r}: a repair has no {detail!r}; {_near(detail, phases)}")
    if location in NUMBERED and not detail.isdigit():
        raise ValueError(
            f"fault {text!r}: buckets are numbered from 0; write {location}:0 instead of {detail!r}"
        )
    if location not in (*NUMBERED, "repair"):
        raise ValueError(f"fault {text!r}: location {location!r} takes no ':{detail}'; leave it out")


def _check_action(text: str, action: str) -> None:
    name, _, amount = action.partition(":")
    if name not in WITH_AMOUNT:
        if action not in ACTIONS:
            raise ValueError(f"fault {text!r}: there is no action {action!r}; {_near(action, ACTIONS)}")
        return
    try:
        number = float(amount)
    except ValueError:
        number = 0.0
    least = 1.0 if name == "slow" else 0.0
    if name == "errs" and number > 1:
        number = 0.0
    if not least < number < float("inf"):
        raise ValueError(f"fault {text!r}: {name} takes {WITH_AMOUNT[name]}; found {amount!r}")


def _near(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"it must be one of {', '.join(known)}"
