"""`recover bench`: each verb imports what it needs when it is called."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from recover.cli.errors import refusals
from recover_lab.peers.scene import PACE

app = typer.Typer(
    no_args_is_help=True, help="Measure: each figure a ratio against a named peer in the same run."
)
Inside = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[parallel=hsdp shard=2]", help="How a replica is built; one process, unless said."
    ),
]
Replicas = Annotated[int, typer.Option(help="Replicas at the start.", min=2)]
Accum = Annotated[int, typer.Option(help="Microbatches that each of them accumulates in a step.", min=1)]
Model = Annotated[str, typer.Option(help="Of a step: tiny, small, 1b or 7b.")]
Turns = Annotated[int, typer.Option(help="Steps of each kind, turn by turn.", min=3)]
Pace = Annotated[
    float, typer.Option(help="Seconds that a microbatch takes at least, most of it waiting.", min=0)
]
TorchftHome = Annotated[
    Path | None, typer.Option(help="Where torchft is installed.  [default: ~/.cache/recover/torchft]")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures and the machine to this file.")]


@app.command("collectives")
def bench_collectives(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,4,8",
    megabytes: Annotated[str, typer.Option(help="Sizes of the buffer.")] = "1,25,100",
    rounds: Annotated[int, typer.Option(help="Measurements of each.", min=2)] = 9,
    json: Json = None,
) -> None:
    """All-reduce: our carriers, ulfm_allreduce with its probe, stock gloo, and the bound that memory sets."""
    from recover_lab.bench.collectives import bench_collectives as measure

    with refusals("recover bench collectives"):
        numbers = [int(n) for n in ranks.split(",")], [float(size) for size in megabytes.split(",")]
    _measure(measure, *numbers, rounds, json)


@app.command("overhead")
def bench_overhead(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[parallel=hsdp] [shard=2]", help="How a replica is built; one process, unless said."
        ),
    ] = None,
    model: Model = "small",
    replicas: Annotated[int, typer.Option(min=2)] = 2,
    seq_len: Annotated[int, typer.Option(min=1)] = 128,
    accum: Accum = 2,
    turns: Turns = 20,
    json: Json = None,
) -> None:
    """Without failures: tokens/s and memory against stock torch (DDP or HSDP) on gloo, turn by turn."""
    from recover_lab.bench.training import bench_overhead as measure
    from recover_lab.peers.scene import inside

    with refusals("recover bench overhead"):
        sizes = inside(words or [])
        if sizes.keys() - {"shard"}:
            raise ValueError("it takes parallel=ddp or parallel=hsdp shard=2; 3D is not measured")
    _measure(measure, model, replicas, sizes.get("shard", 1), seq_len, accum, turns, json)


@app.command("data")
def bench_data(
    model: Model = "tiny",
    replicas: Annotated[int, typer.Option(min=2)] = 2,
    seq_len: Annotated[int, typer.Option(min=1)] = 128,
    sequences: Annotated[int, typer.Option(help="Items in a microbatch.", min=1)] = 4,
    accum: Accum = 2,
    workers: Annotated[int, typer.Option(help="Processes that read, per replica.", min=1)] = 2,
    turns: Annotated[int, typer.Option(help="Turns of each, of five steps.", min=3)] = 10,
    slow_ms: Annotated[float, typer.Option(help="What an item of the slow dataset takes.", min=0)] = 10.0,
    json: Json = None,
) -> None:
    """recover.stream with workers against torch's DataLoader under stock DDP; a slow dataset, hidden or not."""
    from recover_lab.bench.reading import bench_data as measure

    _measure(measure, model, replicas, seq_len, sequences, accum, workers, turns, slow_ms, json)


@app.command("watch")
def bench_watch(
    model: Model = "tiny",
    replicas: Annotated[int, typer.Option(min=2)] = 2,
    seconds: Annotated[float, typer.Option(help="Of one turn.", min=1)] = 5,
    turns: Annotated[int, typer.Option(help="With onlookers, and as many without.", min=2)] = 12,
    json: Json = None,
) -> None:
    """What a page that is open and Prometheus cost a step: with them and without, turn by turn, in one run."""
    from recover_lab.bench.monitoring import bench_watch as measure

    _measure(measure, model, replicas, seconds, turns, json)


@app.command("recovery")
def bench_recovery(replicas: Annotated[int, typer.Option(min=2)] = 4, json: Json = None) -> None:
    """From SIGKILL in the middle of a reduction to the commit of that very step."""
    from recover_lab.bench.training import bench_recovery as measure

    _measure(measure, replicas, json)


@app.command("repair")
def bench_repair(
    ranks: Annotated[int, typer.Option(help="How many ranks to begin with.", min=2)] = 8, json: Json = None
) -> None:
    """From SIGKILL to a repaired world with a working carrier."""
    from recover_lab.bench.collectives import bench_repair as measure

    _measure(measure, ranks, json)


