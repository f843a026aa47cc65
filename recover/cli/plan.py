"""`recover plan`: the effect of losses and joins on a job, without running it."""

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
    """Keeps --lose and --join in the order in which they are given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [word for arg in args for word in (arg.split("=", 1) if arg.startswith("--") else [arg])]
        pairs = itertools.pairwise(words)
        ctx.meta[EVENTS] = [(name, text) for name, text in pairs if name in ("--lose", "--join")]
        return super().parse_args(ctx, args)


def plan(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.yaml] [KEY=VALUE]...", help="A job, with the keys of `recover train`."
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(help="Instead of a job: number of replicas at the start.", show_default=False),
    ] = None,
    accum: Annotated[
        int | None, typer.Option(help="Instead of a job: microbatches per replica and step.")
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
        typer.Option(
            help="Number of replicas that join between two steps; may be repeated, and mixed with --lose."
        ),
    ] = None,
    until: Annotated[
        int | None, typer.Option(help="Then lose replicas one by one until this many are left, and plot it.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="balanced, paced, static or adaptive.  [default: the job's, or what a job has by default]"
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    png: Annotated[Path | None, typer.Option(help="File for the plot.  [default: plan.png]")] = None,
) -> None:
    """Show the effect of losses and joins on a job: which replicas step in, which run more, and that B stays B."""
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
