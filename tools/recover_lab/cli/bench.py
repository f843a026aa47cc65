"""`recover bench`. Each command imports its benchmark when it is called, so that `--help` is quick."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from recover.cli.errors import refusals
from recover_lab.peers.scene import PACE

app = typer.Typer(no_args_is_help=True, help="Benchmarks: ratios against a named peer in the same run.")
Inside = Annotated[
    list[str] | None,
    typer.Argument(metavar="[parallel=hsdp shard=2]", help="How a replica is built; one process by default."),
]
Replicas = Annotated[int, typer.Option(help="Replicas at the start.", min=2)]
Accum = Annotated[int, typer.Option(help="Microbatches that a replica accumulates in a step.", min=1)]
Model = Annotated[str, typer.Option(help="Size of the model: tiny, small, 1b or 7b.")]
Turns = Annotated[int, typer.Option(help="Turns of each system.", min=3)]
Pace = Annotated[float, typer.Option(help="Seconds that a microbatch takes at least, mostly waiting.", min=0)]
TorchftHome = Annotated[
    Path | None, typer.Option(help="Virtual environment of torchft.  [default: ~/.cache/recover/torchft]")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write results and machine to this file.")]


@app.command("collectives")
def bench_collectives(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "2,4,8",
    megabytes: Annotated[str, typer.Option(help="Sizes of the buffer, in MB.")] = "1,25,100",
    rounds: Annotated[int, typer.Option(help="Measurements of each way.", min=2)] = 9,
    json: Json = None,
) -> None:
    """All-reduce by our carriers, ulfm_allreduce with its probe and stock gloo, and the bound of memory bandwidth."""
    from recover_lab.bench.collectives import bench_collectives as measure

    with refusals("recover bench collectives"):
        numbers = [int(n) for n in ranks.split(",")], [float(size) for size in megabytes.split(",")]
    _measure(measure, *numbers, rounds, json)


@app.command("overhead")
def bench_overhead(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[parallel=hsdp] [shard=2]", help="How a replica is built; one process by default."
        ),
    ] = None,
    model: Model = "small",
    replicas: Annotated[int, typer.Option(min=2)] = 2,
    seq_len: Annotated[int, typer.Option(min=1)] = 128,
    accum: Accum = 2,
    turns: Turns = 20,
    json: Json = None,
) -> None:
    """Tokens/s and memory without failures, against stock torch (DDP or HSDP) on gloo, turn by turn."""
    from recover_lab.bench.training import bench_overhead as measure
    from recover_lab.peers.scene import inside

    with refusals("recover bench overhead"):
        sizes = inside(words or [])
        if sizes.keys() - {"shard"}:
            raise ValueError(
                f"{' '.join(words or [])!r}: 3D is not measured; give parallel=ddp or parallel=hsdp shard=2"
            )
    _measure(measure, model, replicas, sizes.get("shard", 1), seq_len, accum, turns, json)


@app.command("data")
def bench_data(
    model: Model = "tiny",
    replicas: Annotated[int, typer.Option(min=2)] = 2,
    seq_len: Annotated[int, typer.Option(min=1)] = 128,
    sequences: Annotated[int, typer.Option(help="Items of a microbatch.", min=1)] = 4,
    accum: Accum = 2,
    workers: Annotated[int, typer.Option(help="Reader processes of a replica.", min=1)] = 2,
    turns: Annotated[int, typer.Option(help="Turns of each system, of five steps.", min=3)] = 10,
    slow_ms: Annotated[
        float, typer.Option(help="Milliseconds that an item of the slow dataset takes.", min=0)
    ] = 10.0,
    json: Json = None,
) -> None:
    """recover.stream with workers against torch's DataLoader under stock DDP, in memory and with a slow dataset."""
    from recover_lab.bench.reading import bench_data as measure

    _measure(measure, model, replicas, seq_len, sequences, accum, workers, turns, slow_ms, json)


@app.command("watch")
def bench_watch(
    model: Model = "tiny",
    replicas: Annotated[int, typer.Option(min=2)] = 2,
    seconds: Annotated[float, typer.Option(help="Length of a turn.", min=1)] = 5,
    turns: Annotated[int, typer.Option(help="Turns with monitors, and as many without.", min=2)] = 12,
    json: Json = None,
) -> None:
    """Cost of monitoring: steps with an open page and Prometheus and without, turn by turn, in one run."""
    from recover_lab.bench.monitoring import bench_watch as measure

    _measure(measure, model, replicas, seconds, turns, json)


