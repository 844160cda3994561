"""The picture of a run: layers over steps, a panel for each operand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .records import Record, of_statistic, worst

OPERANDS = {"input": "input", "weight": "weight", "grad": "output's gradient"}

#: Statistics that can be drawn, with what is written beside the colours. The first is the default.
LABELS = {
    "sqnr_db": "SQNR (dB)",
    "underflow": "share of elements that became 0",
    "saturated": "share of elements that were too large",
    "amax_to_history": "amax, as a multiple of its history's",
    "amax": "amax (log10)",
    "scale": "scale (log10)",
}
LOGARITHMIC = ("amax", "scale")

#: Layers whose names are in red.
MARKED = 3
#: Layers, for whose names there is room.
NAMED = 80


def plot(records: Sequence[Record], path: Path, statistic: str = "sqnr_db") -> None:
    """Draws a heat map (PNG, SVG, PDF by the name of ``path``).

    Light is good; red is not a number; what was not quantized in a step is grey. The names of the
    layers that lost most in the last step are red.

    Raises:
        ValueError: no record has the statistic.
        ImportError: matplotlib is missing.
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
    colours = matplotlib.colormaps["viridis" if statistic == "sqnr_db" else "viridis_r"]
    colours = colours.with_extremes(bad="lightgrey", under="red")
    for panel, (operand, title) in zip(panels, OPERANDS.items(), strict=True):
        rows = [[_shown(v, low, high) for v in row] for row in values[operand]]
        image = panel.imshow(
            rows, aspect="auto", interpolation="nearest", cmap=colours, vmin=low, vmax=high
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
    figure.savefig(path, dpi=120)


def _value(value: float | None, statistic: str) -> float:
    """What is drawn of a value: infinities stand for what there is none of."""
    if value is None:
        return math.nan
    if math.isnan(value):
        return -math.inf
    if statistic in LOGARITHMIC:
        return math.log10(value) if value > 0 else math.nan
    return value


def _shown(value: float, low: float, high: float) -> float:
    """A value within the colours: below them what was no number, their end for infinity."""
    if value == -math.inf:
        return low - 1.0
    return min(value, high) if value == math.inf else value
