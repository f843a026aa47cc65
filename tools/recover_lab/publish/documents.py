"""Publishes benchmarks: `docs/figures.json`, and the documents that quote it.

A document quotes a value between two comments, and a table between two others:

    <!--fig overhead.ratio-->1.01x<!--/fig-->
    <!--table collectives--> ... <!--/table-->

`recover bench publish` writes the results of runs to the file and to every document that quotes them. A test compares
the documents with the file, so that neither can be edited alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recover_lab.locations import CHECKOUT
from recover_lab.publish.figure import Figure, split_name

FILE = Path("docs", "figures.json")
ORIGIN = ("command", "machine", "commit", "sources", "measured_at")
KINDS = ("", "ddp", "hsdp", "3d")
GPU = "gpu"
# Also measured on a machine with a wheel of torchft, and on one with more cores.
SEVERAL_HOSTS = ("hosts", "hosts-torchft", "hosts-wide")
HEADLINES = ["what", "measured", "in the paper"]
QUOTED = re.compile(r"(<!--fig ([\w.-]+)-->)(.*?)(<!--/fig-->)", re.DOTALL)
TABLE = re.compile(r"(<!--table ([\w-]+)-->\n)(.*?)(<!--/table-->)", re.DOTALL)

Published = dict[str, dict[str, Any]]  # content of docs/figures.json, by the names of the benchmarks' files


def publish(runs: Sequence[Path], figures: Mapping[str, Figure], root: Path = CHECKOUT) -> list[str]:
    """Publish files of benchmarks; returns their names.

    Raises ValueError, and writes nothing, if a document quotes a value that the new results do not have.
    """
    file = root / FILE
    if not file.exists():
        raise ValueError(f"there is no {file}; figures are published in a checkout of the sources")
    published = read(root)
    paths = [path for run in runs for path in (sorted(run.glob("*.json")) if run.is_dir() else [run])]
    for path in paths:
        published[path.stem] = extract(path.stem, json.loads(path.read_text()), figures)
    order = list(figures)
    published = {stem: published[stem] for stem in sorted(published, key=lambda stem: _rank(stem, order))}
    # All documents are filled before the first file is written: a refusal leaves everything unchanged.
    texts = {page: page.read_text() for page in pages(root)}
    filled = {page: fill(text, published) for page, text in texts.items()}
    file.write_text(json.dumps(published, indent=1, ensure_ascii=False) + "\n")
    for page, text in filled.items():
        if text != texts[page]:
            page.write_text(text)
    return [path.stem for path in paths]


def extract(stem: str, content: dict[str, Any], figures: Mapping[str, Figure]) -> dict[str, Any]:
    """The entry of `docs/figures.json` for a benchmark's file."""
    name, kind = split_name(stem)
    if name not in figures or not all(key in content for key in ORIGIN):
        raise ValueError(
            f"{stem} is not a file of a benchmark; such files are called {', '.join(figures)} and hold "
            f"{', '.join(ORIGIN)}"
        )
    figure = figures[name]
    results = figure.results(content)
    return {
        **{key: content[key] for key in ORIGIN},
        "values": {key: str(value) for key, value in figure.values(results).items()},
        "lines": [list(line) for line in figure.headlines(kind, results)],
        "rows": [[str(cell) for cell in row] for row in figure.rows(results)],
    }


def read(root: Path = CHECKOUT) -> Published:
    found: Published = json.loads((root / FILE).read_text())
    return found


def pages(root: Path = CHECKOUT) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])


def fill(text: str, published: Published) -> str:
    """The document with every value and table as published. Raises ValueError for a value that is not published."""

    def value(found: re.Match[str]) -> str:
        name, _, key = found[2].rpartition(".")
        try:
            quoted = origin(published) if found[2] == "origin" else published[name]["values"][key]
        except KeyError:
            raise ValueError(
                f"a document quotes {found[2]}, which {FILE} does not have; publish a run with it"
            ) from None
        return f"{found[1]}{quoted}{found[4]}"

    def table(found: re.Match[str]) -> str:
        rows = (
            [HEADLINES, *(line for each in published.values() for line in each["lines"])]
            if found[2] == "headlines"
            else published.get(found[2], {"rows": []})["rows"]
        )
        return found[1] + to_markdown(rows) + found[4]

    return TABLE.sub(table, QUOTED.sub(value, text))


def origin(published: Published) -> str:
    """The machines of all figures but those of GPUs and of several hosts, whose tables name their own."""
    kept = (each for name, each in published.items() if name not in (GPU, *SEVERAL_HOSTS))
    return "; ".join(dict.fromkeys(map(_machine, kept)))


def to_markdown(rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "No table has been published yet; `recover bench publish` writes it here.\n"
    head, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *others]) + "\n"


def _machine(entry: dict[str, Any]) -> str:
    machine = entry["machine"]
    # Some systems name only the architecture: then both are the same.
    kind = ", ".join(dict.fromkeys((machine["processor"], machine["architecture"])))
    return f"{machine['cores']} cores ({kind}), torch {machine['torch']}, Open MPI {machine['openmpi']}"


def _rank(stem: str, order: Sequence[str]) -> tuple[int, int]:
    name, kind = split_name(stem)
    return order.index(name), KINDS.index(kind) if kind in KINDS else len(KINDS)
