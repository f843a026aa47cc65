"""Whole rounds instead of single microbatches, for pipelines: the same step, the trajectory of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from toy_rounds import reference
from worlds import run_world


@pytest.mark.guarantee(
    "The trajectory", "Whole rounds have the trajectory of single microbatches in one process."
)
def test_rounds_match_the_trajectory_of_one_process_through_deaths(tmp_path: Path) -> None:
    """Rounds of odd steps have one backward pass, those of even steps a pass for each microbatch, as in a pipeline;
    both kinds have to run an extra round."""
    kills = ["2:1:in-reduce", "5:0:forward"]
    outcome = run_world("rounds.py", tmp_path / "run", 4, kills=kills)
    assert outcome.code == 0, outcome.output
    assert outcome.survivors == [2, 3], outcome.output
    found, other = (outcome.notes(rank, "run")[0] for rank in (2, 3))
    assert found["parameters"] == other["parameters"]
    losses, parameters = reference()
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-6)
    for mine, theirs in zip(found["parameters"], parameters, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    # 12 microbatches over 4 replicas, then over 3, then over 2; and what a lost replica had run is shared out.
    assert found["rounds"] == [[3], [3, 1], [4], [4], [4, 2], [6]]
