"""One self-contained page about a simulated cluster, with its pictures."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from recover.runs.report.page import document, inline
from recover_lab.simulate.simulation_pictures import draw_simulation
from recover_lab.simulate.simulation_tables import (
    Rows,
    crossing_rows,
    lost_rows,
    parameter_rows,
    rate_rows,
    system_rows,
    value_rows,
)
from recover_lab.simulate.study import Study

_CAPTIONS = {
    "parts": (
        "Where the time goes",
        "All GPU time that is paid for. Preserved work is what a run without failures and checkpoints would have done "
        "in that time, and what no rollback has taken back.",
    ),
    "rates": (
        "More failures, and fewer",
        "The same job at other rates; the dashed line is the one asked for.",
    ),
    "sweep": ("Sweep", "Each point a simulation of its own."),
}
_HONEST = (
    "A simulation. The policy is the one that runs in production; times are parameters. The last table says of each "
    "one where it comes from: published, measured, given, assumed."
)


def build_simulation(study: Study, output: Path) -> Path:
    """Write the page, its pictures and `simulation.json` to `output`; returns the path of the page."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "simulation.json").write_text(json.dumps(study.to_json(), indent=1) + "\n")
    body = [f"<h1>What failures cost: {escape(study.question.title)}</h1>", f'<p class="lead">{_HONEST}</p>']
    body += [f'<p class="lead">{escape(note)}</p>' for note in study.question.notes]
    body.append(_table(system_rows(study)))
    for name, picture in draw_simulation(study, output).items():
        heading, caption = _CAPTIONS[name]
        body += [f"<h2>{heading}</h2><p>{caption}</p>", inline(picture, heading)]
        if name == "parts":
            body.append(_table(lost_rows(study)))
        if name == "rates":
            body.append(_table(rate_rows(study)))
    if rows := crossing_rows(study):
        body += ["<h2>Where they cross</h2>", _table(rows)]
    if rows := value_rows(study):
        body += ["<h2>What a change is worth</h2>", _table(rows)]
    body += ["<h2>Parameters</h2>", _table(parameter_rows(study.question), numbers=False)]
    page = output / "index.html"
    page.write_text(document(study.question.title, body), encoding="utf-8")
    return page


def _table(rows: Rows, numbers: bool = True) -> str:
    head, *others = rows

    def line(row: list[str], tag: str) -> str:
        kinds = ["name"] + ["number" if numbers else ""] * (len(row) - 1)
        cells = (
            f'<{tag} class="{kind}">{escape(cell)}</{tag}>' for kind, cell in zip(kinds, row, strict=True)
        )
        return f"<tr>{''.join(cells)}</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in others)}</table>"
