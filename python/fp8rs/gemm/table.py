"""The table of GEMMs: the kernel for each device and each pair of operand formats.

``scaled_mm(a, b)`` is a @ b.T over the values of two planes, both contiguous along the contracted
dimension. A kernel is a row of `GEMMS`. On CPU and meta, and on CUDA with ``emulate``,
operands are dequantized instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fp8rs._core import UnsupportedError
from fp8rs._torch import autocast_dtype, depends_on_data
from fp8rs.gemm import kernels
from fp8rs.gemm.devices import check_cuda
from fp8rs.quantize import formats
from fp8rs.quantize.formats import BLOCK_1X128, BLOCK_128X128, MX_1X32, MX_32X32, ROW, TENSOR
from fp8rs.quantize.planes import Plane


class Gemm(NamedTuple):
    """A row of the table.

    Attributes:
        kernel: (a, b, bias, out_dtype, use_fast_accum) -> (rows of a, rows of b).
        recipe: the name of the recipe whose GPUs have the kernel.
    """

    kernel: Callable[[Plane, Plane, Tensor | None, torch.dtype, bool], Tensor]
    recipe: str


_MX = Gemm(kernels.microscaled, "mxfp8")
_BLOCK = Gemm(kernels.blockwise, "block")

#: (device, format of a, format of b) -> the GEMM.
GEMMS: dict[tuple[str, formats.BlockFormat, formats.BlockFormat], Gemm] = {
    ("cuda", TENSOR, TENSOR): Gemm(kernels.tensorwise, "current"),
    ("cuda", ROW, ROW): Gemm(kernels.rowwise, "rowwise"),
    ("cuda", BLOCK_1X128, BLOCK_128X128): _BLOCK,
    ("cuda", BLOCK_1X128, BLOCK_1X128): _BLOCK,
    ("cuda", MX_1X32, MX_1X32): _MX,
    ("cuda", MX_1X32, MX_32X32): _MX,
    ("cuda", MX_32X32, MX_1X32): _MX,
    ("cuda", MX_32X32, MX_32X32): _MX,
    # On GPUs without MXFP8 GEMMs, operands may already have one scale per row.
    ("cuda", MX_1X32, ROW): _MX,
    ("cuda", MX_32X32, ROW): _MX,
    ("cuda", ROW, MX_1X32): _MX,
    ("cuda", ROW, MX_32X32): _MX,
}


def scaled_mm(
    a: Plane,
    b: Plane,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    use_fast_accum: bool = False,
    emulate: bool = False,
) -> Tensor:
    """Compute a @ b.T + bias over the dequantized values, accumulated in fp32.

    Args:
        a: plane of a matrix (M, K).
        b: plane of a matrix (N, K).
        out_dtype: float32, bfloat16 or float16.
        bias: (N,), added before the cast to ``out_dtype``.
        use_fast_accum: accumulate with reduced precision on CUDA.
        emulate: dequantize and multiply in fp32, on CUDA too.

    Returns:
        (M, N), contiguous. Any sizes are supported, including 0.

    Raises:
        ValueError: the inner sizes differ.
        UnsupportedError: the device has no GEMM for these operands. The message has the reason.
    """
    a_codes = a.data
    b_codes = b.data
    m, k = a_codes.shape
    n, k_b = b_codes.shape
    if k != k_b:
        raise ValueError(f"a is {(m, k)} and b is {(n, k_b)}: their last dims must be equal")

    # A size that a compiler does not know must not decide a branch in a trace.
    if not (type(m) is type(n) is type(k) is int) and depends_on_data(m, n, k):
        product = _scaled_mm(
            a_codes,
            a.scale,
            a.format.name,
            b_codes,
            b.scale,
            b.format.name,
            bias,
            out_dtype,
            use_fast_accum,
            emulate,
        )
        return cast(Tensor, product)
    if m == 0 or n == 0 or k == 0:
        out = torch.zeros((m, n), dtype=out_dtype, device=a_codes.device)
        return out if bias is None else out + bias.to(out_dtype)
    multiply = _kernel(a_codes.device, a.format, b.format, emulate)
    return multiply(a, b, bias, out_dtype, use_fast_accum)


@functools.cache
def _kernel(
    device: torch.device, a: formats.BlockFormat, b: formats.BlockFormat, emulate: bool
) -> Callable[..., Tensor]:
    """Return the kernel for operands in two formats."""
    # On meta, only the shape is needed.
    if emulate or device.type in ("cpu", "meta"):
        return _dequantized
    gemm = GEMMS.get((device.type, a, b))
    if gemm is None:
        raise UnsupportedError(
            f"no FP8 GEMM on {device.type} takes operands in formats {a.name!r} and {b.name!r}; a "
            "recipe with emulate=True runs on dequantized operands"
        )
    check_cuda(device.index, gemm.recipe)
    return gemm.kernel


@torch.library.custom_op("fp8rs::_scaled_mm", mutates_args=())
def _scaled_mm(
    a: Tensor,
    a_scale: Tensor,
    a_format: str,
    b: Tensor,
    b_scale: Tensor,
    b_format: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    emulate: bool,
) -> Tensor:
    """Run ``scaled_mm`` as one operator, for sizes that a compiler does not know.

    Whether operands are empty, and how they are padded, is decided at run time.
    """
    return scaled_mm(
        Plane(a, a_scale, formats.format_named(a_format)),
        Plane(b, b_scale, formats.format_named(b_format)),
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
        emulate=emulate,
    )


@_scaled_mm.register_fake
def _(
    a: Tensor,
    a_scale: Tensor,
    a_format: str,
    b: Tensor,
    b_scale: Tensor,
    b_format: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    emulate: bool,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _dequantized(
    a: Plane,
    b: Plane,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """Multiply in fp32. Per-tensor scales are applied to the product, as FP8 GEMMs do."""
    device = a.data.device
    if autocast_dtype(device.type) is not None:
        with torch.autocast(device.type, enabled=False):
            return _dequantized(a, b, bias, out_dtype, use_fast_accum)
    if a.format.per_tensor and b.format.per_tensor:
        unit_scale = torch.ones((), dtype=torch.float32, device=device)
        out = torch.mm(_values(a, unit_scale), _values(b, unit_scale).t())
        # Multiply by one scale after the other, because the product of two small scales can
        # underflow. Do so out of place, because selective checkpointing may have saved the product.
        out = out * a.scale * b.scale
    else:
        out = torch.mm(_values(a), _values(b).t())
    if bias is not None:
        out = out + bias
    return out.to(out_dtype)


def _values(plane: Plane, scale: Tensor | None = None) -> Tensor:
    scale = plane.scale if scale is None else scale
    block = list(plane.format.block)
    values = torch.ops.fp8rs.dequantize(plane.data, scale, block, torch.float32)
    return cast(Tensor, values)
