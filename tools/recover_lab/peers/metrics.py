"""The paper's metrics, as arithmetic on events: appendix A, "Profiling" and "Metric Definitions".

A step begins when the first rank begins it and ends when the last rank has finished it; so do saving and
loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from recover.runs.records.kinds import Event
from recover_lab.peers.costs import RestartCosts


@dataclass(frozen=True)
class Restart:
    """One failure of the checkpoint-restart baseline: the paper's stamps A to H."""

    A: float  # before the last checkpoint
    B: float  # training no longer waits for that checkpoint
    C: float  # failure
    D: float  # the old processes have ended, and the first new one starts
    E: float  # loading begins
    F: float  # loading ends
    G: float  # training continues, on all ranks
    H: float  # the failed step is complete
    imported: float  # during the restart: the last rank has finished its imports
    joined: float  # the last rank has its process groups

    def pieces(self) -> dict[str, float]:
        return {
            "save": self.B - self.A,
            "normal": self.C - self.B,
            "handling": self.D - self.C,
            "load": self.F - self.E,
            "restart": self.G - self.D - (self.F - self.E),
            "rerun": self.H - self.G,
        }

    @property
    def stall(self) -> float:
        """Seconds without training: everything but saving and rerunning."""
        return self.G - self.C

    def inside_restart(self) -> dict[str, float]:
        """Parts of the restart."""
        return {
            "import": self.imported - self.D,
            "join": self.joined - self.imported,
            "build": self.E - self.joined,  # model, optimizer, data
            "begin": self.G - self.F,
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "stamps": {name: round(at - self.A, 4) for name, at in asdict(self).items()},
            "pieces": {name: round(seconds, 4) for name, seconds in self.pieces().items()},
            "inside_restart": {name: round(seconds, 4) for name, seconds in self.inside_restart().items()},
        }


@dataclass(frozen=True)
class Recovery:
    """One failure of a run that continues: the paper's three stamps."""

    start: float  # step N is complete
    failure: float
    recovered: float  # the world is repaired and gradients are restored
    complete: float  # the failed step is complete
    repair: float  # seconds
    restore: float

    def pieces(self) -> dict[str, float]:
        repairing = self.recovered - self.repair - self.restore
        return {
            "normal": self.failure - self.start,
            "detect": repairing - self.failure,
            "repair": self.repair,
            "restore": self.restore,
            "redo": self.complete - self.recovered,
        }

    def to_json(self) -> dict[str, Any]:
        stamps = {name: getattr(self, name) - self.start for name in ("failure", "recovered", "complete")}
        return {
            "stamps": {name: round(at, 4) for name, at in stamps.items()},
            "pieces": {name: round(s, 4) for name, s in self.pieces().items()},
        }


def failures(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event["what"] == "failure"]


def restarts(events: Sequence[Event]) -> list[Restart]:
    """Every failure of a baseline's run."""
    return [_restart(events, failure) for failure in failures(events)]


def _restart(events: Sequence[Event], failure: Event) -> Restart:
    step, life = failure["step"], failure["life"]
    after = [e for e in events if e["life"] == life + 1]
    resumed = min(e["step"] for e in after if e["what"] == "step-begin")
    if resumed > 1:  # a checkpoint that was incomplete at the failure does not count
        saves = [e for e in events if e["life"] <= life and e.get("step") == resumed - 1]
        # A save that a failure interrupted was repeated in a later life.
        writers = max(e["life"] for e in saves if e["what"] == "save-end")
        written = [e for e in saves if e["life"] == writers]
        save, saved_at = min(_times(written, "save-begin")), max(_times(written, "save-end"))
    else:  # no checkpoint: from the first step on
        save = saved_at = min(_times(events, "step-begin"))
    starting = min(_times(after, "start"))
    imported, joined = (max(_times(after, what), default=starting) for what in ("imported", "joined"))
    return Restart(
        A=save,
        B=saved_at,
        C=failure["at"],
        D=starting,
        E=min(_times(after, "load-begin"), default=joined),
        F=max(_times(after, "load-end"), default=joined),
        G=max(_times(after, "step-begin", resumed)),
        H=max(e["at"] for e in events if _is(e, "step-end", step) and e["life"] > life),
        imported=imported,
        joined=joined,
    )


def recoveries(events: Sequence[Event], since: int) -> list[Recovery]:
    """Every failure of our run; recording starts when step `since` is complete."""
    start = max(_times(events, "step-end", since))
    found = []
    for failure in failures(events):
        step = failure["step"]
        struck = [e for e in events if _is(e, "step-end", step)]
        incidents = [incident for e in struck for incident in e["incidents"]]
        latest = max(incidents, key=lambda i: i["noticed_at"] + i["detect"] + i["repair"] + i["restore"])
        recovered = latest["noticed_at"] + latest["detect"] + latest["repair"] + latest["restore"]
        complete = max(e["at"] for e in struck)
        found.append(Recovery(start, failure["at"], recovered, complete, latest["repair"], latest["restore"]))
    return found


