"""Plot a monitor's file as heat maps of layers and steps, one for each operand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fp8rs.quantize.recipes import check_choice
from fp8rs.storage import replace_atomically

from .records import of_statistic, read, worst

OPERANDS = {"input": "input", "weight": "weight", "grad": "output's gradient"}

#: Labels of the color bar, by statistic.
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


def plot(file: str | Path, output: str | Path, statistic: str = "sqnr_db") -> None:
    """Plot one statistic of all layers and steps as heat maps, one for each operand.

    Lighter is better, NaN is red, and operands that were not quantized in a step are grey. The
    names of the layers with the smallest SQNR in the last step are red.

    Args:
        file: the file of ``fp8rs.monitor(model, file=FILE)``.
        output: the file to write, with the suffix of PNG, SVG or PDF.
        statistic: "sqnr_db", "underflow", "saturated", "amax_to_history", "amax" or "scale".

    Raises:
        OSError: ``file`` cannot be read.
        ValueError: a monitor did not write ``file``, or it has no values of ``statistic``.
        ImportError: matplotlib is not installed.
    """
    check_choice("statistic", statistic, LABELS)
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plot requires matplotlib: pip install matplotlib") from None

    records = read(Path(file))
    values_by_step = [of_statistic(record.statistics, statistic) for record in records]
    layer_names: dict[str, None] = {}  # a set in the order of the model
    for values in values_by_step:
        layer_names.update(dict.fromkeys(layer for layer, _ in values))
    layers = list(layer_names)
    if not layers:
        raise ValueError(f"no line of {file} has the statistic {statistic!r}")

    # One matrix (layer, step) for each operand.
    matrices: dict[str, list[list[float]]] = {}
    finite: list[float] = []
    for operand in OPERANDS:
        matrix = []
        for layer in layers:
            row = [_value(values.get((layer, operand)), statistic) for values in values_by_step]
            finite += filter(math.isfinite, row)
            matrix.append(row)
        matrices[operand] = matrix
    low = min(finite, default=0.0)
    high = max(finite, default=1.0)

    height = 1.6 + 0.18 * min(len(layers), NAMED)
    figure = Figure(figsize=(12, max(height, 3.2)), layout="constrained")
    panels: Any = figure.subplots(1, len(OPERANDS), sharey=True)
    colors = matplotlib.colormaps["viridis" if statistic == "sqnr_db" else "viridis_r"]
    colors = colors.with_extremes(bad="lightgrey", under="red")
    steps = [str(record.step) for record in records]
    steps_per_label = -(-len(steps) // 8)
    for panel, (operand, title) in zip(panels, OPERANDS.items(), strict=True):
        matrix = []
        for row in matrices[operand]:
            matrix.append([_in_color_range(value, low, high) for value in row])
        image = panel.imshow(
            matrix, aspect="auto", interpolation="nearest", cmap=colors, vmin=low, vmax=high
        )
        panel.set(title=title, xlabel="step")
        panel.set_xticks(range(0, len(steps), steps_per_label), steps[::steps_per_label])

    layers_per_label = -(-len(layers) // NAMED)
    panels[0].set_yticks(
        range(0, len(layers), layers_per_label), layers[::layers_per_label], fontsize=7
    )
    lossy_layers = {lossy.layer for lossy in worst(records[-1].statistics, MARKED)}
    for label in panels[0].get_yticklabels():
        if label.get_text() in lossy_layers:
            label.set(color="red", weight="bold")
    figure.colorbar(image, ax=panels, label=LABELS[statistic])
    with replace_atomically(Path(output)) as temporary:
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


def _in_color_range(value: float, low: float, high: float) -> float:
    """Clamp a value to the color range. NaN (-inf) maps to a value below the range."""
    if value == -math.inf:
        return low - 1.0
    return min(value, high) if value == math.inf else value
