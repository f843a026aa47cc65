"""The time of a script between two commits: each moment is attributed once, to the activity that it was spent on."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover.runs.writing.script_time import ScriptTime


class Script:
    """A script with a clock that it advances itself; its steps take a second each."""

    def __init__(self) -> None:
        self.now = 100.0
        self.world: Any = SimpleNamespace(epoch=1, last_census=SimpleNamespace(seconds=0.0))
        self.time = ScriptTime(self.world, lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def take_step(self, after_backward: float = 0.0) -> dict[str, float]:
        self.time.begin_step()
        self.sleep(0.75)
        self.time.backward_done()
        self.sleep(after_backward)
        self.time.next_microbatch()
        self.sleep(0.25)
        spent = self.time.commit_step()
        self.time.recorded()
        return {str(name): milliseconds for name, milliseconds in spent.items()}

    def leave_step(self, seconds: float) -> None:
        self.time.begin_step()
        self.time.backward_done()
        self.sleep(seconds)
        self.time.next_microbatch()
        self.time.leave_step()

    def call(self, name: Any, seconds: float) -> None:
        with self.time.spending(name):
            self.sleep(seconds)

    def evaluate(self, seconds: float) -> None:
        self.sleep(seconds)
        self.time.evaluated()

    def repair(self, seconds: float) -> None:
        self.sleep(seconds)
        self.world.epoch += 1
        self.world.last_census.seconds = seconds


def test_time_between_steps_is_attributed_to_what_the_script_called() -> None:
    script = Script()
    script.sleep(30)  # start-up
    script.call("checkpoint_ms", 5)
    assert script.take_step() == {}
    script.sleep(2)
    script.call("checkpoint_ms", 3)
    script.evaluate(4)
    script.sleep(0.5)
    assert script.take_step() == {"outside_ms": 2500.0, "checkpoint_ms": 3000.0, "evaluation_ms": 4000.0}
    assert script.take_step() == {}, "the time of an earlier step is counted again"


def test_evaluation_in_on_first_is_counted_once() -> None:
    """`step.record_heldout_loss` is called inside `step.on_first`, which is timed as a whole."""
    script = Script()
    script.take_step()
    with script.time.spending("evaluation_ms"):
        script.evaluate(4)
        script.sleep(1)
    assert script.take_step() == {"evaluation_ms": 5000.0}


def test_call_that_raises_is_counted() -> None:
    script = Script()
    script.take_step()
    with suppress(KeyError), script.time.spending("checkpoint_ms"):
        script.sleep(3)
        raise KeyError
    assert script.take_step() == {"checkpoint_ms": 3000.0}


def test_script_after_backward_is_outside_and_a_left_step_is_as_a_whole() -> None:
    script = Script()
    assert script.take_step(after_backward=2) == {"outside_ms": 2000.0}
    script.leave_step(1.5)
    assert script.take_step(after_backward=0.5) == {"outside_ms": 2000.0}


def test_repair_between_steps_is_not_counted_with_what_the_script_called() -> None:
    """The incident records the repair: counted twice, its time would be taken from the productive parts."""
    script = Script()
    script.take_step()
    with script.time.spending("checkpoint_ms"):
        script.sleep(1)
        script.repair(0.25)
    assert script.take_step() == {"checkpoint_ms": 1000.0}


def test_step_inside_the_loop_of_another_step_is_no_time_of_the_script() -> None:
    script = Script()
    script.take_step()
    script.sleep(1)
    script.time.begin_step()
    script.sleep(5)
    assert script.take_step() == {"outside_ms": 1000.0}
    script.sleep(3)
    assert script.time.commit_step() == {}


PIECES = st.tuples(st.sampled_from(["sleep", "save", "evaluate", "leave"]), st.integers(1, 50))


@given(st.lists(st.lists(PIECES, max_size=6), min_size=1, max_size=5))
def test_all_time_between_steps_is_attributed_once(gaps: list[list[tuple[str, int]]]) -> None:
    script = Script()
    script.take_step()
    for gap in gaps:
        began = script.now
        for what, seconds in gap:
            if what == "save":
                script.call("checkpoint_ms", seconds)
            else:
                {"sleep": script.sleep, "evaluate": script.evaluate, "leave": script.leave_step}[what](
                    seconds
                )
        ended = script.now
        assert sum(script.take_step().values()) == pytest.approx(1e3 * (ended - began))
