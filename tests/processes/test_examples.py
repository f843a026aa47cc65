"""The examples run as they are, lose replicas on the way, and train on."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from worlds import run_world

EXAMPLES = Path(__file__).parents[2] / "examples"
LINE = re.compile(r"step (\d+) loss (\S+) on (\d+), replicas \(([\d, ]+)\)")


@dataclass(frozen=True)
class Reported:
    """A line that an example prints after a committed step."""

    step: int
    loss: float
    microbatches: int
    replicas: list[int]


def run_example(tmp_path: Path, name: str, kills: list[str], survivors: list[int]) -> list[Reported]:
    """Run it on three replicas, kill some, and hold what it says against the laws."""
    outcome = run_world(str(EXAMPLES / name), tmp_path / "run", 3, kills=kills, hang_after=60)
    lines = [
        Reported(int(step), float(loss), int(microbatches), [int(r) for r in replicas.strip(",").split(",")])
        for step, loss, microbatches, replicas in LINE.findall(outcome.output)
    ]
    assert outcome.code == 0, outcome.output
    assert outcome.survivors == survivors, outcome.output
    assert [line.step for line in lines] == list(range(1, len(lines) + 1)), outcome.output
    assert {line.microbatches for line in lines} == {12}, outcome.output
    assert lines[0].replicas == [0, 1, 2], outcome.output
    assert lines[-1].replicas == survivors, outcome.output
    assert lines[-1].loss < 0.8 * lines[0].loss, outcome.output
    return lines


@pytest.mark.parametrize(
    ("name", "kills", "survivors"),
    [
        ("huggingface.py", ["3:0:backward", "6:2:vote"], [1]),
        ("own_ddp.py", ["5:1:in-reduce"], [0, 2]),
    ],
)
def test_an_example_loses_replicas_and_trains_on_with_the_same_batch(
    tmp_path: Path, name: str, kills: list[str], survivors: list[int]
) -> None:
    run_example(tmp_path, name, kills, survivors)


def test_the_plain_loop_loses_replicas_and_keeps_the_losses_of_its_twin(tmp_path: Path) -> None:
    twin = subprocess.run(
        [sys.executable, str(EXAMPLES / "plain_loop_before.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    expected = [float(loss) for loss in re.findall(r"loss (\S+)", twin.stdout)]
    lines = run_example(tmp_path, "plain_loop.py", ["8:1:in-reduce", "12:0:backward"], [2])
    assert len(expected) == 20
    assert [line.loss for line in lines] == pytest.approx(expected, rel=1e-3)


def test_the_plain_loop_differs_from_its_twin_by_at_most_ten_lines() -> None:
    before, after = (_code(EXAMPLES / name) for name in ("plain_loop_before.py", "plain_loop.py"))
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    added, removed = (sum(line[0] == sign for line in changes) for sign in "+-")
    assert max(added, removed) <= 10, "\n".join(changes)


def _code(path: Path) -> list[str]:
    """What follows the module's docstring."""
    return path.read_text().split('"""', 2)[2].splitlines()