@app.command("paced")
def bench_paced(
    replicas: Replicas = 8,
    accum: Accum = 32,
    pace: Annotated[float, typer.Option(help="Seconds per microbatch, mostly waiting.", min=0.001)] = 0.05,
    factors: Annotated[
        str, typer.Option(help="How slow one replica becomes, separated by commas.")
    ] = "1.2,1.5,2,3,4",
    json: Json = None,
) -> None:
    """One replica becomes slow: time of a step with policy=paced, over that of equal replicas in the same run."""
    from recover_lab.bench.paced import bench_paced as measure

    slow = _factors("paced", factors)
    with refusals("recover bench paced --factors"):
        if wrong := [factor for factor in slow if factor <= 1]:
            raise ValueError(f"{wrong[0]:g} is not slow; give factors above 1, such as 1.2,2")
    _measure(measure, replicas, accum, pace, slow, json)


@app.command("recovery")
def bench_recovery(replicas: Annotated[int, typer.Option(min=2)] = 4, json: Json = None) -> None:
    """From SIGKILL inside a reduction to the commit of that step."""
    from recover_lab.bench.training import bench_recovery as measure

    _measure(measure, replicas, json)


@app.command("repair")
def bench_repair(
    ranks: Annotated[int, typer.Option(help="Ranks at the start.", min=2)] = 8, json: Json = None
) -> None:
    """From SIGKILL to a repaired world with a working carrier."""
    from recover_lab.bench.collectives import bench_repair as measure

    _measure(measure, ranks, json)


@app.command("hosts")
def bench_hosts(
    parts: Annotated[
        str, typer.Option(help="Any of agreement, step, kill, links, peers.")
    ] = "agreement,step,kill,links,peers",
    replicas: Annotated[
        str, typer.Option(help="Numbers of replicas that agree, separated by commas.")
    ] = "4,16,64",
    agreements: Annotated[int, typer.Option(help="Agreements of each number.", min=2)] = 40,
    hosts: Annotated[str, typer.Option(help="Numbers of hosts that take a step, with a rank each.")] = "2,4",
    model: Model = "small",
    turns: Turns = 20,
    struck: Annotated[int, typer.Option(help="Hosts of a job with kills.", min=3)] = 3,
    per_host: Annotated[int, typer.Option(help="Ranks on each of these hosts.", min=2)] = 2,
    rounds: Annotated[int, typer.Option(help="Jobs with kills.", min=1)] = 3,
    pace: Pace = PACE,
    lease: Annotated[
        float, typer.Option(help="Seconds without a sign of life after which a host counts as lost.", min=2)
    ] = 2,
    link_timeout: Annotated[
        float, typer.Option(help="Seconds without a byte after which a link counts as broken.", min=2)
    ] = 5,
    timeout: Annotated[
        float, typer.Option(help="The same for stock torch; torchft uses the 5 s of its README.", min=1)
    ] = 5,
    venv: TorchftHome = None,
    json: Json = None,
) -> None:
    """Several hosts, emulated where possible: agreements, steps, lost ranks, hosts and links, and other systems."""
    from recover_lab.bench.several_hosts import PARTS, HostsOptions
    from recover_lab.bench.several_hosts import bench_hosts as measure

    with refusals("recover bench hosts"):
        chosen = _chosen("--parts", parts, PARTS)
        voters, sizes = ([int(count) for count in text.split(",")] for text in (replicas, hosts))
    struck_job = (struck, per_host, rounds, pace, lease, link_timeout, timeout)
    options = HostsOptions(chosen, voters, agreements, sizes, model, turns, *struck_job)
    _measure(measure, options, venv, json)


