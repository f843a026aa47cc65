"""A run in the terminal, with the content of the live page."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from recover.job.record_files import FILES
from recover.runs.live.view import RunView
from recover.runs.records.goodput import PARTS, PRODUCTIVE
from recover.runs.records.job_log import job_files
from recover.runs.records.job_state import ENDED
from recover.runs.records.sentences import wrong_sums

_LOOK = 0.5  # seconds
_SHOWN = 8  # incidents that are shown, the last ones
_LETTERS = {
    "starting": "S", "warming up": "W", "preparing": "P", "computing": "C", "reducing": "R", "voting": "V",
    "repairing": "!", "updating": "U", "between steps": "B", "ending": "E", "stopped": "Z", "gone": "x",
    "done": ".", "not known": "?", "joining": "J", "left on notice": "-",
}  # fmt: skip
_GRID = 256  # ranks that are shown; more are only counted


def is_run(path: Path) -> bool:
    """Whether `path` is a run directory."""
    # Path.exists raises for a directory of another user.
    return os.path.exists(path / "steps.jsonl") or any(map(os.path.exists, job_files(path)))


def runs_in(place: Path) -> list[Path]:
    """The run directories in a directory, the one that was written to last at the end."""
    return sorted(filter(is_run, place.glob("*")), key=_written)


def newest(place: Path) -> Path:
    """The run directory that was written to last."""
    found = runs_in(place)
    if not found:
        raise ValueError(f"there is no run in {place.absolute()}; name a run directory")
    return found[-1]


def _written(path: Path) -> int:
    return max(map(FILES.modified, (path, path / "steps.jsonl", *job_files(path))))


def once(view: RunView, how: str = "") -> None:
    """Print a run. `how`: the words for the state of the job, in place of the usual ones."""
    Console(highlight=False, soft_wrap=True).print(shown(view, how))


def show_list(views: Sequence[RunView]) -> None:
    """Runs of one directory, one line each: name, step, loss, replicas, state."""
    rows = [("run", "step", "loss", "replicas", "state")]
    for view in views:
        state = view.state()
        values = dict(_rows(state))
        rows.append((state["name"], values["step"], values["loss"], values["replicas"], state["how"]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        show("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def show(text: str) -> None:
    Console(highlight=False, soft_wrap=True).print(text, markup=False)


def follow(view: RunView) -> None:
    """Update until the run has ended, or Ctrl-C."""
    with Live(shown(view), console=Console(highlight=False), refresh_per_second=4) as live:
        try:
            while not view.job().is_over:
                time.sleep(_LOOK)
                view.refresh()
                live.update(shown(view))
        except KeyboardInterrupt:
            pass


def shown(view: RunView, how: str = "") -> RenderableType:
    state, ranks, incidents = view.state(), view.ranks(), view.incidents()
    table = Table.grid(padding=(0, 2))
    for name, value in _rows(state):
        table.add_row(Text(name, style="dim"), Text(value))
    parts: list[RenderableType] = [Text(f"{state['name']}: {how or state['how']}", style="bold"), table]
    if page := view.page():
        if view.job().is_over:  # its launcher could not remove the file
            page = (
                f"none: {page} was that of the job that has ended; `recover watch {view.run_dir}` serves one"
            )
        table.add_row(Text("page", style="dim"), Text(page))
    if ranks:
        counts = Counter(entry["doing"] for entry in ranks)
        parts.append(Text("ranks: " + ", ".join(f"{n} {doing}" for doing, n in counts.items())))
        if len(ranks) <= _GRID:
            size = max(1, state["replica_size"])
            letters = [_LETTERS.get(entry["doing"], "?") for entry in ranks]
            cells = ["".join(letters[at : at + size]) for at in range(0, len(letters), size)]
            parts.append(Text("  " + (" " if size > 1 else "").join(cells)))
    if len(incidents) > _SHOWN:
        parts.append(Text(f"... {len(incidents) - _SHOWN} losses before these"))
    parts += [Text(_incident(incident)) for incident in incidents[-_SHOWN:]]
    for replica, seen in state["stragglers"].items():
        parts.append(Text(f"replica {replica} took up to {seen['factor']:g} times as long as the others"))
    parts += [Text(f"replica {replica} joins: {each}%") for replica, each in state["joining"].items()]
    return Group(*parts)


def _incident(incident: dict[str, Any]) -> str:
    where = "no committed step tells of it" if incident["step"] is None else f"step {incident['step']}"
    happened = []
    if lost := ", ".join(map(str, incident["dead_replicas"])):
        happened.append(f"lost replica {lost}; {incident['cause'] or 'cause unknown'}")
    if joined := ", ".join(map(str, incident["joined_replicas"])):
        happened.append(f"replica {joined} joined")
    if left := ", ".join(map(str, incident["left_replicas"])):
        happened.append(f"replica {left} left on notice")
    if wrong := wrong_sums(incident):
        happened.append(wrong)
    paused = "the others waited " if incident["joined_replicas"] or incident["left_replicas"] else ""
    return f"{incident['number']}. {where}: {'; '.join(happened)}; {paused}{incident['pause_ms']:.0f} ms"


def _skipped(steps: int) -> str:
    return f"{steps} step{'s' * (steps > 1)}: the gradient was not finite, or no microbatch had a weight"


def _verified(counts: dict[str, int]) -> str:
    """Verified gradients, in words."""
    wrong, lost, sums = (counts[name] for name in ("corrupt_gradients", "unverified_slots", "wrong_sums"))
    told = f"{counts['verified_slots']} microbatches"
    told += f", {lost} lost their pair" if lost else ""
    told += f"; {wrong} replica{'s' * (wrong > 1)} evicted for wrong gradients or sums" if wrong else ""
    return told + (f"; {sums} wrong sum{'s' * (sums > 1)} reduced again" if sums else "")


def _known(number: int | None) -> str:
    return "-" if number is None else str(number)


def _replicas(state: dict[str, Any]) -> str:
    """Living replicas; for a run that ended early, those of its last step, and whether none was left."""
    number, end = state["replicas"] or state["replicas_start"], state["replicas_end"]
    told = f"{_known(number)} of {_known(state['replicas_start'])}"
    if not state["step"] or (state["state"] != ENDED and end != 0):
        return told
    return f"{told} in its last step" + (", none at the end" if end == 0 else "")


def _speed(state: dict[str, Any]) -> tuple[str, str]:
    """Tokens per second; for scripts that count no tokens, microbatches per second."""
    tokens, microbatches = state["tokens_per_second"], state["microbatches_per_second"]
    if tokens is None and microbatches is not None:
        return "microbatches/s", f"{microbatches:,.{0 if microbatches >= 100 else 2}f}"
    return "tokens/s", "-" if tokens is None else f"{tokens:,.0f}"


def _rows(state: dict[str, Any]) -> list[tuple[str, str]]:
    loss, eta = state["loss"], state["eta_seconds"]
    goodput = state["goodput"]
    lost = {name: spent for name, spent in goodput["parts_ms"].items() if name not in PRODUCTIVE}
    most = max(lost, key=lambda name: lost[name])
    of = f" of {state['steps']}" if state["steps"] else ""
    rows = [
        ("step", f"{state['step']}{of}" + (f", {eta:.0f} s to go" if eta is not None else "")),
        ("loss", "-" if loss is None else f"{loss:.4f}"),
        *([("skipped", _skipped(state["skipped"]))] if state["skipped"] else []),
        *([("verified", _verified(state["verification"]))] if state["verification"] else []),
        ("microbatches", f"{_known(state['microbatches'])} of B = {_known(state['global_batch'])}"),
        ("replicas", _replicas(state)),
        _speed(state),
        ("goodput", f"{goodput['goodput']:.2%}"),
    ]
    if goodput["total_ms"] and lost[most]:
        rows.append(("most lost to", f"{PARTS[most]}, {lost[most] / goodput['total_ms']:.2%}"))
    return rows
