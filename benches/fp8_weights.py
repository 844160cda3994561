"""Compare the held-out loss of the demo's model with FP8 weights and with master weights.

For each recipe, the model is trained with master weights (torch's AdamW) and with FP8 weights
(fp8rs.optim.AdamW). FP8 weights are trained with fp32 masters in the optimizer, and without them
with stochastic rounding and with rounding to nearest. The model, seeds and batches are equal.

    python benches/fp8_weights.py [--recipes current,delayed] [--kinds master,masters] [--out FILE]

The JSON file is written after each run. Runs that it already contains are skipped.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fp8rs.demo.launch import launch
from fp8rs.demo.report import Progress
from fp8rs.demo.train import Settings, train_under_fsdp
from fp8rs.quantize.recipes import RECIPES

#: Options of fp8rs.optim.AdamW. Without them, torch's AdamW trains master weights.
KINDS: dict[str, dict[str, Any] | None] = {
    "master": None,
    "masters": {},
    "stochastic": {"master_weights": False},
    "nearest": {"master_weights": False, "stochastic_rounding": False},
}
TITLES = {
    "master": "master weights",
    "masters": "FP8, masters in the optimizer",
    "stochastic": "FP8, no masters",
    "nearest": "FP8, no masters, rounded to nearest",
}


def main() -> int:
    """Train the models that the file does not contain, and print the table."""
    options = _options()
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    settings = Settings.choose(options.device, options.ranks, options.steps)
    for recipe in options.recipes:
        for kind in options.kinds:
            if kind in found.setdefault(recipe, {}):
                continue
            progress = Progress(f"{recipe} {kind}", settings.steps, sys.stdout)
            results = launch(
                train_under_fsdp,
                settings,
                recipe,
                KINDS[kind],
                ranks=options.ranks,
                device=options.device,
                on_event=progress,
            )
            found[recipe][kind] = asdict(results[0])
            options.out.write_text(json.dumps(found, indent=2) + "\n")
    print(table(found))
    return 0


def table(found: dict[str, Any]) -> str:
    """Return a table of the last held-out losses, with ratios to master weights."""
    kinds = [kind for kind in KINDS if any(kind in runs for runs in found.values())]
    lines = [
        "| recipe | " + " | ".join(TITLES[kind] for kind in kinds) + " |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    for recipe, runs in found.items():
        base = runs["master"]["held_out"][-1][1] if "master" in runs else None
        cells = []
        for kind in kinds:
            if kind not in runs:
                cells.append("")
                continue
            loss, rest = runs[kind]["held_out"][-1][1], runs[kind]["at_rest"]
            ratio = f" ({loss / base:.3f})" if base and kind != "master" else ""
            cells.append(f"{loss:.4f}{ratio}, {rest['weights']:.2f} + {rest['optimizer']:.2f} B")
        lines.append(f"| {recipe} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    recipes = [name for name in RECIPES if name != "tensorwise"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", type=names, default=recipes)
    parser.add_argument("--kinds", type=names, default=list(KINDS), help=", ".join(KINDS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, default=Path("fp8_weights.json"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
