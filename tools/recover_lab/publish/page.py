"""One page of all benchmarks: our figures, with the paper's next to them as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from recover.runs.report.page import document, inline
from recover_lab.publish.documents import HEADLINES, to_markdown
from recover_lab.publish.figure import Figure, Rows, split_name
from recover_lab.publish.measured_sources import measured
from recover_lab.publish.pictures import draw

TITLE = "What failures cost"
PACED = (
    "The comparisons are paced: every microbatch takes at least a set time, most of it waiting, as if each rank had "
    "an accelerator of its own. Ranks that share a few cores would get faster when one dies, which would flatter the "
    "system that continues without it. Processes, SIGKILLs, communication, failure handling, restarts and checkpoints "
    "are real."
)
BASELINE = (
    "The baseline is stock torch on gloo: DistributedDataParallel, fully_shard on a 2-D mesh, or its tensor and "
    "pipeline parallelism, with asynchronous torch.distributed.checkpoint to memory (/dev/shm) and torchrun's own "
    "restart, at full size again each time."
)


def build(output: Path, figures: Mapping[str, Figure]) -> Path:
    """The page of all files that were measured on the present sources; its headlines also as `figures.md`."""
    order = list(figures)
    found = [path for path in output.glob("*.json") if split_name(path.stem)[0] in figures and measured(path)]
    found.sort(key=lambda path: (order.index(split_name(path.stem)[0]), path.stem))
    contents = {path.stem: json.loads(path.read_text()) for path in found}
    headlines: Rows = [HEADLINES]
    sections = []
    for stem, content in contents.items():
        name, kind = split_name(stem)
        figure = figures[name]
        headlines += map(list, figure.headlines(kind, figure.results(content)))
        sections += _section(figure, stem, content, output)
    (output / "figures.md").write_text(to_markdown(headlines), encoding="utf-8")
    body = [f"<h1>{TITLE}</h1>", f'<p class="lead">{PACED}</p>', f'<p class="lead">{BASELINE}</p>']
    page = output / "index.html"
    page.write_text(document(TITLE, [*body, _table(headlines), *sections]), encoding="utf-8")
    return page


def _section(figure: Figure, stem: str, content: dict[str, Any], output: Path) -> list[str]:
    results, machine = figure.results(content), content["machine"]
    section = [f"<h2>{escape(_heading(stem))}</h2>", f"<p>{escape(figure.text)}</p>"]
    if figure.picture is not None:
        section.append(inline(draw(figure.picture, results, output / f"{stem}.png"), stem))
    section.append(_table(figure.rows(results)))
    if figure.paper:
        section.append(f"<p><i>The paper:</i> {escape(figure.paper)}</p>")
    section.append(
        f'<p class="lead">{machine["cores"]} cores ({escape(machine["processor"])}), torch {machine["torch"]}, '
        f"Open MPI {machine['openmpi']}, commit {content.get('commit', 'not known')}, "
        f"{content.get('measured_at', '')}</p>"
    )
    return section


def _heading(stem: str) -> str:
    name, kind = split_name(stem)
    return name.capitalize() + (f", {kind.upper()}" if kind else "")


def _table(rows: Rows) -> str:
    head, *others = rows
    cells = "".join(f'<th class="number">{escape(str(cell))}</th>' for cell in head)
    lines = [
        "<tr>" + "".join(f'<td class="number">{escape(str(cell))}</td>' for cell in row) + "</tr>"
        for row in others
    ]
    return f"<table><tr>{cells}</tr>{''.join(lines)}</table>"
