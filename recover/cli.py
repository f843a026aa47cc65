"""The command `recover`. Each verb imports what it needs when it is called, so that `--help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from recover.commands import bench, faults
from recover.commands.refusals import refusals

app = typer.Typer(
    name="recover",
    help="Pre-train LLMs on machines that fail: every optimizer step on exactly B microbatches.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

app.add_typer(faults.app, name="faults")
app.add_typer(bench.app, name="bench")


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="How many processes.")],
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The Python file that every rank runs.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Handed to the script as they are.")
    ] = None,
    replica_size: Annotated[int, typer.Option(help="Ranks that hold one copy of the model.")] = 1,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where logs and results go.  [default: runs/SCRIPT-TIME]")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="End a job that shows no progress for so many seconds; 0: never.")
    ] = 1800,
    mpirun: Annotated[
        str | None, typer.Option(help="Open MPI's mpirun.  [default: the one beside this Python, then PATH]")
    ] = None,
    hang_limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="A rank that hangs for so long while others wait is taken for dead.  [default: 10 if its process "
            "does not run, 60 or ten steps if it does]",
        ),
    ] = None,
) -> None:
    """Start SCRIPT on several ranks that survive each other. Options go before SCRIPT."""
    from recover.world.launcher import launch

    code = launch(
        ranks,
        script,
        args or [],
        replica_size=replica_size,
        run_dir=run_dir,
        timeout=timeout,
        mpirun=mpirun,
        hang_limit=hang_limit,
    )
    raise typer.Exit(code)


class _Train(TyperCommand):
    """Its help ends with all keys; they are looked up only when somebody asks for it."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from recover.train.config import describe

        rows = [(key, f"{meaning}  [default: {_as_yaml(default)}]") for key, default, meaning in describe()]
        with formatter.section("Keys, in CONFIG.yaml or as key=value"):
            formatter.write_dl(rows)


def _as_yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@app.command(cls=_Train)
def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.yaml] [KEY=VALUE]...", help="What to train and how; the keys are below."
        ),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run is written.  [default: runs/train-TIME]")
    ] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STEP:REPLICA[.LOCAL]:LOCATION[=ACTION]",
            help="A fault on schedule, as 3:1:in-reduce, or 5:2:vote=stop (kill is the default); may be repeated.",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Go on from the last checkpoint of this run, with as many replicas as you like.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show grid, memory and plan; start nothing.")
    ] = False,
) -> None:
    """Pre-train a LLaMA. Replicas may die at any moment; every step has exactly B = replicas x accum microbatches."""
    from recover.train.command import train as start

    raise typer.Exit(start(words or [], run_dir, kill or [], resume, dry_run))


@app.command()
def doctor(
    mpirun: Annotated[
        str | None, typer.Option(help="Open MPI's mpirun.  [default: the one beside this Python, then PATH]")
    ] = None,
) -> None:
    """Check this machine: versions, fault tolerance, memory, cores, and three real processes, one killed."""
    from recover.world.doctor import examine

    raise typer.Exit(examine(mpirun))


@app.command()
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


@app.command()
def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", help="Run directories; several are laid over each other."),
    ],
    compare: Annotated[
        bool, typer.Option("--compare", help="Say in one line whether runs did the same; draw nothing.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Where page and pictures go.  [default: RUN_DIR/report]")
    ] = None,
) -> None:
    """Show what runs did: one page with loss, batch, replicas, throughput and every incident."""
    from recover.report import build
    from recover.report import compare as compare_runs

    with refusals("recover report"):
        if compare:
            typer.echo("\n".join(compare_runs(run_dirs)))
        else:
            typer.echo(f"page: {build(run_dirs, output or run_dirs[0] / 'report')}")


@app.command()
def demo(
    output: Annotated[
        Path | None, typer.Option(help="Where runs and page go.  [default: runs/demo-TIME]")
    ] = None,
) -> None:
    """Train twice, undisturbed and losing half of the replicas, and show both curves: a minute or two."""
    from recover.report.demo import demo as show

    raise typer.Exit(show(output))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
