"""The answer of `recover why` for the run of a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from recover.cli import app


def why(run_dir: Path) -> list[dict[str, Any]]:
    """The stories of a run, as `recover why --json` prints them."""
    told = CliRunner().invoke(app, ["why", str(run_dir), "--json"])
    assert told.exit_code == 0, told.output
    in_words = CliRunner().invoke(app, ["why", str(run_dir)])
    assert in_words.exit_code == 0, in_words.output
    found: list[dict[str, Any]] = json.loads(told.output)
    for story in found:
        for death in story["first"]:
            assert death["text"].splitlines()[0] in in_words.output
            assert death["advice"] in in_words.output
    return found


def first_causes(run_dir: Path) -> dict[int, str]:
    """By rank, all that are named as a first cause."""
    return {death["rank"]: death["cause"] for story in why(run_dir) for death in story["first"]}
