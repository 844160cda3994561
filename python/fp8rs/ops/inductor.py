"""A decomposition of current scaling for Inductor that fuses the amax into the input's producer.

In eager code, ``quantize_current`` reads its input twice, for the amax and for the cast. A
compiled input usually comes from Inductor's own code (a norm, an activation, a residual), which has
each value in a register and can compute the amax there. Codes and scale equal the operator's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8rs._torch import inductor_decomposition, inductor_reads_memory, may_be_empty
from fp8rs.ops import tensorwise  # noqa: F401  (defines the operators)

_F32 = torch.float32
_INTEGERS = {_F32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_amax = torch.ops.fp8rs.amax.default
_quantize = torch.ops.fp8rs.quantize.default
_quantize_current = torch.ops.fp8rs.quantize_current.default
_scale_from_amax = torch.ops.fp8rs.scale_from_amax.default


def fuse_maxima() -> None:
    """Register the decomposition. Not called at import time, because it imports Inductor."""
    inductor_decomposition(_quantize_current, quantize_current)


def quantize_current(
    x: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    batched: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Decompose the operator into arithmetic that a compiler can fuse, and a cast.

    Use a sequence of operators instead if the arithmetic does not cover the arguments or is not
    faster. The operators also raise the errors for bad arguments.
    """
    is_fused = fuses(x) and not batched
    if is_fused:
        inductor_reads_memory(_quantize)  # so that the amax is of the values that are cast
        amax = fused_amax(x)
    else:
        amax = _amax(x, batched)
    if is_fused and not power_2_scale and 0 <= amax_epsilon <= torch.finfo(_F32).max:
        scale = fused_scale(amax, torch.finfo(fp8_dtype).max, amax_epsilon)
    else:
        scale = _scale_from_amax(amax, fp8_dtype, power_2_scale, amax_epsilon)
    row, col = _quantize(x, scale, fp8_dtype, rowwise, columnwise, None, batched)
    return row, col, scale


def fuses(x: Tensor) -> bool:
    """Return whether Inductor's code is used. Its maximum of integers is not vectorized on CPUs."""
    return x.is_cuda and covers(x)


def covers(x: Tensor) -> bool:
    """Return whether the arithmetic covers the input."""
    return x.dtype in _INTEGERS and x.dim() > 0 and not may_be_empty(x)


def fused_amax(x: Tensor) -> Tensor:
    """Compute the largest magnitude as float32, with NaN above infinity.

    The maximum is over bits, because Inductor would compute a maximum of floats before rounding to
    ``x.dtype``, while codes are made from rounded values. Rows are reduced first, as in norms.
    """
    integer = _INTEGERS[x.dtype]
    magnitudes = x.view(integer) & torch.iinfo(integer).max
    bits = magnitudes.amax(-1).amax()
    return bits.view(x.dtype).to(_F32)


def fused_scale(amax: Tensor, largest: float, epsilon: float) -> Tensor:
    """Compute ``scale_from_amax`` as arithmetic, equal in every bit.

    Inductor's float32 division is not IEEE division. For a constant divisor, Inductor and torch on
    CUDA multiply by the reciprocal. In float64, both are exact after rounding to float32: the
    quotient of a float32 number and 7 * 2^k is at least 1/14 of the spacing of float32 numbers away
    from the midpoint between two of them.
    """
    raised = torch.clamp_min(amax, epsilon) if epsilon else amax
    scale = torch.clamp_min(raised.to(torch.float64) / largest, 2.0**-126).to(_F32)
    scale = torch.where(raised == 0, 1.0, scale)
    return torch.where(amax < torch.inf, scale, torch.nan)
