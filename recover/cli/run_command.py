"""`recover run` reads its own options up to the name of the script; the rest is the script's."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand


class RunCommand(TyperCommand):
    """Options that stand after the script's name go to the script. Where that makes a difference, it is said."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            rest: list[str] = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            script, late = self.late_options(given)
            if not late:
                raise
            typer.echo(
                f"recover run: {error.format_message().rstrip('.')}; {', '.join(late)} after {script} is handed to the "
                f"script: give it before its name, as `recover run {late[0]} ... {script}`",
                err=True,
            )
            raise typer.Exit(2) from None
        return rest

    def late_options(self, args: list[str]) -> tuple[str, list[str]]:
        """The script's name, and the options of this command that stand after it."""
        options = {name: option for option in self.params for name in (*option.opts, *option.secondary_opts)}
        known = {name: option for name, option in options.items() if name.startswith("-")}
        place = 0
        while place < len(args) and args[place].startswith("-"):
            name, _, value = args[place].partition("=")
            takes_value = name in known and not getattr(known[name], "is_flag", False) and not value
            place += 2 if takes_value else 1
        script = args[place] if place < len(args) else ""
        return script, [word for word in args[place + 1 :] if word.partition("=")[0] in known]
