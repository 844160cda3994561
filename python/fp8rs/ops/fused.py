"""Operators that compute values and quantize them with one scale, without returning the values.

The values are rounded to the dtype of the input first, as they would be if they were returned. CPU
and CUDA give the same bytes. ``scale`` and ``amax`` are given together, for delayed scaling, as in
``quantize_delayed``. Like ``_quantize_delayed``, the operators do not declare the write to
``amax``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8rs.ops.define import native_op
from fp8rs.ops.shapes import allocate_codes, allocate_scalars


@native_op
def _quantize_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    centered: bool,
    eps: float,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute a norm over the last dimension and quantize it.

    Args:
        x: float32, bfloat16 or float16, of one or more dimensions.
        weight: (cols,), with the dtype of ``x``, or None.
        bias: (cols,), with the dtype of ``x``, or None. It requires a weight.
        centered: subtract the mean (LayerNorm) or not (RMSNorm).
        eps: added to the mean square.
        fp8_dtype: the dtype of the codes.
        rowwise: whether to return rowwise codes.
        columnwise: whether to return columnwise codes.
        power_2_scale: whether the scale is rounded up to a power of two.
        amax_epsilon: lower bound for the absolute maximum.
        scale: with delayed scaling, the scale.
        amax: with delayed scaling, the absolute maximum that is raised.

    Returns:
        Rowwise codes, columnwise codes, the scale, and for each row in float32 (..., 1) the mean
        and the reciprocal standard deviation. Without ``centered``, the mean has the shape (0,).
    """
    statistics = (*x.shape[:-1], 1)
    return (
        *allocate_codes(x, fp8_dtype, rowwise, columnwise),
        allocate_scalars(x),
        x.new_empty(statistics if centered else 0, dtype=torch.float32),
        x.new_empty(statistics, dtype=torch.float32),
    )


@native_op
def _quantize_glu(
    gate: Tensor,
    up: Tensor,
    activation: str,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute activation(gate) * up in float32 and quantize it.

    Args:
        gate: float32, bfloat16 or float16.
        up: the other factor, with the shape and dtype of ``gate``.
        activation: "silu" or "gelu_tanh".
        fp8_dtype: see `_quantize_norm`, as for the other arguments.
        rowwise: whether to return rowwise codes.
        columnwise: whether to return columnwise codes.
        power_2_scale: whether the scale is rounded up to a power of two.
        amax_epsilon: lower bound for the absolute maximum.
        scale: with delayed scaling, the scale.
        amax: with delayed scaling, the absolute maximum that is raised.

    Returns:
        Rowwise codes, columnwise codes, and the scale.
    """
    return *allocate_codes(gate, fp8_dtype, rowwise, columnwise), allocate_scalars(gate)


@native_op
def _quantize_glu_backward(
    gate: Tensor,
    up: Tensor,
    dy: Tensor,
    activation: str,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = True,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    gate_scale: Tensor | None = None,
    gate_amax: Tensor | None = None,
    up_scale: Tensor | None = None,
    up_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of gate and up in float32 and quantize each of them.

    Args:
        gate: float32, bfloat16 or float16.
        up: the other factor, with the shape and dtype of ``gate``.
        dy: the gradient of activation(gate) * up, with the shape and dtype of ``gate``.
        activation: "silu" or "gelu_tanh".
        fp8_dtype: see `_quantize_norm`, as for the other arguments.
        rowwise: whether to return rowwise codes.
        columnwise: whether to return columnwise codes.
        power_2_scale: whether scales are rounded up to powers of two.
        amax_epsilon: lower bound for the absolute maxima.
        gate_scale: with delayed scaling, the scale of the gradient of ``gate``.
        gate_amax: with delayed scaling, its absolute maximum that is raised.
        up_scale: with delayed scaling, the scale of the gradient of ``up``.
        up_amax: with delayed scaling, its absolute maximum that is raised.

    Returns:
        Rowwise codes, columnwise codes and the scale of the gradient of ``gate``, then those of the
        gradient of ``up``.
    """
    return (
        *allocate_codes(gate, fp8_dtype, rowwise, columnwise),
        allocate_scalars(gate),
        *allocate_codes(gate, fp8_dtype, rowwise, columnwise),
        allocate_scalars(gate),
    )
