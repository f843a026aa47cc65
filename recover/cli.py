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
    from recover.report.demo import demo as show

    raise typer.Exit(show(output))


faults = typer.Typer(
    no_args_is_help=True,
    help="Schedules of faults: make one, check one, or let chance strike a training job.",
)
app.add_typer(faults, name="faults")


@faults.command("make")
def faults_make(
    replicas: Annotated[int, typer.Option(help="Replicas of the job.")],
    replica_size: Annotated[int, typer.Option(help="Ranks that hold one copy of the model.")] = 1,
    count: Annotated[int | None, typer.Option(help="How many faults.")] = None,
    mtbf: Annotated[
        str | None, typer.Option(help="Instead: the mean between failures, in steps (12) or seconds (30s).")
    ] = None,
    steps: Annotated[str, typer.Option(metavar="FIRST:LAST", help="Where they may strike.")] = "1:60",
    seed: Annotated[int, typer.Option(help="The same seed gives the same schedule.")] = 0,
    locations: Annotated[
        str | None, typer.Option(help="Weights, as in-reduce=3,vote.  [default: all alike]")
    ] = None,
    actions: Annotated[
        str | None, typer.Option(help="Weights, as kill=5,pause:1,stop.  [default: kill]")
    ] = None,
) -> None:
    """Draw a schedule from a seed and print it as YAML, for `recover train faults=FILE`."""
    from recover.faults.command import make

    try:
        typer.echo(make(replicas, replica_size, seed, count, steps, mtbf, locations, actions), nl=False)
    except ValueError as error:
        typer.echo(f"recover faults make: {error}", err=True)
        raise typer.Exit(2) from None


@faults.command("check")
def faults_check(
    schedule: Annotated[Path, typer.Argument(metavar="FILE.yaml")],
    replicas: Annotated[int | None, typer.Option(help="Replicas of the job.")] = None,
    replica_size: Annotated[int | None, typer.Option(help="Ranks that hold one copy of the model.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the job.")] = None,
) -> None:
    """Say which faults of a schedule can never strike, and why."""
    from recover.faults.command import check

    try:
        found, problems = check(schedule, replicas, replica_size, steps)
    except ValueError as error:
        typer.echo(f"recover faults check: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo("\n".join(problems or [f"{len(found)} faults, each of which can strike"]))
    raise typer.Exit(1 if problems else 0)


@faults.command("chaos", context_settings={"allow_interspersed_args": False})
def faults_chaos(
    words: Annotated[list[str], typer.Argument(metavar="-- recover train [CONFIG.yaml] [KEY=VALUE]...")],
    seed: Annotated[int, typer.Option(help="Of the first run; the next ones count on from it.")] = 0,
    minutes: Annotated[float | None, typer.Option(help="Begin no run after so long.")] = None,
    runs: Annotated[int | None, typer.Option(help="How many.  [default: 10, or as --minutes says]")] = None,
    replicas: Annotated[
        str | None, typer.Option(metavar="LOW:HIGH", help="Draw their number, too; B stays the same.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where violations are kept.  [default: a temporary directory]")
    ] = None,
) -> None:
    """Random schedules against a training job: every step on B microbatches, nothing lost, no hang, no leftover."""
    from recover.bench.chaos import chaos
    from recover.faults.command import read_range

    words = words[2:] if words[:2] == ["recover", "train"] else words
    try:
        span = read_range(replicas, "--replicas") if replicas else None
        limit = 10 if runs is None and minutes is None else runs
        raise typer.Exit(chaos(words, seed, minutes, limit, span, output))
    except (ValueError, OSError) as error:
        typer.echo(f"recover faults chaos: {error}", err=True)
        raise typer.Exit(2) from None


@faults.command("matrix", context_settings={"allow_interspersed_args": False})
def faults_matrix(
    words: Annotated[list[str], typer.Argument(metavar="-- recover train [CONFIG.yaml] [KEY=VALUE]...")],
    launches: Annotated[
        int | None, typer.Option(help="Only so many, those that serve most cells.  [default: all]")
    ] = None,
    write: Annotated[Path | None, typer.Option(help="A page whose table is replaced.")] = None,
) -> None:
    """A death at every location, of every role, alone, in pairs and during recoveries, many in one launch."""
    from recover.bench.matrix import matrix

    words = words[2:] if words[:2] == ["recover", "train"] else words
    try:
        raise typer.Exit(matrix(words, launches, write))
    except (ValueError, OSError) as error:
        typer.echo(f"recover faults matrix: {error}", err=True)
        raise typer.Exit(2) from None


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
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[parallel=hsdp] [shard=2]", help="How a replica is built; one process, unless said."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="tiny, small, 1b or 7b.")] = "small",
    replicas: Annotated[int, typer.Option(min=2)] = 2,
    seq_len: Annotated[int, typer.Option(min=1)] = 128,
    accum: Annotated[int, typer.Option(help="Microbatches per replica and step.", min=1)] = 2,
    turns: Annotated[int, typer.Option(help="Pairs of steps.", min=3)] = 20,
    json: Json = None,
) -> None:
    """Without failures: tokens/s and memory against stock torch (DDP or HSDP) on gloo, turn by turn."""
    from recover.bench.training import bench_overhead as measure
    from recover.bench.training import shards

    try:
        measure(model, replicas, shards(words or []), seq_len, accum, turns, json)
    except ValueError as error:
        typer.echo(f"recover bench overhead: {error}", err=True)
        raise typer.Exit(2) from None


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


