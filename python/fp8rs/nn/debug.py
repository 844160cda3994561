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
from fp8rs.tensor.quantized import QuantizedTensor

from .backward import gathered_weight, read_weight, refuse_double_backward
from .function import DelayedSlots, linear_call, run_linear
from .observe import OperandStats

#: The GEMMs of a layer.
GEMMS = ("forward", "dgrad", "wgrad")
FORWARD, DGRAD, WGRAD = range(3)


class Debug(NamedTuple):
    """The debug options of one layer.

    Attributes:
        high_precision: for each of `GEMMS`, whether its operands are in high precision.
        stats: accumulates statistics of training forwards and their backwards.
    """

    high_precision: tuple[bool, bool, bool] = (False, False, False)
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
    high, stats = debug
    if stats is not None:
        stats = OperandStats(*stats)
    if not any(high):
        return run_linear(x, weight, bias, linear_call(key, x.device, out_dtype, delayed, stats))

    y = None
    if all(high):
        operands = [operand for operand in (x, weight, bias) if operand is not None]
        if not _are_cast(operands, out_dtype):
            return F.linear(x, weight, bias)
    else:
        # Detach the operands whose gradients are computed in high precision.
        y = run_linear(
            x.detach() if high[DGRAD] else x,
            weight.detach() if high[WGRAD] else weight,
            None if bias is None else bias.detach(),
            linear_call(key, x.device, out_dtype, delayed, stats),
        )
    out: Tensor = _HighPrecision.apply(x, weight, bias, y, high, out_dtype)
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
    """Runs the GEMMs in high precision. The FP8 layer that runs the others has the output ``y``.

    It has no double backward, because casts in its forward are not recorded.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        y: Tensor | None,
        high: tuple[bool, bool, bool],
        dtype: torch.dtype,
    ) -> Tensor:
        dgrad = ctx.needs_input_grad[0] and high[DGRAD]
        wgrad = ctx.needs_input_grad[1] and high[WGRAD]
        gathered = gathered_weight(weight)
        ctx.save_for_backward(
            _values(x, dtype) if wgrad else None,
            weight if dgrad and gathered is None else None,
        )
        ctx.high = high
        ctx.gemm_dtype = dtype
        ctx.gathered_weight = gathered
        ctx.x_dtype = x.dtype
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype

        if y is not None and not high[FORWARD]:
            return y.clone()
        cast_bias = None if bias is None else bias.to(dtype)
        return F.linear(_values(x, dtype), _values(weight, dtype), cast_bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        high = ctx.high
        refuse_double_backward(
            "high-precision layers whose operands are cast or dequantized"
            if all(high)
            else "FP8 linear layers"
        )
        needs_x, needs_w, needs_bias, needs_y, *_ = gradients_needed(ctx)
        x, weight = ctx.saved_tensors
        values = _values(dy, ctx.gemm_dtype)
        rows = values.reshape(-1, values.shape[-1])

        dx = dw = db = None
        if needs_x and high[DGRAD]:
            weight = read_weight(ctx.gathered_weight, weight, "a layer in high precision")
            dx = (values @ _values(weight, ctx.gemm_dtype)).to(ctx.x_dtype)
        if needs_w and high[WGRAD]:
            dw = (rows.t() @ x.reshape(-1, x.shape[-1])).to(ctx.weight_dtype)
        if needs_bias:
            db = rows.sum(0, dtype=ctx.bias_dtype)
        return dx, dw, db, dy if needs_y else None, None, None


def _values(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an operand in high precision. Quantized operands are dequantized."""
    return x.dequantize(dtype) if isinstance(x, QuantizedTensor) else x.to(dtype)
