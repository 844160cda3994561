"""Time linear layers of fp8rs and nn.Linear in bf16, by the shape of their GEMMs.

    python benches/linear_shapes.py [--json FILE] [--recipes current,rowwise] [--rounds N]
    python benches/linear_shapes.py --shapes 8192x4096x14336,2048x2048x2048    # TOKENSxINxOUT
    python benches/linear_shapes.py --device cpu        # a smoke run with small shapes

Weights are bf16. Layers are compiled (``dynamic=False``), or eager with ``--eager``. An FP8 layer
quantizes its whole weight in each forward. Under FSDP2, a rank only quantizes its shard, so that
FP8 is slightly faster than measured here. The forward saves tensors for a backward. "both" is the
forward, dgrad and wgrad.

Times are medians of CUDA events, in milliseconds per call. A round times each layer once, with
several inputs and gradients that exceed the L2 cache. The device first sleeps for twice the host
time, so that it does not wait for the host, as in a training step. ``tools/figures.py`` plots the
JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp8rs
from fp8rs.quantize.recipes import RECIPES

#: (tokens, in_features, out_features).
Shape = tuple[int, int, int]

#: Shapes by group.
SHAPES: dict[str, list[Shape]] = {
    "Llama-3-8B": [
        (8192, 4096, 4096),
        (8192, 4096, 1024),
        (8192, 4096, 14336),
        (8192, 14336, 4096),
    ],
    "squares": [(n, n, n) for n in (1024, 2048, 4096, 8192, 16384)],
    "few tokens": [(tokens, 4096, 14336) for tokens in (128, 512, 2048)],
    "odd tokens": [(tokens, 4096, 4096) for tokens in (2047, 8191)],
}
SMALL: dict[str, list[Shape]] = {"small": [(64, 128, 256), (48, 64, 64)]}

#: Bytes of inputs and gradients per round, more than the L2 cache holds.
COLD_BYTES = 2**28
#: The maximum number of inputs and gradients.
MAX_PAIRS = 16

#: Clock cycles of a GPU in a millisecond, as an upper bound.
CYCLES = 2_000_000

Step = Callable[[Tensor, Tensor], object]


def steps(layer: nn.Linear, eager: bool) -> dict[str, Step]:
    """Return the calls to time, which take an input and the gradient of the output."""
    run: Callable[[Tensor], Tensor] = layer
    if not eager:
        run = torch.compile(layer, dynamic=False, fullgraph=True)

    def forward(x: Tensor, dy: Tensor) -> object:
        return run(x)

    def both(x: Tensor, dy: Tensor) -> object:
        return torch.autograd.grad(run(x), (x, layer.weight), dy)

    return {"forward": forward, "both": both}


def time_ms(step: Step, pairs: list[tuple[Tensor, Tensor]], host_ms: float) -> tuple[float, float]:
    """Return the mean time of a call, and its host time.

    Args:
        step: the function to call.
        pairs: the arguments of consecutive calls.
        host_ms: the last measured host time. The device first sleeps twice as long, but at most 10
            ms, because a call may have compiled.
    """
    on_gpu = pairs[0][0].is_cuda
    if on_gpu:
        start_event = torch.cuda.Event(enable_timing=True)
        end_event = torch.cuda.Event(enable_timing=True)
        sleep_ms = 2 * min(host_ms, 5.0) * len(pairs)
        torch.cuda.synchronize()
        torch.cuda._sleep(int(sleep_ms * CYCLES))
        start_event.record()

    start = time.perf_counter()
    for x, dy in pairs:
        step(x, dy)
    new_host_ms = (time.perf_counter() - start) * 1e3 / len(pairs)
    if not on_gpu:
        return new_host_ms, new_host_ms

    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event) / len(pairs), new_host_ms


@dataclass
class Timed:
    """A call to time, and its times in milliseconds.

    Attributes:
        layer: "bf16" or a recipe.
        passes: "forward" or "both".
        step: the call.
        host_ms: the host time of the last round.
        times_ms: the time of each round after the first ones.
    """

    layer: str
    passes: str
    step: Step
    host_ms: float = 0.0
    times_ms: list[float] = field(default_factory=list)


def measure(
    shape: Shape, recipes: list[str], device: str, rounds: int, eager: bool
) -> dict[str, dict[str, float]]:
    """Return the times in milliseconds of bf16 and of each recipe, by the passes."""
    tokens, in_features, out_features = shape
    torch.compiler.reset()
    plain = nn.Linear(in_features, out_features, bias=False, dtype=torch.bfloat16, device=device)
    layers: dict[str, nn.Linear] = {"bf16": plain}
    for recipe in recipes:
        layers[recipe] = fp8rs.nn.Linear.from_linear(copy.deepcopy(plain), recipe=recipe)
    all_timed = []
    for name, layer in layers.items():
        for passes, step in steps(layer, eager).items():
            all_timed.append(Timed(name, passes, step))

    count = 2
    if device == "cuda":
        pair_bytes = 2 * tokens * (in_features + out_features)
        count = min(MAX_PAIRS, 1 + COLD_BYTES // pair_bytes)
    pairs = []
    for _ in range(count):
        x = torch.randn(tokens, in_features, dtype=torch.bfloat16, device=device)
        dy = torch.randn(tokens, out_features, dtype=torch.bfloat16, device=device)
        pairs.append((x.requires_grad_(), dy))

    # Three rounds compile, warm up and measure the host time.
    for round_number in range(rounds + 3):
        for timed in all_timed:
            ms, timed.host_ms = time_ms(timed.step, pairs, timed.host_ms)
            if round_number >= 3:
                timed.times_ms.append(ms)

    medians: dict[str, dict[str, float]] = {name: {} for name in layers}
    for timed in all_timed:
        medians[timed.layer][timed.passes] = round(statistics.median(timed.times_ms), 5)
    return medians


def main() -> int:
    """Measure all shapes."""
    options = _options()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "these shapes require a GPU, and torch finds none. For a smoke run on the CPU:\n"
            "    python benches/linear_shapes.py --device cpu",
            file=sys.stderr,
        )
        return 2

    on_gpu = options.device == "cuda"
    groups = SHAPES if on_gpu else SMALL
    if options.shapes:
        groups = {"chosen": options.shapes}

    results: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "rows": [],
    }
    print(results["device"], "torch", results["torch"])
    print("| tokens x in x out | layer | forward, ms | x bf16 | both, ms | x bf16 |")
    print("|---|---|---|---|---|---|", flush=True)
    for group, shapes in groups.items():
        for shape in shapes:
            ms = measure(shape, options.recipes, options.device, options.rounds, options.eager)
            results["rows"].append({"group": group, "shape": shape, "ms": ms})
            shape_name = "x".join(map(str, shape))
            for name, layer_ms in ms.items():
                cells = []
                for passes in layer_ms:
                    speedup = ms["bf16"][passes] / layer_ms[passes]
                    cells.append(f"{layer_ms[passes]:.4f} | {speedup:.2f}")
                print(f"| {shape_name} | {name} | {' | '.join(cells)} |", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1))
    return 0


def _options() -> argparse.Namespace:
    def shapes(text: str) -> list[tuple[int, ...]]:
        result: list[tuple[int, ...]] = []
        for part in text.split(","):
            shape = tuple(map(int, part.split("x")))
            if len(shape) != 3:
                raise argparse.ArgumentTypeError(f"TOKENSxINxOUT, not {text!r}")
            result.append(shape)
        return result

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shapes", type=shapes, metavar="SHAPE,...")
    parser.add_argument(
        "--recipes",
        type=lambda text: text.split(","),
        default=["current", "rowwise", "mxfp8", "block"],
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    for name in options.recipes:
        if name not in RECIPES:
            parser.error(f"no recipe {name!r}; there are {', '.join(RECIPES)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
