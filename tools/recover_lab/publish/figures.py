"""One source for every figure: `docs/figures.json`, written by benchmarks, and quoted by the documents.

A document quotes a value between two comments, and a whole table between two others:

    <!--fig overhead.ratio-->1.01x<!--/fig-->
    <!--table collectives--> ... <!--/table-->

`recover bench publish` puts the figures of runs into the file, and into every document that quotes them. A test holds
the documents against the file, so that neither changes alone.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recover_lab.locations import CHECKOUT
from recover_lab.publish.headlines import Content, headlines
from recover_lab.publish.tables import rows_of

FILE = Path("docs", "figures.json")
ORIGIN = ("command", "machine", "commit", "sources", "measured_at")
ORDER = (
    "trajectory",
    "breakdown",
    "multi",
    "sweep",
    "peers",
    "overhead",
    "recovery",
    "repair",
    "collectives",
    "hosts",
    "return",
    "returning",
    "gpu",
    "simulate",
)
KINDS = ("", "ddp", "hsdp", "3d")
GPU = "gpu"
# On a machine that has a wheel of torchft's, and on one with more cores.
SEVERAL_HOSTS = ("hosts", "hosts-torchft", "hosts-wide")
QUOTED = re.compile(r"(<!--fig ([\w.-]+)-->)(.*?)(<!--/fig-->)", re.DOTALL)
TABLE = re.compile(r"(<!--table ([\w-]+)-->\n)(.*?)(<!--/table-->)", re.DOTALL)

Figures = dict[str, dict[str, Any]]  # by the names of the benchmarks' files


def publish(runs: Sequence[Path], root: Path = CHECKOUT) -> list[str]:
    """The names of what was published. A figure that a document quotes and no run has any more is refused."""
    file = root / FILE
    if not file.exists():
        raise ValueError(f"there is no {file}; figures are published in a checkout of the sources")
    figures = read(root)
    paths = [path for run in runs for path in (sorted(run.glob("*.json")) if run.is_dir() else [run])]
    for path in paths:
        figures[path.stem] = figure(path.stem, json.loads(path.read_text()))
    figures = {name: figures[name] for name in sorted(figures, key=_rank)}
    texts = {page: page.read_text() for page in pages(root)}
    filled = {page: fill(text, figures) for page, text in texts.items()}  # all, before one is written
    file.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    for page, text in filled.items():
        if text != texts[page]:
            page.write_text(text)
    return [path.stem for path in paths]


def read(root: Path = CHECKOUT) -> Figures:
    found: Figures = json.loads((root / FILE).read_text())
    return found


def pages(root: Path = CHECKOUT) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("docs/*.md")])


def fill(text: str, figures: Figures) -> str:
    """The document with every figure as the file has it. Raises ValueError for one that the file does not have."""

    def value(found: re.Match[str]) -> str:
        name, _, key = found[2].rpartition(".")
        try:
            told = origin(figures) if found[2] == "origin" else figures[name]["values"][key]
        except KeyError:
            raise ValueError(
                f"a document quotes {found[2]}, which {FILE} does not have; publish a run with it"
            ) from None
        return f"{found[1]}{told}{found[4]}"

    def table(found: re.Match[str]) -> str:
        short = {"gpu-short": _gpu_short, "hosts-short": _hosts_short}.get(found[2])
        if short is not None:
            return found[1] + short(figures) + found[4]
        rows = (
            [
                ["what", "measured", "in the paper"],
                *(line for each in figures.values() for line in each["lines"]),
            ]
            if found[2] == "headlines"
            else figures.get(found[2], {"rows": []})["rows"]
        )
        return found[1] + _markdown(rows) + found[4]

    return TABLE.sub(table, QUOTED.sub(value, text))


def figure(name: str, content: Content) -> dict[str, Any]:
    """What is kept of a benchmark's file."""
    part = name.partition("-")[0]
    if part not in ORDER or not all(key in content for key in ORIGIN):
        raise ValueError(
            f"{name} is not a benchmark's file; they are called {', '.join(ORDER)}, and say where they come from"
        )
    results = content.get(part, content)
    return {
        **{key: content[key] for key in ORIGIN},
        "values": {key: str(told) for key, told in TELLERS[part](results).items()},
        "lines": [list(line) for line in headlines({name: content})],
        "rows": ROWS[part](results) if part in ROWS else [],
    }


def origin(figures: Figures) -> str:
    """Where all of them were measured, but those of GPUs and of several hosts: these tell it themselves."""
    kept = (each for name, each in figures.items() if name not in (GPU, *SEVERAL_HOSTS))
    return "; ".join(dict.fromkeys(map(_place, kept)))


def _place(figure: dict[str, Any]) -> str:
    place = figure["machine"]
    kind = ", ".join(
        dict.fromkeys((place["processor"], place["architecture"]))
    )  # not every system names the first
    return f"{place['cores']} cores ({kind}), torch {place['torch']}, Open MPI {place['openmpi']}"


