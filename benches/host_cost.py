"""Measure the host time of eager calls in microseconds: operators, quantizers and linear layers.

    python benches/host_cost.py [cpu|cuda] [--json FILE] [--seconds N] [--features N] [--rows N]

Tensors are tiny, so that the time before the kernel dominates. On CUDA, the device is idle before
each measurement, and nothing waits for it. A round times each call as the mean of twenty, so that
a slow phase of the machine affects all calls of a round. Rounds are repeated for ``--seconds``, at
least once. "us" is the minimum over rounds, and "median" shows the noise. "ratio" compares minima
with nn.Linear.

With ``--features 512 --rows 256``, recipe block pads no operand, as in a model of real size.

On CUDA, a backward runs in a thread of autograd. The time of one layer includes the thread's
wake-up and cold caches of another core. "each of 8" is the time per layer of eight consecutive
layers, where the thread wakes up once.

"least" is a lower bound for layers in Python: an autograd.Function that calls only the operators of
recipe current and torch._scaled_mm, without checks. On the CPU, an empty tensor replaces the GEMM.
"least, nothing called" is an autograd.Function without calls.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import fp8rs

ops = torch.ops.fp8rs
E4M3 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu
RECIPES = ("current", "delayed", "rowwise", "mxfp8", "block")


def mean_us(device: str, call: Callable[[], object], calls: int = 20) -> float:
    """Return the mean host time of a call."""
    for _ in range(3):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def operators(device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield calls of operators and a quantizer."""
    x = torch.randn(64, 128, device=device, dtype=torch.bfloat16)
    scale, amax = torch.tensor(0.5, device=device), torch.tensor(1.0, device=device)
    row, _ = ops.quantize.default(x, scale, E4M3)
    mx = (x, E4M3, [1, 32], E8M0)
    codes, square = ops.quantize_blocks.default(x, E4M3, [32, 32], E8M0, True, False)[:2]
    yield "torch.empty_like", lambda: torch.empty_like(x)
    yield "x.to(float8)", lambda: x.to(E4M3)
    yield "quantize, one plane", lambda: ops.quantize.default(x, scale, E4M3)
    yield "quantize, both", lambda: ops.quantize.default(x, scale, E4M3, True, True)
    yield "quantize_current, both", lambda: ops.quantize_current.default(x, E4M3, True, True)
    yield (
        "quantize_delayed, both",
        lambda: ops.quantize_delayed.default(x, scale, amax, E4M3, True, True),
    )
    yield (
        "_quantize_delayed, both",
        lambda: ops._quantize_delayed.default(x, scale, amax, E4M3, True, True),
    )
    yield "quantize_blocks, MX, one plane", lambda: ops.quantize_blocks.default(*mx)
    yield "quantize_blocks, MX, both", lambda: ops.quantize_blocks.default(*mx, True, True)
    yield "amax", lambda: ops.amax.default(x)
    yield "transpose", lambda: ops.transpose.default(row)
    yield "rebase", lambda: ops.rebase.default(codes, square, [32, 32], 1)
    quantizer = fp8rs.Quantizer("current")
    yield "Quantizer, both", lambda: quantizer(x)


def product(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor) -> Any:
    """Return a @ b.T, or an empty tensor on the CPU, where a GEMM would add host time."""
    if a.is_cpu:
        return torch.empty((a.shape[0], b.t().shape[1]), dtype=torch.bfloat16)
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16)


class Least(torch.autograd.Function):
    """Calls the operators of recipe current, without checks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        """Multiply quantized operands."""
        row, col, scale = ops.quantize_current.default(x, E4M3, True, True)
        codes, _, w_scale = ops.quantize_current.default(weight, E4M3)
        ctx.save_for_backward(col, scale, weight, w_scale)
        return product(row, codes, scale, w_scale)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        """Return both gradients, as products of quantized operands."""
        x, x_scale, weight, w_scale = ctx.saved_tensors
        row, col, scale = ops.quantize_current.default(dy, E4M3, True, True)
        _, codes = ops.quantize.default(weight, w_scale, E4M3, False, True)
        return product(row, codes, scale, w_scale), product(col, x, scale, x_scale)


class Nothing(torch.autograd.Function):
    """Only allocates the output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        """Return an output that is not initialized."""
        ctx.save_for_backward(x, weight)
        return torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        """Return the input and the weight in place of their gradients."""
        x, weight = ctx.saved_tensors
        return x.detach(), weight.detach()


BARE: dict[str | None, type[torch.autograd.Function]] = {
    "least": Least,
    "least, nothing called": Nothing,
}


class Bare(nn.Module):
    """A layer that applies an autograd.Function to its input and a weight."""

    def __init__(self, function: type[torch.autograd.Function], weight: torch.Tensor) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> Any:
        """Apply the function."""
        return self.function.apply(x, self.weight)


