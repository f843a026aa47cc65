"""Runs of users' scripts, with deaths, are computed again bit by bit by one replica, and leave nothing behind."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from typer.testing import CliRunner

from recover.cli import app

PROGRAM = Path(__file__).parents[1] / "programs" / "replayed_script.py"
STEPS = 7


def run(place: Path, *words: str) -> Path:
    """A run of the script: options of `recover run` before `--`, flags of the script behind it."""
    at = words.index("--")
    place.mkdir(parents=True, exist_ok=True)
    script = place / "script.py"
    shutil.copy(PROGRAM, script)
    command = [sys.executable, "-m", "recover.cli", "run", "--run-dir", str(place / "run"), *words[:at]]
    told = subprocess.run(
        [*command, "script.py", str(place), str(STEPS), *words[at + 1 :]],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    return place / "run"


def recover(*arguments: object) -> tuple[int, str]:
    told = CliRunner().invoke(app, [*map(str, arguments)])
    return told.exit_code, told.output


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.guarantee(
    "Replay",
    "Steps of a script's run with deaths are computed again with the same bits, and nothing is saved.",
)
def test_script_with_deaths_is_replayed_bit_by_bit(tmp_path: Path) -> None:
    """From a checkpoint, and from the beginning where there is none before the step; then an audit, and the effect of a
    record that is not true."""
    place = tmp_path / "place"
    run_dir = run(place, "-n", "3", "--kill", "2:1:in-reduce", "--kill", "5:0:vote", "--", "--save")
    before = (place / "log.txt").read_text(), sorted(path.name for path in (place / "checkpoints").iterdir())
    code, told = recover("replay", run_dir, "--step", 5, "--until", STEPS, "--output", tmp_path / "again")
    assert code == 0, told
    assert "from checkpoint step-3" in told
    assert f"steps 4 to {STEPS}: bitwise equal" in told
    again = lines(tmp_path / "again/steps.jsonl")
    assert [(line["step"], line["replicas"]) for line in again] == [(4, 1), (5, 1), (6, 1), (7, 1)]
    code, told = recover("replay", run_dir, "--step", 2, "--output", tmp_path / "early")
    assert code == 0, told
    assert "from the beginning" in told
    # The replay ends by itself: one step more shows the parameters after the step that was asked for.
    assert [line["step"] for line in lines(tmp_path / "early/steps.jsonl")] == [1, 2, 3]
    assert before == (
        (place / "log.txt").read_text(),
        sorted(path.name for path in (place / "checkpoints").iterdir()),
    )
    steps = lines(run_dir / "steps.jsonl")
    steps[5]["parameters_before"] = "0" * 32  # as if the update of step 5 had gone wrong
    (run_dir / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    seed = next(n for n in range(1000) if random.Random(n).sample(range(1, STEPS + 1), 1) == [5])
    code, told = recover("audit", run_dir, "--segments", 1, "--seed", seed)
    assert code == 1, told
    assert "steps 4 to 5: differs: step 6: parameters_before was '000" in told


@pytest.mark.soak
@pytest.mark.parametrize("flags", [("--save",), ()])
def test_script_of_sharded_replicas_is_replayed_by_one_of_its_shape(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """With checkpoints; and without any, from the beginning."""
    options = ("-n", "4", "--replica-size", "2", "--kill", "4:0.1:vote")
    run_dir = run(tmp_path / "place", *options, "--", "--sharded", *flags)
    code, told = recover("replay", run_dir, "--step", 5, "--until", 6)
    assert code == 0, told
    assert ("from checkpoint step-3" if flags else "from the beginning") in told
    assert "to 6: bitwise equal" in told