def step_seconds(events: Sequence[Event]) -> dict[int, float]:
    """Seconds of each step without a death; of a step that was run twice, the last time."""
    struck = {(e["step"], e["life"]) for e in failures(events)}
    begun: dict[tuple[int, int], float] = {}
    took: dict[int, float] = {}
    for event in events:
        key = event.get("step", 0), event["life"]
        if event["what"] == "step-begin":
            begun.setdefault(key, event["at"])
        elif event["what"] == "step-end" and key not in struck:
            took[key[0]] = event["at"] - begun[key]
    return took


def warm_steps(events: Sequence[Event]) -> dict[int, float]:
    """`step_seconds` without the first step of every life, which warms up."""
    begun: dict[int, int] = {}
    for event in events:
        if event["what"] == "step-begin":
            begun[event["life"]] = min(event["step"], begun.get(event["life"], event["step"]))
    first = set(begun.values())
    return {step: took for step, took in step_seconds(events).items() if step not in first}


def restart_costs(runs: Sequence[Sequence[Event]]) -> RestartCosts:
    """Mean costs of the restarts in these runs of a baseline."""
    found = [restart for events in runs for restart in restarts(events)]
    return RestartCosts(
        step=median(took for events in runs for took in warm_steps(events).values()),
        save=median(restart.B - restart.A for restart in found),
        stall=fmean(restart.stall for restart in found),
    )


def steps_by_alive(events: Sequence[Event]) -> dict[int, float]:
    """Median seconds of a step without a death, by living replicas."""
    seconds = step_seconds(events)
    replicas = {e["step"]: e["replicas"] for e in events if e["what"] == "step-end"}
    return {
        alive: median(took for step, took in seconds.items() if replicas[step] == alive)
        for alive in sorted(set(replicas.values()), reverse=True)
    }


def recovery_seconds(events: Sequence[Event]) -> float:
    """Seconds that a failure adds to its step, compared with the steps before it."""
    normal = steps_by_alive(events)
    replicas = {e["step"]: e["replicas"] for e in events if e["what"] == "step-end"}
    extra = []
    for failure in failures(events):
        step = failure["step"]
        bounds = [e["at"] for e in events if e["what"] in ("step-begin", "step-end") and e["step"] == step]
        extra.append(max(bounds) - min(bounds) - normal[replicas[step - 1]])
    return fmean(extra)


def interval_throughput(
    events: Sequence[Event], last_step: int, tokens_per_step: int, alive: Sequence[int], provisioned: int
) -> list[dict[str, float]]:
    """Effective throughput between each failure and the next, and from the last one to the end of `last_step`.

    `alive[i]` ranks live in interval i. Tokens per second and living rank are the paper's metric; tokens per second and
    rank at the start show the cost of the losses.
    """
    deaths = failures(events)
    bounds = [(e["at"], e["step"]) for e in deaths] + [
        (max(_times(events, "step-end", last_step)), last_step)
    ]
    found = []
    for (begin, first), (end, last), ranks in zip(bounds, bounds[1:], alive, strict=False):
        tokens, seconds = (last - first) * tokens_per_step, end - begin
        found.append(
            {
                "steps": last - first,
                "seconds": seconds,
                "alive": ranks,
                "effective_throughput": tokens / (seconds * ranks),
                "per_provisioned_rank": tokens / (seconds * provisioned),
            }
        )
    return found


def progress(
    events: Sequence[Event], tokens_per_step: int, ranks: int, lost_per_failure: int
) -> list[tuple[float, float]]:
    """The curve of (rank-seconds spent, tokens in the highest step completed so far), from the first step on."""
    ends: dict[tuple[int, int], float] = {}  # by step and life: when the last rank had finished
    for event in events:
        if event["what"] == "step-end":
            ends[event["step"], event["life"]] = event["at"]
    moments = sorted(
        [(at, "step", step) for (step, _), at in ends.items()]
        + [(event["at"], "failure", 0) for event in failures(events)]
    )
    last, spent, highest = min(_times(events, "step-begin")), 0.0, 0
    curve = [(0.0, 0.0)]
    for at, kind, step in moments:
        spent += (at - last) * ranks
        last = at
        if kind == "failure":
            ranks -= lost_per_failure
        highest = max(highest, step)
        curve.append((spent, float(highest * tokens_per_step)))
    return curve


def tokens_at(curve: Sequence[tuple[float, float]], rank_seconds: float) -> float:
    """Tokens processed after this many rank-seconds."""
    return max(tokens for spent, tokens in curve if spent <= rank_seconds)


def advantage(ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """How many more tokens ours had processed at equal rank-hours, at the last moment that both curves reach.

    Where that moment lies between two stalls of the baseline is chance; the rank-hours for the same tokens are not.
    """
    at = min(ours[-1][0], theirs[-1][0])
    mine, other = tokens_at(ours, at), tokens_at(theirs, at)
    both = min(ours[-1][1], theirs[-1][1])
    spent, other_spent = (min(spent for spent, tokens in curve if tokens >= both) for curve in (ours, theirs))
    return {
        "rank_seconds": at,
        "ours": mine,
        "baseline": other,
        "more": mine / other - 1,
        "rank_seconds_ratio": other_spent / spent,
    }


def _is(event: Event, what: str, step: int) -> bool:
    return event["what"] == what and event["step"] == step


def _times(events: Sequence[Event], what: str, step: int | None = None) -> list[float]:
    return [e["at"] for e in events if e["what"] == what and (step is None or e["step"] == step)]
