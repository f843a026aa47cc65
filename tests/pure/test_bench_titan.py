"""Figures of `recover bench titan` from log lines: new steps, full strength, and steps that are run again."""

from __future__ import annotations

from typing import Any

import pytest
from recover_lab.bench.titan import FIGURE, _first_of_each, _whole_again
from recover_lab.peers.ended import BenchmarkError
from recover_lab.peers.titan_runs import OURS, RESTART, TORCHFT, judge_kill, step_times


def line(at: float, step: int, replicas: int = 2, sequences: int = 2) -> dict[str, Any]:
    return {"at": at, "step": step, "replicas": replicas, "sequences": sequences, "loss": 1.0}


def test_kill_is_judged_by_the_first_step_that_was_not_there_before() -> None:
    """A restart runs steps 11 and 12 again before step 13, which is new."""
    lines = [line(1, 11), line(2, 12), line(20, 11), line(21, 12), line(22, 13)]
    facts = judge_kill(lines, 2.5, 2)
    assert facts["seconds_to_next_step"] == 22 - 2.5
    assert facts["seconds_to_full_strength"] == 22 - 2.5
    assert facts["steps_run_again"] == 2


def test_full_strength_counts_from_the_last_step_with_fewer_replicas() -> None:
    """A step that was committed at the moment of the kill still has all replicas."""
    lines = [line(1, 1), line(2.1, 2), line(3, 3, 1), line(4, 4, 1, 1), line(9, 5), line(10, 6)]
    facts = judge_kill(lines, 2, 2)
    assert facts["seconds_to_next_step"] == pytest.approx(0.1)
    assert facts["seconds_to_full_strength"] == 7
    assert facts["sequences"] == [1, 2]


def test_run_that_stays_smaller_has_no_full_strength() -> None:
    facts = judge_kill([line(1, 1), line(3, 2, 1)], 2, 2)
    assert "seconds_to_full_strength" not in facts
    with pytest.raises(BenchmarkError, match="no step was committed after the kill"):
        judge_kill([line(1, 1), line(3, 1)], 2, 2)


@pytest.mark.parametrize(
    ("after", "shrinks", "is_whole"),
    [
        ([2, 2, 2, 2], False, True),  # a restart
        ([2, 2, 2, 2], True, False),  # the loss has not been noticed yet
        ([1, 1, 2, 2, 2, 2], True, True),
        ([1, 2, 2, 2, 1], True, False),
        ([1, 2, 2, 2], True, False),  # all replicas, but for too few steps
    ],
)
def test_job_is_whole_again_after_steps_of_all_replicas(
    after: list[int], shrinks: bool, is_whole: bool
) -> None:
    lines = [line(1, 1), *(line(3 + number, 2 + number, replicas) for number, replicas in enumerate(after))]
    assert bool(_whole_again(2.0, 2, shrinks)(lines)) is is_whole


def test_step_times_skip_the_warm_up_and_count_steps_between_lines() -> None:
    lines = [line(0, 1), line(50, 5), line(54, 9), line(58, 13)]
    assert step_times(lines, 1) == [1.0, 1.0]
    assert _first_of_each([line(1, 1), line(1.5, 1), line(2, 2)]) == [line(1, 1), line(2, 2)]


def test_systems_that_were_not_measured_say_why_in_every_row() -> None:
    kill = judge_kill([line(1, 1), line(2, 2), line(3, 3)], 1.5, 2) | {"broken": ""}
    stays = judge_kill([line(1, 1), line(3, 2, 1)], 2, 2) | {"broken": "torchft: the job ended"}
    ratio = {"value": 1.0, "low": 0.9, "high": 1.1}
    times = {name: {"median": 10.0} for name in (OURS, RESTART)}
    results = {
        "replicas": 2,
        "device": "CPU",
        "step": {"batch": 2, "ours_against_stock": ratio, "milliseconds": times},
        "kill": {OURS: kill, RESTART: {"not_measured": "no torchrun"}, TORCHFT: stays},
    }
    rows = {row[0]: row[1:] for row in FIGURE.rows(results)}
    assert rows["SIGKILL to the next new step"] == ["0.5 s", "no torchrun", "1.0 s"]
    assert rows["SIGKILL to a step of all replicas"][2] == "never: torchft: the job ended"
    assert FIGURE.values(results)["restart-next"] == "not measured: no torchrun"
