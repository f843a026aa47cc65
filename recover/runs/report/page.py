"""One page about one or several runs: it stands alone, with its pictures inside."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from recover.runs.records.goodput import PARTS, shares
from recover.runs.report.comparison import compare
from recover.runs.report.pictures import COLOURS, draw
from recover.runs.report.recorded_runs import Run, read_runs
from recover.runs.report.wording import losses, many, quantity, sentences, stragglers, title

_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1000px; margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; line-height: 1.3; margin-bottom: .3rem; }
h2 { font-size: 1.2rem; margin-top: 2.4rem; }
p.lead { color: #555; margin: .3rem 0; }
img { width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.digest { font: 13px monospace; overflow-wrap: anywhere; }
td.name { white-space: nowrap; }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
"""
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
    """Read the runs, draw, and write the page and its pictures into `output`."""
    runs = read_runs(run_dirs)
    output.mkdir(parents=True, exist_ok=True)
    pictures = draw(runs, output)
    page = output / "index.html"
    page.write_text(_page(runs, pictures), encoding="utf-8")
    return page


def _page(runs: list[Run], pictures: list[Path]) -> str:
    body = _head(runs)
    for picture in pictures:
        heading, caption = _CAPTIONS[picture.stem]
        body += [f"<h2>{heading}</h2><p>{caption}</p>", inline(picture, heading)]
    body += ["<h2>What happened</h2>", _incident_table(runs)]
    body += [f"<p>{escape(text)}</p>" for run in runs for text in stragglers(run)]
    body += ["<h2>Goodput</h2>", _goodput_table(runs)]
    body += ["<h2>Numbers</h2>", _summary_table(runs)]
    return document(_heading(runs), body)


def document(title: str, body: list[str]) -> str:
    """A page that stands alone."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_CSS}</style></head>\n'
        "<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def inline(picture: Path, name: str) -> str:
    """The picture itself, inside the page."""
    data = base64.b64encode(picture.read_bytes()).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{escape(name)}">'


def _heading(runs: list[Run]) -> str:
    return title(runs[0]) if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"


def _head(runs: list[Run]) -> list[str]:
    lines = [f"<h1>{escape(_heading(runs))}</h1>"]
    lead = (
        [f"{_key(index, runs)}{escape(title(run))}" for index, run in enumerate(runs)]
        if len(runs) > 1
        else []
    )
    lead += [escape(_state(run)) for run in runs if _state(run)]
    lead += [escape(compare(runs[0], other)) + "." for other in runs[1:]]
    return lines + [f'<p class="lead">{text}</p>' for text in lead]


def _state(run: Run) -> str:
    notes = []
    if not run.summary:
        notes.append(f"{run.name} has no summary: it is still going, or was ended before it could write one.")
    if run.unreadable:
        notes.append(f"{many(run.unreadable, 'line')} of {run.name} could not be read.")
    return " ".join(notes)


def _key(index: int, runs: list[Run]) -> str:
    if len(runs) == 1:
        return ""
    return f'<span class="key" style="background: {COLOURS[index % len(COLOURS)]}"></span>'


def _incident_table(runs: list[Run]) -> str:
    rows = [
        f'<tr><td class="number">{incident["step"]}</td>'
        + (f'<td class="name">{_key(index, runs)}{escape(run.name)}</td>' if len(runs) > 1 else "")
        + f"<td>{escape(sentences(run, incident)).replace(' ms', '&nbsp;ms')}</td></tr>"
        for index, run in enumerate(runs)
        for incident in run.incidents
    ]
    if not rows:
        return "<p>Nobody died.</p>"
    run_column = "<th>run</th>" if len(runs) > 1 else ""
    return f'<table><tr><th class="number">step</th>{run_column}<th>incident</th></tr>{"".join(rows)}</table>'


def _goodput_table(runs: list[Run]) -> str:
    """All time of all ranks, and where it went."""
    told = [(run.goodput, shares(run.goodput)) for run in runs]
    if not any(goodput["total_ms"] for goodput, _ in told):
        return "<p>No step was committed.</p>"
    head = "".join(
        f'<th class="number">{_key(index, runs)}{escape(run.name)}</th>' for index, run in enumerate(runs)
    )
    rows = [
        f'<tr><td class="name">{what}</td>'
        + "".join(f'<td class="number">{part[name]:.2%}</td>' for _, part in told)
        + "</tr>"
        for name, what in PARTS.items()
        if any(part[name] for _, part in told)
    ]
    good = "".join(
        f'<td class="number"><strong>{goodput["goodput"]:.2%}</strong></td>' for goodput, _ in told
    )
    total = "".join(f'<td class="number">{quantity(g["total_ms"] / 1e3)} s</td>' for g, _ in told)
    return (
        f'<table><tr><th></th>{head}</tr><tr><td class="name"><strong>goodput</strong></td>{good}</tr>{"".join(rows)}'
        f'<tr><td class="name">all time of all ranks</td>{total}</tr></table>'
    )


def _summary_table(runs: list[Run]) -> str:
    head = "".join(
        f'<th class="number">{_key(index, runs)}{escape(run.name)}</th>' for index, run in enumerate(runs)
    )
    rows = []
    for key, name in _SUMMARY.items():
        if any(key in run.summary for run in runs):
            kind = "digest" if key == "parameters_digest" else "number"
            cells = [
                f'<td class="{kind}">{escape(quantity(run.summary.get(key, "not known")))}</td>'
                for run in runs
            ]
            rows.append(f'<tr><td class="name">{name}</td>{"".join(cells)}</tr>')
    if not rows:
        known = [f"{run.name}: {many(len(run.steps), 'step')} so far, {losses(run)}." for run in runs]
        return "".join(f"<p>{escape(line)}</p>" for line in known)
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"
