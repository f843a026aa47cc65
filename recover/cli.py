"""The command `recover`. Each verb imports what it needs when it is called, so that `--help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
