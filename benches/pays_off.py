"""Time training steps by width and tokens, to see where FP8 pays off, on one GPU.

    python benches/pays_off.py --json FILE                       # the whole sweep
    python benches/pays_off.py --widths 1024,2048 --tokens 2048,8192 --mode compiled
    python benches/pays_off.py --device cpu --widths 64 --tokens 64    # a smoke run

A model is a Llama of blocks whose hidden layer is four times as wide as the model, one key/value
head for four query heads of 128, and one sequence. It trains as rank 0 of 8 under FSDP2, whose
other ranks do not exist: an all-gather copies the rank's shard, so that links take no time. What
FP8 saves on links is not in these figures.

Variants are bf16, and for a recipe:

- RECIPE: gemms="fp8", all GEMMs on FP8 operands
- RECIPE-auto: gemms="auto", the default
- RECIPE-gather: the FP8 all-gather, and GEMMs in high precision

The steps of all variants alternate. Times are medians of whole steps, in milliseconds, with the
host waiting for the device at the end. A JSON file that exists gets the new rows.
`tools/figures.py` draws it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp8rs
from fp8rs.demo.model import Llama, LlamaConfig
from fp8rs.demo.train import HIGH_PRECISION, shard

RANKS = 8
WIDTHS = [512, 1024, 2048, 4096, 8192]
TOKENS = [512, 2048, 8192, 16384]
WARM_UP = 4


@dataclass
class Trained:
    """A model and its optimizer."""

    model: Llama
    optimizer: torch.optim.Optimizer

    def step(self, batch: torch.Tensor) -> None:
        """Run a training step."""
        loss = self.model.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def build(variant: str, width: int, layers: int, device: str, compiled: bool) -> Trained:
    """Return the sharded model of a variant, and its optimizer."""
    heads = max(1, width // 128)
    config = LlamaConfig(
        vocabulary=512,
        dim=width,
        layers=layers,
        heads=heads,
        kv_heads=max(1, heads // 4),
        hidden=4 * width,
    )
    with torch.device(device):
        model = Llama(config)

    recipe, *settings = variant.split("-")
    if recipe != "bf16":
        gemms = "auto" if "auto" in settings else "fp8"
        fp8rs.convert_to_float8_training(
            model, recipe=recipe, filter_fqns=HIGH_PRECISION, gemms=gemms
        )
    if "gather" in settings:
        fp8rs.high_precision(model, "*")

    if compiled:
        for block in model.blocks:
            block.compile()
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Trained(model, optimizer)


def layers_of(width: int) -> int:
    """Return the number of blocks: fewer wide ones, so that a step takes a fraction of a second."""
    return max(2, min(8, 16384 // width))


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def step_ms(trained: Trained, batch: torch.Tensor, device: str) -> float:
    """Return the milliseconds of a step."""
    synchronize(device)
    start = time.perf_counter()
    trained.step(batch)
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def measure(
    models: dict[str, Trained], tokens: int, device: str, steps: int
) -> dict[str, list[float]]:
    """Return the times of the steps of each variant."""
    batch = torch.randint(512, (1, tokens + 1), device=device)
    for trained in models.values():
        for _ in range(WARM_UP):
            step_ms(trained, batch, device)

    # A garbage collection would add its time to one variant's step.
    times: dict[str, list[float]] = {name: [] for name in models}
    gc.collect()
    gc.disable()
    for _ in range(steps):
        for name, trained in models.items():
            times[name].append(step_ms(trained, batch, device))
    gc.enable()
    return times


def main() -> None:
    """Measure all widths and numbers of tokens."""
    options = _options()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    gpu = options.device == "cuda"
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "rows": [],
    }
    if options.json is not None and options.json.exists():
        report = json.loads(options.json.read_text())
    compiled = options.mode == "compiled"

    print("| width | tokens | " + " | ".join(options.variants) + " |")
    print("|---" * (2 + len(options.variants)) + "|", flush=True)
    for width in options.widths:
        for tokens in options.tokens:
            start = time.perf_counter()
            # The first forward of a model decides for its life, so each size has new models.
            torch.compiler.reset()
            layers = layers_of(width)
            models = {}
            for variant in options.variants:
                models[variant] = build(variant, width, layers, options.device, compiled)
            times = measure(models, tokens, options.device, options.steps)

            # Free the models before those of the next size are built.
            del models
            gc.collect()
            if gpu:
                torch.cuda.empty_cache()

            medians = {name: statistics.median(ms) for name, ms in times.items()}
            bf16_ms = medians["bf16"]
            cells = [f"{ms:.2f} ({bf16_ms / ms:.2f})" for ms in medians.values()]
            seconds = time.perf_counter() - start
            print(f"| {width} | {tokens} | {' | '.join(cells)} | {seconds:.0f} s", flush=True)
            row = {
                "mode": options.mode,
                "width": width,
                "tokens": tokens,
                "layers": layers,
                "ms": medians,
            }
            report["rows"].append(row)
            if options.json is not None:
                options.json.write_text(json.dumps(report, indent=1))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--widths", type=_numbers, default=WIDTHS)
    parser.add_argument("--tokens", type=_numbers, default=TOKENS)
    parser.add_argument(
        "--variants",
        type=lambda text: text.split(","),
        default=["bf16", "current", "current-auto"],
    )
    parser.add_argument("--mode", choices=("eager", "compiled"), default="eager")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