@app.command("return")
def bench_return(
    megabytes: Annotated[str, typer.Option(help="Approximate sizes of the state, in MB.")] = "5,50,200",
    replicas: Annotated[int, typer.Option(min=2)] = 3,
    rounds: Annotated[int, typer.Option(help="Rejoins of ours, of each size.", min=1)] = 3,
    pace: Pace = PACE,
    venv: TorchftHome = None,
    json: Json = None,
) -> None:
    """A replica dies and rejoins: time to full strength and wait of the others, against two other systems."""
    from recover_lab.bench.rejoin_hosts import bench_return as measure

    with refusals("recover bench return"):
        sizes = [float(size) for size in megabytes.split(",")]
        if not all(0 < size < 1e6 for size in sizes):
            raise ValueError(f"--megabytes {megabytes}: give numbers above 0, such as 5,50")
    _measure(measure, replicas, pace, sizes, rounds, venv, json)


def _scene(words: list[str] | None, **given: Any) -> Any:
    """The scene of a comparison, from its options."""
    from recover_lab.peers.runs import configure, scratch
    from recover_lab.peers.scene import Scene, inside

    with refusals("recover bench"):
        scene = Scene(**given).but(**inside(words or []))
        with scratch() as directory:
            configure(scene, directory)  # refuses a grid that does not fit the model
        return scene


def _factors(verb: str, text: str) -> list[float]:
    with refusals(f"recover bench {verb} --factors"):
        rarer = [float(factor) for factor in text.split(",")]
        if not all(0 < factor < 1e6 for factor in rarer):
            raise ValueError(f"{text!r}: give numbers above 0, such as 0.5,2")
        return rarer


def _chosen(option: str, text: str, known: Collection[str]) -> list[str]:
    """The words of an option. Raises ValueError for an unknown one."""
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
    steps: Annotated[int, typer.Option(help="Steps of a run; the paper has 260.", min=2)] = 32,
    every: Annotated[int, typer.Option(help="Steps between deaths; the paper has 5.", min=1)] = 8,
    seed: int = 0,
    json: Json = None,
) -> None:
    """The same training without failures, with half of its replicas lost, and with a batch that shrinks."""
    from recover_lab.bench.trajectory import bench_trajectory as measure

    scene = _scene(words, replicas=replicas, accum=accum, pace=pace, steps=steps, seed=seed)
    _measure(measure, scene, every, json)


@app.command("breakdown")
def bench_breakdown(
    words: Inside = None,
    intervals: Annotated[str, typer.Option(help="Steps between checkpoints; even numbers.")] = "2,8,24",
    replicas: Replicas = 6,
    accum: Accum = 4,
    pace: Pace = PACE,
    json: Json = None,
) -> None:
    """Cost of one failure in step 1.5N: ours, and checkpoint-restart with a checkpoint every N steps."""
    from recover_lab.bench.breakdown import bench_breakdown as measure

    with refusals("recover bench breakdown"):
        words_of = [n.strip() for n in intervals.split(",")]
        if not all(n.isdigit() and int(n) and int(n) % 2 == 0 for n in words_of):
            raise ValueError(f"--intervals {intervals}: give even numbers, such as 2,8,24")
        every = [int(n) for n in words_of]
    _measure(measure, _scene(words, replicas=replicas, accum=accum, pace=pace), every, json)


@app.command("multi")
def bench_multi(
    words: Inside = None,
    interval: Annotated[
        int | None,
        typer.Option(
            help="Steps between failures.  [default: as in production, scaled to a restart on this machine]",
            min=2,
        ),
    ] = None,
    replicas: Replicas = 6,
    accum: Accum = 4,
    pace: Pace = PACE,
    returns: Annotated[
        bool, typer.Option("--return", help="Lost replicas rejoin: tokens an hour at several rates.")
    ] = False,
    factors: Annotated[
        str, typer.Option(help="With --return: how many times rarer failures are, each measured end to end.")
    ] = "1,4",
    json: Json = None,
) -> None:
    """Failure after failure, until half of the replicas are lost: throughput and tokens against checkpoint-restart."""
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
        str,
        typer.Option(help="How many times rarer failures are than in production, each measured end to end."),
    ] = "0.5,2",
    known: Annotated[
        Path | None, typer.Option(help="File of a `recover bench multi`, which is then not measured again.")
    ] = None,
    replicas: Replicas = 6,
    accum: Accum = 4,
    pace: Pace = PACE,
    json: Json = None,
) -> None:
    """The rate of failures at which checkpoint-restart is as good: measured points, and arithmetic between them."""
    from recover_lab.bench.sweep import bench_sweep as measure

    rarer = _factors("sweep", factors)
    _measure(measure, _scene(words, replicas=replicas, accum=accum, pace=pace), rarer, known, json)


