"""Print the quantization error of each format: SQNR, values flushed to zero, GEMM error.

    python benches/quant_error.py [--size 4096] [--device cuda]

Global SQNR hides flushing: if rows differ in magnitude, the largest rows dominate it. The tables
therefore also have the first percentile of the SQNR of runs of 32 values.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

import fp8rs  # noqa: F401  (registers the operators)

ops = torch.ops.fp8rs
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
E8M0 = torch.float8_e8m0fnu
F32 = torch.float32

Round = Callable[[Tensor], Tensor]


def per_tensor(dtype: torch.dtype) -> Round:
    """Return a function that quantizes with one scale and dequantizes."""

    def call(x: Tensor) -> Tensor:
        codes, _, scale = ops.quantize_current(x, dtype)
        return ops.dequantize(codes, scale, [-1, -1], F32)

    return call


def blocks(block: tuple[int, int], dtype: torch.dtype = E4M3, **options: object) -> Round:
    """Return a function that quantizes with a scale for each block and dequantizes."""
    scale_dtype = E8M0 if block[1] == 32 else F32

    def call(x: Tensor) -> Tensor:
        codes, scale, _, _ = ops.quantize_blocks(x, dtype, block, scale_dtype, **options)
        return ops.dequantize(codes, scale, block, F32)

    return call


def rebased(block: tuple[int, int], axis: int) -> Round:
    """Return a function that quantizes to MXFP8, rebases to one scale per line, and dequantizes."""

    def call(x: Tensor) -> Tensor:
        codes, scale, _, _ = ops.quantize_blocks(x, E4M3, block, E8M0)
        rebased_codes, line_scales = ops.rebase(codes, scale, block, axis)
        y: Tensor = ops.dequantize(rebased_codes, line_scales, [1, -1], F32)
        # Columns are rebased to rows of the transpose.
        return y if axis == 0 else y.t()

    return call


FORMATS: dict[str, Round] = {
    "per tensor, E4M3": per_tensor(E4M3),
    "per tensor, E5M2": per_tensor(E5M2),
    "128x128": blocks((128, 128)),
    "1x128": blocks((1, 128)),
    "per row": blocks((1, -1)),
    "per row, power of two": blocks((1, -1), power_2_scale=True),
    "MX 32x32": blocks((32, 32)),
    "MX 32x32 rebased, rows": rebased((32, 32), 0),
    "MX 32x32 rebased, columns": rebased((32, 32), 1),
    "MX 1x32": blocks((1, 32)),
    "MX 1x32 rebased, rows": rebased((1, 32), 0),
    "MX 1x32, FLOOR": blocks((1, 32), rounding="floor"),
    "MX 1x32, E5M2": blocks((1, 32), E5M2),
}


def decibels(signal: Tensor, noise: Tensor) -> Tensor:
    """Return the ratio of two powers in dB."""
    return 10 * torch.log10(signal / noise)


def sqnr(x: Tensor, y: Tensor) -> float:
    """Return the signal-to-quantization-noise ratio of ``y`` in dB."""
    x = x.double()
    y = y.double()
    return decibels(x.square().sum(), (x - y).square().sum()).item()


def first_percentile(x: Tensor, y: Tensor) -> float:
    """Return the first percentile of the SQNR of runs of 32 values."""
    x = x.double().reshape(-1, 32)
    y = y.double().reshape(-1, 32)
    sqnr_of_runs = decibels(x.square().sum(1), (x - y).square().sum(1))
    rank = max(1, sqnr_of_runs.numel() // 100)
    return sqnr_of_runs.kthvalue(rank).values.item()


def data(size: int, device: str) -> dict[str, Tensor]:
    """Return the matrices (size, size) to quantize, by name."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    gaussian = normal(size, size)
    outliers = normal(size, size)
    outliers[torch.rand(size, size, generator=generator) < 0.001] *= 1000
    lognormal_rows = normal(size, size) * normal(size, 1).mul(3).exp()
    return {
        "gaussian": gaussian.to(device),
        "lognormal(3) rows": lognormal_rows.to(device),
        "0.1% outliers x1000": outliers.to(device),
    }


def main() -> None:
    """Print a table of errors for each matrix."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    # The other operand of the GEMM has 32x32 blocks.
    w = torch.randn(512, options.size, generator=torch.Generator().manual_seed(1))
    w = w.to(options.device)
    quantize_squares = blocks((32, 32))
    w_mx = quantize_squares(w)

    for name, x in data(options.size, options.device).items():
        print(f"\n{name}, {options.size}x{options.size}\n")
        print("| format | SQNR, dB | first percentile of 32, dB | flushed to zero, % | GEMM, dB |")
        print("|---|---|---|---|---|")
        exact_product = x[:512].double() @ w.double().t()
        for format_name, round_values in FORMATS.items():
            y = round_values(x)
            flushed_percent = 100 * ((y == 0) & (x != 0)).double().mean().item()
            product = y[:512].double() @ w_mx.double().t()
            print(
                f"| {format_name} | {sqnr(x, y):.2f} | {first_percentile(x, y):.2f} "
                f"| {flushed_percent:.4f} | {sqnr(exact_product, product):.2f} |"
            )


if __name__ == "__main__":
    main()
