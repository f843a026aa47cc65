"""`recover bench titan`: one torchtitan job on ReCoVer, under torchrun with restarts, and on torchft."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from recover_lab.bench.measure import BenchmarkError, begin, machine_line, paired_ratio, summary, write
from recover_lab.peers.runs import scratch
from recover_lab.peers.titan_assets import make_assets
from recover_lab.peers.titan_runs import OURS, RESTART, TORCHFT, TitanJob, judge_kill, step_times, titan_run
from recover_lab.peers.torchft_runs import TorchftUnavailable, install_torchft, torchft_home
from recover_lab.publish.figure import Figure, Headline, Results, Rows, ratio_and_interval, show

PARTS = ("step", "kill")
SYSTEMS = (OURS, RESTART, TORCHFT)
WARM_UP = 3  # log lines of a launch that do not count
SAVE_EVERY = 10  # steps between checkpoints of a job that restarts from them
KILL_AFTER = 15
PATIENCE = 300.0  # seconds for one launch to reach what is awaited
LIKE_STOCK = 1e-4  # relative difference of losses that is rounding, and not another trajectory


@dataclass(frozen=True)
class TitanOptions:
    model: str
    replicas: int
    accum: int
    turns: int
    lines: int  # log lines of a launch that count
    every: int  # steps between two log lines
    local: int
    length: int
    device: str
    attention: str
    carrier: str
    arguments: tuple[str, ...]


def bench_titan(
    options: TitanOptions,
    parts: Sequence[str],
    systems: Sequence[str],
    environment: Path | None,
    output: Path | None,
) -> dict[str, Any]:
    """A launch that fails is reported at the end; everything that was measured is written."""
    console = begin(output)
    if find_spec("torchtitan") is None:
        raise BenchmarkError("torchtitan is not installed; run: pip install 'recover-train[titan]'")
    results: dict[str, Any] = {"model": options.model, "replicas": options.replicas, "step": {}, "kill": {}}
    results |= {"device": _device(options.device), "settings": _settings(options)}
    with scratch() as directory:
        assets = make_assets(directory / "assets")
        job = TitanJob(
            options.model,
            options.device,
            options.replicas,
            options.replicas * options.local,
            options.local,
            options.length,
            assets,
            arguments=options.arguments,
            attention=options.attention,
            carrier=options.carrier,
        )
        if "step" in parts:
            for measured in _steps(job, options, directory, console):
                results["step"] = measured
                write(output, {"titan": results})
        for system in systems if "kill" in parts else ():
            console.print(f"kill, {system} ...", style="dim")
            try:
                results["kill"][system] = _kill(job, system, directory, environment, console)
            except (BenchmarkError, TorchftUnavailable) as reason:
                console.print(f"{system}: not measured: {reason}", markup=False)
                results["kill"][system] = {"not_measured": str(reason)}
            write(output, {"titan": results})
    _compare_losses(results["kill"])
    write(output, {"titan": results})
    title = f"torchtitan, llama3 {options.model}, {options.replicas} replicas, {results['device']}"
    show(console, title, FIGURE.rows(results))
    console.print(machine_line())
    return results


def _device(kind: str) -> str:
    if kind == "cpu":
        return "CPU"
    import torch

    if not torch.cuda.is_available():
        raise BenchmarkError(f"torch {torch.__version__} sees no CUDA device here; give --device cpu")
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


def _settings(options: TitanOptions) -> dict[str, Any]:
    names = ("accum", "local", "length", "attention", "carrier", "arguments")
    return {name: getattr(options, name) for name in names}


def _steps(
    job: TitanJob, options: TitanOptions, directory: Path, console: Console
) -> Iterator[dict[str, Any]]:
    """Launches of both in turn; a step is the median of a launch. Yields what is known after each turn: a launch that
    fails later loses no measurement."""
    batch = job.batch * options.accum
    job = job.but(batch=batch, every=options.every, steps=options.every * (WARM_UP + options.lines + 1))
    seconds: dict[str, list[float]] = {OURS: [], RESTART: []}
    for turn in range(options.turns):
        # Each goes first in every other turn.
        for system in (OURS, RESTART) if turn % 2 else (RESTART, OURS):
            console.print(f"step, {system}, launch {turn + 1} of {options.turns} ...", style="dim")
            with titan_run(job, system, directory / f"step-{turn}-{system[:4]}") as run:
                lines = run.wait_for(_reached(job.every * (WARM_UP + options.lines)), PATIENCE)
            seconds[system].append(median(step_times(_first_of_each(lines), WARM_UP)))
        value, low, high = paired_ratio(seconds[RESTART], seconds[OURS])
        yield {
            "batch": batch,
            "launches": {name: [1e3 * each for each in values] for name, values in seconds.items()},
            "milliseconds": {
                name: summary([1e3 * each for each in values]) for name, values in seconds.items()
            },
            "ours_against_stock": {"value": value, "low": low, "high": high},
        }


def _kill(
    job: TitanJob, system: str, directory: Path, environment: Path | None, console: Console
) -> dict[str, Any]:
    """One replica is killed after some steps; the job runs until all replicas compute again."""
    python = install_torchft(environment or torchft_home(), console) if system == TORCHFT else None
    # torchft sends its state through the checkpoint manager.
    saving = job.but(save_every=0 if system == OURS else SAVE_EVERY)
    with titan_run(saving, system, directory / f"kill-{system[:7]}", python) as run:
        run.wait_for(_reached(KILL_AFTER), PATIENCE)
        killed_at = run.kill(job.replicas - 1)
        run.wait_for(_goes_on(killed_at), PATIENCE)
        broken = ""
        try:
            run.wait_for(_whole_again(killed_at, job.replicas, shrinks=system != RESTART), PATIENCE)
        except BenchmarkError as error:
            broken = str(error)
        lines = run.lines()
    facts = judge_kill(lines, killed_at, job.replicas) | {"batch": job.batch, "broken": broken}
    return facts | {"losses": {str(line["step"]): line["loss"] for line in lines}}


def _reached(step: int) -> Callable[[list[dict[str, Any]]], Any]:
    return lambda lines: lines if lines and lines[-1]["step"] >= step else None


def _goes_on(at: float) -> Callable[[list[dict[str, Any]]], Any]:
    """A condition: a new step, higher than all before the kill, was committed after it."""

    def done(lines: list[dict[str, Any]]) -> bool:
        before = max(line["step"] for line in lines if line["at"] <= at)
        return any(line["at"] > at and line["step"] > before for line in lines)

    return done


def _whole_again(at: float, replicas: int, shrinks: bool) -> Callable[[list[dict[str, Any]]], Any]:
    """A condition: all replicas take part again, for some steps. `shrinks`: only after steps with fewer replicas."""

    def done(lines: list[dict[str, Any]]) -> Any:
        before = max(line["step"] for line in lines if line["at"] <= at)
        after = sorted(
            (line for line in lines if line["at"] > at and line["step"] > before),
            key=lambda line: float(line["at"]),
        )
        fewer = [number for number, line in enumerate(after) if line["replicas"] < replicas]
        whole = after[fewer[-1] + 1 :] if fewer else [] if shrinks else after
        return lines if len(whole) > 3 else None

    return done


def _first_of_each(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each step: torchtitan alone logs on all ranks."""
    return list({line["step"]: line for line in reversed(lines)}.values())[::-1]


