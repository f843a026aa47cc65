"""Goodput: all time of all ranks is accounted for, to the millisecond, and each part is what its name says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover.runs.records.goodput import PARTS, PRODUCTIVE, LaunchTime, account
from recover.runs.records.job_log import JobLog, job_lines, launches

span = st.floats(0, 1e5, allow_nan=False)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Any], list[Any], list[LaunchTime], float | None]:
    """Any records at all: clocks that jump back, times that do not fit into their step, launches without an end."""
    begun = draw(st.lists(st.floats(1e9, 1e9 + 500), max_size=3))
    started = [
        LaunchTime(at, draw(st.integers(0, 6)), draw(st.integers(1, 4)), draw(st.none() | st.just(at + 9.5)))
        for at in sorted(begun)
    ]
    steps, incidents, at = [], [], 1e9
    for number in range(1, draw(st.integers(0, 8)) + 1):
        at += draw(st.floats(-1, 100))
        line = {"step": number, "replicas": draw(st.integers(1, 6)), "seconds": draw(st.floats(0, 200))}
        line |= {name: draw(span) for name in ("compute_ms", "wait_ms")}
        if draw(st.booleans()):
            line |= {
                "at": at,
                "checkpoint_ms": draw(span),
                "evaluation_ms": draw(span),
                "outside_ms": draw(span),
            }
        steps.append(line)
        for epoch in range(draw(st.integers(0, 2))):
            times = ("detect_ms", "repair_ms", "restore_ms", "redo_ms", "transfer_ms")
            dead = draw(st.sampled_from([[], [1]]))
            incidents.append(
                {"step": number, "epoch": epoch, "dead_ranks": dead} | {n: draw(span) for n in times}
            )
    return steps, incidents, started, draw(st.none() | st.just(at + 3.25))


@pytest.mark.guarantee(
    "Monitoring",
    "Goodput accounts for all time of all ranks to the millisecond, and each part is what it says.",
)
@given(histories())
def test_goodput_accounts_for_all_rank_time_to_the_millisecond(history: Any) -> None:
    told = account(*history)
    assert sum(told["parts_ms"].values()) == told["total_ms"]
    assert list(told["parts_ms"]) == list(PARTS)
    assert all(isinstance(spent, int) and spent >= 0 for spent in told["parts_ms"].values())
    assert 0 <= told["goodput"] <= 1


def steady(*, began: float = 1000.0, steps: int = 10, replicas: int = 4) -> list[dict[str, Any]]:
    """Steps of one second each: 0.8 s of computing, and one of the replicas takes 0.1 s longer than the others."""
    compute = 1e3 * (0.8 * (replicas - 1) + 0.9)
    return [
        {"step": n, "at": began + n, "seconds": 1.0, "replicas": replicas}
        | {"compute_ms": compute, "wait_ms": 100.0 * (replicas - 1)}
        for n in range(1, steps + 1)
    ]


@pytest.mark.guarantee(
    "Monitoring",
    "Goodput accounts for all time of all ranks to the millisecond, and each part is what it says.",
)
def test_goodput_parts_are_what_they_say() -> None:
    steps = steady()
    for line in steps[6:]:
        line |= {"replicas": 3, "compute_ms": 2500.0, "wait_ms": 200.0}
    for line in steps[3:]:
        line["at"] += 0.25  # a checkpoint after the third step
    for line in steps[6:]:
        line["at"] += 10.9  # 0.5 s of repair, 0.4 s redone, and ten seconds until the loss was detected
    steps[3]["checkpoint_ms"] = 250.0
    lost = {
        "step": 7,
        "epoch": 2,
        "dead_ranks": [2, 3],
        "detect_ms": 1.0,
        "repair_ms": 500.0,
        "restore_ms": 10.0,
        "redo_ms": 390.0,
    }
    started = [LaunchTime(998.0, replicas=4, replica_size=2)]  # two seconds until the first step
    told = account(steps, [lost], started, until=steps[-1]["at"] + 0.75)
    assert told["total_ms"] == 2 * 4 * 23_900
    assert {name: spent / 2 for name, spent in told["parts_ms"].items()} == {
        "computing": 6 * 3300 + 4 * 2500,
        "waiting": 6 * 300 + 4 * 200,
        "exchange": 6 * 400 + 4 * 300,
        "start_up": 4 * 2000,
        "detection": 3 * 10_000,
        "repair": 3 * 500,
        "redone": 3 * 400,
        "transfer": 0,
        "checkpoint": 4 * 250,
        "evaluation": 0,
        "outside": 0,
        "rolled_back": 3 * 750,
        "lost_capacity": 1000 + 10_900 + 3 * 1000 + 750,
    }
    assert told["goodput"] == pytest.approx(
        sum(told["parts_ms"][n] for n in PRODUCTIVE) / told["total_ms"], abs=1e-6
    )


@pytest.mark.guarantee(
    "Monitoring",
    "Goodput of a script does not count what the script does between two steps, nor its checkpoints and evaluations.",
)
def test_goodput_does_not_count_what_a_script_does_outside_of_steps() -> None:
    """The script spends half a second between the steps, and once a second more on a checkpoint and an evaluation."""
    calm, steps = account(steady(), [], [LaunchTime(1000.0, 4)]), steady()
    for number, line in enumerate(steps[1:], 1):
        line |= {"at": line["at"] + 0.5 * number + (number >= 5), "outside_ms": 500.0}
    steps[5] |= {"checkpoint_ms": 250.0, "evaluation_ms": 750.0}
    told = account(steps, [], [LaunchTime(1000.0, 4)])
    assert told["total_ms"] == calm["total_ms"] + 4 * (9 * 500 + 1000)
    found = {"outside": 4 * 9 * 500, "checkpoint": 4 * 250, "evaluation": 4 * 750}
    assert told["parts_ms"] == calm["parts_ms"] | found
    assert told["goodput"] < 0.9 * calm["goodput"]


def test_goodput_counts_a_join_as_transfer_and_regained_capacity() -> None:
    steps = steady()
    for line in steps[:5]:
        line |= {"replicas": 3, "compute_ms": 2500.0, "wait_ms": 200.0}
    for line in steps[5:]:
        line["at"] += 0.7
    joined = {"step": 6, "epoch": 2, "dead_ranks": [], "joined_ranks": [4], "joined_replicas": [4]}
    joined |= {"repair_ms": 200.0, "transfer_ms": 500.0}
    parts = account(steps, [joined], [LaunchTime(1000.0, 4)])["parts_ms"]
    assert (parts["transfer"], parts["repair"], parts["detection"]) == (4 * 500, 4 * 200, 0)
    assert parts["lost_capacity"] == 5 * 1000


@pytest.mark.guarantee(
    "Monitoring",
    "Goodput accounts for all time of all ranks to the millisecond, and each part is what it says.",
)
def test_goodput_counts_steps_repeated_after_a_resume_as_rolled_back() -> None:
    """The first launch took ten steps and then five more, which came after its last checkpoint."""
    first, second = steady(began=1000.0), steady(began=5000.0, steps=3)
    for line in second:
        line["step"] += 10
    started = [LaunchTime(1000.0, 4, 1, ended=1015.0), LaunchTime(4999.0, 4, 1)]
    told = account([*first, *second], [], started)
    assert told["total_ms"] == 4 * (15_000 + 4_000)
    assert told["parts_ms"]["rolled_back"] == 4 * 5_000
    assert told["parts_ms"]["start_up"] == 4 * 1_000


def test_goodput_does_not_depend_on_intermediate_queries(tmp_path: Path) -> None:
    """A query of the goodput up to some moment changes nothing of later reports."""
    from recover.runs.records.goodput import TimeAccount

    whole = TimeAccount([LaunchTime(999.0, 4)])
    for line in steady():
        whole.add(line)
        whole.report(until=line["at"] + 100)
    assert whole.report() == account(steady(), [], [LaunchTime(999.0, 4)])


def test_launcher_events_wait_in_memory_for_disk_space_and_are_never_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    log, write, room = JobLog(tmp_path), os.write, [10_000]

    def short(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken = write(file, data[: room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", short)
    log.write({"what": "start", "at": 10.0, "ranks": 8, "replica_size": 2})
    room[0] = 20
    log.write({"what": "exit", "at": 11.0, "rank": 1})
    assert [line["what"] for line in job_lines(tmp_path)] == ["start"]
    assert (tmp_path / "job.jsonl").read_text().endswith("}\n"), "half a line was left"
    room[0] = 0
    log.write({"what": "end", "at": 12.0})
    room[0] = 10_000
    log.flush()
    assert [json.loads(text)["what"] for text in (tmp_path / "job.jsonl").read_text().splitlines()] == [
        *("start", "exit", "end")
    ]
    assert launches(job_lines(tmp_path)) == [LaunchTime(10.0, 4, 2, 12.0)]
