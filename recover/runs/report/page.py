"""The page of `recover report`, about one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recover.runs.records.goodput import PARTS, shares
from recover.runs.records.incident_times import pause
from recover.runs.records.kinds import Line
from recover.runs.report.comparison import compare
from recover.runs.report.html import render
from recover.runs.report.recorded_runs import Run, read_runs
from recover.runs.report.wording import losses, many, milliseconds, quantity, sentences, stragglers, title

_COLOURS = 6  # `--run-0` and so on, of the theme
_PHASES = {"detect": "--detection", "repair": "--repair", "restore": "--checkpoint", "redo": "--redone"}
_PAUSE = ("pause", "--transfer")
_MOST_BARS = 40
_SUMMARY = {
    "steps": "steps",
    "microbatches_min": "microbatches in a step, least",
    "microbatches_max": "microbatches in a step, most",
    "replicas_start": "replicas at the start",
    "replicas_end": "replicas at the end",
    "failures": "replicas lost",
    "verified": "microbatches verified",
    "unverified": "microbatches to verify that lost their pair",
    "corrupt": "replicas evicted for wrong gradients or sums",
    "wrong_sums": "wrong reduced sums, reduced again",
    "tokens": "tokens",
    "seconds": "seconds",
    "tokens_per_second": "tokens per second",
    "effective_throughput": "tokens per second and living rank",
    "gpu": "GPU",
    "mfu": "model FLOPs utilisation of its peak",
    "gpu_peak_mib": "memory on the GPU, most of a rank, MiB",
    "final_loss": "final loss",
    "parameters_digest": "parameters, SHA-256",
}


def build(run_dirs: list[Path], output: Path) -> Path:
    """Write the page about these runs into `output`. Returns its path."""
    runs = read_runs(run_dirs)
    output.mkdir(parents=True, exist_ok=True)
    page = output / "index.html"
    page.write_text(_page(runs), encoding="utf-8")
    return page


def _page(runs: list[Run]) -> str:
    incidents = [(index, incident) for index, run in enumerate(runs) for incident in run.incidents]
    longest = sorted((pause(incident) for _, incident in incidents), reverse=True)
    return render(
        Path(__file__).with_name("runs.html"),
        title=title(runs[0])
        if len(runs) == 1
        else f"{len(runs)} runs: {', '.join(run.name for run in runs)}",
        runs=[
            {
                "name": run.name,
                "title": title(run),
                "colour": f"--run-{index % _COLOURS}",
                "so_far": f"{run.name}: {many(len(run.steps), 'step')} so far, {losses(run)}.",
                "shares": [
                    (name, f"{100 * share:.3f}") for name, share in shares(run.goodput).items() if share
                ],
            }
            for index, run in enumerate(runs)
        ],
        notes=[*filter(None, map(_state, runs)), *(f"{compare(runs[0], other)}." for other in runs[1:])],
        charts=[_charts(run, f"--run-{index % _COLOURS}") for index, run in enumerate(runs)]
        if any(run.steps for run in runs)
        else [],
        phases=[*_PHASES.items(), *([_PAUSE] if any(i.get("joined_replicas") for _, i in incidents) else [])],
        bars=_MOST_BARS,
        left_out=len(incidents) > _MOST_BARS,
        incidents=[
            (index, _incident(runs[index], incident, longest[:_MOST_BARS])) for index, incident in incidents
        ],
        stragglers=[text for run in runs for text in stragglers(run)],
        goodput=_goodput(runs),
        summary=_summary(runs),
    )


def _charts(run: Run, colour: str) -> dict[str, Any]:
    """Data of a run for `charts.js`."""
    return {
        "name": run.name,
        "colour": colour,
        "series": run.curves.series(),
        "heldout": run.curves.heldout(),
        "global_batch": run.global_batch,
        "incidents": [
            {key: incident.get(key) or [] for key in ("dead_replicas", "joined_replicas", "left_replicas")}
            | {"step": incident["step"]}
            for incident in run.incidents
        ],
        "resumed": [{"step": part.first, "replicas": part.replicas} for part in run.launch_parts[1:]],
    }


def _incident(run: Run, incident: Line, longest: list[float]) -> dict[str, Any]:
    """An incident in words, and its bar: of a loss with its phases, of a join one for the pause."""
    total, joined = pause(incident), bool(incident.get("joined_replicas"))
    spans = {_PAUSE[0]: total} if joined else {name: incident.get(f"{name}_ms") or 0.0 for name in _PHASES}
    colours = dict([_PAUSE]) if joined else _PHASES
    return {
        "step": incident["step"],
        "joined": joined,
        "text": sentences(run, incident),
        "width": f"{75 * total / max(longest[0], 1e-9):.2f}",
        "total": f"{'pause ' if joined else ''}{milliseconds(total)}",
        "bar": [
            (f"{name} {milliseconds(spent)}", colours[name], f"{100 * spent / total:.2f}")
            for name, spent in spans.items()
            if spent
        ]
        if total >= longest[-1]
        else [],
    }


def _state(run: Run) -> str:
    notes = []
    if not run.summary:
        notes.append(f"{run.name} has no summary: it is still going, or was ended before it could write one.")
    if run.unreadable:
        notes.append(f"{many(run.unreadable, 'line')} of {run.name} could not be read.")
    return " ".join(notes)


def _goodput(runs: list[Run]) -> list[tuple[str, str, list[str]]]:
    """All time of all ranks, and what it was spent on; nothing if no step was committed."""
    if not any(run.goodput["total_ms"] for run in runs):
        return []
    parts = [shares(run.goodput) for run in runs]
    return [
        ("", "goodput", [f"{run.goodput['goodput']:.2%}" for run in runs]),
        *(
            (name, what, [f"{of_run[name]:.2%}" for of_run in parts])
            for name, what in PARTS.items()
            if any(of_run[name] for of_run in parts)
        ),
        ("", "all time of all ranks", [f"{quantity(run.goodput['total_ms'] / 1e3)} s" for run in runs]),
    ]


def _summary(runs: list[Run]) -> list[tuple[str, str, list[str]]]:
    """The name of each row of numbers, the class of its cells, and its value in each run."""
    return [
        (
            what,
            "digest" if key == "parameters_digest" else "number",
            [quantity(_value(run, key)) for run in runs],
        )
        for key, what in _SUMMARY.items()
        if any(key in run.summary for run in runs)
    ]


def _value(run: Run, key: str) -> Any:
    """A summary counts the replicas at the start of its own launch, the last one of a resumed run."""
    if key == "replicas_start" and (first := run.launch_parts[0].replicas):
        return first
    return run.summary.get(key, "not known")
