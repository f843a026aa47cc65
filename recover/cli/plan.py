"""`recover plan`: what losses would do to a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recover.cli.refusals import refusals


def plan(
    replicas: Annotated[int, typer.Option(help="Replicas at the start.")],
    accum: Annotated[int, typer.Option(help="Microbatches that each of them accumulates in a step.")],
    lose: Annotated[
        list[str] | None,
        typer.Option(
            help="A loss; may be repeated. A number (majors go first), a role, several at the same moment "
            "(major,minor), or in an extra round of the loss before it (major@extra1)."
        ),
    ] = None,
    until: Annotated[
        int | None, typer.Option(help="Then lose one after another until so many are left, and draw it.")
    ] = None,
    policy: Annotated[str, typer.Option(help="static, balanced or adaptive.")] = "static",
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    png: Annotated[Path | None, typer.Option(help="Where the picture goes.  [default: plan.png]")] = None,
) -> None:
    """Show what losses would do to a job: who steps in, who runs more, and that B stays B."""
    from recover.report.plan import tell

    with refusals("recover plan"):
        tell(policy, replicas, accum, lose or [], until, as_json=json, png=png)
