"""`recover bench gpu`: a step without failures, a kill inside a reduction, large sums; on GPUs, for each carrier."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from recover_lab.bench.kills import ACCUM, NO_PROGRESS, measure_kills, sequence_length
from recover_lab.bench.measure import (
    PEER_PROGRAMS,
    BenchmarkError,
    begin,
    launch_program,
    machine_line,
    paired_ratio,
    summary,
    write,
)
from recover_lab.publish.figure import Figure, Results, Rows, ratio_and_interval, show
from recover_lab.publish.measured_sources import measured

PARTS = ("step", "kill", "reduce")
Facts = dict[str, Any]


def bench_gpu(
    models: Sequence[str],
    carriers: Sequence[str],
    replicas: int,
    kill_replicas: int,
    turns: int,
    kills: int,
    parts: Sequence[str],
    device: str,
    output: Path | None,
) -> Facts:
    """Every launch is written to the file when it ends, and adds to what the same sources have measured before.

    A launch that fails is reported at the end. `device` is cpu for tests of the benchmark itself.
    """
    console = begin(output)
    if device == "cuda":
        _check_cuda()
    results: Facts = {"replicas": replicas, "step": {}, "kill": {}, "reduce": {}}
    if output is not None and measured(output):
        results |= json.loads(output.read_text())["gpu"]
    lost: dict[str, str] = {}

    def keep(part: str, *path: str, measure: Callable[[], Facts]) -> None:
        console.print(f"{part} {' '.join(path)} ...", style="dim")
        try:
            facts = measure()
        except BenchmarkError as error:
            lost[" ".join((part, *path))] = str(error)
            console.print(f"{part} {' '.join(path)}: {error}", style="red", markup=False)
            return
        results.update(facts.pop("place"))
        where = results[part]
        for name in path[:-1]:
            where = where.setdefault(name, {})
        where[path[-1]] = facts
        lost.update((f"a launch of {part} {' '.join(path)}", text) for text in facts.get("broken", ()))
        write(output, {"gpu": results})

    for carrier in carriers if "step" in parts else ():
        for model in models:
            keep(
                "step",
                model,
                carrier,
                measure=partial(_step, model, carrier, replicas, turns, device),
            )
    for carrier in carriers if "kill" in parts else ():
        keep("kill", carrier, measure=partial(_kill, models[0], carrier, kill_replicas, kills, device))
    for carrier in carriers if "reduce" in parts else ():
        keep("reduce", carrier, measure=partial(_reduce, carrier, replicas, device))
    show(console, f"{results.get('card', device)}, {replicas} replicas", FIGURE.rows(results))
    console.print(machine_line())
    if lost:
        told = "; ".join(f"{what} ({why})" for what, why in lost.items())
        raise BenchmarkError(f"not measured: {told}; all other results are written")
    return results


def _check_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        asked = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise BenchmarkError(
            f"torch {torch.__version__} sees no CUDA device here (CUDA_VISIBLE_DEVICES is {asked}); this benchmark "
            "measures GPUs: run it where there is one, or `recover bench overhead` on a CPU"
        )


def _stocks(carrier: str, device: str) -> str:
    """Backends of torch to compare with: NCCL where ours uses it, and gloo."""
    return "nccl,gloo" if device == "cuda" and carrier == "nccl" else "gloo"


def _step(model: str, carrier: str, replicas: int, turns: int, device: str) -> Facts:
    seq_len = sequence_length(model)
    words = [device, model, str(seq_len), str(ACCUM), str(turns), _stocks(carrier, device)]
    # On a CPU both orders of turns are tested, one by each carrier, since memory is never too small there.
    words.append("auto" if device == "cuda" else "no" if carrier == "gloo" else "yes")
    ranks = _run("gpu_step.py", replicas, words, carrier, "step-*.json")
    seconds = {
        name: [max(each) for each in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]
        for name in ranks[0]["seconds"]
    }
    ratios = {
        name: dict(zip(("value", "low", "high"), paired_ratio(times, seconds["ours"]), strict=True))
        for name, times in seconds.items()
        if name != "ours"
    }
    peaks = {name: max(rank["peak_bytes"][name] for rank in ranks) for name in ranks[0]["peak_bytes"]}
    return {
        "place": _place(ranks),
        "parameters": ranks[0]["parameters"],
        "seq_len": seq_len,
        "microbatches": ACCUM * replicas,
        "turn_by_turn": ranks[0]["together"],
        "milliseconds": {name: summary([1e3 * s for s in times]) for name, times in seconds.items()},
        "tokens_per_second": {
            name: ACCUM * replicas * seq_len / summary(times)["median"] for name, times in seconds.items()
        },
        "ours_against": ratios,
        "peak_bytes": peaks,
        "refused": ranks[0]["refused"],
    }


def _kill(model: str, carrier: str, replicas: int, kills: int, device: str) -> Facts:
    """Measure at least `kills` deaths. Each launch has as many deaths as leave two replicas, or one death if it
    has only two replicas."""
    deaths = max(1, replicas - 2)
    return measure_kills(model, carrier, replicas, deaths, -(-kills // deaths), device)


def _reduce(carrier: str, replicas: int, device: str) -> Facts:
    sizes = "400,4000" if device == "cuda" else "1,4"
    words = [device, sizes, "3", _stocks(carrier, device)]
    ranks = _run("gpu_reduce.py", replicas, words, carrier, "reduce-*.json")
    found = {}
    for size, ways in ranks[0]["seconds"].items():
        found[size] = {
            way: summary(
                [
                    float(size) / 1e3 / max(each)  # the bytes of one buffer
                    for each in zip(*(rank["seconds"][size][way] for rank in ranks), strict=True)
                ]
            )
            for way in ways
        }
    return {"place": _place(ranks), "gigabytes_per_second": found, "refused": ranks[0]["refused"]}


def _run(program: str, ranks: int, words: Sequence[str], carrier: str, pattern: str) -> list[Facts]:
    with launch_program(
        PEER_PROGRAMS / program, ranks, words, timeout=NO_PROGRESS, carrier=carrier
    ) as run_dir:
        found = [json.loads(path.read_text()) for path in sorted(run_dir.glob(pattern))]
    if len(found) != ranks:
        raise BenchmarkError(f"{program}: {ranks - len(found)} of {ranks} ranks were lost without a kill")
    return found


def _place(ranks: Sequence[Facts]) -> Facts:
    return {key: ranks[0][key] for key in ("card", "cards", "nccl")}


def _values(results: Results) -> dict[str, Any]:
    nccl = f", NCCL {results['nccl']}" if results["nccl"] else ""
    values = {"place": f"{results['replicas']} replicas on {results['cards']} x {results['card']}{nccl}"}
    for model, carriers in results["step"].items():
        for carrier, facts in carriers.items():
            for way, ratio in facts["ours_against"].items():
                values[f"{model}-{carrier}-{way.replace(' ', '-')}"] = f"{ratio['value']:.2f}x"
    for carrier, facts in results["kill"].items():
        values[f"kill-{carrier}"] = f"{facts['less_redone_ms']['median']:.0f} ms"
    return values


def _rows(results: Results) -> Rows:
    rows: Rows = [["", "carrier", "ours", "for comparison, in the same run"]]
    for model, carriers in results["step"].items():
        for carrier, facts in carriers.items():
            name = f"step without failures, {model} ({facts['parameters'] / 1e6:,.0f}M parameters)"
            others = [_step_cell(facts, way) for way in facts["milliseconds"] if way != "ours"]
            rows.append([name, carrier, _step_cell(facts, "ours"), "; ".join(others)])
    for carrier, facts in results["kill"].items():
        took, left = facts["kill_to_commit_ms"], facts["less_redone_ms"]
        name = f"SIGKILL inside a reduction to the commit, {facts['model']}, {facts['replicas']} replicas"
        whole = f"{took['median']:.0f} ms, {left['median']:.0f} less the microbatches run again"
        parts = ", ".join(f"{part} {ms['median']:.0f}" for part, ms in facts["parts_ms"].items())
        kept = f"{facts['deaths']} deaths, every step on {facts['microbatches']} microbatches"
        if facts["broken"]:
            kept += f"; {len(facts['broken'])} of {facts['launches']} launches failed"
        rows.append(
            [name, carrier, whole, f"{parts}; {kept}; a step takes {facts['step_ms']['median']:.0f} ms"]
        )
    for carrier, facts in results["reduce"].items():
        for size, ways in facts["gigabytes_per_second"].items():
            speeds = {way: f"{each['median']:.2f} GB/s" for way, each in ways.items()}
            others = [f"{way} {speed}" for way, speed in speeds.items() if way != "ours"]
            rows.append([f"sum of {size} MB", carrier, speeds["ours"], "; ".join(others)])
    return rows


def _step_cell(facts: Facts, way: str) -> str:
    """Time and memory of a step; of another system also how ours compares."""
    text = f"{facts['milliseconds'][way]['median']:,.0f} ms"
    if way in facts["peak_bytes"]:
        text += f", {facts['peak_bytes'][way] / 2**30:.1f} GiB"
    return text if way == "ours" else f"{way} {text} ({ratio_and_interval(facts['ours_against'][way])})"


FIGURE = Figure(
    name="gpu",
    text="On GPUs: a step without failures, with the times of others and ours as a ratio to their tokens/s; a SIGKILL "
    "inside a reduction; sums of large tensors.",
    paper="Close to the NCCL reference.",
    values=_values,
    rows=_rows,
)
