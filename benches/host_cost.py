"""Host time of eager calls, in microseconds: operators, quantizers, and Linear beside nn.Linear.

    python benches/host_cost.py [cpu|cuda] [--json FILE] [--rounds N]

Tensors are tiny, so that what is timed is the way to the kernel: on CUDA nothing waits for the
device inside the timing, which is idle before each round. Each figure is the median over rounds of
the mean over a round's calls. "ratio" is to nn.Linear's in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

import fp8rs
from fp8rs import _core

ops = torch.ops.fp8rs
E4M3 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu
RECIPES = ("current", "delayed", "rowwise", "mxfp8", "block")


def median_us(device: str, call: Callable[[], object], rounds: int, calls: int = 100) -> float:
    """The median over rounds of a call's mean time on the host."""
    for _ in range(20):
        call()
    times = []
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def operators(device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of operators, and of the functions that take their outputs."""
    x = torch.randn(64, 128, device=device, dtype=torch.bfloat16)
    scale, amax = torch.tensor(0.5, device=device), torch.tensor(1.0, device=device)
    row, col = ops.quantize.default(x, scale, E4M3, True, True)
    used = torch.empty((), device=device)
    mx = (x, E4M3, [1, 32], E8M0)
    _, mx_row_scale, _, mx_col_scale = ops.quantize_blocks.default(*mx, True, True)
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
    yield "into given outputs: quantize, one plane", lambda: _core.quantize(x, scale, row, None)
    yield "into given outputs: quantize, both", lambda: _core.quantize(x, scale, row, col)
    yield (
        "into given outputs: quantize_current, both",
        lambda: _core.quantize_current(x, used, row, col),
    )
    yield (
        "into given outputs: quantize_delayed, both",
        lambda: _core.quantize_delayed(x, scale, amax, used, row, col),
    )
    yield (
        "into given outputs: quantize_blocks, MX, both",
        lambda: _core.quantize_blocks(x, 1, 32, row, mx_row_scale, col, mx_col_scale),
    )
    quantizer = fp8rs.Float8CurrentScalingQuantizer(E4M3, rowwise=True, columnwise=True)
    yield "Float8CurrentScalingQuantizer, both", lambda: quantizer(x)


def linears(device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Forward, and forward with backward, of nn.Linear and of each recipe's."""
    for recipe in (None, *RECIPES):
        x = torch.randn(64, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        model = nn.Sequential(nn.Linear(128, 128, bias=False, device=device, dtype=torch.bfloat16))
        if recipe is not None:
            fp8rs.convert_to_float8_training(model, recipe=recipe)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            for _ in range(4):  # delayed scaling finds its scales
                model(x).sum().backward()
                optimizer.step()
            model[0]._fp8_state.begin_forward(model, ())  # as in a forward of the whole model
        name = "nn.Linear" if recipe is None else f"Linear, {recipe}"
        layer, gradient = model[0], torch.ones(64, 128, device=device, dtype=torch.bfloat16)

        def forward(layer: nn.Module = layer, x: torch.Tensor = x) -> torch.Tensor:
            # A tensor of its own each time: layers share what one input was quantized to.
            y: torch.Tensor = layer(x.detach().requires_grad_())
            return y

        def both(
            layer: nn.Module = layer, x: torch.Tensor = x, gradient: torch.Tensor = gradient
        ) -> None:
            forward(layer, x).backward(gradient)
            layer.weight.grad = None

        yield f"{name}: forward", forward
        yield f"{name}: forward + backward", both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for part in (operators, linears):
        for name, call in part(args.device):
            figures[name] = median_us(args.device, call, args.rounds)
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "no GPU"
    print(f"torch {torch.__version__}, fp8rs {fp8rs.__version__}, {args.device} ({gpu})\n")
    print("| call | us | ratio |\n|---|---|---|")
    for name, us in figures.items():
        _, colon, kind = name.partition(": f")
        plain = figures.get(f"nn.Linear: f{kind}") if colon else None
        print(f"| {name} | {us:.1f} | {'' if plain is None else f'{us / plain:.1f}'} |")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"torch": torch.__version__, "device": args.device, "us": figures}, file)


if __name__ == "__main__":
    main()
