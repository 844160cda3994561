"""Linear layers whose GEMMs run in high precision, also with quantized weights and inputs.

A quantized weight is dequantized in the forward and again in the backward, so that no layer keeps
its values in between.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rs._torch import gradients_needed
from fp8rs.tensor.quantized import QuantizedTensor

from .backward import gathered_weight, read_weight, refuse_double_backward


def high_precision_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Compute x @ weight.T + bias in high precision.

    Args:
        x: (..., in_features).
        weight: (out_features, in_features).
        bias: (out_features,) or None.
        dtype: dtype of the GEMMs and of the result.
    """
    if not _are_cast(x, weight, bias, dtype):
        return F.linear(x, weight, bias)
    out: Tensor = _HighPrecisionLinear.apply(x, weight, bias, dtype)
    return out


def _are_cast(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether an operand is quantized or has another dtype than the GEMMs.

    For such operands, `_HighPrecisionLinear` casts the weight again in the backward. torch's own
    function would save the cast weight.
    """
    if isinstance(weight, QuantizedTensor) or isinstance(x, QuantizedTensor):
        return True
    if x.dtype != dtype or weight.dtype != dtype:
        return True
    return bias is not None and bias.dtype != dtype


class _HighPrecisionLinear(torch.autograd.Function):
    """A layer whose GEMMs all run in high precision, on operands that are cast or dequantized.

    It has no double backward, because casts in its forward are not recorded.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad[:2]
        x_values = values_of(x, dtype)
        gathered = gathered_weight(weight)
        ctx.save_for_backward(
            x_values if needs_w else None,
            weight if needs_x and gathered is None else None,
        )
        ctx.gemm_dtype = dtype
        ctx.gathered_weight = gathered
        ctx.x_dtype = x.dtype
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype

        cast_bias = None if bias is None else bias.to(dtype)
        return F.linear(x_values, values_of(weight, dtype), cast_bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("high-precision layers whose operands are cast or dequantized")
        needs_x, needs_w, needs_bias, _ = gradients_needed(ctx)
        x, weight = ctx.saved_tensors

        dx = dw = db = None
        if needs_x:
            weight = read_weight(ctx.gathered_weight, weight, "a layer in high precision")
            dx = high_precision_dgrad(dy, weight, ctx.gemm_dtype).to(ctx.x_dtype)
        if needs_w:
            dw = high_precision_wgrad(dy, x, ctx.gemm_dtype).to(ctx.weight_dtype)
        if needs_bias:
            rows = values_of(dy, ctx.gemm_dtype)
            db = rows.reshape(-1, rows.shape[-1]).sum(0, dtype=ctx.bias_dtype)
        return dx, dw, db, None


def values_of(operand: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an operand in high precision. Quantized operands are dequantized."""
    if isinstance(operand, QuantizedTensor):
        return operand.dequantize(dtype)
    return operand.to(dtype)


def high_precision_dgrad(dy: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of the input, computed in ``dtype``.

    Args:
        dy: (..., out_features), the gradient of the output.
        weight: (out_features, in_features).
        dtype: dtype of the operands and of the result.
    """
    return values_of(dy, dtype) @ values_of(weight, dtype)


def high_precision_wgrad(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of the weight, computed in ``dtype``.

    Args:
        dy: (..., out_features), the gradient of the output.
        x: (..., in_features), the input in ``dtype``.
        dtype: dtype of the operands and of the result.
    """
    rows = values_of(dy, dtype)
    return rows.reshape(-1, rows.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
