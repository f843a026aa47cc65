"""Runs the scripts of `examples/` on replicas that die, and compares their losses with those of their plain twins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from worlds import run_world

EXAMPLES = Path(__file__).parents[1] / "examples"
LINE = re.compile(r"step (\d+) loss ([\d.]+)(?: on (\d+) by \(([\d, ]+)\))?")
KILLS = {
    "plain_loop": (["8:1:in-reduce", "12:0:backward"], [2]),
    "nanogpt": (["3:0:backward", "9:2:in-reduce"], [1]),
    "huggingface": (["3:0:backward", "6:2:vote"], [1]),
    "own_ddp": (["5:1:in-reduce"], [0, 2]),
}


def run_example(tmp_path: Path, name: str, arguments: list[str]) -> tuple[list[float], str]:
    """Run an example on three replicas, kill some, and check its notes against the laws. Returns losses and output."""
    kills, survivors = KILLS[name]
    script = str(EXAMPLES / f"{name}.py")
    outcome = run_world(script, tmp_path / "run", 3, arguments, kills=kills)
    assert outcome.code == 0, outcome.output
    assert outcome.survivors == survivors, outcome.output
    lines = LINE.findall(outcome.output)
    assert [int(step) for step, *_ in lines] == list(range(1, len(lines) + 1)), outcome.output
    if name != "nanogpt":
        assert {microbatches for _, _, microbatches, _ in lines} == {"12"}, outcome.output
        assert lines[0][3] == "0, 1, 2", outcome.output
        assert [int(r) for r in lines[-1][3].strip(",").split(",")] == survivors, outcome.output
    losses = [float(loss) for _, loss, _, _ in lines]
    assert losses[-1] < 0.8 * losses[0], outcome.output
    return losses, outcome.output


def check_example_against_its_twin(tmp_path: Path, name: str) -> None:
    def arguments(where: str) -> list[str]:
        return [str(tmp_path / where)] if name == "nanogpt" else []

    twin = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}_before.py"), *arguments("plain")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    expected = [float(loss) for _, loss, *_ in LINE.findall(twin.stdout)]
    losses, said = run_example(tmp_path, name, arguments("ours"))
    assert losses == pytest.approx(expected, rel=1e-3)
    if name == "nanogpt":
        held_out = [re.findall(r"val (\S+)", text) for text in (twin.stdout, said)]
        assert [float(x) for x in held_out[1]] == pytest.approx([float(x) for x in held_out[0]], rel=1e-3)
        assert (tmp_path / "ours" / "checkpoints" / "step-16").is_dir()
