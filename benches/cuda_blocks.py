"""Time the CUDA kernels of block formats, compared with a copy of as many bytes.

    python benches/cuda_blocks.py [--json FILE] [--sizes 8192x8192,...]

Measures as cuda_kernels.py does. Includes torchao's compiled casts if it is installed. Bytes are
the bytes of inputs, codes and scales.
"""

from __future__ import annotations

import argparse
import functools
import json

import torch
from cuda_kernels import Kernel, Row, copy_us, time_us
from torch import Tensor

import fp8rs  # noqa: F401  (registers the operators)

ops = torch.ops.fp8rs
E4M3 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu
F32 = torch.float32


def kernels(xs: list[Tensor]) -> dict[str, Kernel]:
    """Return each kernel with a call per input, by name."""
    rows, cols = xs[0].shape
    size = xs[0].element_size()
    result: dict[str, Kernel] = {}

    def quantize(name: str, block: tuple[int, int], directions: str, **options: object) -> None:
        """Add a cast to blocks, whose directions are "r", "c" or "rc"."""
        rowwise = "r" in directions
        columnwise = "c" in directions
        scale_dtype = E8M0 if block[1] == 32 else F32

        def call(x: Tensor) -> list[Tensor]:
            planes: list[Tensor] = ops.quantize_blocks(
                x, E4M3, block, scale_dtype, rowwise, columnwise, **options
            )
            return planes

        output_bytes = sum(output.numel() * output.element_size() for output in call(xs[0]))
        result[name] = Kernel.of(size + output_bytes / (rows * cols), call, xs)

    quantize("MX rowwise", (1, 32), "r")
    quantize("MX rowwise, packed", (1, 32), "r", packed=True)
    quantize("MX columnwise", (1, 32), "c")
    quantize("MX both", (1, 32), "rc")
    quantize("MX both, packed", (1, 32), "rc", packed=True)
    quantize("MX 32x32", (32, 32), "r")
    quantize("MX 32x32 both", (32, 32), "rc")
    quantize("1x128", (1, 128), "r")
    quantize("1x128 both", (1, 128), "rc")
    quantize("128x128", (128, 128), "r")
    quantize("128x128 both", (128, 128), "rc")
    quantize("per row", (1, -1), "r")
    quantize("per row, power of two", (1, -1), "r", power_2_scale=True)
    column_scale = torch.ones(cols, device="cuda")
    quantize("per row, column scale", (1, -1), "r", column_scale=column_scale)
    quantize("per row both", (1, -1), "rc")
    quantize("per row both, column scale", (1, -1), "rc", column_scale=column_scale)
    quantize(
        "per row both, amax given",
        (1, -1),
        "rc",
        amax=torch.ones(rows, 1, device="cuda"),
        amax_columnwise=torch.ones(cols, 1, device="cuda"),
    )

    for name, block in (("32x32", (32, 32)), ("128x128", (128, 128)), ("rows", (1, -1))):
        block_amax = functools.partial(ops.block_amax, block=block)
        result[f"block amax, {name}"] = Kernel.of(size, block_amax, xs)

    codes = []
    for _ in xs:
        code_bytes = torch.randint(0, 255, (rows, cols), dtype=torch.uint8, device="cuda")
        codes.append(code_bytes.view(E4M3))
    grid = (-(-rows // 32), -(-cols // 32))
    scales = torch.randint(110, 130, grid, dtype=torch.uint8, device="cuda").view(E8M0)
    for axis, name in enumerate(("rows", "columns")):
        rebase = functools.partial(ops.rebase, scale=scales, block=[32, 32], axis=axis)
        result[f"rebase {name}"] = Kernel.of(2, rebase, codes)
    return result


def peers(xs: list[Tensor]) -> dict[str, Kernel]:
    """Return torchao's compiled casts to MX, or nothing if it is not installed."""
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    except ImportError:
        return {}

    # The input, a code per element, and a scale per 32 elements.
    bytes_per_element = xs[0].element_size() + 1 + 1 / 32
    result: dict[str, Kernel] = {}
    for mode in (ScaleCalculationMode.FLOOR, ScaleCalculationMode.RCEIL):

        def cast(x: Tensor, mode: ScaleCalculationMode = mode) -> object:
            return to_mx(x, E4M3, 32, mode)

        compiled = torch.compile(cast, fullgraph=True, dynamic=False)
        result[f"torchao to_mx, {mode.name}"] = Kernel.of(bytes_per_element, compiled, xs)
    return result


def main() -> None:
    """Time the kernels of each size, and print the times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--sizes", default="4096x4096,8192x8192,16384x14336")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", default="", help="time kernels whose names contain this")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, dtype, "in, E4M3 out")

    results: dict[str, list[Row]] = {}
    for size in arguments.sizes.split(","):
        rows, cols = map(int, size.split("x"))
        # So many inputs that the L2 cache does not hold them.
        sets = max(3, min(8, int(1e9 / (rows * cols * 2))))
        xs = [torch.randn(rows, cols, dtype=dtype, device="cuda") for _ in range(sets)]
        print(f"\n{size}, {sets} sets")

        #: Times of copies by bytes per element, rounded so that similar kernels share one.
        copies_us: dict[float, float] = {}
        results[size] = []
        all_kernels = kernels(xs) | peers(xs)
        for name, kernel in all_kernels.items():
            if arguments.only not in name:
                continue

            nbytes = round(kernel.bytes_per_element, 2)
            if nbytes not in copies_us:
                copies_us[nbytes] = copy_us(rows * cols * nbytes, sets)
            kernel_us = time_us(kernel.calls)
            copied_us = copies_us[nbytes]
            fraction = copied_us / kernel_us
            print(
                f"{name:26} {kernel_us:8.1f} us  copy {copied_us:8.1f}  fraction {fraction:.2f}",
                flush=True,
            )
            results[size].append((name, kernel_us, fraction))
        del xs, all_kernels

    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
