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

import torch
import torch.distributed as dist
from launch import Report, launch
from meter import Meter, converted_weights

from fp8rs import convert_to_float8_training
from fp8rs.demo.data import Corpus, load_corpus
from fp8rs.demo.model import Llama
from fp8rs.demo.train import (
    HIGH_PRECISION,
    Settings,
    build_model,
    held_out_loss,
    make_optimizer,
    shard,
    train_step,
)
from fp8rs.optim import AdamW
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
    runs: dict[str, dict[str, Any]] = {}
    if options.out.exists():
        runs = json.loads(options.out.read_text())
    settings = Settings.choose(options.device, options.ranks, options.steps)

    for recipe in options.recipes:
        runs_of_recipe = runs.setdefault(recipe, {})
        for kind in options.kinds:
            if kind in runs_of_recipe:
                continue
            results = launch(
                train,
                settings,
                recipe,
                kind,
                ranks=options.ranks,
                device=options.device,
                on_event=lambda event: print(event["line"], flush=True),
            )
            runs_of_recipe[kind] = results[0]
            options.out.write_text(json.dumps(runs, indent=2) + "\n")

    print(table(runs))
    return 0


def train(settings: Settings, recipe: Any, kind: str, report: Report) -> dict[str, Any]:
    """Train on this rank. Return the held-out losses and the bytes per parameter at rest.

    Args:
        settings: the same on all ranks.
        recipe: short name of a recipe.
        kind: a key of `KINDS`.
        report: called with lines of progress.
    """
    corpus = load_corpus()
    meter = Meter()
    model = build_model(settings)
    weight_names = converted_weights(model)

    adamw_options = KINDS[kind]
    fp8_weights = adamw_options is not None
    # Masters start with the values before quantization.
    masters = adamw_options is not None and adamw_options.get("master_weights", True)
    convert_to_float8_training(
        model,
        recipe=recipe,
        gemms="fp8",
        filter_fqns=HIGH_PRECISION,
        fp8_weights=fp8_weights,
        preserve_high_precision_init_val=masters,
    )
    shard(model)
    if adamw_options is None:
        optimizer = make_optimizer(model, settings)
    else:
        optimizer = AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            **adamw_options,
        )

    held_out = [(0, held_out_loss(model, corpus, settings))]
    interval = max(1, settings.steps // 10)
    for step in range(1, settings.steps + 1):
        _train_step(model, optimizer, corpus, settings, step - 1)
        if step % interval == 0 or step == settings.steps:
            loss = held_out_loss(model, corpus, settings)
            held_out.append((step, loss))
            progress = f"step {step}/{settings.steps}, held-out loss {loss:.4f}"
            report({"line": f"{recipe} {kind}: {progress}"})

    model.reshard()  # type: ignore[operator]
    at_rest = meter.at_rest(model, optimizer, weight_names)
    return {"held_out": held_out, "at_rest": asdict(at_rest)}


def _train_step(
    model: Llama,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    settings: Settings,
    step: int,
) -> None:
    """Run a step. Its batch is freed when it ends, so that the meter does not count it."""
    batch = corpus.batch(settings.seed, step, settings.rows, settings.length)
    batches_of_ranks = batch.chunk(dist.get_world_size())
    tokens = batches_of_ranks[dist.get_rank()].to(settings.device)
    train_step(model, optimizer, settings, step, tokens)


def table(runs: dict[str, dict[str, Any]]) -> str:
    """Return a table of the last held-out losses, with ratios to master weights.

    Args:
        runs: the results of `train`, by recipe and kind.
    """
    kinds = []
    for kind in KINDS:
        if any(kind in runs_of_recipe for runs_of_recipe in runs.values()):
            kinds.append(kind)

    titles = [TITLES[kind] for kind in kinds]
    lines = [
        f"| recipe | {' | '.join(titles)} |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    for recipe, runs_of_recipe in runs.items():
        master_loss = None
        if "master" in runs_of_recipe:
            master_loss = _last_loss(runs_of_recipe["master"])

        cells = []
        for kind in kinds:
            if kind not in runs_of_recipe:
                cells.append("")
                continue

            run = runs_of_recipe[kind]
            cell = f"{_last_loss(run):.4f}"
            if master_loss and kind != "master":
                cell += f" ({_last_loss(run) / master_loss:.3f})"
            at_rest = run["at_rest"]
            cell += f", {at_rest['weights']:.2f} + {at_rest['optimizer']:.2f} B"
            cells.append(cell)
        lines.append(f"| {recipe} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _last_loss(run: dict[str, Any]) -> float:
    _, loss = run["held_out"][-1]
    return float(loss)


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
