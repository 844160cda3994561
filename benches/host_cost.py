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

#: The name of a row, and the call that it times.
NamedCall = tuple[str, Callable[[], object]]


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


def operators(device: str) -> Iterator[NamedCall]:
    """Yield calls of operators and a quantizer."""
    x = torch.randn(64, 128, device=device, dtype=torch.bfloat16)
    scale = torch.tensor(0.5, device=device)
    amax = torch.tensor(1.0, device=device)
    rowwise_codes, _ = ops.quantize.default(x, scale, E4M3)
    mx = (x, E4M3, [1, 32], E8M0)
    squares = ops.quantize_blocks.default(x, E4M3, [32, 32], E8M0, True, False)
    square_codes, square_scales = squares[:2]
    quantizer = fp8rs.Quantizer("current")

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
    yield "transpose", lambda: ops.transpose.default(rowwise_codes)
    yield "rebase", lambda: ops.rebase.default(square_codes, square_scales, [32, 32], 1)
    yield "Quantizer, both", lambda: quantizer(x)


def product(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor
) -> torch.Tensor:
    """Return a @ b.T, or an empty tensor on the CPU, where a GEMM would add host time."""
    if a.is_cpu:
        return torch.empty((a.shape[0], b.t().shape[1]), dtype=torch.bfloat16)
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16)


class Least(torch.autograd.Function):
    """Calls the operators of recipe current, without checks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply quantized operands."""
        x_row, x_col, x_scale = ops.quantize_current.default(x, E4M3, True, True)
        w_row, _, w_scale = ops.quantize_current.default(weight, E4M3)
        ctx.save_for_backward(x_col, x_scale, weight, w_scale)
        return product(x_row, w_row, x_scale, w_scale)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both gradients, as products of quantized operands."""
        x_col, x_scale, weight, w_scale = ctx.saved_tensors
        dy_row, dy_col, dy_scale = ops.quantize_current.default(dy, E4M3, True, True)
        _, w_col = ops.quantize.default(weight, w_scale, E4M3, False, True)
        dx = product(dy_row, w_col, dy_scale, w_scale)
        dw = product(dy_col, x_col, dy_scale, x_scale)
        return dx, dw


class Nothing(torch.autograd.Function):
    """Only allocates the output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return an output that is not initialized."""
        ctx.save_for_backward(x, weight)
        return torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
        self.function = function
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> Any:
        """Apply the function."""
        return self.function.apply(x, self.weight)


def gemms(device: str, rows: int, features: int) -> Iterator[NamedCall]:
    """Yield calls of GEMMs on a GPU."""
    if device != "cuda":
        return
    x = torch.randn(rows, features, device=device, dtype=torch.bfloat16)
    w = torch.randn(features, features, device=device, dtype=torch.bfloat16)
    x_codes = x.to(E4M3)
    w_codes = w.to(E4M3)
    tensor_scale = torch.ones((), device=device)
    x_scale = torch.ones(rows, 1, device=device)
    w_scale = torch.ones(features, 1, device=device)

    yield "torch.mm", lambda: torch.mm(x, w.t())
    yield (
        "torch._scaled_mm, per tensor",
        lambda: product(x_codes, w_codes, tensor_scale, tensor_scale),
    )
    yield "torch._scaled_mm, per row", lambda: product(x_codes, w_codes, x_scale, w_scale.t())


def calls_of_least(device: str, rows: int, features: int) -> Iterator[NamedCall]:
    """Yield the operators that "least" calls. The rest of its time is autograd's."""
    x = torch.randn(rows, features, device=device, dtype=torch.bfloat16)
    w = torch.randn(features, features, device=device, dtype=torch.bfloat16)
    scale = torch.ones((), device=device)
    current = ops.quantize_current.default
    quantize = ops.quantize.default

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
    model = nn.Sequential()
    for _ in range(layers):
        layer = nn.Linear(features, features, bias=False, device=device, dtype=torch.bfloat16)
        if recipe in BARE:
            model.append(Bare(BARE[recipe], layer.weight.detach()))
        else:
            model.append(layer)

    if recipe in RECIPES:
        fp8rs.convert_to_float8_training(model, recipe=recipe, gemms="fp8")
        # Some steps initialize the scales of delayed scaling.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(4):
            x = torch.randn(rows, features, device=device, dtype=torch.bfloat16)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def linears(device: str, rows: int, features: int) -> Iterator[NamedCall]:
    """Yield forward, and forward and backward, of nn.Linear and of each recipe."""
    x = torch.randn(rows, features, device=device, dtype=torch.bfloat16)
    gradient = torch.randn(rows, features, device=device, dtype=torch.bfloat16)

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
            layer._fp8_state.begin_forward(model, (), {})  # as in a forward of the whole model
        yield f"{name}: forward", functools.partial(forward, layer)
        yield f"{name}: forward + backward", functools.partial(both, layer)

        deep_model = model_of(DEEP, recipe, device, rows, features)
        yield f"{name}: forward + backward, {EACH}", functools.partial(both, deep_model)


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

    start = time.perf_counter()
    calls = dict(operators(args.device))
    calls.update(gemms(args.device, args.rows, args.features))
    calls.update(calls_of_least(args.device, args.rows, args.features))
    calls.update(linears(args.device, args.rows, args.features))

    times_us: dict[str, list[float]] = {name: [] for name in calls}
    rounds = 0
    while rounds == 0 or time.perf_counter() - start < args.seconds:
        for name, call in calls.items():
            layers = DEEP if name.endswith(EACH) else 1
            times_us[name].append(mean_us(args.device, call) / layers)
        rounds += 1
        print(f"{time.perf_counter() - start:.0f} s: round {rounds}", flush=True)

    min_us = {name: min(times) for name, times in times_us.items()}
    median_us = {name: statistics.median(times) for name, times in times_us.items()}

    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "no GPU"
    print(f"torch {torch.__version__}, fp8rs {fp8rs.__version__}, {args.device} ({gpu})\n")
    print("| call | us | median | ratio |\n|---|---|---|---|")
    for name, us in min_us.items():
        # Rows of layers, such as "Linear, current: forward", are compared with those of nn.Linear.
        _, separator, passes = name.partition(": f")
        ratio = ""
        if separator:
            bf16_us = min_us[f"nn.Linear: f{passes}"]
            ratio = f"{us / bf16_us:.1f}"
        print(f"| {name} | {us:.1f} | {median_us[name]:.1f} | {ratio} |")

    if args.json:
        report = {
            "torch": torch.__version__,
            "device": args.device,
            "us": min_us,
            "median_us": median_us,
        }
        with open(args.json, "w") as file:
            json.dump(report, file)


if __name__ == "__main__":
    main()
