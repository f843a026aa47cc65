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
    try:
        known = environments(run_dir)
    except ValueError:
        known = {}  # a damaged file must not end a run
    earlier = {str(step): each for step, each in known.items() if step < first}
    text = json.dumps(earlier | {str(first): dict(facts)}, indent=2)
    FILES.replace(run_dir / NAME, text.encode() + b"\n")


def environments(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The recorded environments by the first step of each launch, in order; empty if none is recorded. Raises
    ValueError if the file is damaged."""
    path = run_dir / NAME
    try:
        text = path.read_bytes()
    except OSError:
        return {}
    try:
        found = {int(step): facts for step, facts in json.loads(text).items()}
        if strange := [step for step, facts in found.items() if not isinstance(facts, dict)]:
            raise ValueError(f"its entry {strange[0]} is no object")
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): it must have one object for each launch, by its first step; restore it "
            "from a copy of the run"
        ) from None
    return dict(sorted(found.items()))


def environments_of(run_dir: Path, first: int, last: int) -> list[dict[str, Any]]:
    """The environments of the launches that have taken these steps."""
    found = list(environments(run_dir).items())
    ends = [step for step, _ in found[1:]] + [last + 1]
    return [facts for (begin, facts), end in zip(found, ends, strict=False) if begin <= last and end > first]
