"""Parsing of `recover run`: options before the script's name are its own, everything after it is the script's."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

MISSING = "how many ranks? give -n RANKS, or --nnodes HOSTS for several hosts"


class RunCommand(TyperCommand):
    """Passes options after the script's name to the script, and explains it where one of them was meant for us."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            rest: list[str] = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            self._explain_late_options(given, error.format_message().rstrip("."))
            raise
        if all(ctx.params[name] is None for name in ("ranks", "nnodes", "rdzv_endpoint", "rdzv_id")):
            self._explain_late_options(given, MISSING)
        return rest

    def _explain_late_options(self, args: list[str], problem: str) -> None:
        """End the command with an explanation if some of its options are given after the script's name."""
        script, late = self.late_options(args)
        if not late:
            return
        typer.echo(
            f"recover run: {problem}; {', '.join(late)} after {script} is handed to the "
            f"script: give it before its name, as `recover run {late[0]} ... {script}`",
            err=True,
        )
        raise typer.Exit(2) from None

    def late_options(self, args: list[str]) -> tuple[str, list[str]]:
        """The script's name, and the options of this command that are given after it."""
        options = {name: option for option in self.params for name in (*option.opts, *option.secondary_opts)}
        known = {name: option for name, option in options.items() if name.startswith("-")}
        place = 0
        while place < len(args) and args[place].startswith("-"):
            name, _, value = args[place].partition("=")
            takes_value = name in known and not getattr(known[name], "is_flag", False) and not value
            place += 2 if takes_value else 1
        script = args[place] if place < len(args) else ""
        return script, [word for word in args[place + 1 :] if word.partition("=")[0] in known]