@app.command("peers")
def bench_peers(
    venv: TorchftHome = None,
    json: Json = None,
) -> None:
    """The same kill on torchft, with the settings of its README, where it can be installed."""
    from recover_lab.bench.peers import bench_peers as measure

    _measure(measure, venv, json)


@app.command("gpu")
def bench_gpu(
    models: Annotated[str, typer.Option(help="Sizes of the model; kills use the first one.")] = "small,1b",
    carriers: Annotated[str, typer.Option(help="Any of nccl, mpi, gloo.")] = "nccl,mpi,gloo",
    replicas: Annotated[int, typer.Option(help="Replicas of a step, and of a sum.", min=2)] = 2,
    kill_replicas: Annotated[int, typer.Option(help="Replicas of a job with kills.", min=2)] = 3,
    turns: Turns = 10,
    kills: Annotated[int, typer.Option(help="Deaths of each carrier, at least.", min=1)] = 5,
    parts: Annotated[str, typer.Option(help="Any of step, kill, reduce.")] = "step,kill,reduce",
    device: Annotated[str, typer.Option(hidden=True, help="cpu: for tests of the benchmark.")] = "cuda",
    json: Json = None,
) -> None:
    """On GPUs, for each carrier: a step against stock DDP and against no communication, a kill, large sums."""
    from recover.job.spec import CARRIERS
    from recover.train.config import MODELS
    from recover_lab.bench.gpu import PARTS
    from recover_lab.bench.gpu import bench_gpu as measure

    with refusals("recover bench gpu"):
        sizes = _chosen("--models", models, MODELS)
        ways = _chosen("--carriers", carriers, [name for name in CARRIERS if name != "auto"])
        pieces = _chosen("--parts", parts, PARTS)
    _measure(measure, sizes, ways, replicas, kill_replicas, turns, kills, pieces, device, json)


@app.command("titan", context_settings={"ignore_unknown_options": True})
def bench_titan(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- --compile.enable ...]", help="Further options of torchtitan."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Llama 3 of torchtitan: debug, 1b, debug_float8 or 1b_float8.")
    ] = "debug",
    replicas: Annotated[int, typer.Option(min=2)] = 2,
    accum: Accum = 1,
    turns: Annotated[int, typer.Option(help="Launches of each system for the step.", min=2)] = 3,
    lines: Annotated[int, typer.Option(help="Log lines of a launch that count.", min=3)] = 10,
    every: Annotated[int, typer.Option(help="Steps between two log lines.", min=1)] = 5,
    local: Annotated[int, typer.Option(help="Sequences of a microbatch.", min=1)] = 1,
    seq_len: Annotated[int, typer.Option(min=1)] = 128,
    attention: Annotated[str, typer.Option(help="On GPUs: flex, flex_flash, varlen or sdpa.")] = "flex",
    carrier: Annotated[str, typer.Option(help="Of ReCoVer: auto, mpi, gloo or nccl.")] = "auto",
    parts: Annotated[str, typer.Option(help="Any of step, kill.")] = "step,kill",
    systems: Annotated[str, typer.Option(help="Of the kill: any of ours, restart, torchft.")] = (
        "ours,restart,torchft"
    ),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    venv: TorchftHome = None,
    json: Json = None,
) -> None:
    """One torchtitan job on ReCoVer, under torchrun with restarts, and on torchft: a step, and a kill."""
    from recover_lab.bench.titan import PARTS, TitanOptions
    from recover_lab.bench.titan import bench_titan as measure
    from recover_lab.peers.titan_runs import OURS, RESTART, TORCHFT

    names = {"ours": OURS, "restart": RESTART, "torchft": TORCHFT}
    with refusals("recover bench titan"):
        _chosen("--model", model, ("debug", "1b", "debug_float8", "1b_float8"))
        _chosen("--device", device, ("cpu", "cuda"))
        _chosen("--attention", attention, ("flex", "flex_flash", "varlen", "sdpa"))
        pieces = _chosen("--parts", parts, PARTS)
        chosen = [names[name] for name in _chosen("--systems", systems, names)]
    options = TitanOptions(
        model=model,
        replicas=replicas,
        accum=accum,
        turns=turns,
        lines=lines,
        every=every,
        local=local,
        length=seq_len,
        device=device,
        attention=attention,
        carrier=carrier,
        arguments=tuple(words or ()),
    )
    _measure(measure, options, pieces, chosen, venv, json)


