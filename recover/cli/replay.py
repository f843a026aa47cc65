"""`recover replay`: compute steps of a run again, and compare them bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recover.cli.errors import refusals


def replay(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory of a `recover train`, or of a script.")
    ],
    step: Annotated[int, typer.Option(help="The step to compute again.", min=1)],
    slot: Annotated[
        int | None, typer.Option(help="Compute only the loss of this microbatch of the step (from 0).", min=0)
    ] = None,
    until: Annotated[
        int | None, typer.Option(help="The last step to compute again.  [default: the same step]", min=1)
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Keep the files of the replay here.  [default: they are removed]")
    ] = None,
) -> None:
    """Compute steps of a run again with one replica, from the nearest checkpoint, and compare them bit by bit.

    Exit code 0: all bits are equal; 1: they differ; 2: the run cannot be computed again here; 130: ended by Ctrl-C.
    """
    from recover.train.replay import compute, prepare, refuse_used

    with refusals("recover replay"):
        if slot is not None and until not in (None, step):
            raise ValueError(f"--slot names a microbatch of step {step}; leave --until out")
        refuse_used(output)
        order = prepare(run_dir, step, until, slot)
        start = f"checkpoint step-{order.first - 1}" if order.checkpoint else "the beginning"
        typer.echo(f"computing again from {start}: steps {order.first} to {order.until}", err=True)
        outcome = compute(order, output)
    for difference in outcome.differences:
        typer.echo(difference.text)
    if outcome.slot is not None:
        found = outcome.slot
        mean = next(line["loss"] for line in order.run.steps if line["step"] == step)
        typer.echo(
            f"slot {slot} of step {step} is microbatch {found['sample']}: loss {found['loss']!r} (mean of the step: "
            f"{mean!r})"
        )
    if outcome.differences:
        typer.echo(f"the run differs from its replay, first in step {outcome.differences[0].step}")
        raise typer.Exit(1)
    if outcome.compared:
        typer.echo(
            f"steps {outcome.compared[0]} to {outcome.compared[-1]}: bitwise equal (samples, losses, gradient norms, "
            "parameters)"
        )