def _scene(words: list[str] | None, **given: Any) -> Any:
    """What a comparison runs, from its options; refusals as sentences."""
    from recover.bench.scene import Scene, inside

    try:
        return Scene(**given).but(**inside(words or []))
    except ValueError as error:
        typer.echo(f"recover bench: {error}", err=True)
        raise typer.Exit(2) from None


def _measure(measure: Any, *arguments: Any) -> None:
    from recover.bench.measure import BenchmarkError, tidy_on_sigterm

    tidy_on_sigterm()
    try:
        measure(*arguments)
    except BenchmarkError as error:
        typer.echo(f"recover bench: {error}", err=True)
        raise typer.Exit(1) from None


Inside = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[parallel=hsdp shard=2]", help="How a replica is built; one process, unless said."
    ),
]
Replicas = Annotated[int, typer.Option(help="Replicas at the start.", min=2)]
Accum = Annotated[int, typer.Option(help="Microbatches that each of them accumulates in a step.", min=1)]
Pace = Annotated[
    float, typer.Option(help="Seconds that a microbatch takes at least, most of it waiting.", min=0)
]


@bench.command("trajectory")
def bench_trajectory(
    words: Inside = None,
    replicas: Replicas = 6,
    accum: Accum = 4,
    pace: Pace = 0.1,
    steps: Annotated[int, typer.Option(help="The paper has 260.", min=2)] = 32,
    every: Annotated[int, typer.Option(help="Steps between deaths; the paper has 5.", min=1)] = 8,
    seed: int = 0,
    json: Json = None,
) -> None:
    """The same training undisturbed, losing half of its replicas, and with a batch that shrinks: curves and speed."""
    from recover.bench.trajectory import bench_trajectory as measure

    scene = _scene(words, replicas=replicas, accum=accum, pace=pace, steps=steps, seed=seed)
    _measure(measure, scene, every, json)


@bench.command("breakdown")
def bench_breakdown(
    words: Inside = None,
    intervals: Annotated[str, typer.Option(help="Steps between checkpoints, even numbers.")] = "2,8,24",
    replicas: Replicas = 6,
    accum: Accum = 4,
    pace: Pace = 0.1,
    json: Json = None,
) -> None:
    """One failure in step 1.5N: what it costs us, and checkpoint-restart with a checkpoint every N steps."""
    from recover.bench.breakdown import bench_breakdown as measure

    every = [int(n) for n in intervals.split(",") if n.strip().isdigit()]
    if not every or any(n < 2 or n % 2 for n in every):
        typer.echo(f"recover bench: --intervals {intervals} must be even numbers, as 2,8,24", err=True)
        raise typer.Exit(2)
    _measure(measure, _scene(words, replicas=replicas, accum=accum, pace=pace), every, json)


@bench.command("multi")
def bench_multi(
    words: Inside = None,
    interval: Annotated[
        int | None,
        typer.Option(
            help="Steps between failures.  [default: as in production, scaled to a restart here]", min=2
        ),
    ] = None,
    replicas: Replicas = 6,
    accum: Accum = 4,
    pace: Pace = 0.1,
    json: Json = None,
) -> None:
    """Failure after failure, until half of the replicas are gone: throughput and tokens against checkpoint-restart."""
    from recover.bench.multi import bench_multi as measure

    _measure(measure, _scene(words, replicas=replicas, accum=accum, pace=pace), interval, json)


@bench.command("sweep")
def bench_sweep(
    words: Inside = None,
    factors: Annotated[
        str, typer.Option(help="How many times rarer than in production, each measured end to end.")
    ] = "0.5,2",
    known: Annotated[
        Path | None, typer.Option(help="The file of a `recover bench multi`, not to measure that again.")
    ] = None,
    replicas: Replicas = 6,
    accum: Accum = 4,
    pace: Pace = 0.1,
    json: Json = None,
) -> None:
    """How rare must failures be for checkpoint-restart to be as good? Measured points, and arithmetic between them."""
    from recover.bench.sweep import bench_sweep as measure

    rarer = [float(factor) for factor in factors.split(",")]
    _measure(measure, _scene(words, replicas=replicas, accum=accum, pace=pace), rarer, known, json)


@bench.command("peers")
def bench_peers(
    venv: Annotated[
        Path | None, typer.Option(help="Where torchft is installed.  [default: ~/.cache/recover/torchft]")
    ] = None,
    json: Json = None,
) -> None:
    """The same kill on torchft, with its README's settings, where it can be installed."""
    from recover.bench.peers import bench_peers as measure

    _measure(measure, venv, json)


@bench.command("all")
def bench_all(
    output: Annotated[Path, typer.Option(help="Where figures and page go.")] = Path("runs/bench"),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what these sources were measured for already.")
    ] = False,
    long: Annotated[
        bool, typer.Option("--long", help="The paper's ranges: hours, instead of half an hour.")
    ] = False,
) -> None:
    """Every benchmark, and one page of them all. Goes on where it was interrupted."""
    from recover.bench.measure import tidy_on_sigterm
    from recover.bench.suite import bench_all as measure

    tidy_on_sigterm()
    raise typer.Exit(1 if measure(output, fresh, long) else 0)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
