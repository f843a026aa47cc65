"""Errors of commands: one sentence and exit code 2, no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def refusals(command: str) -> Iterator[None]:
    """Print a ValueError or an OSError that is raised inside, and end the command with exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"{command}: {error}", err=True)
        raise typer.Exit(2) from None
