"""`recover faults chaos` and `recover faults matrix`: campaigns of faults against a training job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recover.cli.errors import refusals

if TYPE_CHECKING:
    from recover_lab.chaos.on_hosts import HostPlatform

Words = Annotated[list[str], typer.Argument(metavar="-- recover train [CONFIG.yaml] [KEY=VALUE]...")]
HowManyHosts = Annotated[
    int,
    typer.Option(
        metavar="H",
        help="Run on H emulated hosts (3 or more; needs root); faults strike hosts, links and etcd, too.",
    ),
]
SharedDirectory = Annotated[
    bool, typer.Option("--shared", help="With --hosts: the hosts share one run directory.")
]


def add_chaos(app: typer.Typer) -> None:
    app.command("chaos", context_settings={"allow_interspersed_args": False})(chaos)


def add_matrix(app: typer.Typer) -> None:
    app.command("matrix", context_settings={"allow_interspersed_args": False})(matrix)


def chaos(
    words: Words,
    seed: Annotated[int, typer.Option(help="Seed of the first run; the following runs count up.")] = 0,
    minutes: Annotated[float | None, typer.Option(help="Start no run after this time.")] = None,
    runs: Annotated[
        int | None, typer.Option(help="Number of runs.  [default: 10, or as --minutes says]")
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(metavar="LOW:HIGH", help="Draw the number of replicas, too; B stays the same."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Directory for runs with violations.  [default: a temporary directory]"),
    ] = None,
    returns: Annotated[
        bool,
        typer.Option("--return", help="Lost replicas and hosts are restarted, and struck again."),
    ] = False,
    hosts: HowManyHosts = 0,
    shared: SharedDirectory = False,
) -> None:
    """Random fault schedules against a training job. Every step must have B microbatches, and nothing may hang."""
    from recover.faults.command import read_range
    from recover_lab.bench.measure import exit_on_sigterm
    from recover_lab.chaos import campaign as campaign

    exit_on_sigterm()
    with refusals("recover faults chaos"):
        span = read_range(replicas, "--replicas") if replicas else None
        limit = 10 if runs is None and minutes is None else runs
        platform = _hosts(hosts, shared, returns) if hosts else campaign.LocalMachine(returns)
        raise typer.Exit(campaign.chaos(_keys(words), seed, minutes, limit, span, output, platform))


def matrix(
    words: Words,
    launches: Annotated[
        int | None,
        typer.Option(help="Launches to run; those with the most cells come first.  [default: all]", min=1),
    ] = None,
    skip: Annotated[int, typer.Option(help="Skip this many launches, which were run before.", min=0)] = 0,
    jobs: Annotated[int, typer.Option(help="Launches at the same time.", min=1)] = 1,
    write: Annotated[Path | None, typer.Option(help="Page whose table is replaced.")] = None,
    hosts: HowManyHosts = 0,
    shared: SharedDirectory = False,
) -> None:
    """A death at every location, of every role, alone, in pairs and during recoveries, many in one launch."""
    from recover_lab.bench.measure import exit_on_sigterm
    from recover_lab.chaos import matrix as campaign

    exit_on_sigterm()
    with refusals("recover faults matrix"):
        if hosts:
            from recover_lab.chaos.host_matrix import host_matrix

            platform = _hosts(hosts, shared)
            raise typer.Exit(host_matrix(_keys(words), platform, launches, write, jobs, skip=skip))
        raise typer.Exit(campaign.matrix(_keys(words), launches, write, jobs, skip=skip))


def _hosts(count: int, shared: bool, returns: bool = False) -> HostPlatform:
    from recover_lab.chaos.on_hosts import HostPlatform
    from recover_lab.lab.hosts import unavailable

    hosts = HostPlatform(count, shared, returns)
    if reason := unavailable():
        raise ValueError(f"--hosts {count}: {reason}")
    return hosts


def _keys(words: list[str]) -> list[str]:
    """The words without a leading `recover train`."""
    return words[2:] if words[:2] == ["recover", "train"] else words