@app.command("hosts")
def bench_hosts(
    parts: Annotated[str, typer.Option(help="agreement, step, kill, peers.")] = "agreement,step,kill,peers",
    replicas: Annotated[str, typer.Option(help="Numbers of replicas that agree.")] = "4,16,64",
    agreements: Annotated[int, typer.Option(help="Measurements of each.", min=2)] = 40,
    hosts: Annotated[str, typer.Option(help="Numbers of hosts that take a step, a rank on each.")] = "2,4",
    model: Model = "small",
    turns: Turns = 20,
    struck: Annotated[int, typer.Option(help="Hosts of a job that is struck.", min=3)] = 3,
    per_host: Annotated[int, typer.Option(help="Ranks on each of them.", min=2)] = 2,
    rounds: Annotated[int, typer.Option(help="Jobs that are struck.", min=1)] = 3,
    pace: Pace = PACE,
    lease: Annotated[
        float, typer.Option(help="Seconds without a sign after which a host is lost.", min=2)
    ] = 2,
    timeout: Annotated[
        float, typer.Option(help="The same for stock torch; torchft has its README's 5 s.", min=1)
    ] = 5,
    venv: TorchftHome = None,
    json: Json = None,
) -> None:
    """Several hosts, emulated where possible: agreements, a step, lost ranks, hosts and cables, and other systems."""
    from recover_lab.bench.several_hosts import PARTS, HostsOptions
    from recover_lab.bench.several_hosts import bench_hosts as measure

    with refusals("recover bench hosts"):
        chosen = _chosen("--parts", parts, PARTS)
        voters, sizes = ([int(count) for count in text.split(",")] for text in (replicas, hosts))
    struck_job = (struck, per_host, rounds, pace, lease, timeout)
    options = HostsOptions(chosen, voters, agreements, sizes, model, turns, *struck_job)
    _measure(measure, options, venv, json)


@app.command("return")
def bench_return(
    megabytes: Annotated[str, typer.Option(help="Sizes of the state, about.")] = "5,50,200",
    replicas: Annotated[int, typer.Option(min=2)] = 3,
    rounds: Annotated[int, typer.Option(help="Returns of ours, of each size.", min=1)] = 3,
    pace: Pace = PACE,
    venv: TorchftHome = None,
    json: Json = None,
) -> None:
    """A replica dies and comes back: time to full strength and what the others wait for, beside two other systems."""
    from recover_lab.bench.rejoin_hosts import bench_return as measure

    with refusals("recover bench return"):
        sizes = [float(size) for size in megabytes.split(",")]
        if not all(0 < size < 1e6 for size in sizes):
            raise ValueError(f"--megabytes {megabytes}: give numbers above 0, as 5,50")
    _measure(measure, replicas, pace, sizes, rounds, venv, json)


def _scene(words: list[str] | None, **given: Any) -> Any:
    """What a comparison runs, from its options; refusals as sentences."""
    from recover_lab.peers.runs import configure, scratch
    from recover_lab.peers.scene import Scene, inside

    with refusals("recover bench"):
        scene = Scene(**given).but(**inside(words or []))
        with scratch() as directory:
            configure(scene, directory)  # a grid that does not fit the model is refused now
        return scene


def _factors(verb: str, text: str) -> list[float]:
    with refusals(f"recover bench {verb} --factors"):
        rarer = [float(factor) for factor in text.split(",")]
        if not all(0 < factor < 1e6 for factor in rarer):
            raise ValueError(f"{text} must be numbers above 0, as 0.5,2")
        return rarer


def _chosen(option: str, text: str, known: Collection[str]) -> list[str]:
    """Raises ValueError for a word that nobody knows."""
    words = text.split(",")
    if wrong := [word for word in words if word not in known]:
        raise ValueError(f"{option}: {wrong[0]!r} must be one of {', '.join(known)}")
    return words


def _measure(measure: Any, *arguments: Any) -> None:
    from recover_lab.bench.measure import BenchmarkError, exit_on_sigterm

    exit_on_sigterm()
    try:
        measure(*arguments)
    except BenchmarkError as error:
        typer.echo(f"recover bench: {error}", err=True)
        raise typer.Exit(1) from None


@app.command("trajectory")
def bench_trajectory(
    words: Inside = None,
    replicas: Replicas = 6,
    accum: Accum = 4,
    pace: Pace = PACE,
    steps: Annotated[int, typer.Option(help="The paper has 260.", min=2)] = 32,
    every: Annotated[int, typer.Option(help="Steps between deaths; the paper has 5.", min=1)] = 8,
    seed: int = 0,
    json: Json = None,
) -> None:
    """The same training undisturbed, losing half of its replicas, and with a batch that shrinks: curves and speed."""
    from recover_lab.bench.trajectory import bench_trajectory as measure

    scene = _scene(words, replicas=replicas, accum=accum, pace=pace, steps=steps, seed=seed)
    _measure(measure, scene, every, json)