@app.command("verify")
def bench_verify(
    batches: Annotated[str, typer.Option(help="Global batches, B.")] = "16,256",
    replicas: Annotated[int, typer.Option(min=2, help="Replicas of one rank.")] = 4,
    slots: Annotated[
        int, typer.Option("--verify", min=1, help="Slots that are verified in each step, K.")
    ] = 1,
    steps: Annotated[int, typer.Option(min=8, help="Steps of a run.")] = 24,
    pace: Annotated[
        float, typer.Option(min=0, help="Seconds of a microbatch at least, by waiting: for few cores.")
    ] = 0.02,
    turns: Annotated[int, typer.Option(min=1, help="Pairs of runs for each B.")] = 3,
    json: Json = None,
) -> None:
    """Cost of verified gradients: step time with verify=K against verify=0, in turns."""
    from recover_lab.bench.verify import bench_verify as measure

    with refusals("recover bench verify"):
        sizes = [int(size) for size in batches.split(",")]
        if any(size < max(replicas, slots) for size in sizes):
            raise ValueError(
                f"--batches {batches}: give {max(replicas, slots)} or more, one slot for each replica"
            )
    _measure(measure, sizes, replicas, slots, steps, pace, turns, json)


@app.command("sums")
def bench_sums(
    steps: Annotated[int, typer.Option(min=8, help="Steps of a run.")] = 2000,
    batch: Annotated[int, typer.Option(min=2, max=256, help="Microbatches per step, B.")] = 8,
    lr: Annotated[float, typer.Option(min=0, help="The highest learning rate.")] = 3e-3,
    seed: int = 0,
    json: Json = None,
) -> None:
    """Loss curves of one training with fast sums, and with reproducible ones in words of 64 and of 32 bits."""
    from recover_lab.bench.sums import bench_sums as measure

    _measure(measure, steps, batch, lr, seed, json)


@app.command("simulate")
def bench_simulate(
    gpus: Annotated[str, typer.Option(help="GPUs of the clusters.")] = "1024,16384,131072,600000",
    json: Json = None,
) -> None:
    """Failures simulated per second, and memory, as the cluster grows; and a whole study of 600,000 GPUs."""
    from recover_lab.bench.simulations import bench_simulate as measure

    with refusals("recover bench simulate"):
        sizes = [int(size) for size in gpus.split(",")]
        if any(size < 16 or size % 8 for size in sizes):
            raise ValueError(f"--gpus {gpus}: give multiples of 8 (whole nodes), 16 at least")
    _measure(measure, sizes, json)


@app.command("publish")
def bench_publish(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN.json | DIRECTORY]...", help="Results of benchmarks.  [default: runs/bench]"
        ),
    ] = None,
) -> None:
    """Write results to docs/figures.json, and to every document that quotes them."""
    from recover_lab.bench.figures import FIGURES
    from recover_lab.publish.documents import publish

    with refusals("recover bench publish"):
        names = publish(runs or [Path("runs/bench")], FIGURES)
        typer.echo(f"published: {', '.join(names) or 'nothing'}")


@app.command("all")
def bench_all(
    output: Annotated[Path, typer.Option(help="Directory of results and page.")] = Path("runs/bench"),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what was measured on the present sources.")
    ] = False,
    long: Annotated[
        bool, typer.Option("--long", help="The paper's ranges: hours instead of half an hour.")
    ] = False,
) -> None:
    """Every benchmark, and one page of them all. Continues where it was interrupted."""
    from recover_lab.bench.measure import exit_on_sigterm
    from recover_lab.bench.suite import bench_all as measure

    exit_on_sigterm()
    raise typer.Exit(1 if measure(output, fresh, long) else 0)


def add_bench(parent: typer.Typer) -> None:
    parent.add_typer(app, name="bench")
