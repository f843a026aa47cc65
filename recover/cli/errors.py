"""What cannot be done is said in a sentence, not in a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def refusals(command: str) -> Iterator[None]:
    """Inside, an error that names a wrong value ends the command with exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"{command}: {error}", err=True)
        raise typer.Exit(2) from None
