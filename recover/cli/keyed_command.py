"""Commands whose configuration is given by keys, as key=value."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import typer
from typer.core import TyperCommand


class KeyedCommand(TyperCommand):
    """Explains what to write where a key is given as an option (`--steps 5`)."""

    def keys(self) -> Collection[str]:
        """All keys. Called only for the explanation."""
        raise NotImplementedError

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            rest: list[str] = super().parse_args(ctx, args)
        except Exception as error:
            # The class of this error is not among typer's public names.
            self._explain_key(ctx, given, getattr(error, "option_name", None) or "")
            raise
        return rest

    def _explain_key(self, ctx: Any, args: list[str], option: str) -> None:
        """End the command with an explanation if this unknown option has the name of a key."""
        key = _as_key(option)
        if not option.startswith("--") or key not in self.keys():
            return
        place = next(place for place, word in enumerate(args) if _as_key(word.partition("=")[0]) == key)
        _, has_value, value = args[place].partition("=")
        after = args[place + 1 : place + 2]
        if not has_value:
            value = after[0] if after and not after[0].startswith("--") else "VALUE"
        typer.echo(
            f"recover {ctx.info_name}: {option} is a key, not an option; write {key}={value}",
            err=True,
        )
        raise typer.Exit(2) from None


def _as_key(option: str) -> str:
    return option.lstrip("-").replace("-", "_")