def _rank(name: str) -> tuple[int, int]:
    part, _, kind = name.partition("-")
    return ORDER.index(part), KINDS.index(kind) if kind in KINDS else len(KINDS)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "No table has been published yet; `recover bench publish` writes it here.\n"
    head, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *others]) + "\n"


def _gpu_short(figures: Figures) -> str:
    """What one carrier does in a step and at a death, with its machine; nothing at all before it was measured."""
    if GPU not in figures:
        return ""
    head, *rows = figures[GPU]["rows"]
    told = f"On {figures['gpu']['values']['place']}, by `recover bench gpu`:\n\n"
    shown = (row for row in rows if row[1] == rows[0][1] and not row[0].startswith("sum"))
    return told + _markdown([head, *shown])


def _hosts_short(figures: Figures) -> str:
    """What several hosts and returning replicas cost, with the machine; nothing before it was measured."""
    parts = [
        name for name in (*SEVERAL_HOSTS, "return", "returning") if figures.get(name, {"rows": []})["rows"]
    ]
    tables = (
        f"On {_place(figures[name])}, by `{figures[name]['command'].partition(' --json')[0]}`:\n\n"
        + _markdown(figures[name]["rows"])
        for name in parts
    )
    return "\n".join(tables)


def _setting(scene: Content) -> str:
    size = scene["replica_size"]
    return f"{scene['replicas']} replicas" + (f" of {size} ranks" if size > 1 else "")


def _overhead(results: Content) -> dict[str, Any]:
    ratio, exact, more = (
        results["ratio"],
        results["reproducible_against_fast"],
        results["extra_bytes_per_parameter"],
    )
    inside = f" of {results['shard']} ranks" if results["shard"] > 1 else ""
    return {
        "setting": f"{results['replicas']} replicas{inside}, {results['parameters'] / 1e6:.0f}M parameters",
        "ratio": f"{ratio['value']:.2f}x",
        "interval": f"{ratio['low']:.2f} to {ratio['high']:.2f}",
        "memory": "no more memory" if more < 0.05 else f"{more:.1f} bytes per parameter more",
        "reproducible": f"{exact['value']:.2f}x",
    }


def _recovery(results: Content) -> dict[str, Any]:
    took = results["recovery_ms"]
    return {
        "setting": f"{results['replicas']} replicas",
        "median": f"{took['median']:.0f} ms",
        "middle": f"{took['low']:.0f} to {took['high']:.0f}",
        "discarded": results["discarded"],
    }


def _repair(content: Content) -> dict[str, Any]:
    took = {carrier: f"{facts['median']:.0f} ms" for carrier, facts in content["repair_ms"].items()}
    return {"setting": f"{content['ranks']} ranks", **took}


def _collectives(content: Content) -> dict[str, Any]:
    return {
        f"{ranks}-{float(size):g}": f"{ways['stock gloo']['median'] / ways['mpi carrier']['median']:.1f}x"
        for ranks, sizes in content["collectives_ms"].items()
        for size, ways in sizes.items()
    }


def _hosts(results: Content) -> dict[str, Any]:
    values: dict[str, Any] = {
        f"{kind}-{replicas}": f"{facts['median']:.1f} ms"
        for kind, name in (("all", "agreement_ms"), ("own", "agreement_own_ms"))
        for replicas, facts in results.get(name, {}).items()
    }
    for hosts, facts in results.get("step", {}).items():
        values[f"step-{hosts}"] = f"{facts['ratio']['value']:.2f}x"
    for what, facts in results.get("kill", {}).items():
        if "less_redone" in facts:
            values[f"kill-{what}"] = f"{facts['less_redone']['median']:.0f} ms"
    for name, facts in results.get("power_cut", {"systems": {}})["systems"].items():
        seconds = facts["seconds"]
        values[f"power-cut-{name}"] = f"{seconds:.1f} s" if isinstance(seconds, float) else seconds
    return values


def _return(results: Content) -> dict[str, Any]:
    values: dict[str, Any] = {"replicas": results["replicas"]}
    for size in results["sizes"]:
        mb = f"{size['bytes'] / 1e6:.0f}"
        values[f"stall-{mb}"] = f"{size['ours']['stall']['median'] * 1e3:.0f} ms"
        values[f"whole-{mb}"] = f"{size['ours']['whole']['median']:.1f} s"
        values[f"cold-{mb}"] = f"{size['cold']['whole']['median']:.1f} s"
        for name in ("restart", "torchft"):
            facts = size[name]
            values[f"{name}-{mb}"] = "not measured" if "not_measured" in facts else f"{facts['whole']:.1f} s"
            values[f"{name}-wait-{mb}"] = (
                "not measured" if "not_measured" in facts else f"{facts['wait']:.1f} s"
            )
    return values


