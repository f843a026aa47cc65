"""Commands of recover-lab: its entry points load, and without the lab each command names what to install."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from recover.cli import plugins
from recover.cli.demo import demo

PROJECT = tomllib.loads((Path(__file__).parents[2] / "tools" / "pyproject.toml").read_text())["project"]
DECLARED = PROJECT["entry-points"][plugins.GROUP]
ENTRY_POINTS = [EntryPoint(name, value, plugins.GROUP) for name, value in DECLARED.items()]


def entry_points_of_the_lab(group: str, name: str | None = None) -> list[EntryPoint]:
    return [found for found in ENTRY_POINTS if found.group == group and name in (None, found.name)]


def no_entry_points(group: str, name: str | None = None) -> list[EntryPoint]:
    return []


def command_line() -> typer.Typer:
    """A command line with the commands of other distributions and `demo`, built as `recover` builds its own."""
    app, faults = typer.Typer(), typer.Typer()
    app.command()(demo)
    plugins.add_commands(app)
    plugins.add_commands(faults, "faults")
    app.add_typer(faults, name="faults")
    return app


def test_lab_commands_have_placeholders_in_the_core() -> None:
    assert plugins.LAB_COMMANDS.keys() | {"demo.hosts"} == DECLARED.keys()
    assert PROJECT["name"] == plugins.LAB


@pytest.mark.parametrize("entry_point", ENTRY_POINTS, ids=lambda entry_point: entry_point.name)
def test_entry_point_loads_and_its_command_has_a_help(
    entry_point: EntryPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "entry_points", entry_points_of_the_lab)
    assert plugins.load(entry_point.name) is entry_point.load()
    if entry_point.name in plugins.LAB_COMMANDS:
        shown = CliRunner().invoke(command_line(), [*entry_point.name.split("."), "--help"])
        assert shown.exit_code == 0, shown.output
        assert plugins.LAB not in shown.output


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "overhead", "--turns", "3"],
        ["bench", "--help"],
        ["simulate", "cluster.nodes=8"],
        ["faults", "chaos", "--", "recover", "train"],
        ["faults", "matrix", "--hosts", "3"],
        ["demo", "--hosts", "3"],
    ],
    ids=" ".join,
)
def test_lab_command_without_the_package_names_what_to_install(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "entry_points", no_entry_points)
    refused = CliRunner().invoke(command_line(), words)
    assert refused.exit_code == 2, refused.output
    assert "is part of recover-lab, which is not installed" in refused.output
    assert "pip install recover-lab" in refused.output
