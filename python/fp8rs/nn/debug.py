"""Debug options of a layer: statistics of its operands, and GEMMs in high precision.

A layer reads its `Debug` in each call. Compilers treat it as a constant, so that changing it
selects or compiles another graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rs._torch import allow_in_graph, gradients_needed
from fp8rs.model.linear_spec import HighPrecision
from fp8rs.quantize.recipes import GEMMS
from fp8rs.tensor.quantized import QuantizedTensor

from .backward import gathered_weight, read_weight, refuse_double_backward
from .function import (
    DelayedSlots,
    high_precision_dgrad,
    high_precision_wgrad,
    linear_call,
    run_linear,
    values_of,
)
from .observe import OperandStats

__all__ = ["GEMMS", "Debug", "debugged_linear", "set_debug"]


class Debug(NamedTuple):
    """The debug options of one layer.

    Attributes:
        high_precision: for each of `GEMMS`, whether its operands are in high precision. GEMMs that
            the recipe runs in high precision stay so.
        stats: accumulates statistics of training forwards and their backwards.
    """

    high_precision: HighPrecision = (False, False, False)
    stats: OperandStats | None = None

    def now(self, training: bool) -> Debug:
        """Return the options of a call."""
        return self if training or self.stats is None else Debug(self.high_precision)


def set_debug(layer: Any, **changed: Any) -> None:
    """Change fields of a layer's `Debug`."""
    allow_in_graph(debugged_linear)
    debug = (layer._fp8_debug or Debug())._replace(**changed)
    layer._fp8_debug = None if debug == Debug() else debug


def debugged_linear(
    debug: Debug,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    key: str,
    out_dtype: torch.dtype,
    delayed: DelayedSlots | None = None,
) -> Tensor:
    """Run `linear` with debug options.

    Args:
        debug: the options. In a graph named tuples arrive as plain tuples.
        x: (..., in_features).
        weight: (out_features, in_features).
        bias: (out_features,) or None.
        key: see `linear`.
        out_dtype: see `linear`.
        delayed: see `linear`.
    """
    high_precision, stats = debug
    if stats is not None:
        stats = OperandStats(*stats)
    call = linear_call(key, x.device, out_dtype, delayed, stats, high_precision)
    if not all(call.spec.high_precision):
        return run_linear(x, weight, bias, call)

    operands = [operand for operand in (x, weight, bias) if operand is not None]
    if not _are_cast(operands, out_dtype):
        return F.linear(x, weight, bias)
    out: Tensor = _HighPrecision.apply(x, weight, bias, out_dtype)
    return out


def _are_cast(operands: Iterable[Tensor], dtype: torch.dtype) -> bool:
    """Whether an operand is quantized or has another dtype than the GEMMs.

    For such operands, `_HighPrecision` casts the weight again in the backward. torch's own function
    would save the cast weight.
    """
    return any(
        isinstance(operand, QuantizedTensor) or operand.dtype != dtype for operand in operands
    )


class _HighPrecision(torch.autograd.Function):
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
