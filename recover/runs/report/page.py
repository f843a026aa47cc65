"""The page of `recover report`, about one or several runs."""

from __future__ import annotations

from pathlib import Path

from recover.runs.records.goodput import PARTS, shares
from recover.runs.report.comparison import compare
from recover.runs.report.html import render
from recover.runs.report.pictures import COLOURS, draw
from recover.runs.report.recorded_runs import Run, read_runs
from recover.runs.report.wording import losses, many, quantity, sentences, stragglers, title

_CAPTIONS = {
    "loss": ("Loss", "A dashed mark is a step in which somebody died; above it stands which replica."),
    "steps": ("Steps", "What each committed step was taken on, by how many replicas, and how fast."),
    "incidents": (
        "Incidents",
        "Detect: from the first sign of a death to the repair, while survivors finish what they were dealt. "
        "Repair: until the world is whole. Restore and redo: until the gradients are.",
    ),
}
_SUMMARY = {
    "steps": "steps",
    "microbatches_min": "microbatches in a step, least",
    "microbatches_max": "microbatches in a step, most",
    "replicas_start": "replicas at the start",
    "replicas_end": "replicas at the end",
    "failures": "replicas lost",
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
    """Write the page about these runs and its pictures into `output`. Returns the path of the page."""
    runs = read_runs(run_dirs)
    output.mkdir(parents=True, exist_ok=True)
    pictures = draw(runs, output)
    page = output / "index.html"
    page.write_text(_page(runs, pictures), encoding="utf-8")
    return page


def _page(runs: list[Run], pictures: list[Path]) -> str:
    return render(
        Path(__file__).with_name("runs.html"),
        title=title(runs[0])
        if len(runs) == 1
        else f"{len(runs)} runs: {', '.join(run.name for run in runs)}",
        runs=[
            {
                "name": run.name,
                "title": title(run),
                "colour": COLOURS[index % len(COLOURS)],
                "so_far": f"{run.name}: {many(len(run.steps), 'step')} so far, {losses(run)}.",
            }
            for index, run in enumerate(runs)
        ],
        notes=[*filter(None, map(_state, runs)), *(f"{compare(runs[0], other)}." for other in runs[1:])],
        pictures=[(*_CAPTIONS[picture.stem], picture) for picture in pictures],
        incidents=[
            (index, incident["step"], sentences(run, incident))
            for index, run in enumerate(runs)
            for incident in run.incidents
        ],
        stragglers=[text for run in runs for text in stragglers(run)],
        goodput=_goodput(runs),
        summary=_summary(runs),
    )


def _state(run: Run) -> str:
    notes = []
    if not run.summary:
        notes.append(f"{run.name} has no summary: it is still going, or was ended before it could write one.")
    if run.unreadable:
        notes.append(f"{many(run.unreadable, 'line')} of {run.name} could not be read.")
    return " ".join(notes)


def _goodput(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """All time of all ranks, and what it was spent on; nothing if no step was committed."""
    if not any(run.goodput["total_ms"] for run in runs):
        return []
    parts = [shares(run.goodput) for run in runs]
    return [
        ("goodput", [f"{run.goodput['goodput']:.2%}" for run in runs]),
        *(
            (what, [f"{of_run[name]:.2%}" for of_run in parts])
            for name, what in PARTS.items()
            if any(of_run[name] for of_run in parts)
        ),
        ("all time of all ranks", [f"{quantity(run.goodput['total_ms'] / 1e3)} s" for run in runs]),
    ]


def _summary(runs: list[Run]) -> list[tuple[str, str, list[str]]]:
    """What each row of numbers is, the class of its cells, and its value in each run."""
    return [
        (
            what,
            "digest" if key == "parameters_digest" else "number",
            [quantity(run.summary.get(key, "not known")) for run in runs],
        )
        for key, what in _SUMMARY.items()
        if any(key in run.summary for run in runs)
    ]
