"""`recover demo`: the same training twice, undisturbed and losing half of its replicas, and both on one page."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recover.cli.looking_on import Page
from recover.cli.refusals import refusals

if TYPE_CHECKING:
    from recover.launch.launcher import Beside

STEPS = 24
WORDS = (
    f"steps={STEPS}",
    "replicas=4",
    "accum=4",
    "warmup_steps=6",
    "checkpoint.every=0",
    "log.tensorboard=false",
)
KILLS = (f"{STEPS // 3}:1:in-reduce", f"{STEPS * 2 // 3}:0:update")  # 0 is the one that writes the log


def demo(
    output: Annotated[
        Path | None, typer.Option(help="Where runs and page go.  [default: runs/demo-TIME]")
    ] = None,
    page: Page = "auto",
) -> None:
    """Train twice, undisturbed and losing half of the replicas, and show both curves: a minute or two."""
    from recover.records.lines import read_lines
    from recover.report import build
    from recover.train.supervision import train

    place = output or Path("runs", f"demo-{datetime.now().strftime('%Y%m%d-%H%M%S')}")
    calm, rough = place / "failure-free", place / "two-replicas-lost"
    print("A run in which nothing fails:", flush=True)
    if code := train(WORDS, calm, beside=_page(page)):
        raise typer.Exit(code)
    print(f"\nThe same run, in which two of four replicas are killed ({', '.join(KILLS)}):", flush=True)
    if code := train(WORDS, rough, KILLS, beside=_page(page)):
        raise typer.Exit(code)
    picture = build([calm, rough], place / "report")
    undisturbed, survived = (list(read_lines(run / "steps.jsonl")) for run in (calm, rough))
    apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(undisturbed, survived, strict=True))
    batches = {line["microbatches"] for line in (*undisturbed, *survived)}
    same = [line["data_digest"] for line in undisturbed] == [line["data_digest"] for line in survived]
    print(
        f"\nShown: {len(survived)} steps went on through the loss of 2 of 4 replicas, one of them inside a gradient "
        f"reduction and one the writer of the log, between verdict and update.\n"
        f"Every step of both runs was committed on {' or '.join(map(str, sorted(batches)))} microbatches, "
        f"{'on the same samples' if same else 'BUT NOT ON THE SAME SAMPLES'}; the losses are never more than "
        f"{apart:.2g} apart.\n"
        f"Both curves: {picture}"
    )


def _page(page: str) -> Beside:
    from recover.monitor.beside import LOOPBACK, onlookers

    with refusals("recover demo"):
        return onlookers(page, LOOPBACK, None, typer.echo)
