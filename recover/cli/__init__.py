"""The command `recover`: one file per verb. Each imports what it needs when it is called, so that `--help` is quick."""

from __future__ import annotations

import typer

from recover.cli import bench, faults
from recover.cli.demo import demo
from recover.cli.doctor import doctor
from recover.cli.plan import plan
from recover.cli.report import report
from recover.cli.run import run
from recover.cli.train import TrainCommand, train

app = typer.Typer(
    name="recover",
    help="Pre-train LLMs on machines that fail: every optimizer step on exactly B microbatches.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command(cls=TrainCommand)(train)
for verb in (doctor, plan, report, demo):
    app.command()(verb)
app.add_typer(faults.app, name="faults")
app.add_typer(bench.app, name="bench")


def main() -> None:
    app()
