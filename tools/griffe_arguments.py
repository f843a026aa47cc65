"""An extension of griffe for the API reference: aligned lists of arguments become Markdown lists.

Docstrings here list arguments as `name:  meaning`, aligned, with indented continuation lines. `mkdocs.yml` names this
file; nothing else uses it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"^(?:`(\w+)`: |(\w+): {2,})(?=\S)")


def with_lists(text: str) -> str:
    """The docstring with every aligned list of arguments as a list of Markdown."""
    lines: list[str] = []
    inside = False
    for line in text.split("\n"):
        if found := ARGUMENT.match(line):
            if not inside and lines and lines[-1]:
                lines.append("")
            lines.append(f"- **`{found[1] or found[2]}`**: {line[found.end() :]}")
            inside = True
        elif inside and line.startswith("  "):
            lines.append(f"  {line.strip()}")
        else:
            inside = False
            lines.append(line)
    return "\n".join(lines)


class ArgumentLists(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)
