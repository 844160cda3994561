"""Time the CUDA kernels, compared with a copy of as many bytes.

    python benches/cuda_kernels.py [--json FILE] [--sizes 8192x8192,...]

CUDA events surround replays of a graph with several calls on random data. Each call has separate
inputs and outputs, so that the L2 cache is cold. Times are medians. *Fraction* is the time of a
device copy of as many bytes as the kernel's inputs and outputs, divided by the kernel's time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fp8rs  # noqa: F401  (registers the operators)

ops = torch.ops.fp8rs
E4M3 = torch.float8_e4m3fn


def time_us(calls: list[Callable[[], object]], rounds: int = 15) -> float:
    """Return the median time of a call, from replays of one graph of all calls."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _kept = [call() for call in calls]
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def copy_us(nbytes: float, sets: int) -> float:
    """Return the time to read and write ``nbytes`` in total.

    It is the shorter of the driver's copy and an elementwise kernel.
    """
    half = int(nbytes / 2) // 16 * 4
    sources = [
        torch.randint(1 << 30, (half,), dtype=torch.int32, device="cuda") for _ in range(sets)
    ]
    targets = [torch.empty_like(s) for s in sources]
    pairs = list(zip(targets, sources, strict=True))
    driver = time_us([lambda t=t, s=s: t.copy_(s) for t, s in pairs])
    kernel = time_us([lambda t=t, s=s: torch.neg(s, out=t) for t, s in pairs])
    return min(driver, kernel)


def kernels(xs: list[Tensor]) -> dict[str, tuple[float, list[Callable[[], object]]]]:
    """Return the bytes per element and one call per input, by name."""
    size = xs[0].element_size()
    scale = torch.tensor(0.01, device="cuda")
    amax = torch.zeros_like(scale)
    codes = [ops.quantize(x, scale, E4M3)[0] for x in xs]

    def each(call: Callable[[Tensor], object], of: list[Tensor] = xs) -> list[Callable[[], object]]:
        return [lambda x=x: call(x) for x in of]

    def both(name: str, call: Callable[[Tensor, bool], object]) -> dict[str, Any]:
        return {
            name.format(""): (size + 1, each(lambda x: call(x, False))),
            name.format(" + transpose"): (size + 2, each(lambda x: call(x, True))),
        }

    def sum_over(ranks: int) -> tuple[float, list[Callable[[], object]]]:
        def call(x: Tensor) -> object:
            sent = x.view(ranks, -1)
            return ops.sum_rows_(sent.new_empty(sent.shape[1], dtype=torch.float32), sent, 3.0)

        return size + 4 / ranks, each(call)

    weight = torch.ones(xs[0].shape[1], dtype=xs[0].dtype, device="cuda")
    following = dict(zip(map(id, xs), [*xs[1:], xs[0]], strict=True))

    def norm(centered: bool, **delayed: Tensor) -> Callable[[Tensor, bool], object]:
        bias = weight if centered else None
        return lambda x, transpose: ops._quantize_norm(
            x, weight, bias, centered, 1e-5, E4M3, True, transpose, **delayed
        )

    def gated(x: Tensor, transpose: bool) -> object:
        return ops._quantize_glu(x, following[id(x)], "silu", E4M3, True, transpose)

    def gated_backward(x: Tensor) -> object:
        return ops._quantize_glu_backward(x, following[id(x)], x, "silu", E4M3)

    return {
        **both("RMSNorm, current scaling{}", norm(False)),
        **both("RMSNorm, delayed{}", norm(False, scale=scale, amax=amax)),
        **both("LayerNorm, current scaling{}", norm(True)),
        "SwiGLU, current scaling": (2 * size + 1, each(lambda x: gated(x, False))),
        "SwiGLU, current scaling + transpose": (2 * size + 2, each(lambda x: gated(x, True))),
        "SwiGLU's gradients, current scaling + transpose": (3 * size + 4, each(gated_backward)),
        "amax": (size, each(ops.amax)),
        **both("cast{}", lambda x, t: ops.quantize(x, scale, E4M3, True, t)),
        **both(
            "cast{}, delayed", lambda x, t: ops._quantize_delayed(x, scale, amax, E4M3, True, t)
        ),
        **both("current scaling{}", lambda x, t: ops.quantize_current(x, E4M3, True, t)),
        "transpose": (2, each(ops.transpose, codes)),
        "dequantize": (
            size + 1,
            each(lambda c: ops.dequantize(c, scale, [-1, -1], xs[0].dtype), codes),
        ),
        "sum over 2 ranks": sum_over(2),
        "sum over 8 ranks": sum_over(8),
    }


def multi() -> list[tuple[str, float, float]]:
    """Measure kernels for lists, on fp32 weights of 16 layers of Llama-3-8B in 224 tensors."""
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
    shapes += [(14336, 4096), (14336, 4096), (4096, 14336)]
    xs = [
        torch.randn(r // 4 // 2, c, device="cuda")
        for _ in range(16)
        for r, c in shapes
        for _ in (0, 1)
    ]
    n = sum(x.numel() for x in xs)
    outs = [torch.empty(x.shape, dtype=E4M3, device="cuda") for x in xs]
    scales = torch.full((len(xs),), 0.01, device="cuda")
    amaxes = torch.zeros_like(scales)
    rows = {
        "multi amax": (4, lambda: ops.multi_amax(xs)),
        "multi cast": (5, lambda: ops.multi_quantize(xs, scales, outs)),
        "multi cast, delayed": (
            5,
            lambda: ops.multi_quantize_delayed(xs, scales, amaxes, outs),
        ),
    }
    print(f"\n{len(xs)} tensors, {n / 1e6:.0f} M fp32")
    result = []
    for name, (per_element, call) in rows.items():
        took, copy = time_us([call], 9), copy_us(n * per_element, 1)
        print(f"{name:30} {took:8.1f} us  copy {copy:8.1f}  fraction {copy / took:.2f}", flush=True)
        result.append((name, took, copy / took))
    return result


def main() -> None:
    """Time the kernels of each size, and print the times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--sizes", default="4096x4096,8192x8192,16384x14336")
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "bf16 in, E4M3 out")
    results: dict[str, list[tuple[str, float, float]]] = {}
    for size in arguments.sizes.split(","):
        rows, cols = map(int, size.split("x"))
        sets = max(3, min(8, int(1e9 / (rows * cols * 2))))
        xs = [torch.randn(rows, cols, dtype=torch.bfloat16, device="cuda") for _ in range(sets)]
        copies: dict[float, float] = {}
        print(f"\n{size}, {sets} sets")
        results[size] = []
        for name, (per_element, calls) in kernels(xs).items():
            if per_element not in copies:
                copies[per_element] = copy_us(rows * cols * per_element, sets)
            took, copy = time_us(calls), copies[per_element]
            print(
                f"{name:30} {took:8.1f} us  copy {copy:8.1f}  fraction {copy / took:.2f}",
                flush=True,
            )
            results[size].append((name, took, copy / took))
        del xs
    results["multi"] = multi()
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
