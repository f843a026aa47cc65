"""`recover plan`: what losses would do to a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recover.cli.refusals import refusals
from recover.policy import DEFAULT_POLICY


def plan(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.yaml] [KEY=VALUE]...", help="A job, as `recover train` takes it."),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Instead of a job: replicas at the start.", show_default=False)
    ] = None,
    accum: Annotated[
        int | None, typer.Option(help="... and microbatches that each of them accumulates in a step.")
    ] = None,
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
    policy: Annotated[
        str | None,
        typer.Option(
            help="static, balanced or adaptive.  [default: the job's, or what a job has by default]"
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    png: Annotated[Path | None, typer.Option(help="Where the picture goes.  [default: plan.png]")] = None,
) -> None:
    """Show what losses would do to a job: who steps in, who runs more, and that B stays B."""
    from recover.report.narration import tell

    with refusals("recover plan"):
        batch = None
        if words:
            from recover.train.config import parse, read

            if replicas is not None or accum is not None:
                raise ValueError("--replicas and --accum are keys of a job; write replicas=8 accum=4")
            job = parse(read(words))
            replicas, accum, batch, policy = job.replicas, job.accum, job.global_batch, policy or job.policy
        if replicas is None or accum is None:
            raise ValueError(
                "what job? Give --replicas and --accum, or what you would give to `recover train`"
            )
        policy = policy or DEFAULT_POLICY
        tell(policy, replicas, accum, batch, lose or [], until, as_json=json, png=png)
