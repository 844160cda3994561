"""Time of one linear layer by the shape of its GEMMs: fp8rs beside nn.Linear in bf16.

    python benches/linear_shapes.py [--json FILE] [--recipes current,rowwise] [--rounds N]
    python benches/linear_shapes.py --shapes 8192x4096x14336,2048x2048x2048    # TOKENSxINxOUT
    python benches/linear_shapes.py --device cpu        # small shapes: that it runs, no measurement

Layers are compiled (``dynamic=False``; with ``--eager`` they are not), their weights bf16. An FP8
layer quantizes its weight in each forward, all of it: of a weight that FSDP2 shards a rank
quantizes its part alone, so that in training FP8 gains a little more than here. The forward keeps
what a backward needs. "both" is the forward, dgrad and wgrad.

Times are of CUDA events, in milliseconds a call. A round times each layer once, in turn, over
several inputs and gradients, which together are larger than the L2 cache. The device sleeps before
it, twice as long as the host takes: as in a training step, the device does not wait for the host.
Each figure is the median of the rounds. ``tools/figures.py`` draws the JSON.
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

#: Tokens, inputs and outputs, by what has such layers.
SHAPES = {
    "Llama-3-8B": [(8192, 4096, n) for n in (4096, 1024, 14336)] + [(8192, 14336, 4096)],
    "squares": [(n, n, n) for n in (1024, 2048, 4096, 8192, 16384)],
    "few tokens": [(n, 4096, 14336) for n in (128, 512, 2048)],
    "odd tokens": [(n, 4096, 4096) for n in (2047, 8191)],
}
SMALL = {"small": [(64, 128, 256), (48, 64, 64)]}

#: Bytes of inputs and gradients that a round reads, and the largest number of pairs.
COLD, PAIRS = 2**28, 16

#: Of a GPU's clock in a millisecond, at most.
CYCLES = 2_000_000

Step = Callable[[Tensor, Tensor], object]


def steps(layer: nn.Module, eager: bool) -> dict[str, Step]:
    """What is timed of a layer, given an input and the gradient of its output."""
    run = layer if eager else torch.compile(layer, dynamic=False, fullgraph=True)

    def forward(x: Tensor, dy: Tensor) -> object:
        return run(x)

    def both(x: Tensor, dy: Tensor) -> object:
        return torch.autograd.grad(run(x), (x, layer.weight), dy)

    return {"forward": forward, "both": both}


def time_ms(step: Step, pairs: list[tuple[Tensor, Tensor]], host_ms: float) -> tuple[float, float]:
    """The mean time of a call, over all pairs; and what the host took for one.

    Args:
        step: what is called.
        pairs: with what, one after the other.
        host_ms: the host's time of a call, as last found. The device sleeps twice as long, unless
            that was a call that compiled.
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
    """Milliseconds of each layer's steps: bf16's and each recipe's."""
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
    for n in range(rounds + 3):  # three to compile, to warm up and to time the host
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
    """Measures the shapes one after the other."""
    options = _options()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "these shapes are for GPUs, and torch sees none here. A smoke run on the CPU:\n"
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
