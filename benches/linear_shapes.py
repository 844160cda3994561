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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp8rs
from fp8rs.quantize.recipes import RECIPES

#: (tokens, in_features, out_features), by group.
SHAPES = {
    "Llama-3-8B": [(8192, 4096, n) for n in (4096, 1024, 14336)] + [(8192, 14336, 4096)],
    "squares": [(n, n, n) for n in (1024, 2048, 4096, 8192, 16384)],
    "few tokens": [(n, 4096, 14336) for n in (128, 512, 2048)],
    "odd tokens": [(n, 4096, 4096) for n in (2047, 8191)],
}
SMALL = {"small": [(64, 128, 256), (48, 64, 64)]}

#: Bytes of inputs and gradients per round, and the maximum number of pairs.
COLD, PAIRS = 2**28, 16

#: Clock cycles of a GPU in a millisecond, as an upper bound.
CYCLES = 2_000_000

Step = Callable[[Tensor, Tensor], object]


def steps(layer: nn.Module, eager: bool) -> dict[str, Step]:
    """Return the calls to time, which take an input and the gradient of the output."""
    run = layer if eager else torch.compile(layer, dynamic=False, fullgraph=True)

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
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(2 * min(host_ms, 5.0) * len(pairs) * CYCLES))
        start.record()
    begun = time.perf_counter()
    for pair in pairs:
        step(*pair)
    host = (time.perf_counter() - begun) * 1e3 / len(pairs)
    if not on_gpu:
        return host, host
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / len(pairs), host


def measure(
    shape: tuple[int, int, int], recipes: list[str], device: str, rounds: int, eager: bool
) -> dict[str, dict[str, float]]:
    """Return the times in milliseconds of bf16 and of each recipe."""
    tokens, inputs, outputs = shape
    torch.compiler.reset()
    new = {"dtype": torch.bfloat16, "device": device}
    plain = nn.Linear(inputs, outputs, bias=False, **new)
    timed = {"bf16": steps(plain, eager)}
    for recipe in recipes:
        layer = fp8rs.nn.Linear.from_linear(copy.deepcopy(plain), recipe=recipe)
        timed[recipe] = steps(layer, eager)
    count = min(PAIRS, 1 + COLD // (2 * tokens * (inputs + outputs))) if device == "cuda" else 2
    pairs = [
        (
            torch.randn(tokens, inputs, **new, requires_grad=True),
            torch.randn(tokens, outputs, **new),
        )
        for _ in range(count)
    ]
    found: dict[str, dict[str, list[float]]] = {name: {} for name in timed}
    host_ms: dict[tuple[str, str], float] = {}
    for n in range(rounds + 3):  # three rounds to compile, warm up and measure the host time
        for name, of_layer in timed.items():
            for kind, step in of_layer.items():
                took, host_ms[name, kind] = time_ms(step, pairs, host_ms.get((name, kind), 0.0))
                if n >= 3:
                    found[name].setdefault(kind, []).append(took)
    return {
        name: {kind: round(statistics.median(ms), 5) for kind, ms in kinds.items()}
        for name, kinds in found.items()
    }


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
            for name, took in ms.items():
                cells = [f"{took[kind]:.4f} | {ms['bf16'][kind] / took[kind]:.2f}" for kind in took]
                print(f"| {'x'.join(map(str, shape))} | {name} | {' | '.join(cells)} |", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1))
    return 0


def _options() -> argparse.Namespace:
    def shapes(text: str) -> list[tuple[int, ...]]:
        found = [tuple(map(int, part.split("x"))) for part in text.split(",")]
        if any(len(shape) != 3 for shape in found):
            raise argparse.ArgumentTypeError(f"TOKENSxINxOUT, not {text!r}")
        return found

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
    unknown = [name for name in options.recipes if name not in RECIPES]
    if unknown:
        parser.error(f"no recipe {unknown[0]!r}; there are {', '.join(RECIPES)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