@app.command("breakdown")
def bench_breakdown(
    words: Inside = None,
    intervals: Annotated[str, typer.Option(help="Steps between checkpoints, even numbers.")] = "2,8,24",
    replicas: Replicas = 6,
    accum: Accum = 4,
    pace: Pace = PACE,
    json: Json = None,
) -> None:
    """One failure in step 1.5N: what it costs us, and checkpoint-restart with a checkpoint every N steps."""
    from recover_lab.bench.breakdown import bench_breakdown as measure

    with refusals("recover bench breakdown"):
        words_of = [n.strip() for n in intervals.split(",")]
        if not all(n.isdigit() and int(n) and int(n) % 2 == 0 for n in words_of):
            raise ValueError(f"--intervals {intervals} must be even numbers, as 2,8,24")
        every = [int(n) for n in words_of]
    _measure(measure, _scene(words, replicas=replicas, accum=accum, pace=pace), every, json)


@app.command("multi")
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
    pace: Pace = PACE,
    returns: Annotated[
        bool, typer.Option("--return", help="Lost replicas come back: tokens an hour at several rates.")
    ] = False,
    factors: Annotated[
        str, typer.Option(help="With --return: how many times rarer, each measured end to end.")
    ] = "1,4",
    json: Json = None,
) -> None:
    """Failure after failure, until half of the replicas are gone: throughput and tokens against checkpoint-restart."""
    scene = _scene(words, replicas=replicas, accum=accum, pace=pace)
    if returns:
        from recover_lab.bench.rejoin import bench_multi_rejoining

        _measure(bench_multi_rejoining, scene, interval, _factors("multi", factors), json)
        return
    from recover_lab.bench.multi import bench_multi as measure

    _measure(measure, scene, interval, json)


@app.command("sweep")
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
    pace: Pace = PACE,
    json: Json = None,
) -> None:
    """How rare must failures be for checkpoint-restart to be as good? Measured points, and arithmetic between them."""
    from recover_lab.bench.sweep import bench_sweep as measure

    rarer = _factors("sweep", factors)
    _measure(measure, _scene(words, replicas=replicas, accum=accum, pace=pace), rarer, known, json)


@app.command("peers")
def bench_peers(
    venv: TorchftHome = None,
    json: Json = None,
) -> None:
    """The same kill on torchft, with its README's settings, where it can be installed."""
    from recover_lab.bench.peers import bench_peers as measure

    _measure(measure, venv, json)


@app.command("gpu")
def bench_gpu(
    models: Annotated[str, typer.Option(help="Sizes; kills are tried with the first one.")] = "small,1b",
    carriers: Annotated[str, typer.Option(help="nccl, mpi, gloo.")] = "nccl,mpi,gloo",
    replicas: Annotated[int, typer.Option(help="Of a step, and of a sum.", min=2)] = 2,
    kill_replicas: Annotated[int, typer.Option(help="Of a job that loses some.", min=2)] = 3,
    turns: Turns = 10,
    kills: Annotated[int, typer.Option(help="Deaths for each carrier, at least.", min=1)] = 5,
    parts: Annotated[str, typer.Option(help="step, kill, reduce.")] = "step,kill,reduce",
    device: Annotated[str, typer.Option(hidden=True, help="cpu: to try the benchmark itself.")] = "cuda",
    json: Json = None,
) -> None:
    """On GPUs: a step against stock DDP and no communication at all, a kill, large sums, for each carrier."""
    from recover.job.spec import CARRIERS
    from recover.train.config import MODELS
    from recover_lab.bench.gpu import PARTS
    from recover_lab.bench.gpu import bench_gpu as measure

    with refusals("recover bench gpu"):
        sizes = _chosen("--models", models, MODELS)
        ways = _chosen("--carriers", carriers, [name for name in CARRIERS if name != "auto"])
        pieces = _chosen("--parts", parts, PARTS)
    _measure(measure, sizes, ways, replicas, kill_replicas, turns, kills, pieces, device, json)


@app.command("simulate")
def bench_simulate(
    gpus: Annotated[str, typer.Option(help="Sizes of clusters.")] = "1024,16384,131072,600000",
    json: Json = None,
) -> None:
    """Failures simulated per second, and memory, as the cluster grows; and a whole study of 600,000 GPUs."""
    from recover_lab.bench.simulations import bench_simulate as measure

    with refusals("recover bench simulate"):
        sizes = [int(size) for size in gpus.split(",")]
        if any(size < 16 or size % 8 for size in sizes):
            raise ValueError(f"--gpus {gpus}: whole nodes of 8 GPUs, two at least")
    _measure(measure, sizes, json)


@app.command("publish")
def bench_publish(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN.json | DIRECTORY]...", help="Files of benchmarks.  [default: runs/bench]"
        ),
    ] = None,
) -> None:
    """Put figures into docs/figures.json, and into every document that quotes them."""
    from recover_lab.bench.figures import FIGURES
    from recover_lab.publish.documents import publish

    with refusals("recover bench publish"):
        names = publish(runs or [Path("runs/bench")], FIGURES)
        typer.echo(f"published: {', '.join(names) or 'nothing'}")


@app.command("all")
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
    from recover_lab.bench.measure import exit_on_sigterm
    from recover_lab.bench.suite import bench_all as measure

    exit_on_sigterm()
    raise typer.Exit(1 if measure(output, fresh, long) else 0)


def add_bench(parent: typer.Typer) -> None:
    parent.add_typer(app, name="bench")
