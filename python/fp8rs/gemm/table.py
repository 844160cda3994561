"""GEMMs on quantized planes: which kernel multiplies operands of which formats on which device.

``scaled_mm(a, b)`` is a @ b.T over the values of two planes, both contiguous along the dim that is
contracted over. A kernel is a row of :data:`GEMMS`, keyed by the device kind and the operands'
formats; what has no row can be dequantized (always on CPU and meta, on CUDA with ``emulate``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from fp8rs._core import UnsupportedError
from fp8rs._torch import depends_on_data, is_batched
from fp8rs.gemm.devices import gpu_path
from fp8rs.tensor import formats
from fp8rs.tensor.planes import Plane

#: (a, b, bias, out_dtype, use_fast_accum) -> (rows of a, rows of b)
Gemm = Callable[[Plane, Plane, "Tensor | None", torch.dtype, bool], Tensor]

GEMMS: dict[tuple[str, str, str], Gemm] = {}


def gemm_for(device: str, a: formats.BlockFormat, b: formats.BlockFormat) -> Callable[[Gemm], Gemm]:
    """Register a kernel for operands of these formats."""

    def register(gemm: Gemm) -> Gemm:
        GEMMS[device, a.name, b.name] = gemm
        return gemm

    return register


def scaled_mm(
    a: Plane,
    b: Plane,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    use_fast_accum: bool = False,
    emulate: bool = False,
) -> Tensor:
    """a @ b.T + bias over the dequantized values, accumulated in fp32.

    Args:
        a: plane whose 2-D view is (M, K).
        b: plane whose 2-D view is (N, K).
        out_dtype: float32, bfloat16 or float16.
        bias: (N,), added before the cast to ``out_dtype``.
        use_fast_accum: let CUDA accumulate with reduced precision.
        emulate: dequantize and multiply in fp32, on CUDA too.

    Returns:
        (M, N), contiguous. Sizes need not be multiples of anything.

    Raises:
        ValueError: the inner sizes differ.
        UnsupportedError: the device has no GEMM for these operands; the message says why.
    """
    codes = a.data
    m, k = formats.matrix_shape(codes.shape)
    n, k_b = formats.matrix_shape(b.data.shape)
    if k != k_b:
        raise ValueError(f"a is {(m, k)} and b is {(n, k_b)}: their last dims must be equal")
    if not (type(m) is type(n) is type(k) is int) and depends_on_data(m, n, k):
        given = (codes, a.scale, a.format.name, b.data, b.scale, b.format.name)
        return cast(Tensor, _scaled_mm(*given, bias, out_dtype, use_fast_accum, emulate))
    if m == 0 or n == 0 or k == 0:
        out = torch.zeros((m, n), dtype=out_dtype, device=codes.device)
        return out if bias is None else out + bias.to(out_dtype)
    # On meta nothing is computed, and all that is asked for is a shape.
    if emulate or codes.is_cpu or codes.is_meta:
        return _dequantized(a, b, bias, out_dtype, use_fast_accum)
    device = codes.device
    gemm = GEMMS.get((device.type, a.format.name, b.format.name))
    if gemm is None:
        raise UnsupportedError(
            f"no FP8 GEMM on {device.type} takes operands in formats {a.format.name!r} and "
            f"{b.format.name!r}; a recipe with emulate=True runs on dequantized operands"
        )
    return gemm(a, b, bias, out_dtype, use_fast_accum)


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
    """``scaled_mm`` as one operator, for sizes that a compiler does not know.

    Whether operands are empty, and by how much they are padded, is found when it is called.
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
def _(a: Tensor, a_scale: Tensor, a_format: str, b: Tensor, *others: Any) -> Tensor:
    *_, out_dtype, _, _ = others
    rows, cols = formats.matrix_shape(a.shape)[0], formats.matrix_shape(b.shape)[0]
    return a.new_empty((rows, cols), dtype=out_dtype)


