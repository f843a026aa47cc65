"""Imports between the parts of the package run in one direction, as docs/explanation/architecture.md draws it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"recover": ROOT / "recover", "recover_lab": ROOT / "tools" / "recover_lab"}

# Imports that run upwards and are allowed, with the reason, by the file and the module that it imports.
UPWARDS: dict[tuple[str, str], str] = {}


def levels(page: str) -> dict[str, int]:
    """The parts in the picture by their height: the first 30 columns of a line name them, the rest explains."""
    (picture,) = re.findall(r"^## The parts$.*?^```$\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    for height, line in enumerate(reversed(picture.splitlines())):
        for part in line[:30].split():
            assert part not in found, f"the picture shows {part} twice"
            found[part] = height
    return found


LEVELS = levels((ROOT / "docs" / "explanation" / "architecture.md").read_text())


def part_of(name: str) -> str:
    """The part that a module (or a file, as a path) belongs to: the longest name in the picture that begins it."""
    words = name.removesuffix(".py").replace(".", "/").split("/")
    if words[0] == "recover":
        words = words[1:]
    for count in range(len(words), 0, -1):
        if (part := "/".join(words[:count])) in LEVELS:
            return part
    return "recover"  # the public names: `from recover import Step`


def modules_in(source: str, place: str) -> Iterator[str]:
    """All modules of these packages that are imported anywhere: at the top, for types alone, or inside a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in PACKAGES)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{place}:{node.lineno}: imports are written in full here"
            package = (node.module or "").split(".")[0]
            if package in PACKAGES:
                # A module of a package may be a part of its own: `from recover.world import fabrics`.
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def upwards(name: str, source: str) -> set[tuple[str, str]]:
    """Imports of this file from a part on the same line as its own, or above it."""
    part = part_of(name)
    return {
        (name, module)
        for module in modules_in(source, name)
        if part_of(module) != part and LEVELS[part_of(module)] >= LEVELS[part]
    }


def files() -> Iterator[tuple[str, str]]:
    for package, directory in PACKAGES.items():
        for path in directory.rglob("*.py"):
            yield f"{package}/{path.relative_to(directory).as_posix()}", path.read_text()


def test_architecture_picture_shows_every_part_and_no_other() -> None:
    folders = {
        f"{'' if package == 'recover' else package + '/'}{path.name}"
        for package, directory in PACKAGES.items()
        for path in directory.iterdir()
        if (path / "__init__.py").exists()
    }
    assert {part for part in LEVELS if part_of(part) == part} == LEVELS.keys()
    assert folders <= LEVELS.keys()
    missing = [
        part
        for part in LEVELS.keys() - {"recover"}
        if not any((ROOT / at / part).is_dir() for at in ("recover", "tools"))
    ]
    assert missing == []


def test_imports_run_downwards() -> None:
    found = set.union(*(upwards(name, source) for name, source in files()))
    assert sorted(found - UPWARDS.keys()) == [], (
        "docs/explanation/architecture.md says which part may use which"
    )
    assert sorted(UPWARDS.keys() - found) == [], "these need no exception any more"


def test_parts_depend_on_each_other_in_one_direction() -> None:
    """Two parts that contain smaller parts may not use each other through these either."""

    def whole(part: str) -> str:
        return "/".join(part.split("/")[: 2 if part.startswith("recover_lab/") else 1])

    uses = {
        (whole(part_of(name)), whole(part_of(module)))
        for name, source in files()
        for module in modules_in(source, name)
    }
    assert sorted((a, b) for a, b in uses if a < b and (b, a) in uses) == []


@pytest.mark.parametrize(
    "line",
    [
        "import recover.train.trainer",
        "from recover.world import rank_exit",
        "from recover import world",
        "def late():\n    from recover.launch.launcher import launch",
        "import recover",
        "from recover import Step",
        "if TYPE_CHECKING:\n    from recover.cli import app",
    ],
)
def test_upward_import_is_found_in_every_form(line: str) -> None:
    below = "from recover.world.fabrics.base import Fabric\nimport torch"
    assert upwards("recover/world/carriers/new.py", line)
    assert not upwards("recover/world/carriers/new.py", below)
