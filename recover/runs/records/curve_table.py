"""The curves of a run as columns, reduced to as many points as a screen can show: for the live page and reports."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from recover.runs.records.curves import curves
from recover.runs.records.kinds import Line

POINTS = 600  # points of a curve: more than a screen can show
COLUMNS = (
    "step",
    "loss",
    "microbatches",
    "replicas",
    "tokens_per_second",
    "seconds",
    "grad_norm",
    "lr",
    "gpu_peak_mib",
)
_EXTREMES = {"loss": ("low", "high"), "grad_norm": ("grad_low", "grad_high")}


class CurveTable:
    """Takes the committed steps in order; each step is one row."""

    def __init__(self) -> None:
        self._columns = {name: array("d") for name in COLUMNS}
        self._heldout = array("d"), array("d")  # steps after which it was evaluated, and losses

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self._columns["step"])

    def add(self, line: Line) -> None:
        values = curves(line)
        for name in COLUMNS:
            self._columns[name].append(float(line["step"] if name == "step" else values.get(name, "nan")))
        self.add_heldout(line)

    def add_heldout(self, line: Line) -> None:
        """Add the held-out loss of a step, or of the summary, if there is a newer one in it."""
        steps, losses = self._heldout
        value, step = line.get("heldout_loss"), line.get("heldout_step", line.get("step"))
        if isinstance(value, int | float) and isinstance(step, int) and not (steps and steps[-1] >= step):
            steps.append(step)
            losses.append(value)

    def rows(self, first: int) -> list[list[float | None]]:
        """The rows from number `first` on."""
        return [[_number(self._columns[name][row]) for name in COLUMNS] for row in range(first, self.count)]

    def series(self, points: int = POINTS) -> dict[str, Any]:
        """The columns, with at most `points` points: of each interval the mean, the extremes of loss and gradient
        norm, and what matters of the others."""
        table = {
            name: np.frombuffer(column, dtype=np.float64).copy() for name, column in self._columns.items()
        }
        shown: dict[str, Any] = {"count": self.count}
        if self.count == 0:
            return shown | {
                name: [] for name in (*COLUMNS, *(n for pair in _EXTREMES.values() for n in pair))
            }
        cuts = _cuts(self.count, points)
        ends = np.append(cuts[1:], self.count) - 1
        found = {"step": table["step"][ends], "lr": table["lr"][ends]}
        for name in ("loss", "grad_norm", "tokens_per_second", "seconds"):
            found[name] = _means(table[name], cuts)
        for name, (low, high) in _EXTREMES.items():
            found[low], found[high] = np.fmin.reduceat(table[name], cuts), np.fmax.reduceat(table[name], cuts)
        found["replicas"] = np.fmin.reduceat(table["replicas"], cuts)
        found["gpu_peak_mib"] = np.fmax.reduceat(table["gpu_peak_mib"], cuts)
        least = np.fmin.reduceat(table["microbatches"], cuts)
        most = np.fmax.reduceat(table["microbatches"], cuts)
        batch = table["microbatches"][0]
        # A single step with another number of microbatches than B must not be averaged away.
        found["microbatches"] = np.where(np.abs(least - batch) > np.abs(most - batch), least, most)
        return shown | {name: [_number(float(value)) for value in values] for name, values in found.items()}

    def heldout(self, points: int = POINTS) -> dict[str, list[float | None]]:
        """The held-out loss by the step after which it was evaluated, with at most `points` points."""
        steps, losses = (np.frombuffer(column, dtype=np.float64).copy() for column in self._heldout)
        if not len(steps):
            return {"step": [], "loss": []}
        cuts = _cuts(len(steps), points)
        at = steps[np.append(cuts[1:], len(steps)) - 1]
        return {"step": [_number(s) for s in at], "loss": [_number(v) for v in _means(losses, cuts)]}


def _cuts(count: int, points: int) -> Any:
    return np.unique(np.linspace(0, count, min(points, count), endpoint=False).astype(int))


def _means(values: Any, cuts: Any) -> Any:
    """The mean of the finite values of each interval; NaN where there is none."""
    finite = np.isfinite(values)
    sums = np.add.reduceat(np.where(finite, values, 0.0), cuts)
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums / np.add.reduceat(finite.astype(float), cuts)


def _number(value: float) -> float | None:
    """Eight significant digits; None for what is not finite."""
    return None if value != value or abs(value) == float("inf") else float(f"{value:.8g}")
