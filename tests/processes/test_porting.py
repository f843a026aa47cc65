"""`docs/guides/porting.md`: what it says of a construct is what happens, against one process of plain PyTorch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from constructs import CONSTRUCTS, plain
from worlds import run_world

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "porting.md"


@pytest.mark.guarantee(
    "User code",
    "Every construct on the porting page ends with the parameters of one process to 1e-5 through two "
    "deaths, or is refused.",
)
def test_construct_ends_with_the_parameters_of_one_process_through_deaths(tmp_path: Path) -> None:
    """Three replicas, two of which die on the way: final parameters to 1e-5."""
    outcome = run_world("constructs.py", tmp_path / "run", 3, ["constructs", {"1": 2, "0": 8}])
    assert outcome.code == 0, outcome.output
    assert outcome.survivors == [2], outcome.output
    for number, (name, construct) in enumerate(CONSTRUCTS.items()):
        found = torch.load(tmp_path / "run" / f"{number}-2.pt")
        torch.testing.assert_close(
            found, plain(construct), rtol=0, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.guarantee(
    "User code",
    "Every construct on the porting page ends with the parameters of one process to 1e-5 through two "
    "deaths, or is refused.",
)
def test_porting_page_lists_every_tested_construct() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    assert [name for name in CONSTRUCTS if name not in rows] == []
