"""The command `recover`. Each verb imports what it needs when it is called, so that `--help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

app = typer.Typer(
    name="recover",
    help="Pre-train LLMs on machines that fail: every optimizer step on exactly B microbatches.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


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
) -> None:
    """Start SCRIPT on several ranks that survive each other. Options go before SCRIPT."""
    from recover.world.launcher import launch

    code = launch(
        ranks, script, args or [], replica_size=replica_size, run_dir=run_dir, timeout=timeout, mpirun=mpirun
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
            metavar="STEP:REPLICA[.LOCAL]:LOCATION",
            help="A death on schedule, as 3:1:in-reduce; may be repeated.",
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

    try:
        tell(policy, replicas, accum, lose or [], until, as_json=json, png=png)
    except (ValueError, OSError) as error:
        typer.echo(f"recover plan: {error}", err=True)
        raise typer.Exit(2) from None


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

    try:
        if compare:
            typer.echo("\n".join(compare_runs(run_dirs)))
        else:
            typer.echo(f"page: {build(run_dirs, output or run_dirs[0] / 'report')}")
    except (ValueError, OSError) as error:
        typer.echo(f"recover report: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def demo(
    output: Annotated[
        Path | None, typer.Option(help="Where runs and page go.  [default: runs/demo-TIME]")
    ] = None,
) -> None:
    """Train twice, undisturbed and losing half of the replicas, and show both curves: a minute or two."""
    from recover.train.demo import demo as show

    raise typer.Exit(show(output))


bench = typer.Typer(
    no_args_is_help=True, help="Measure: each figure a ratio against a named peer in the same run."
)
app.add_typer(bench, name="bench")
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures and the machine to this file.")]


@bench.command("collectives")
def bench_collectives(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,4,8",
    megabytes: Annotated[str, typer.Option(help="Sizes of the buffer.")] = "1,25,100",
    rounds: Annotated[int, typer.Option(help="Measurements of each.", min=2)] = 9,
    json: Json = None,
) -> None:
    """All-reduce: our carriers, ulfm_allreduce with its probe, stock gloo, and the bound that memory sets."""
    from recover.bench.collectives import bench_collectives as measure

    measure([int(n) for n in ranks.split(",")], [float(size) for size in megabytes.split(",")], rounds, json)


@bench.command("overhead")
def bench_overhead(
    model: Annotated[str, typer.Option(help="tiny, small, 1b or 7b.")] = "small",
    replicas: Annotated[int, typer.Option(min=2)] = 2,
    seq_len: Annotated[int, typer.Option(min=1)] = 128,
    accum: Annotated[int, typer.Option(help="Microbatches per replica and step.", min=1)] = 2,
    turns: Annotated[int, typer.Option(help="Pairs of steps.", min=3)] = 20,
    json: Json = None,
) -> None:
    """Without failures: tokens/s and memory against stock torch DDP on gloo, turn by turn."""
    from recover.bench.training import bench_overhead as measure

    measure(model, replicas, seq_len, accum, turns, json)


@bench.command("recovery")
def bench_recovery(replicas: Annotated[int, typer.Option(min=2)] = 4, json: Json = None) -> None:
    """From SIGKILL in the middle of a reduction to the commit of that very step."""
    from recover.bench.training import bench_recovery as measure

    measure(replicas, json)


@bench.command("repair")
def bench_repair(
    ranks: Annotated[int, typer.Option(help="How many ranks to begin with.", min=2)] = 8, json: Json = None
) -> None:
    """From SIGKILL to a repaired world with a working carrier."""
    from recover.bench.collectives import bench_repair as measure

    measure(ranks, json)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
