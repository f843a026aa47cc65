"""A name means one thing: whoever reads `Grid`, or looks for `plan.py`, finds one."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2] / "recover"
# What every room may have one of.
COMMON = {"__init__", "__main__", "base"}
# What a step asks for, and what `recover.data` gives it.
SAME_THING = {"Stream"}
# A verb of the command line has the name of what it commands; scripts of a benchmark are read on their own.
OWN_NAMES = (ROOT / "cli", ROOT / "bench" / "programs")


def modules() -> list[Path]:
    return [path for path in ROOT.rglob("*.py") if path.parent not in OWN_NAMES]


def test_no_two_modules_have_the_same_name() -> None:
    places = defaultdict(list)
    for path in modules():
        places[path.stem].append(str(path.relative_to(ROOT)))
    assert not {name: found for name, found in places.items() if len(found) > 1 and name not in COMMON}


def test_no_two_classes_have_the_same_name() -> None:
    places = defaultdict(list)
    for path in modules():
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
            places[name].append(str(path.relative_to(ROOT)))
    assert not {name: found for name, found in places.items() if len(found) > 1 and name not in SAME_THING}
