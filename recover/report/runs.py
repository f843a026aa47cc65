"""Reading what a run left, whether it is finished, still going, or was killed in the middle of a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Line = dict[str, Any]


@dataclass(frozen=True)
class Run:
    path: Path
    name: str
    steps: list[Line]  # in the order of steps, each once
    incidents: list[Line]
    summary: Line  # empty while the run is not finished
    config: Line
    unreadable: int  # lines that could not be read, a torn last one aside

    @property
    def global_batch(self) -> int | None:
        """B as configured; the first committed step has it, too."""
        first = self.steps[0].get("microbatches") if self.steps else None
        return self.config.get("global_batch", first)

    def column(self, key: str) -> tuple[list[int], list[float]]:
        """Steps, and this key in them, where it was recorded."""
        rows = [line for line in self.steps if isinstance(line.get(key), int | float)]
        return [line["step"] for line in rows], [line[key] for line in rows]


def read_runs(paths: list[Path]) -> list[Run]:
    """Runs of the same name are called by their paths."""
    names = [path.resolve().name for path in paths]
    return [
        _read(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(paths, names, strict=True)
    ]


def _read(path: Path, name: str) -> Run:
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory; name the run directory of a `recover train`")
    if not any((path / file).exists() for file in ("steps.jsonl", "config.yaml")):
        raise ValueError(
            f"{path} is not a run directory: it holds neither steps.jsonl nor config.yaml; "
            "name one that `recover train` made"
        )
    steps, lost_steps = _lines(path / "steps.jsonl")
    incidents, lost_incidents = _lines(path / "incidents.jsonl")
    once = {line["step"]: line for line in steps}
    return Run(
        path,
        name,
        [once[step] for step in sorted(once)],
        sorted(incidents, key=lambda line: (line["step"], line.get("epoch", 0))),
        _mapping(path / "summary.json"),
        _mapping(path / "config.yaml"),
        lost_steps + lost_incidents,
    )


def _lines(path: Path) -> tuple[list[Line], int]:
    """The lines of a file that grows, and how many could not be read. An unfinished last line is none yet."""
    if not path.exists():
        return [], 0
    *whole, unfinished = path.read_bytes().split(b"\n")
    found, unreadable = [], 0
    for text in (text for text in whole if text.strip()):
        line = _json(text)
        if line is None or not isinstance(line.get("step"), int):
            unreadable += 1
        else:
            found.append(line)
    line = _json(unfinished)
    if line is not None and isinstance(line.get("step"), int):
        found.append(line)
    return found, unreadable


def _json(text: bytes) -> Line | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _mapping(path: Path) -> Line:
    """JSON is YAML's subset only almost, so each is read by its own reader; anything unreadable counts as missing."""
    if not path.exists():
        return {}
    text = path.read_bytes()
    if path.suffix == ".json":
        return _json(text) or {}
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return value if isinstance(value, dict) else {}