def _returning(results: Content) -> dict[str, Any]:
    return {
        "ratios": ", ".join(f"{duel['ratio']:.2f}x" for duel in results["duels"]),
        "calm": f"{results['calm_ratio']:.2f}x",
        "crossing": "never" if results["crossing"] is None else f"{results['crossing']:.1%}",
    }


def _milliseconds(content: Content) -> list[list[str]]:
    """Medians, by ranks and size."""
    times = content["collectives_ms"]
    names = list(next(iter(next(iter(times.values())).values())))
    return [["ranks", "MB", *names]] + [
        [ranks, f"{float(size):g}", *(f"{ways[name]['median']:.1f}" for name in names)]
        for ranks, sizes in times.items()
        for size, ways in sizes.items()
    ]


def _trajectory(results: Content) -> dict[str, Any]:
    runs = results["runs"]
    return {
        "apart": f"{runs['ours']['largest_distance']:.0e}".replace("e-0", "e-"),
        "shrinking": f"{runs['adaptive']['largest_distance']:.2g}",
        "living": f"{runs['ours']['effective_throughput'] / runs['stock']['effective_throughput']:.2f}x",
        "start": f"{runs['ours']['per_provisioned_rank'] / runs['stock']['per_provisioned_rank']:.2f}x",
    }


def _breakdown(results: Content) -> dict[str, Any]:
    rows = results["rows"]
    ours, last = [row["ours_cost"] for row in rows], rows[-1]
    best = min(rows, key=lambda row: row["baseline_cost"])
    return {
        "setting": _setting(results["scene"]),
        "step": f"{sum(row['step_seconds'] for row in rows) / len(rows):.2f} s",
        "ours": f"{min(ours):.2f} to {max(ours):.2f} s",
        "best": f"{best['baseline_cost']:.1f} s",
        "best-every": best["N"],
        "last": f"{last['baseline_cost']:.1f} s",
        "last-every": last["N"],
    }


def _multi(results: Content) -> dict[str, Any]:
    return {
        "every": results["interval"],
        "living": f"{min(each['ratios'][-1] for each in results['baselines']):.2f}",
        "more": f"{min(each['advantage']['more'] for each in results['baselines']):+.0%}",
    }


def _sweep(results: Content) -> dict[str, Any]:
    return {
        f"per-hour-{curve['alive']}": "any"
        if curve["crossing_wall"] is None
        else f"{curve['crossing_wall']:.0%}"
        for curve in results["curves"]
    }


def _peers(results: Content) -> dict[str, Any]:
    batch = results["scene"]["global_batch"]
    values: dict[str, Any] = {"step": f"{results['scene']['pace']:g} s"}
    for key, name in (("ours", "ours"), ("torchft", "torchft Manager.allreduce")):
        facts = results["systems"].get(name, {"seconds": "not measured"})
        seconds = facts["seconds"]
        values[key] = f"{seconds:.2f} s" if isinstance(seconds, float) else seconds
        values[f"{key}-batch"] = f"{facts.get('microbatches', '?')} of {batch}"
    return values


def _gpu(results: Content) -> dict[str, Any]:
    nccl = f", NCCL {results['nccl']}" if results["nccl"] else ""
    values = {"place": f"{results['replicas']} replicas on {results['cards']} x {results['card']}{nccl}"}
    for model, carriers in results["step"].items():
        for carrier, facts in carriers.items():
            for way, ratio in facts["ours_against"].items():
                values[f"{model}-{carrier}-{way.replace(' ', '-')}"] = f"{ratio['value']:.2f}x"
    for carrier, facts in results["kill"].items():
        values[f"kill-{carrier}"] = f"{facts['less_redone_ms']['median']:.0f} ms"
    return values


def _simulate(results: Content) -> dict[str, Any]:
    largest = results["rows"][-1]
    return {
        "whole": f"{results['whole_seconds']:.0f} s",
        "computing": f"{results['whole_cpu_seconds']:.0f} s",
        "speed": f"{largest['failures_per_second']['recover-return']:,.0f}",
    }


def _plain_rows(part: str, results: Content) -> list[list[str]]:
    return [[str(cell) for cell in row] for row in rows_of(part, results)]


ROWS: dict[str, Callable[[Content], list[list[str]]]] = {
    "collectives": _milliseconds,
    "gpu": lambda results: rows_of("gpu", results),
    **{part: functools.partial(_plain_rows, part) for part in ("hosts", "return", "returning", "simulate")},
}
TELLERS: dict[str, Callable[[Content], dict[str, Any]]] = {
    "trajectory": _trajectory,
    "breakdown": _breakdown,
    "multi": _multi,
    "sweep": _sweep,
    "peers": _peers,
    "overhead": _overhead,
    "recovery": _recovery,
    "repair": _repair,
    "collectives": _collectives,
    "hosts": _hosts,
    "return": _return,
    "returning": _returning,
    "gpu": _gpu,
    "simulate": _simulate,
}
