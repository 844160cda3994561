"""Train the demo's model in bf16 and in three recipes, and draw docs/figures/gallery.svg.

python tools/gallery.py [--steps N] [--ranks N] [--out FOLDER]   # requires matplotlib

Also writes the results to gallery.json in the same folder. docs/gallery.md describes them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import fp8rs
from fp8rs.demo.train import HIGH_PRECISION, Result, Settings, build_model, train

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benches"))
from launch import Report, launch

ROOT = Path(__file__).resolve().parents[1]
RECIPES = (None, "current", "delayed", "mxfp8")


def main(arguments: list[str] | None = None) -> None:
    """Train the models and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="steps of each run; default: 200")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    options = parser.parse_args(arguments)
    settings = Settings.choose("cpu", options.ranks, options.steps)
    model = build_model(settings)
    weight_numel = fp8rs.report(model, filter_fqns=HIGH_PRECISION).converted_parameters

    found: dict[str, Any] = {"steps": settings.steps, "ranks": options.ranks, "runs": {}}
    for recipe in RECIPES:
        name = recipe or "bf16"
        results = launch(train_on_rank, settings, recipe, ranks=options.ranks, device="cpu")
        result = results[0]
        print(f"{name}: held-out loss {result.held_out[-1][1]:.4f}", flush=True)
        if recipe is None:
            # A step gathers each converted weight twice. Other parameters are equal in all runs.
            other_bytes = result.gathered_bytes - 2 * weight_numel * torch.bfloat16.itemsize
        found["runs"][name] = {
            "held_out": result.held_out,
            "allgather_bytes": result.gathered_bytes,
            "weight_bytes": result.gathered_bytes - other_bytes,
        }
    (options.out / "gallery.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, options.out / "gallery.svg")


def train_on_rank(settings: Settings, recipe: Any, report: Report) -> Result:
    """Train on this rank. The progress is not reported."""
    return train(settings, recipe)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the losses, their difference to bf16, and the gathered bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "fp8rs"  # for reproducible bytes
    runs = results["runs"]
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    losses, apart, traffic = figure.subplots(1, 3, width_ratios=(2, 2, 1.6))
    reference = dict(runs["bf16"]["held_out"])
    for name, run in runs.items():
        steps, values = zip(*run["held_out"], strict=True)
        losses.plot(steps, values, marker="o", markersize=2.5, label=name)
        ratios = [100 * (v / reference[s] - 1) for s, v in run["held_out"]]
        apart.plot(steps, ratios, marker="o", markersize=2.5)
    losses.set(xlabel="step", ylabel="nats a byte", title="Held-out loss")
    losses.legend()
    apart.set(xlabel="step", ylabel="percent", title="... above bf16's")

    weights_mb = []
    others_mb = []
    for run in runs.values():
        weights_mb.append(run["weight_bytes"] / 1e6)
        others_mb.append((run["allgather_bytes"] - run["weight_bytes"]) / 1e6)
    traffic.barh(list(runs), weights_mb, label="converted weights")
    traffic.barh(list(runs), others_mb, left=weights_mb, label="the rest")
    traffic.invert_yaxis()
    traffic.set(xlabel="MB a rank", title="All-gathered in a step")
    traffic.legend(loc="lower right", fontsize=8)
    for axes in (losses, apart):
        axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
