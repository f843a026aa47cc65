"""The recipes of the guide keep their numbers through deaths, a rejoin and a resume."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from recipes import RECIPES, WAIT_FOR_JOIN, Told, assemble, commands, example, pace, run_script

from recover.checkpoint import directory
from recover.runs.records.json_lines import read

TOGETHER = [page for page in RECIPES if page != "weights-and-biases"]


def check(found: Told, expected: Told) -> None:
    """The same lines, and the same numbers: sums of other replicas differ in their last bits."""
    assert list(found) == list(expected)
    for name, numbers in expected.items():
        assert found[name] == pytest.approx(numbers, rel=1e-4, abs=1e-4), name


@pytest.mark.guarantee(
    "User code",
    "Every recipe of the guide prints the numbers of one failure-free process through deaths, a rejoin and a "
    "resume.",
)
def test_recipes_together_keep_their_numbers_through_a_rejoin_and_a_resume(tmp_path: Path) -> None:
    """All recipes in one script. Replica 1 dies, another one joins, replica 0 dies: what the run prints afterwards
    comes from the state that the joined replica received. Another process resumes from its checkpoint, until the run
    stops early."""
    calm = run_script(tmp_path / "calm", pace(assemble(*TOGETHER), 100))
    assert calm["step 20 patience"][0] == 1, "a replica with an own count would stop at another step"
    assert calm["step 40 patience"][0] == 0
    assert "step 41 loss" not in calm
    assert calm["step 40 best"][1] < 40, "a replica with an own best loss would save alone"
    place, options = tmp_path / "struck", ["-n", "2", "--return", "--page", "off", "--run-dir", "run"]
    struck = run_script(
        place,
        pace(assemble(*TOGETHER, more=WAIT_FOR_JOIN), 30),
        options,
        RECOVER_KILL="7:1:in-reduce 27:0:vote",
    )
    incidents = read(place / "run" / "incidents.jsonl").whole
    assert [line.get("kind", "lost") for line in incidents][:3] == ["lost", "joined", "lost"]
    del struck["adapters"]
    resumed = run_script(place, pace(assemble(*TOGETHER), 100))
    check(struck | resumed, calm)
    for where in ("calm", "struck"):
        assert [found.step for found in directory.all_good(tmp_path / where / "runs" / "best")] == [35]


@pytest.mark.guarantee(
    "User code",
    "Every recipe of the guide prints the numbers of one failure-free process through deaths, a rejoin and a "
    "resume.",
)
@pytest.mark.soak
@pytest.mark.parametrize("page", TOGETHER)
def test_recipe_keeps_its_numbers_under_the_commands_of_its_page(tmp_path: Path, page: str) -> None:
    calm = run_script(tmp_path / "calm", pace(example(page).read_text()))
    for number, command in enumerate(commands(page)):
        kills, *words, _ = shlex.split(command)
        assert words[:3] == ["recover", "run", "-n"]
        check(
            run_script(
                tmp_path / str(number),
                example(page).read_text(),
                [*words[2:], "--page", "off"],
                RECOVER_KILL=kills.removeprefix("RECOVER_KILL="),
            ),
            calm,
        )
