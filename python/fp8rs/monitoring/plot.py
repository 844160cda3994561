"""Plot a monitor's records as a heat map of layers and steps, with a panel per operand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8rs.storage import replace_atomically

from .records import Record, of_statistic, worst

OPERANDS = {"input": "input", "weight": "weight", "grad": "output's gradient"}

#: Labels of the color bar, by statistic. The first statistic is the default.
LABELS = {
    "sqnr_db": "SQNR (dB)",
    "underflow": "share of elements that became 0",
    "saturated": "share of elements that were too large",
    "amax_to_history": "amax, relative to its history",
    "amax": "amax (log10)",
    "scale": "scale (log10)",
}
LOGARITHMIC = ("amax", "scale")

#: The number of layers whose names are red.
MARKED = 3
#: The largest number of layer names in a plot.
NAMED = 80


def plot(records: Sequence[Record], path: Path, statistic: str = "sqnr_db") -> None:
    """Plot a statistic as a heat map.

    Lighter is better, NaN is red, and operands that were not quantized in a step are grey. The
    names of the layers with the smallest SQNR in the last step are red.

    Args:
        records: the records of a monitor's file.
        path: the file to write, with the suffix of PNG, SVG or PDF.
        statistic: a key of `LABELS`.

    Raises:
        ValueError: no record has the statistic.
        ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    by_step = [of_statistic(record.statistics, statistic) for record in records]
    layers = list(dict.fromkeys(layer for found in by_step for layer, _ in found))
    if not layers:
        raise ValueError(f"no line has the statistic {statistic!r}")
    steps = [str(record.step) for record in records]
    height = 1.6 + 0.18 * min(len(layers), NAMED)
    figure = Figure(figsize=(12, max(height, 3.2)), layout="constrained")
    panels: Any = figure.subplots(1, len(OPERANDS), sharey=True)
    values = {
        operand: [
            [_value(found.get((layer, operand)), statistic) for found in by_step]
            for layer in layers
        ]
        for operand in OPERANDS
    }
    finite = [v for rows in values.values() for row in rows for v in row if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    colors = matplotlib.colormaps["viridis" if statistic == "sqnr_db" else "viridis_r"]
    colors = colors.with_extremes(bad="lightgrey", under="red")
    for panel, (operand, title) in zip(panels, OPERANDS.items(), strict=True):
        rows = [[_shown(v, low, high) for v in row] for row in values[operand]]
        image = panel.imshow(
            rows, aspect="auto", interpolation="nearest", cmap=colors, vmin=low, vmax=high
        )
        panel.set(title=title, xlabel="step")
        every = -(-len(steps) // 8)
        panel.set_xticks(range(0, len(steps), every), steps[::every])
    every = -(-len(layers) // NAMED)
    panels[0].set_yticks(range(0, len(layers), every), layers[::every], fontsize=7)
    marked = {one.layer for one in worst(records[-1].statistics, MARKED)}
    for label in panels[0].get_yticklabels():
        if label.get_text() in marked:
            label.set(color="red", weight="bold")
    figure.colorbar(image, ax=panels, label=LABELS[statistic])
    with replace_atomically(path) as temporary:
        figure.savefig(temporary, dpi=120)


def _value(value: float | None, statistic: str) -> float:
    """Return the value to plot: NaN for a missing value, and -inf for NaN."""
    if value is None:
        return math.nan
    if math.isnan(value):
        return -math.inf
    if statistic in LOGARITHMIC:
        return math.log10(value) if value > 0 else math.nan
    return value


def _shown(value: float, low: float, high: float) -> float:
    """Clamp a value to the color range. NaN (-inf) maps to a value below the range."""
    if value == -math.inf:
        return low - 1.0
    return min(value, high) if value == math.inf else value
