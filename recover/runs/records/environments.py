"""`environment.json` of a run: torch, hardware, threads and whatever else the bits depend on, by the first step of each
launch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recover.job.record_files import FILES

NAME = "environment.json"


def note_environment(run_dir: Path, first: int, facts: Mapping[str, Any]) -> None:
    """Record the environment of the launch that takes the steps from `first` on."""
    earlier = {str(step): each for step, each in environments(run_dir).items() if step < first}
    text = json.dumps(earlier | {str(first): dict(facts)}, indent=2)
    FILES.replace(run_dir / NAME, text.encode() + b"\n")


def environments(run_dir: Path) -> dict[int, dict[str, Any]]:
    """By the first step of each launch, in order; empty if none is recorded."""
    try:
        found = json.loads((run_dir / NAME).read_text())
        return {int(step): found[step] for step in sorted(found, key=int)}
    except (OSError, ValueError, AttributeError):
        return {}


def environments_of(run_dir: Path, first: int, last: int) -> list[dict[str, Any]]:
    """Of the launches that have taken these steps."""
    found = list(environments(run_dir).items())
    ends = [step for step, _ in found[1:]] + [last + 1]
    return [facts for (begin, facts), end in zip(found, ends, strict=False) if begin <= last and end > first]
