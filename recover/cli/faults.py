"""`recover faults`: each verb imports what it needs when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recover.cli.refusals import refusals

if TYPE_CHECKING:
    from recover.chaos.on_hosts import Hosts

app = typer.Typer(
    no_args_is_help=True,
    help="Schedules of faults: make one, check one, or let chance strike a training job.",
)

Words = Annotated[list[str], typer.Argument(metavar="-- recover train [CONFIG.yaml] [KEY=VALUE]...")]
HowManyHosts = Annotated[
    int,
    typer.Option(
        metavar="H",
        help="On so many hosts of a lab (3 or more; needs root); hosts, cables and etcd are struck, too.",
    ),
]
SharedDirectory = Annotated[
    bool, typer.Option("--shared", help="With --hosts: they share one run directory.")
]


@app.command("make")
def make(
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
    from recover.faults import command

    with refusals("recover faults make"):
        text = command.make(replicas, replica_size, seed, count, steps, mtbf, locations, actions)
    typer.echo(text, nl=False)


@app.command("check")
def check(
    schedule: Annotated[Path, typer.Argument(metavar="FILE.yaml")],
    replicas: Annotated[int | None, typer.Option(help="Replicas of the job.")] = None,
    replica_size: Annotated[int | None, typer.Option(help="Ranks that hold one copy of the model.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the job.")] = None,
) -> None:
    """Say which faults of a schedule can never strike, and why."""
    from recover.faults import command

    with refusals("recover faults check"):
        found, problems = command.check(schedule, replicas, replica_size, steps)
    typer.echo("\n".join(problems or [f"{len(found)} faults, each of which can strike"]))
    raise typer.Exit(1 if problems else 0)


@app.command("chaos", context_settings={"allow_interspersed_args": False})
def chaos(
    words: Words,
    seed: Annotated[int, typer.Option(help="Of the first run; the next ones count on from it.")] = 0,
    minutes: Annotated[float | None, typer.Option(help="Begin no run after so long.")] = None,
    runs: Annotated[int | None, typer.Option(help="How many.  [default: 10, or as --minutes says]")] = None,
    replicas: Annotated[
        str | None, typer.Option(metavar="LOW:HIGH", help="Draw their number, too; B stays the same.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where violations are kept.  [default: a temporary directory]")
    ] = None,
    returns: Annotated[
        bool,
        typer.Option("--return", help="Lost replicas are started again, and struck again; lost hosts, too."),
    ] = False,
    hosts: HowManyHosts = 0,
    shared: SharedDirectory = False,
) -> None:
    """Random schedules against a training job: every step on B microbatches, nothing lost, no hang, no leftover."""
    from recover.bench.measure import tidy_on_sigterm
    from recover.chaos import campaign as campaign
    from recover.faults.command import read_range

    tidy_on_sigterm()
    with refusals("recover faults chaos"):
        span = read_range(replicas, "--replicas") if replicas else None
        limit = 10 if runs is None and minutes is None else runs
        ground = _hosts(hosts, shared, returns) if hosts else campaign.OneMachine(returns)
        raise typer.Exit(campaign.chaos(_keys(words), seed, minutes, limit, span, output, ground))


@app.command("matrix", context_settings={"allow_interspersed_args": False})
def matrix(
    words: Words,
    launches: Annotated[
        int | None, typer.Option(help="Only so many, those that serve most cells.  [default: all]", min=1)
    ] = None,
    skip: Annotated[
        int, typer.Option(help="Go on after the first so many launches, which were run before.", min=0)
    ] = 0,
    jobs: Annotated[int, typer.Option(help="Launches at a time.", min=1)] = 1,
    write: Annotated[Path | None, typer.Option(help="A page whose table is replaced.")] = None,
    hosts: HowManyHosts = 0,
    shared: SharedDirectory = False,
) -> None:
    """A death at every location, of every role, alone, in pairs and during recoveries, many in one launch."""
    from recover.bench.measure import tidy_on_sigterm
    from recover.chaos import matrix as campaign

    tidy_on_sigterm()
    with refusals("recover faults matrix"):
        if hosts:
            from recover.chaos.host_matrix import host_matrix

            ground = _hosts(hosts, shared)
            raise typer.Exit(host_matrix(_keys(words), ground, launches, write, jobs, skip=skip))
        raise typer.Exit(campaign.matrix(_keys(words), launches, write, jobs, skip=skip))


def _hosts(count: int, shared: bool, returns: bool = False) -> Hosts:
    from recover.chaos.on_hosts import Hosts
    from recover.lab.hosts import unavailable

    hosts = Hosts(count, shared, returns)
    if reason := unavailable():
        raise ValueError(f"--hosts {count}: {reason}")
    return hosts


def _keys(words: list[str]) -> list[str]:
    """Without the command that they are written after."""
    return words[2:] if words[:2] == ["recover", "train"] else words
