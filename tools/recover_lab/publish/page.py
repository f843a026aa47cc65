"""One page of all benchmarks: our figures, with the paper's next to them as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recover.runs.report.html import render
from recover_lab.publish.documents import HEADLINES, to_markdown
from recover_lab.publish.figure import Figure, Rows, split_name
from recover_lab.publish.measured_sources import measured
from recover_lab.publish.pictures import draw

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
    headlines: Rows = [HEADLINES]
    parts = []
    for path in found:
        name, kind = split_name(path.stem)
        figure, content = figures[name], json.loads(path.read_text())
        headlines += map(list, figure.headlines(kind, figure.results(content)))
        parts.append(_part(figure, path.stem, content, output))
    (output / "figures.md").write_text(to_markdown(headlines), encoding="utf-8")
    page = output / "index.html"
    text = render(
        Path(__file__).with_name("page.html"),
        title="What failures cost",
        leads=(PACED, BASELINE),
        headlines=headlines,
        parts=parts,
    )
    page.write_text(text, encoding="utf-8")
    return page


def _part(figure: Figure, stem: str, content: dict[str, Any], output: Path) -> dict[str, Any]:
    """The section about one file of a benchmark."""
    results = figure.results(content)
    return {
        "name": stem,
        "heading": _heading(stem),
        "before": figure.text,
        "paper": figure.paper,
        "picture": draw(figure.picture, results, output / f"{stem}.png") if figure.picture else None,
        "rows": figure.rows(results),
        "machine": content["machine"],
        "commit": content.get("commit", "not known"),
        "measured_at": content.get("measured_at", ""),
    }


def _heading(stem: str) -> str:
    name, kind = split_name(stem)
    return name.capitalize() + (f", {kind.upper()}" if kind else "")
