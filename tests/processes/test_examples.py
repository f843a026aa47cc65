"""The examples run as they are, lose replicas on the way, and train on with the losses of their plain twins.

`examples/huggingface.py` needs transformers: `tests/integrations/test_huggingface.py` runs it.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
from example_runs import EXAMPLES, check_example_against_its_twin, run_example

PORTING = EXAMPLES.parent / "docs" / "guides" / "porting.md"
TWINS = ("plain_loop", "nanogpt", "huggingface")


@pytest.mark.guarantee("User code", "A user's own DDP model survives deaths with the same batch.")
def test_own_ddp_model_survives_deaths_with_the_same_batch(tmp_path: Path) -> None:
    run_example(tmp_path, "own_ddp", [])


# Loops of one's own are tried by test_user_loop.py, too.
@pytest.mark.guarantee(
    "The trajectory",
    "A plain loop under recover keeps the losses of its twin in one process through two deaths.",
)
@pytest.mark.guarantee(
    "User code",
    "A GPT and a Hugging Face model with a DataLoader keep the losses of their plain twins through deaths.",
)
@pytest.mark.parametrize("name", [pytest.param("plain_loop", marks=pytest.mark.soak), "nanogpt"])
def test_example_keeps_the_losses_of_its_plain_twin_through_deaths(tmp_path: Path, name: str) -> None:
    check_example_against_its_twin(tmp_path, name)


def changed(name: str) -> tuple[int, int]:
    """Lines added to a plain script to port it, and lines deleted; what its docstring says of it does not count."""
    before, after = (
        (EXAMPLES / file).read_text().split('"""', 2)[2].splitlines()
        for file in (f"{name}_before.py", f"{name}.py")
    )
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[1:].strip()]
    return sum(line[0] == "+" for line in changes), sum(line[0] == "-" for line in changes)


@pytest.mark.guarantee(
    "User code", "A plain loop becomes fault tolerant with at most ten changed lines, as the README states."
)
@pytest.mark.parametrize("name", TWINS)
def test_readme_states_how_many_lines_porting_takes(name: str) -> None:
    added, deleted = changed(name)
    said = f"({name}.py: {added} lines added, {deleted} deleted)"
    assert said in " ".join(PORTING.read_text().split()), said


@pytest.mark.guarantee(
    "User code", "A plain loop becomes fault tolerant with at most ten changed lines, as the README states."
)
def test_plain_loop_differs_from_its_twin_by_at_most_ten_lines() -> None:
    assert max(changed("plain_loop")) <= 10
