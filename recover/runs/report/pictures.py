"""Style of the pictures that the lab draws with matplotlib: readable without colour vision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recover.job.optional_packages import need

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # the palette of Okabe and Ito
STYLE: Any = {
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.9",
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "legend.frameon": False,
    "savefig.dpi": 130,
}
WIDTH = 11.0


def new_figure(height: float) -> Any:
    need("matplotlib", "a picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> Path:
    figure.savefig(path, format="png")
    return path
