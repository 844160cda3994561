"""Time the CUDA kernels against a copy of the same bytes, in one run.

    python benches/cuda_kernels.py [--json FILE] [--sizes 8192x8192,...]

CUDA events around graph replays of several calls; inputs and outputs are rotated so that the L2
cache is cold; random data; medians. A kernel's *fraction* is the time of a device copy that moves
the bytes that the kernel must move (each input once, each output once) over the kernel's time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

import fp8rs  # noqa: F401  (registers the operators)
from fp8rs import _core

E4M3 = torch.float8_e4m3fn


def time_us(calls: list[Callable[[], None]], rounds: int = 15) -> float:
    """The median time of one call: the calls run one after the other, as one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
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
    """The faster of the driver's copy and an elementwise kernel that move `nbytes` in all."""
    half = int(nbytes / 2) // 16 * 4
    sources = [
        torch.randint(1 << 30, (half,), dtype=torch.int32, device="cuda") for _ in range(sets)
    ]
    targets = [torch.empty_like(s) for s in sources]
    pairs = list(zip(targets, sources, strict=True))
    driver = time_us([lambda t=t, s=s: t.copy_(s) for t, s in pairs])
    kernel = time_us([lambda t=t, s=s: torch.neg(s, out=t) for t, s in pairs])
    return min(driver, kernel)


def kernels(xs: list[Tensor]) -> dict[str, tuple[float, list[Callable[[], None]]]]:
    """Name -> (bytes an element, one call for each input)."""
    rows, cols = xs[0].shape
    size = xs[0].element_size()
    row = [torch.empty(rows, cols, dtype=E4M3, device="cuda") for _ in xs]
    col = [torch.empty(cols, rows, dtype=E4M3, device="cuda") for _ in xs]
    scale = torch.tensor(0.01, device="cuda")
    used, amax = torch.empty_like(scale), torch.zeros_like(scale)
    wide = [torch.empty_like(x) for x in xs]
    every = range(len(xs))

    def each(call: Callable[[int], None]) -> list[Callable[[], None]]:
        return [lambda i=i: call(i) for i in every]

    return {
        "amax": (size, each(lambda i: _core.amax(xs[i], used))),
        "cast": (size + 1, each(lambda i: _core.quantize(xs[i], scale, row[i], None))),
        "cast + transpose": (
            size + 2,
            each(lambda i: _core.quantize(xs[i], scale, row[i], col[i])),
        ),
        "cast, delayed": (
            size + 1,
            each(lambda i: _core.quantize_delayed(xs[i], scale, amax, used, row[i], None)),
        ),
        "cast + transpose, delayed": (
            size + 2,
            each(lambda i: _core.quantize_delayed(xs[i], scale, amax, used, row[i], col[i])),
        ),
        "current scaling": (
            size + 1,
            each(lambda i: _core.quantize_current(xs[i], used, row[i], None, False, 0.0)),
        ),
        "current scaling + transpose": (
            size + 2,
            each(lambda i: _core.quantize_current(xs[i], used, row[i], col[i], False, 0.0)),
        ),
        "transpose": (2, each(lambda i: _core.transpose(row[i], col[i]))),
        "dequantize": (size + 1, each(lambda i: _core.dequantize(row[i], scale, -1, -1, wide[i]))),
    }


def multi() -> list[tuple[str, float, float]]:
    """The weights of 16 layers of Llama-3-8B shapes, fp32, in 224 tensors (halves of 112)."""
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
    amaxes, used = torch.zeros_like(scales), torch.zeros_like(scales)
    rows = {
        "multi amax": (4, lambda: _core.multi_amax(xs, amaxes)),
        "multi cast": (5, lambda: _core.multi_quantize(xs, scales, outs)),
        "multi cast, delayed": (
            5,
            lambda: _core.multi_quantize_delayed(xs, scales, amaxes, used, outs),
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
