"""The pages of recipes and the scripts in `examples/recipes` are the same code."""

from __future__ import annotations

import pytest
from recipes import EXAMPLES, PAGES, RECIPES, commands, example, script_of


@pytest.mark.parametrize("page", ["index", *RECIPES])
def test_recipe_example_is_the_code_of_its_page(page: str) -> None:
    assert example(page).read_text() == script_of(page), "run `python tests/recipes.py`"


def test_recipe_examples_have_no_other_files() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        example(page).name for page in ("index", *RECIPES)
    }


@pytest.mark.parametrize("page", RECIPES)
def test_recipe_page_kills_its_own_example_with_and_without_rejoining(page: str) -> None:
    killed, rejoined = commands(page)
    for command in (killed, rejoined):
        assert "RECOVER_KILL=" in command
        assert command.endswith(f"examples/recipes/{example(page).name}")
    assert "--return" in rejoined
    assert "--return" not in killed


@pytest.mark.parametrize("page", RECIPES)
def test_recipe_page_says_why_and_what_goes_wrong_otherwise(page: str) -> None:
    text = (PAGES / f"{page}.md").read_text()
    assert [
        heading
        for heading in ("Why it is written this way", "What goes wrong otherwise", "Try it")
        if f"\n## {heading}\n" not in text
    ] == []
