"""Imports between the parts of the package run in one direction, as docs/architecture.md draws it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOUSE = ROOT / "recover"
PUBLIC = "recover"  # the public names: what `import recover` gives

# What runs up, and why it may: by the file and the module that it imports.
UPWARDS: dict[tuple[str, str], str] = {}


def levels(page: str) -> dict[str, int]:
    """The rooms of the picture, by how high they are; its first 30 columns name them, the rest explains."""
    (picture,) = re.findall(r"^## The rooms$.*?^```$\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    for height, line in enumerate(reversed(picture.splitlines())):
        for room in line[:30].split():
            assert room not in found, f"the picture shows {room} twice"
            found[room] = height
    return found


LEVELS = levels((ROOT / "docs" / "architecture.md").read_text())


def room_of(path: Path) -> str:
    parts = path.relative_to(HOUSE).parts
    return parts[0] if len(parts) > 1 else PUBLIC


def modules_in(source: str, place: str) -> Iterator[str]:
    """All of this package that is imported, anywhere: at the top, for types alone, or inside a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "recover")
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{place}:{node.lineno}: imports are written in full here"
            if node.module == "recover":
                yield from (f"recover.{alias.name}" for alias in node.names)
            elif node.module and node.module.startswith("recover."):
                yield node.module


def used_room(module: str) -> str:
    room = module.removeprefix("recover.").partition(".")[0]
    return room if room in LEVELS else PUBLIC  # `from recover import Step`


def upwards(path: Path, source: str) -> set[tuple[str, str]]:
    """What this file imports from beside or above its room."""
    name, room = path.relative_to(HOUSE).as_posix(), room_of(path)
    return {
        (name, module)
        for module in modules_in(source, name)
        if used_room(module) != room and LEVELS[used_room(module)] >= LEVELS[room]
    }


def test_the_picture_shows_every_room_and_no_other() -> None:
    rooms = {path.name for path in HOUSE.iterdir() if (path / "__init__.py").exists()}
    assert LEVELS.keys() == rooms | {PUBLIC}


def test_no_import_runs_up_or_beside() -> None:
    found = set.union(*(upwards(path, path.read_text()) for path in HOUSE.rglob("*.py")))
    assert sorted(found - UPWARDS.keys()) == [], "docs/architecture.md says who may use whom"
    assert sorted(UPWARDS.keys() - found) == [], "these need no exception any more"


@pytest.mark.parametrize(
    "line",
    [
        "import recover.train.trainer",
        "from recover.world import ending",
        "from recover import world",
        "def late():\n    from recover.launch.launcher import launch",
        "import recover",
        "from recover import Step",
        "if TYPE_CHECKING:\n    from recover.cli import app",
    ],
)
def test_every_way_to_import_from_above_is_seen(line: str) -> None:
    assert upwards(HOUSE / "carriers" / "new.py", line)
    assert not upwards(HOUSE / "carriers" / "new.py", "from recover.fabrics.base import Fabric\nimport torch")
