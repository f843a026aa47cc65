"""Whole rounds instead of single microbatches, for pipelines: the same step, the same trajectory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from worlds import run_world

KILLS = ["2:1:in-reduce", "4:0:forward"]


@pytest.fixture(scope="module")
def by_microbatches(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return run(tmp_path_factory.mktemp("microbatches"), "microbatches")


def run(directory: Path, mode: str) -> dict:
    """What the survivors of two deaths wrote down: the same on each."""
    outcome = run_world("rounds.py", directory / "run", 4, [mode], kills=KILLS, hang_after=60)
    assert outcome.code == 0, outcome.output
    assert outcome.survivors == [2, 3], outcome.output
    first, second = (outcome.notes(rank, "run")[0] for rank in (2, 3))
    assert first["parameters"] == second["parameters"]
    return first


@pytest.mark.parametrize("mode", ["rounds", "pipeline"])
def test_rounds_have_the_trajectory_of_single_microbatches_through_deaths(
    tmp_path: Path, by_microbatches: dict, mode: str
) -> None:
    found = run(tmp_path, mode)
    np.testing.assert_allclose(found["losses"], by_microbatches["losses"], rtol=1e-6)
    for mine, theirs in zip(found["parameters"], by_microbatches["parameters"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert found["rounds"][0] == 3  # 12 microbatches over 4 replicas, all at once
    assert found["rounds"][2] == 1  # the extra round after the first death
    assert found["rounds"][-1] == 6  # two are left
