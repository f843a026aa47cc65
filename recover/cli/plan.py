"""`recover plan`: what losses, and replicas that join, would do to a job."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from recover.cli.errors import refusals
from recover.policy import DEFAULT_POLICY
from recover.policy.losses import Join, Loss

EVENTS = "recover.plan.events"


class PlanCommand(TyperCommand):
    """Losses and joins happen in the order in which they are given, whichever option each of them is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [word for arg in args for word in (arg.split("=", 1) if arg.startswith("--") else [arg])]
        pairs = itertools.pairwise(words)
        ctx.meta[EVENTS] = [(name, text) for name, text in pairs if name in ("--lose", "--join")]
        return super().parse_args(ctx, args)


def plan(
    context: typer.Context,
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
    join: Annotated[
        list[str] | None,
        typer.Option(help="So many replicas join, between two steps; may be repeated, and among the losses."),
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
    """Show what losses and joins would do to a job: who steps in, who runs more, and that B stays B."""
    from recover.runs.report.plan_narration import tell

    with refusals("recover plan"):
        batch = None
        if words:
            from recover.job.config_keys import read
            from recover.train.config import parse

            if replicas is not None or accum is not None:
                raise ValueError("--replicas and --accum are keys of a job; write replicas=8 accum=4")
            job = parse(read(words))
            replicas, accum, batch, policy = job.replicas, job.accum, job.global_batch, policy or job.policy
        if replicas is None or accum is None:
            raise ValueError(
                "what job? Give --replicas and --accum, or what you would give to `recover train`"
            )
        policy = policy or DEFAULT_POLICY
        events = [
            Loss.parse(text) if name == "--lose" else Join.parse(text) for name, text in context.meta[EVENTS]
        ]
        tell(policy, replicas, accum, batch, events, until, as_json=json, png=png)
