"""Time the CUDA kernels, compared with a copy of as many bytes.

    python benches/cuda_kernels.py [--json FILE] [--sizes 8192x8192,...]

CUDA events surround replays of a graph with several calls on random data. Each call has separate
inputs and outputs, so that the L2 cache is cold. Times are medians. *Fraction* is the time of a
device copy of as many bytes as the kernel's inputs and outputs, divided by the kernel's time.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import fp8rs  # noqa: F401  (registers the operators)

ops = torch.ops.fp8rs
E4M3 = torch.float8_e4m3fn


#: A row of the JSON file: a kernel's name, microseconds, and fraction of a copy's speed.
Row = tuple[str, float, float]


@dataclass(frozen=True)
class Kernel:
    """A kernel to time: the bytes that it reads and writes, and one call for each input."""

    bytes_per_element: float
    calls: list[Callable[[], object]]

    @classmethod
    def of(
        cls, bytes_per_element: float, call: Callable[[Tensor], object], inputs: list[Tensor]
    ) -> Kernel:
        """Return a kernel that is called with each of the inputs."""
        calls: list[Callable[[], object]] = []
        for x in inputs:
            calls.append(functools.partial(call, x))
        return cls(bytes_per_element, calls)


def time_us(calls: list[Callable[[], object]], rounds: int = 15) -> float:
    """Return the median time of a call, from replays of one graph of all calls."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Keep the outputs, so that each call writes to memory of its own.
        _outputs = [call() for call in calls]
    graph.replay()
    torch.cuda.synchronize()

    times = []
    for _ in range(rounds):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
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
    # Half of the bytes are read, as int32 in multiples of 16 bytes.
    numel = int(nbytes / 2) // 16 * 4
    driver_calls: list[Callable[[], object]] = []
    kernel_calls: list[Callable[[], object]] = []
    for _ in range(sets):
        source = torch.randint(1 << 30, (numel,), dtype=torch.int32, device="cuda")
        target = torch.empty_like(source)
        driver_calls.append(functools.partial(target.copy_, source))
        kernel_calls.append(functools.partial(torch.neg, source, out=target))
    return min(time_us(driver_calls), time_us(kernel_calls))


def kernels(xs: list[Tensor]) -> dict[str, Kernel]:
    """Return each kernel with a call per input, by name."""
    size = xs[0].element_size()
    scale = torch.tensor(0.01, device="cuda")
    amax = torch.zeros_like(scale)
    up_scale = scale.clone()
    up_amax = amax.clone()
    codes = [ops.quantize(x, scale, E4M3)[0] for x in xs]
    norm_weight = torch.ones(xs[0].shape[1], dtype=xs[0].dtype, device="cuda")
    # A gated activation has two inputs. The second one is the next tensor.
    gated_inputs = list(zip(xs, [*xs[1:], xs[0]], strict=True))
    result: dict[str, Kernel] = {}

    def add(
        name: str,
        bytes_per_element: float,
        call: Callable[[Tensor], object],
        inputs: list[Tensor] = xs,
    ) -> None:
        result[name] = Kernel.of(bytes_per_element, call, inputs)

    def add_cast(name: str, call: Callable[[Tensor, bool], object]) -> None:
        """Add a kernel that writes codes, and one that writes their transpose too."""
        add(name.format(""), size + 1, lambda x: call(x, False))
        add(name.format(" + transpose"), size + 2, lambda x: call(x, True))

    def add_norm(name: str, centered: bool, **delayed: Tensor) -> None:
        bias = norm_weight if centered else None

        def call(x: Tensor, transpose: bool) -> object:
            return ops._quantize_norm(
                x, norm_weight, bias, centered, 1e-5, E4M3, True, transpose, **delayed
            )

        add_cast(name, call)

    def add_gated(
        name: str, bytes_per_element: float, call: Callable[[Tensor, Tensor], object]
    ) -> None:
        calls: list[Callable[[], object]] = []
        for gate, up in gated_inputs:
            calls.append(functools.partial(call, gate, up))
        result[name] = Kernel(bytes_per_element, calls)

    def add_sum(ranks: int) -> None:
        def call(x: Tensor) -> object:
            received = x.view(ranks, -1)
            total = received.new_empty(received.shape[1], dtype=torch.float32)
            return ops.sum_rows_(total, received, 3.0)

        add(f"sum over {ranks} ranks", size + 4 / ranks, call)

    add_norm("RMSNorm, current scaling{}", centered=False)
    add_norm("RMSNorm, delayed{}", centered=False, scale=scale, amax=amax)
    add_norm("LayerNorm, current scaling{}", centered=True)
    add_gated(
        "SwiGLU, current scaling",
        2 * size + 1,
        lambda gate, up: ops._quantize_glu(gate, up, "silu", E4M3, True, False),
    )
    add_gated(
        "SwiGLU, current scaling + transpose",
        2 * size + 2,
        lambda gate, up: ops._quantize_glu(gate, up, "silu", E4M3, True, True),
    )
    add_gated(
        "SwiGLU's gradients, current scaling + transpose",
        3 * size + 4,
        lambda gate, up: ops._quantize_glu_backward(gate, up, gate, "silu", E4M3),
    )
    add_gated(
        "SwiGLU, delayed + transpose",
        2 * size + 2,
        lambda gate, up: ops._quantize_glu(
            gate, up, "silu", E4M3, True, True, scale=scale, amax=amax
        ),
    )
    add_gated(
        "SwiGLU's gradients, delayed + transpose",
        3 * size + 4,
        lambda gate, up: ops._quantize_glu_backward(
            gate,
            up,
            gate,
            "silu",
            E4M3,
            gate_scale=scale,
            gate_amax=amax,
            up_scale=up_scale,
            up_amax=up_amax,
        ),
    )
    cos, sin = torch.rand(2, xs[0].shape[0], 128, device="cuda").unbind()
    add("rotation of heads of 128", 2 * size, lambda x: ops._rotate(x, cos, sin, False))
    add("amax", size, ops.amax)
    add_cast("cast{}", lambda x, transpose: ops.quantize(x, scale, E4M3, True, transpose))
    add_cast(
        "cast{}, delayed",
        lambda x, transpose: ops._quantize_delayed(x, scale, amax, E4M3, True, transpose),
    )
    add_cast(
        "current scaling{}", lambda x, transpose: ops.quantize_current(x, E4M3, True, transpose)
    )
    add("transpose", 2, ops.transpose, codes)
    add(
        "dequantize",
        size + 1,
        lambda c: ops.dequantize(c, scale, [-1, -1], xs[0].dtype),
        codes,
    )
    add_sum(2)
    add_sum(8)
    return result


