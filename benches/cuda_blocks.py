"""Time the CUDA kernels of block formats, compared with a copy of as many bytes.

    python benches/cuda_blocks.py [--json FILE] [--sizes 8192x8192,...]

Measures as cuda_kernels.py does. Includes torchao's compiled casts if it is installed. Bytes are
the bytes of inputs, codes and scales.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from cuda_kernels import copy_us, time_us
from torch import Tensor

import fp8rs  # noqa: F401  (registers the operators)

ops = torch.ops.fp8rs
E4M3, E8M0, F32 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32

Rows = dict[str, tuple[float, list[Callable[[], object]]]]


def kernels(xs: list[Tensor]) -> Rows:
    """Return the bytes per element and one call per input, by name."""
    rows, cols = xs[0].shape
    size = xs[0].element_size()
    made: Rows = {}

    def add(name: str, per_element: float, call: Callable[[Tensor], object], of: Any = xs) -> None:
        made[name] = (per_element, [lambda x=x: call(x) for x in of])

    def quantize(
        name: str, block: tuple[int, int], directions: str, given: bool = False, **options: object
    ) -> None:
        if given:
            options["amax"] = torch.ones(rows, 1, device="cuda")
            if "c" in directions:
                options["amax_columnwise"] = torch.ones(cols, 1, device="cuda")
        scale_dtype = E8M0 if block[1] == 32 else F32

        def call(x: Tensor) -> Any:
            wanted = ("r" in directions, "c" in directions)
            return ops.quantize_blocks(x, E4M3, block, scale_dtype, *wanted, **options)

        nbytes = sum(out.numel() * out.element_size() for out in call(xs[0])) / (rows * cols)
        add(name, size + nbytes, call)

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
    quantize("per row both, amax given", (1, -1), "rc", given=True)
    for name, block in (("32x32", (32, 32)), ("128x128", (128, 128)), ("rows", (1, -1))):
        add(f"block amax, {name}", size, lambda x, block=block: ops.block_amax(x, block))
    codes = [
        torch.randint(0, 255, (rows, cols), dtype=torch.uint8, device="cuda").view(E4M3) for _ in xs
    ]
    grid = (-(-rows // 32), -(-cols // 32))
    square = torch.randint(110, 130, grid, dtype=torch.uint8, device="cuda").view(E8M0)
    for axis, name in enumerate(("rows", "columns")):
        add(f"rebase {name}", 2, lambda c, axis=axis: ops.rebase(c, square, [32, 32], axis), codes)
    return made


def peers(xs: list[Tensor]) -> Rows:
    """Return torchao's compiled casts to MX, or nothing if it is not installed."""
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    except ImportError:
        return {}
    made: Rows = {}
    for mode in (ScaleCalculationMode.FLOOR, ScaleCalculationMode.RCEIL):

        def cast(x: Tensor, mode: ScaleCalculationMode = mode) -> object:
            return to_mx(x, E4M3, 32, mode)

        compiled = torch.compile(cast, fullgraph=True, dynamic=False)
        calls = [lambda x=x, f=compiled: f(x) for x in xs]
        name = f"torchao to_mx, {mode.name}"
        made[name] = (xs[0].element_size() + 1 + 1 / 32, calls)
    return made


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
    results: dict[str, list[tuple[str, float, float]]] = {}
    for size in arguments.sizes.split(","):
        rows, cols = map(int, size.split("x"))
        sets = max(3, min(8, int(1e9 / (rows * cols * 2))))
        xs = [torch.randn(rows, cols, dtype=dtype, device="cuda") for _ in range(sets)]
        copies: dict[float, float] = {}
        print(f"\n{size}, {sets} sets")
        results[size] = []
        for name, (per_element, calls) in (kernels(xs) | peers(xs)).items():
            if arguments.only not in name:
                continue
            key = round(per_element, 2)
            if key not in copies:
                copies[key] = copy_us(rows * cols * key, sets)
            took, copy = time_us(calls), copies[key]
            print(
                f"{name:26} {took:8.1f} us  copy {copy:8.1f}  fraction {copy / took:.2f}",
                flush=True,
            )
            results[size].append((name, took, copy / took))
        del xs
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