def gemms(device: str, rows: int, features: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield calls of GEMMs on a GPU."""
    if device != "cuda":
        return
    x = torch.randn(rows, features, device=device, dtype=torch.bfloat16)
    w = torch.randn(features, features, device=device, dtype=torch.bfloat16)
    one = torch.ones((), device=device)
    a, b = x.to(E4M3), w.to(E4M3)
    a_scale, b_scale = torch.ones(rows, 1, device=device), torch.ones(features, 1, device=device)
    yield "torch.mm", lambda: torch.mm(x, w.t())
    yield "torch._scaled_mm, per tensor", lambda: product(a, b, one, one)
    yield "torch._scaled_mm, per row", lambda: product(a, b, a_scale, b_scale.t())


def calls_of_least(
    device: str, rows: int, features: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the operators that "least" calls. The rest of its time is autograd's."""
    x = torch.randn(rows, features, device=device, dtype=torch.bfloat16)
    w = torch.randn(features, features, device=device, dtype=torch.bfloat16)
    scale = torch.ones((), device=device)
    current, quantize = ops.quantize_current.default, ops.quantize.default
    yield "a layer's input: quantize_current, both", lambda: current(x, E4M3, True, True)
    yield "a layer's weight: quantize_current, one plane", lambda: current(w, E4M3)
    yield "a layer's weight: quantize, columnwise", lambda: quantize(w, scale, E4M3, False, True)


#: The number of consecutive layers, and the suffix of their rows, whose time is per layer.
DEEP = 8
EACH = f"each of {DEEP}"


def model_of(
    layers: int, recipe: str | None, device: str, rows: int, features: int
) -> nn.Sequential:
    """Return consecutive layers: nn.Linear, `Bare`, or converted ones with warm scales."""
    made = {"device": device, "dtype": torch.bfloat16}
    plain = [nn.Linear(features, features, bias=False, **made) for _ in range(layers)]
    if recipe in BARE:
        return nn.Sequential(*(Bare(BARE[recipe], layer.weight.detach()) for layer in plain))
    model = nn.Sequential(*plain)
    if recipe is not None:
        fp8rs.convert_to_float8_training(model, recipe=recipe, gemms="fp8")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(4):  # initializes the scales of delayed scaling
            model(torch.randn(rows, features, **made)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def linears(device: str, rows: int, features: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield forward, and forward and backward, of nn.Linear and of each recipe."""
    x, gradient = (torch.randn(rows, features, device=device, dtype=torch.bfloat16) for _ in "xg")

    def forward(layer: nn.Module) -> torch.Tensor:
        # A new tensor each time, because layers cache the quantized input.
        y: torch.Tensor = layer(x.detach().requires_grad_())
        return y

    def both(layer: nn.Module) -> None:
        forward(layer).backward(gradient)
        for parameter in layer.parameters():
            parameter.grad = None

    for recipe in (None, *BARE, *RECIPES):
        name = "nn.Linear" if recipe is None else f"Linear, {recipe}"
        model = model_of(1, recipe, device, rows, features)
        layer = model[0]
        if recipe in RECIPES:
            layer._fp8_state.begin_forward(model, ())  # as in a forward of the whole model
        yield f"{name}: forward", functools.partial(forward, layer)
        yield f"{name}: forward + backward", functools.partial(both, layer)
        deep = model_of(DEEP, recipe, device, rows, features)
        yield f"{name}: forward + backward, {EACH}", functools.partial(both, deep)


def main() -> None:
    """Time the calls in rounds, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", help="write the times to this file")
    parser.add_argument("--seconds", type=float, default=25, help="repeat rounds for this time")
    parser.add_argument(
        "--features", type=int, default=128, help="input and output features of the layers"
    )
    parser.add_argument("--rows", type=int, default=64, help="rows of the layers' inputs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = (
        operators(args.device),
        *(p(args.device, args.rows, args.features) for p in (gemms, calls_of_least, linears)),
    )
    start = time.perf_counter()
    calls = dict(itertools.chain(*parts))
    times: dict[str, list[float]] = {name: [] for name in calls}
    rounds = 0
    while not rounds or time.perf_counter() - start < args.seconds:
        for name, call in calls.items():
            layers = DEEP if name.endswith(EACH) else 1
            times[name].append(mean_us(args.device, call) / layers)
        rounds += 1
        print(f"{time.perf_counter() - start:.0f} s: round {rounds}", flush=True)
    shortest = {name: min(taken) for name, taken in times.items()}
    median = {name: statistics.median(taken) for name, taken in times.items()}
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "no GPU"
    print(f"torch {torch.__version__}, fp8rs {fp8rs.__version__}, {args.device} ({gpu})\n")
    print("| call | us | median | ratio |\n|---|---|---|---|")
    for name, us in shortest.items():
        _, colon, kind = name.partition(": f")
        plain = shortest.get(f"nn.Linear: f{kind}") if colon else None
        ratio = "" if plain is None else f"{us / plain:.1f}"
        print(f"| {name} | {us:.1f} | {median[name]:.1f} | {ratio} |")
    if args.json:
        with open(args.json, "w") as file:
            of_run = {"torch": torch.__version__, "device": args.device}
            json.dump({**of_run, "us": shortest, "median_us": median}, file)


if __name__ == "__main__":
    main()
