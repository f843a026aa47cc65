"""Commands that another distribution brings, found by the entry-point group `recover.commands`.

An entry point is named after its command, with a dot between a group and its command (`faults.chaos`), and refers to
a function that adds the command to the `typer.Typer` it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import typer

GROUP = "recover.commands"
LAB = "recover-lab"
# The help of these commands where their distribution is not installed.
LAB_COMMANDS = {
    "bench": "Benchmarks",
    "simulate": "Simulations of a cluster",
    "faults.chaos": "Random schedules of faults against a training job",
    "faults.matrix": "A death at every location, of every role",
}


def load(name: str) -> Callable[..., Any] | None:
    """The object that the entry point of this name refers to; None if no distribution provides it."""
    for found in entry_points(group=GROUP, name=name):
        loaded: Callable[..., Any] = found.load()
        return loaded
    return None


def needs_lab(words: str) -> str:
    """The error for a command of the lab that is not installed."""
    return f"`recover {words}` is part of {LAB}, which is not installed; install it: pip install {LAB}"


def add_commands(app: typer.Typer, group: str = "") -> None:
    """Add the commands of a group (the main one, unless named) that other distributions bring.

    A command of the lab that is missing is replaced by one that names what to install.
    """
    found = {entry.name for entry in entry_points(group=GROUP)} | LAB_COMMANDS.keys()
    for name in sorted(found):
        owner, _, command = name.rpartition(".")
        if owner != group:
            continue
        add = load(name)
        if add is not None:
            add(app)
        elif name in LAB_COMMANDS:
            _add_placeholder(app, name, command)


def _add_placeholder(app: typer.Typer, name: str, command: str) -> None:
    def placeholder() -> None:
        typer.echo(f"recover: {needs_lab(name.replace('.', ' '))}", err=True)
        raise typer.Exit(2)

    app.command(
        command,
        help=f"{LAB_COMMANDS[name]} (needs {LAB}).",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )(placeholder)
