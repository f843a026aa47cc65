"""The list of mutants stays true: each still fits the code, and names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mutate import ROOT, Mutant, mutants

MUTANTS = list(mutants())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_code_and_names_its_tests(mutant: Mutant) -> None:
    broken = mutant.applied_to((ROOT / mutant.file).read_text())
    if mutant.file.endswith(".py"):
        compile(broken, mutant.file, "exec")  # it must fail a test, not the import
    assert mutant.why
    assert mutant.caught_by
    for test in mutant.caught_by:
        path, _, name = test.partition("::")
        function = re.escape(name.partition("[")[0])
        assert re.search(rf"^def {function}\(", Path(ROOT, path).read_text(), re.MULTILINE), test


def test_names_of_mutants_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
