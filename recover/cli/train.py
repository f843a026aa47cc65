"""`recover train`: the reference trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from recover.cli.errors import refusals
from recover.cli.host_options import with_host_options
from recover.cli.keyed_command import KeyedCommand
from recover.cli.monitor_options import OnIncident, Otel, Page, PageBind
from recover.job.host_options import HostOptions


class TrainCommand(KeyedCommand):
    """Appends all keys to the help; they are imported only then."""

    def keys(self) -> set[str]:
        from recover.job.config_keys import describe
        from recover.train.config import Config

        return {key for key, _, _ in describe(Config)}

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from recover.job.config_keys import describe
        from recover.train.config import Config

        rows = [
            (key, f"{meaning}  [default: {_as_yaml(default)}]") for key, default, meaning in describe(Config)
        ]
        with formatter.section("Keys, in CONFIG.yaml or as key=value"):
            formatter.write_dl(rows)


def _as_yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@with_host_options()
def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.yaml] [KEY=VALUE]...", help="Configuration; the keys are listed below."
        ),
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run directory.  [default: runs/train-TIME]")] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STEP:REPLICA[.LOCAL]:LOCATION[=ACTION]",
            help="Inject a fault, for example 3:1:in-reduce or 5:2:vote=stop (default action: kill); may be repeated.",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN_DIR|URL",
            help="Resume from the last checkpoint of this run, or of a checkpoint.dir, with any number of replicas.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show grid, memory and plan without starting anything.")
    ] = False,
    page: Page = "auto",
    page_bind: PageBind = "127.0.0.1",
    on_incident: OnIncident = None,
    otel: Otel = False,
    *,
    several: HostOptions,
) -> None:
    """Pre-train a LLaMA. Replicas may die at any moment; every step has exactly B = replicas x accum microbatches."""
    from recover.runs.live.monitors import make_monitors
    from recover.train.supervision import train as start

    with refusals("recover train"):
        several.check_use()
        monitors = make_monitors("off" if dry_run else page, page_bind, on_incident, typer.echo, otel)
    hosts_asked = several if several.asked else None
    returning = several if several.restarts else None
    raise typer.Exit(
        start(words or [], run_dir, kill or [], resume, dry_run, monitors, hosts_asked, returning)
    )
