"""One self-contained page about a simulated cluster, with its pictures."""

from __future__ import annotations

import json
from pathlib import Path

from recover.runs.report.html import render
from recover_lab.simulate.simulation_pictures import draw_simulation
from recover_lab.simulate.simulation_tables import (
    CHANGES,
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
    page = output / "index.html"
    tables = {"parts": lost_rows(study), "rates": rate_rows(study)}
    told = study.answer.sentences() if study.answer else []
    text = render(
        Path(__file__).with_name("simulation_page.html"),
        title=study.question.title,
        leads=(
            *told[:1],
            *filter(None, [study.question.assumed_model]),
            *told[1:],
            *study.question.understood,
            _HONEST,
            *study.question.notes,
        ),
        changes=CHANGES,
        systems=system_rows(study),
        pictures=[
            (*_CAPTIONS[name], picture, tables.get(name, []))
            for name, picture in draw_simulation(study, output).items()
        ],
        crossings=crossing_rows(study),
        worth=value_rows(study),
        parameters=parameter_rows(study.question),
    )
    page.write_text(text, encoding="utf-8")
    return page