def _compare_losses(kills: dict[str, Any]) -> None:
    """Largest relative difference of losses from those of torchtitan alone, over the steps that both have."""
    stock = kills.get(RESTART, {}).get("losses")
    for facts in kills.values():
        if stock and "losses" in facts:
            both = facts["losses"].keys() & stock.keys()
            facts["difference"] = max(abs(facts["losses"][step] / stock[step] - 1) for step in both)
            facts["compared_steps"] = len(both)


def _values(results: Results) -> dict[str, Any]:
    values: dict[str, Any] = {"place": f"{results['replicas']} replicas, {results['device']}"}
    if step := results["step"]:
        values["step"] = f"{step['ours_against_stock']['value']:.2f}x"
    for system, facts in results["kill"].items():
        key = {OURS: "ours", RESTART: "restart", TORCHFT: "torchft"}[system]
        values[f"{key}-next"] = _seconds(facts, "seconds_to_next_step")
        values[f"{key}-full"] = _seconds(facts, "seconds_to_full_strength")
    return values


def _seconds(facts: dict[str, Any], key: str) -> str:
    if key in facts:
        return f"{facts[key]:.1f} s"
    return (
        f"not measured: {facts['not_measured']}" if "not_measured" in facts else f"never: {facts['broken']}"
    )


def _rows(results: Results) -> Rows:
    rows: Rows = [["", *SYSTEMS]]
    if step := results["step"]:
        cells = [f"{step['milliseconds'][name]['median']:.1f} ms" for name in (OURS, RESTART)]
        ratio = ratio_and_interval(step["ours_against_stock"])
        rows.append(
            [f"step without failures, {step['batch']} sequences", f"{cells[0]} ({ratio})", cells[1], ""]
        )
    if kills := results["kill"]:

        def row(name: str, cell: Callable[[dict[str, Any]], str]) -> None:
            found = (kills.get(system, {"not_measured": "not asked for"}) for system in SYSTEMS)
            rows.append([name, *(each.get("not_measured") or cell(each) for each in found)])

        row("SIGKILL to the next new step", lambda facts: _seconds(facts, "seconds_to_next_step"))
        row("SIGKILL to a step of all replicas", lambda facts: _seconds(facts, "seconds_to_full_strength"))
        row("steps run again", lambda facts: str(facts["steps_run_again"]))
        row("sequences of a step afterwards", lambda facts: ", ".join(map(str, facts["sequences"])))
        row("losses against torchtitan alone", _difference)
    return rows


def _difference(facts: dict[str, Any]) -> str:
    if "difference" not in facts:
        return "not compared"
    same = "the same" if facts["difference"] < LIKE_STOCK else "another trajectory"
    return f"{same}: {facts['difference']:.1e} over {facts['compared_steps']} steps"


def _headlines(kind: str, results: Results) -> Iterator[Headline]:
    if step := results["step"]:
        yield "step on torchtitan, against stock HSDP", ratio_and_interval(step["ours_against_stock"]), ""
    for system, facts in results["kill"].items():
        yield (
            f"torchtitan, SIGKILL to the next new step, {system}",
            _seconds(facts, "seconds_to_next_step"),
            "",
        )


FIGURE = Figure(
    name="titan",
    text="One torchtitan job on ReCoVer, under torchrun with restarts from checkpoints, and on torchft.",
    values=_values,
    rows=_rows,
    headlines=_headlines,
)
