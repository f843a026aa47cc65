"""Schedules of faults: read from YAML, written to it, and checked before any process is started.

- {step: 3, replica: 1, location: in-reduce}
- {step: 6, replica: 2, local: 1, location: repair:census, action: exit}
- {after: 30, replica: 0, action: stop}
- {joined: 4, replica: 0, location: vote}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from recover.faults.fault import Fault, parse_fault
from recover.faults.locations import (
    AFTER_VERDICT,
    CHECKED_SUMS,
    IN_RECOVERY,
    LOCATIONS,
    OF_MICROBATCHES,
    VERIFIED,
)

MOMENTS = ("step", "after", "asks", "joined")
KEYS = (*MOMENTS, "replica", "local", "location", "action")
EXAMPLE = "- {step: 3, replica: 1, location: in-reduce}"
_ORDER = {location: number for number, location in enumerate(LOCATIONS)}


class ScheduleError(ValueError):
    """A schedule that cannot be read, or that cannot happen."""


def read_schedule(path: str | Path) -> tuple[Fault, ...]:
    """The faults of a YAML file, in its order.

    Raises ScheduleError with the entry that is wrong.
    """
    try:
        # All values as text: YAML would turn some names into numbers, and some numbers into
        # strings.
        entries = yaml.load(Path(path).read_text(), Loader=yaml.BaseLoader)
    except OSError as error:
        raise ScheduleError(
            f"faults={str(path)!r} cannot be read ({error.strerror}); check the path"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ScheduleError(f"faults={str(path)!r} must be a YAML list like `{EXAMPLE}`; {error}") from None
    if entries in (None, ""):
        return ()
    if not isinstance(entries, list):
        raise ScheduleError(f"faults={str(path)!r} must be a YAML list like `{EXAMPLE}`; found {entries!r}")
    return tuple(_read(entry, f"{path}, entry {number}") for number, entry in enumerate(entries, start=1))


def _read(entry: object, where: str) -> Fault:
    if not isinstance(entry, Mapping) or not ({"replica", "location"} <= set(entry) or "after" in entry):
        raise ScheduleError(f"{where} must be a YAML list like `{EXAMPLE}`; found {entry!r}")
    if unknown := [key for key in entry if key not in KEYS]:
        raise ScheduleError(f"{where}: there is no key {unknown[0]!r}; use {', '.join(KEYS)}")
    given = [key for key in MOMENTS if key in entry]
    if len(given) != 1 or ("after" in entry and "location" in entry):
        raise ScheduleError(
            f"{where}: give `step` (or `asks`, or `joined`) and `location`, or `after` (seconds) and neither of them"
        )
    unit = {"step": "", "after": "s"}.get(given[0], given[0])
    when = f"{entry[given[0]].removesuffix('s')}{unit}"
    place = f":{entry['location']}" if "location" in entry else ""
    text = f"{when}:{entry.get('replica')}.{entry.get('local', '0')}{place}={entry.get('action', 'kill')}"
    try:
        return parse_fault(text)
    except ValueError as error:
        raise ScheduleError(f"{where}: {error}") from None


def write_schedule(faults: Sequence[Fault]) -> str:
    """The faults as YAML, one line each."""
    return "".join(f"- {_flow(_entry(fault))}\n" for fault in faults) or "[]\n"


def _entry(fault: Fault) -> dict[str, object]:
    moments = (("after", fault.after), ("asks", fault.asks), ("joined", fault.joined), ("step", fault.step))
    name, when = next((name, when) for name, when in moments if when is not None)
    entry: dict[str, object] = {name: when, "replica": fault.replica}
    if fault.local:
        entry |= {"local": fault.local}
    if fault.after is None:
        entry |= {"location": fault.location + (f":{fault.detail}" if fault.detail is not None else "")}
    return entry | {"action": fault.action}


def _flow(entry: dict[str, object]) -> str:
    text: str = yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=1000)
    return text.strip()


def check_schedule(
    faults: Sequence[Fault],
    replicas: int | None = None,
    replica_size: int | None = None,
    steps: int | None = None,
    checkpoint_every: int | None = None,
    later: int = 0,
    verify: int | None = None,
    exact_sums: bool | None = None,
) -> None:
    """Raise ScheduleError for a fault that can never strike, as far as the numbers given can tell."""
    for problem in impossible(
        faults, replicas, replica_size, steps, checkpoint_every, later, verify, exact_sums
    ):
        raise ScheduleError(problem)


def impossible(
    faults: Sequence[Fault],
    replicas: int | None = None,
    replica_size: int | None = None,
    steps: int | None = None,
    checkpoint_every: int | None = None,
    later: int = 0,
    verify: int | None = None,
    exact_sums: bool | None = None,
) -> Iterator[str]:
    """An error with its remedy for every fault that can never strike.

    `later`: how many more replicas may join.
    """
    for fault in faults:
        if replicas is not None and (came := fault.joining_replica) is not None and not later:
            yield f"fault {fault}: replica {came} can join only a job whose replicas come back; give --return"
        elif replicas is not None and came is not None and not replicas <= came < replicas + later:
            yield (
                f"fault {fault}: replica {came} never joins; those who do are numbered from {replicas} on, "
                f"{replicas + later - 1} at the most"
            )
        elif replicas is not None and fault.replica >= replicas + later:
            yield f"fault {fault}: there are replicas 0 to {replicas + later - 1}, and no {fault.replica}"
        elif fault.joined == fault.replica and fault.location in OF_MICROBATCHES:
            yield (
                f"fault {fault}: replica {fault.replica} runs no microbatch in its first step; choose another place, "
                "or another replica"
            )
        elif replica_size is not None and fault.local >= replica_size:
            number = "one process" if replica_size == 1 else f"{replica_size} ranks, numbered from 0"
            yield f"fault {fault}: a replica is {number}; there is no {fault.replica}.{fault.local}"
        elif steps is not None and fault.step > steps:
            yield f"fault {fault}: the run has {steps} steps; choose one of them"
        elif fault.location in VERIFIED and verify == 0:
            yield (
                f"fault {fault}: neither microbatches nor sums are checked, since verify is 0; give verify=1, or "
                "choose another place"
            )
        elif fault.location in CHECKED_SUMS and exact_sums is False:
            yield (
                f"fault {fault}: fast sums are not checked; give reduction=reproducible, or choose another place"
            )
        elif (
            fault.location == "checkpoint"
            and checkpoint_every is not None
            and not _divides(checkpoint_every, fault)
        ):
            when = (
                f"after every {checkpoint_every} steps" if checkpoint_every else "never (checkpoint.every=0)"
            )
            yield f"fault {fault}: checkpoints are written {when}; choose such a step"
        elif _needs_a_repair(fault) and not any(_causes_repair(other, fault) for other in faults):
            when = str(fault).partition(":")[0]
            yield (
                f"fault {fault}: there is no {fault.location} unless another replica is lost in step {when}; "
                f"add such a fault, for example {when}:{_another(fault, replicas)}:in-reduce"
            )
        elif earlier := next((other for other in faults if _comes_too_late(fault, other)), None):
            yield f"fault {fault}: replica {fault.replica} is lost already by {earlier}; leave one of them out"


def survivors(faults: Sequence[Fault], replicas: int) -> int:
    """The number of replicas that survive all faults."""
    return replicas - len({fault.replica for fault in faults if fault.lethal})


def _divides(every: int, fault: Fault) -> bool:
    return every > 0 and fault.step % every == 0


def _needs_a_repair(fault: Fault) -> bool:
    """Whether a fault can strike only in the repair of another loss. A fault while a replica asks
    needs no other loss: the repair that admits the replica reaches these locations."""
    return fault.location in IN_RECOVERY and fault.asks is None


def _causes_repair(other: Fault, fault: Fault) -> bool:
    """Whether the loss of `other` is repaired in the step of `fault`.

    A loss by the clock may be, so it counts.
    """
    if other.replica == fault.replica or not other.lethal or other.location in IN_RECOVERY:
        return False
    late = other.location in AFTER_VERDICT or other.action == "corrupt:weights"
    in_time = other.moment == fault.moment or (late and other.step + 1 == fault.step)
    return other.after is not None or in_time or (fault.over_a_join and other.step > 0)


def _comes_too_late(fault: Fault, other: Fault) -> bool:
    """Whether `other` has ended the rank, or in an earlier step its replica, before `fault`."""
    if other is fault or other.replica != fault.replica or not other.lethal:
        return False
    if (fault.over_a_join or other.over_a_join) and fault.moment != other.moment:
        return False  # their order is unknown
    if fault.after is not None or other.after is not None:
        return fault.after is not None and other.after is not None and other.after <= fault.after
    if other.step == fault.step:
        return other.local == fault.local and _ORDER[other.location] <= _ORDER[fault.location]
    return other.step < fault.step - (other.action == "corrupt:weights")  # found in the step after it


def _another(fault: Fault, replicas: int | None) -> int:
    return (fault.replica + 1) % (replicas or fault.replica + 2)
