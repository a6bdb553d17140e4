"""The roofline: how fast each target pass runs beside what bandwidth and arithmetic allow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def draw(path: Path, title: str, bandwidth: float, peak: float, rows: Mapping[str, Any]) -> Path | None:
    """Write the picture; None where matplotlib is not installed or nothing has known work."""
    points = {name: row for name, row in rows.items() if row.work}
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not points:
        return None
    figure = Figure(figsize=(9, 6))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    intensity = np.geomspace(0.1, 1e4, 200)
    axes.loglog(intensity, np.minimum(intensity * bandwidth, peak) / 1e12, color="black", label="copy, matrix product")
    for name, row in points.items():
        rate = row.work.operations / row.timing.seconds / 1e12
        axes.loglog(row.work.operations / row.work.nbytes, rate, "o", label=name)
    axes.set(xlabel="FLOP a byte, both the least a pass needs", ylabel="TFLOP/s", title=title)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=120)
    return path
