"""Draw docs/figures/*.svg.

    python tools/figures.py   # requires matplotlib

weight.svg and step.svg illustrate docs/weight.md and docs/fsdp2.md. linear_shapes.svg, pays_off.svg
and rollouts.svg show JSON files in the same folder. Benchmarks write the first two, and
examples/rl_weight_stream.py writes rollouts.json. benches/training_run.py draws training.svg and
training_moments.svg.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "figures"

OURS, OTHERS = "#3f51b5", "#9e9e9e"
HIGH, CODES, PLAIN = "#ffe0b2", "#c5cae9", "#eeeeee"


def draw_shapes(measured: dict[str, Any], path: Path) -> None:
    """Draw a layer's speedup over bf16, by the shape of its GEMMs and its recipe."""
    rows = measured["rows"]
    groups = list(dict.fromkeys(row["group"] for row in rows))
    # One line per shape, and an empty line between groups.
    lines = [n + groups.index(row["group"]) for n, row in enumerate(rows)]
    figure = Figure(figsize=(10, 1.4 + 0.3 * len(rows)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"forward": "Forward", "both": "Forward and backward"}
    for axes, (kind, title) in zip(panels, titles.items(), strict=True):
        for recipe, marker in zip(list(rows[0]["ms"])[1:], "osD^v", strict=False):
            ratios = [row["ms"]["bf16"][kind] / row["ms"][recipe][kind] for row in rows]
            axes.plot(ratios, lines, marker, label=recipe, markersize=5, alpha=0.8)
        axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set_title(f"{title}, times bf16's speed", fontsize=10)
        axes.grid(alpha=0.3)
    names = ["{} x {} x {}".format(*row["shape"]) for row in rows]
    panels[0].set_yticks(lines, names, fontsize=8)
    for group in groups:
        first = next(at for at, row in zip(lines, rows, strict=True) if row["group"] == group)
        panels[0].text(0.01, first - 0.6, group, transform=panels[0].get_yaxis_transform())
    panels[0].set_ylim(lines[-1] + 0.6, -1.2)
    panels[0].set_ylabel("tokens x inputs x outputs")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.suptitle(f"{measured['device']}, torch {measured['torch']}", fontsize=9)
    figure.savefig(path, metadata={"Date": None})


def draw_pays_off(measured: dict[str, Any], path: Path) -> None:
    """Draw the speed of training steps over bf16, by width and tokens, as heat maps."""
    variants = {"current": "gemms='fp8'", "current-auto": "gemms='auto'"}
    modes = list(dict.fromkeys(row["mode"] for row in measured["rows"]))
    figure = Figure(figsize=(10, 1.2 + 2.8 * len(modes)), layout="constrained")
    panels = figure.subplots(len(modes), len(variants), squeeze=False)
    for mode, panels_of_mode in zip(modes, panels, strict=True):
        rows = [row for row in measured["rows"] if row["mode"] == mode]
        widths = sorted({row["width"] for row in rows})
        tokens = sorted({row["tokens"] for row in rows})
        for axes, (variant, title) in zip(panels_of_mode, variants.items(), strict=True):
            speeds = [[float("nan")] * len(tokens) for _ in widths]
            for row in rows:
                speed = row["ms"]["bf16"] / row["ms"][variant]
                place = widths.index(row["width"]), tokens.index(row["tokens"])
                speeds[place[0]][place[1]] = speed
                axes.text(place[1], place[0], f"{speed:.2f}", ha="center", va="center")
            axes.imshow(speeds, cmap="RdYlGn", vmin=0.5, vmax=1.5, aspect="auto", origin="lower")
            axes.set_xticks(range(len(tokens)), [f"{n:,}" for n in tokens])
            axes.set_yticks(range(len(widths)), [f"{n:,}" for n in widths])
            axes.set_title(f"{mode}, {title}: times bf16's speed", fontsize=10)
            axes.set_xlabel("tokens per GPU")
            axes.set_ylabel("width")
    figure.suptitle(f"{measured['device']}, torch {measured['torch']}", fontsize=9)
    figure.savefig(path, metadata={"Date": None})


def draw_rollouts(measured: dict[str, Any], path: Path) -> None:
    """Draw a policy's reward, and the divergence of its engine from training in FP8 and bf16."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    reward, divergence = figure.subplots(1, 2)
    reward.plot(measured["rewards"], color=OURS)
    reward.set_title("Reward: share of even tokens", fontsize=10)
    divergence.semilogy(measured["bf16"], ".", color=OTHERS, label="training in bf16")
    divergence.semilogy(measured["fp8"], ".", color=OURS, label="training with the engine's codes")
    lowest = 1e-11
    divergence.set_ylim(lowest)  # some updates have less, or 0
    divergence.set_title(f"KL divergence of the FP8 engine (k3), from {lowest:.0e} on", fontsize=10)
    divergence.legend(fontsize=9, loc="lower left")
    for axes in (reward, divergence):
        axes.set_xlabel("update")
        axes.grid(alpha=0.3)
    words = f"{measured['ranks']} ranks, {measured['device']}, torch {measured['torch']}"
    figure.suptitle(words, fontsize=9)
    figure.savefig(path, metadata={"Date": None})


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure without axes. The size is in inches."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, text: str, colour: str, width: float = 1.9) -> None:
    """Draw a box with text, centered at a point."""
    style = {"boxstyle": "round,pad=0.05", "facecolor": colour, "edgecolor": "#555555"}
    patch = matplotlib.patches.FancyBboxPatch((x - width / 2, y - 0.32), width, 0.64, **style)
    axes.add_patch(patch)
    axes.text(x, y, text, ha="center", va="center", fontsize=9)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
    """Draw an arrow, with text above its middle."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "#333333"})
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.1
    axes.text(*middle, text, ha="center", va="bottom", fontsize=8, color="#333333")


def draw_weight(path: Path) -> None:
    """Draw the path of a weight from the optimizer's shard to the GEMMs and back."""
    figure, axes = canvas(10, 3.4)
    for x, y, text, colour in (
        (1.1, 2.6, "shard\nfp32, 4 B per element", HIGH),
        (4.0, 2.6, "codes of the shard\nFP8, 1 B, and scales", CODES),
        (6.9, 2.6, "whole weight\ncodes of all ranks", CODES),
        (8.9, 1.4, "forward: y = x w^T\ndgrad: dx = dy w", PLAIN),
        (6.9, 0.5, "gradient of the\nwhole weight, bf16", HIGH),
        (4.0, 0.5, "gradient of the\nshard, fp32", HIGH),
        (1.1, 0.5, "optimizer's step\non the shard", PLAIN),
    ):
        box(axes, x, y, text, colour)
    arrow(axes, (2.1, 2.6), (3.0, 2.6), "quantize")
    arrow(axes, (5.0, 2.6), (5.9, 2.6), "all-gather")
    arrow(axes, (7.9, 2.45), (8.6, 1.8))
    arrow(axes, (8.6, 1.0), (7.9, 0.6))
    axes.text(9.0, 0.7, "wgrad: dy^T x", ha="center", va="top", fontsize=8)
    arrow(axes, (5.9, 0.5), (5.0, 0.5), "reduce-scatter")
    arrow(axes, (3.0, 0.5), (2.1, 0.5))
    arrow(axes, (1.1, 0.9), (1.1, 2.2))
    axes.text(1.25, 1.55, "writes", fontsize=8, va="center")
    figure.savefig(path, metadata={"Date": None})


def draw_step(path: Path) -> None:
    """Draw the timeline of communication and computation in a step with three units."""
    figure, axes = canvas(10, 3.6)
    lanes = {"all-gather": 2.7, "compute": 1.8, "reduce": 0.9}
    for name, y in lanes.items():
        axes.text(0.02, y, name, fontsize=9, va="center", weight="bold")
    into, gpu, out = lanes
    events = [
        (gpu, 1.2, "scales of all\nweights", CODES, 1.0),
        *((into, 2.1 + 0.9 * i, f"cast and\ngather {i + 1}", CODES, 0.75) for i in range(3)),
        *((gpu, 3.0 + 0.9 * i, f"forward\n{i + 1}", PLAIN, 0.75) for i in range(3)),
        *((into, 5.1 + 0.9 * i, f"gather {3 - i}", CODES, 0.75) for i in range(3)),
        *((gpu, 5.9 + 1.0 * i, f"backward\n{3 - i}", PLAIN, 0.85) for i in range(3)),
        *((out, 6.9 + 1.0 * i, f"gradients\n{3 - i}", HIGH, 0.85) for i in range(3)),
        (gpu, 9.4, "optimizer", PLAIN, 0.85),
    ]
    for lane, x, text, colour, width in events:
        box(axes, x, lanes[lane], text, colour, width)
    axes.text(
        5,
        3.3,
        "Scales: one all-reduce of 4 bytes per weight. Each all-gather: 1 byte per element.",
        ha="center",
        fontsize=9,
    )
    axes.annotate("", (9.9, 0.3), (0.5, 0.3), arrowprops={"arrowstyle": "->"})
    axes.text(9.6, 0.05, "time", fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Draw all figures."""
    matplotlib.rcParams["svg.hashsalt"] = "fp8rs"  # for reproducible bytes
    draw_weight(OUT / "weight.svg")
    draw_step(OUT / "step.svg")
    shapes = OUT / "linear_shapes.json"
    if shapes.exists():
        draw_shapes(json.loads(shapes.read_text()), shapes.with_suffix(".svg"))
    pays_off = OUT / "pays_off.json"
    if pays_off.exists():
        draw_pays_off(json.loads(pays_off.read_text()), pays_off.with_suffix(".svg"))
    rollouts = OUT / "rollouts.json"
    if rollouts.exists():
        draw_rollouts(json.loads(rollouts.read_text()), rollouts.with_suffix(".svg"))


if __name__ == "__main__":
    main()