def multi() -> list[Row]:
    """Measure kernels for lists, on fp32 weights of 16 layers of Llama-3-8B in 224 tensors."""
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
    shapes += [(14336, 4096), (14336, 4096), (4096, 14336)]
    # A quarter of each weight, in two tensors.
    xs = []
    for _ in range(16):
        for rows, cols in shapes:
            for _ in range(2):
                xs.append(torch.randn(rows // 4 // 2, cols, device="cuda"))
    numel = sum(x.numel() for x in xs)
    codes = [torch.empty(x.shape, dtype=E4M3, device="cuda") for x in xs]
    scales = torch.full((len(xs),), 0.01, device="cuda")
    amaxes = torch.zeros_like(scales)

    list_kernels = {
        "multi amax": Kernel(4, [lambda: ops.multi_amax(xs)]),
        "multi cast": Kernel(5, [lambda: ops.multi_quantize(xs, scales, codes)]),
        "multi cast, delayed": Kernel(
            5, [lambda: ops.multi_quantize_delayed(xs, scales, amaxes, codes)]
        ),
    }
    print(f"\n{len(xs)} tensors, {numel / 1e6:.0f} M fp32")
    result = []
    for name, kernel in list_kernels.items():
        kernel_us = time_us(kernel.calls, 9)
        copied_us = copy_us(numel * kernel.bytes_per_element, 1)
        result.append(row_of(name, kernel_us, copied_us))
    return result


def row_of(name: str, kernel_us: float, copied_us: float) -> Row:
    """Print a kernel's time and that of a copy of as many bytes, and return its row."""
    fraction = copied_us / kernel_us
    print(
        f"{name:30} {kernel_us:8.1f} us  copy {copied_us:8.1f}  fraction {fraction:.2f}",
        flush=True,
    )
    return name, kernel_us, fraction


def main() -> None:
    """Time the kernels of each size, and print the times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--sizes", default="4096x4096,8192x8192,16384x14336")
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "bf16 in, E4M3 out")

    results: dict[str, list[Row]] = {}
    for size in arguments.sizes.split(","):
        rows, cols = map(int, size.split("x"))
        # So many inputs that the L2 cache does not hold them.
        sets = max(3, min(8, int(1e9 / (rows * cols * 2))))
        xs = [torch.randn(rows, cols, dtype=torch.bfloat16, device="cuda") for _ in range(sets)]
        print(f"\n{size}, {sets} sets")

        #: Times of copies by bytes per element.
        copies_us: dict[float, float] = {}
        results[size] = []
        for name, kernel in kernels(xs).items():
            nbytes = kernel.bytes_per_element
            if nbytes not in copies_us:
                copies_us[nbytes] = copy_us(rows * cols * nbytes, sets)
            results[size].append(row_of(name, time_us(kernel.calls), copies_us[nbytes]))
        del xs

    results["multi"] = multi()
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
