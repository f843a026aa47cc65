"""The list of mutants stays true: each still fits the code, and names tests that exist."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from mutate import ROOT, Mutant, Shard, mutants

MUTANTS = list(mutants())


@pytest.mark.guarantee(
    "Membership",
    "Every mutant fits the code and names the tests that must fail with it (`make mutants` applies them).",
)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_fits_the_code_and_names_its_tests(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    broken = mutant.applied_to(text)
    before_it = text.partition(mutant.before)[0].rpartition("\n")[2]
    # Without its indentation, the second line would be in another block than it seems to be.
    assert "\n" not in mutant.after or not before_it.isspace(), "several lines need their whole indentation"
    if mutant.file.endswith(".py"):
        compile(broken, mutant.file, "exec")  # it must fail a test, not the import
    assert mutant.why
    assert mutant.caught_by
    for test in mutant.caught_by:
        path, _, name = test.partition("::")
        function = re.escape(name.partition("[")[0])
        assert re.search(rf"^def {function}\(", Path(ROOT, path).read_text(), re.MULTILINE), test


def test_mutant_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("count", [1, 2, 3, 7, len(MUTANTS), len(MUTANTS) + 5])
def test_mutant_is_in_exactly_one_shard(count: int) -> None:
    shards = [Shard.parse(f"{number}/{count}").of(MUTANTS) for number in range(1, count + 1)]
    assert sorted(mutant.name for shard in shards for mutant in shard) == sorted(m.name for m in MUTANTS)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize(
    "wrong", ["", "1", "/", "0/4", "5/4", "1/0", "0/0", "-1/4", "1/4/2", "a/4", "1/b", "1.0/2"]
)
def test_mutant_shard_that_does_not_exist_is_refused(wrong: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(f"shard {wrong!r} is not i/n")):
        Shard.parse(wrong)