def _dequantized(
    a: Plane,
    b: Plane,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """In fp32. Per-tensor scales are applied to the product, as the FP8 GEMMs do."""
    device = a.data.device
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            return _dequantized(a, b, bias, out_dtype, use_fast_accum)
    if a.format.per_tensor and b.format.per_tensor:
        one = torch.ones((), dtype=torch.float32, device=device)
        out = torch.mm(_values(a, one), _values(b, one).t())
        # One after the other: the product of two small scales can underflow. Out of place: what a
        # GEMM gave may be saved by selective checkpointing.
        out = out * a.scale * b.scale
    else:
        out = torch.mm(_values(a), _values(b).t())
    if bias is not None:
        out = out + bias
    return out.to(out_dtype)


def _values(plane: Plane, scale: Tensor | None = None) -> Tensor:
    scale = plane.scale if scale is None else scale
    block = list(plane.format.block)
    values = torch.ops.fp8rs.dequantize(plane.matrix, scale, block, torch.float32)
    return cast(Tensor, values)


@gemm_for("cuda", formats.TENSOR, formats.TENSOR)
def _cuda_tensorwise(
    a: Plane,
    b: Plane,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    a_codes, b_codes = a.matrix, b.matrix
    check_cuda(a_codes.device.index, "current")
    return run(
        aligned(a_codes, rows=False),
        aligned(b_codes, rows=True),
        _aligned_scale(a.scale),
        _aligned_scale(b.scale),
        b_codes.shape[0],
        bias,
        out_dtype,
        use_fast_accum,
    )


def run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    n: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """a @ b.T on aligned codes, of which the first ``n`` columns are kept; plus bias."""
    padded = b.shape[0] - n
    # cuBLASLt adds a bias of the output's dtype, and none to an fp32 output.
    fused = None
    if bias is not None and out_dtype != torch.float32:
        fused = bias.to(out_dtype)
        if padded:
            fused = torch.nn.functional.pad(fused, (0, padded))
    out = torch._scaled_mm(
        a,
        b.t(),
        scale_a=scale_a,
        scale_b=scale_b,
        bias=fused,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )
    if padded:
        out = out[:, :n].contiguous()
    if bias is not None and fused is None:
        out = out + bias
    return out


#: torch._scaled_mm wants the contracted dim and the rows of b in multiples of this.
_MULTIPLE = 16


def aligned(codes: Tensor, *, rows: bool) -> Tensor:
    """Contiguous codes with the last dim, and the rows if asked, padded by zeros."""
    return padded(codes, _MULTIPLE if rows else 1, _MULTIPLE)


def padded(codes: Tensor, rows: int, cols: int) -> Tensor:
    """Contiguous codes padded by zeros to multiples of ``rows`` and ``cols``."""
    m, k = codes.shape
    pad_m, pad_k = _missing(m, rows), _missing(k, cols)
    if pad_m or pad_k:
        wider = torch.nn.functional.pad(codes.view(torch.uint8), (0, pad_k, 0, pad_m))
        return wider.view(codes.dtype)
    return codes if codes.is_contiguous() else codes.contiguous()


def _missing(n: int, multiple: int) -> int:
    """What n lacks to a multiple.

    To a compiler for any size, what lacks nothing is 0, not an expression: sizes made of that one
    would grow from layer to layer.
    """
    rest = n % multiple
    return multiple - rest if rest else 0


def _aligned_scale(scale: Tensor) -> Tensor:
    """A scale at an address that cuBLAS takes: a multiple of 16 bytes."""
    if is_batched(scale):
        return scale.reshape(1).repeat(4)[0]  # that of each example is
    return scale.clone() if scale.storage_offset() % 4 else scale


@functools.cache
def capability(index: int) -> tuple[int, int]:
    """The compute capability of a GPU; asking torch for it takes microseconds."""
    return torch.cuda.get_device_capability(index)


@functools.cache
def check_cuda(index: int, recipe: str) -> None:
    """UnsupportedError, with the reason, unless a GPU has the GEMMs of the recipe of that name."""
    if torch.version.hip is not None:
        raise UnsupportedError("FP8 kernels run on NVIDIA GPUs; on the CPU every recipe runs")
    path, why = gpu_path(recipe, capability(index))
    if path == "no":
        where = f"cuda:{index} ({torch.cuda.get_device_name(index)})"
        raise UnsupportedError(f"recipe {recipe!r} does not run on {where}: {why}")
