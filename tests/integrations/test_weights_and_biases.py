"""The recipe of Weights & Biases, with the real package in its offline mode.

Runs in `.venv-integrations` (`make test-integrations`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from recipes import WAIT_FOR_JOIN, assemble, pace, run_script
from wandb_files import histories


def curves(place: Path) -> list[dict[int, float]]:
    """The loss by step, of each offline run, in the order in which they were begun."""
    return [{row["_step"]: row["loss"] for row in rows} for rows in histories(place, "mine-1")]


@pytest.mark.guarantee(
    "User code",
    "Every recipe of the guide prints the numbers of one failure-free process through deaths, a rejoin and a "
    "resume.",
)
def test_curves_have_no_gap_through_deaths_of_writers_and_a_resume(tmp_path: Path) -> None:
    """Replica 0 writes until it dies, then replica 1 until it dies, then a joined replica, then another job: the
    last one has all rows."""
    script, offline = assemble("weights-and-biases"), {"WANDB_MODE": "offline"}
    run_script(tmp_path / "calm", pace(script), **offline)
    (expected,) = curves(tmp_path / "calm")
    assert list(expected) == list(range(1, 41))
    run_script(
        tmp_path / "struck",
        pace(assemble("weights-and-biases", more=WAIT_FOR_JOIN), 30),
        ["-n", "2", "--return", "--page", "off"],
        RECOVER_KILL="7:0:in-reduce 27:1:vote",
        **offline,
    )
    run_script(tmp_path / "struck", pace(script), **offline)
    assert curves(tmp_path / "struck")[-1] == pytest.approx(expected, rel=1e-4)
