"""Every class has a name of its own, so that a search for it finds one place."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "recover", ROOT / "tools" / "recover_lab")
# The protocol that a step asks for, and its implementation in `recover.data`.
SAME_THING = {"Stream"}
# A command has the name of the class behind it; scripts of a benchmark are read on their own.
OWN_NAMES = (PACKAGES[0] / "cli", PACKAGES[1] / "bench" / "programs")


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in package.rglob("*.py") if path.parent not in OWN_NAMES]


def test_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path in modules():
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
            places[name].append(str(path.relative_to(ROOT)))
    assert not {name: found for name, found in places.items() if len(found) > 1 and name not in SAME_THING}
