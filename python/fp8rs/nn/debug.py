"""Debug options of a layer: statistics of its operands, and GEMMs in high precision.

A layer reads its `Debug` in each call. Compilers treat it as a constant, so that changing it
selects or compiles another graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rs._torch import allow_in_graph, gradients_needed
from fp8rs.tensor.quantized import QuantizedTensor

from .backward import gathered_weight, read_weight, refuse_double_backward
from .function import linear
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
    *delayed: Any,
) -> Tensor:
    """Run `linear` with debug options.

    Args:
        debug: the options. In a graph named tuples arrive as plain tuples.
        x: (..., in_features).
        weight: (out_features, in_features).
        bias: (out_features,) or None.
        key: see `linear`.
        out_dtype: see `linear`.
        delayed: the arguments of `linear` for delayed scaling.
    """
    high, stats = debug
    stats = None if stats is None else OperandStats(*stats)
    quantized: Callable[..., Tensor] = functools.partial(linear, stats=stats)
    if not any(high):
        return quantized(x, weight, bias, key, out_dtype, *delayed)
    operands = [t for t in (x, weight, bias) if t is not None]
    if all(high) and not _are_cast(operands, out_dtype):
        return F.linear(x, weight, bias)
    y = None
    if not all(high):
        # Detach the operands whose gradients are computed in high precision.
        y = quantized(
            x.detach() if high[DGRAD] else x,
            weight.detach() if high[WGRAD] else weight,
            None if bias is None else bias.detach(),
            key,
            out_dtype,
            *delayed,
        )
    out: Tensor = _HighPrecision.apply(x, weight, bias, y, high, out_dtype)
    return out


def _are_cast(operands: Iterable[Tensor], dtype: torch.dtype) -> bool:
    """Whether an operand is quantized or has another dtype than the GEMMs.

    For such operands, `_HighPrecision` casts the weight again in the backward. torch's own function
    would save the cast weight.
    """
    return any(isinstance(t, QuantizedTensor) or t.dtype != dtype for t in operands)


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
        dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.rest = high, gathered, dtypes, dtype
        if y is not None and not high[FORWARD]:
            return y.clone()
        add = None if bias is None else bias.to(dtype)
        return F.linear(_values(x, dtype), _values(weight, dtype), add)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        high, gathered, (x_dtype, weight_dtype, bias_dtype), dtype = ctx.rest
        refuse_double_backward(
            "high-precision layers whose operands are cast or dequantized"
            if all(high)
            else "FP8 linear layers"
        )
        needs_x, needs_w, needs_bias, needs_y, *_ = gradients_needed(ctx)
        x, weight = ctx.saved_tensors
        values = _values(dy, dtype)
        rows = values.reshape(-1, values.shape[-1])
        dx = dw = db = None
        if needs_x and high[DGRAD]:
            weight = read_weight(gathered, weight, "a layer in high precision")
            dx = (values @ _values(weight, dtype)).to(x_dtype)
        if needs_w and high[WGRAD]:
            dw = (rows.t() @ x.reshape(-1, x.shape[-1])).to(weight_dtype)
        if needs_bias:
            db = rows.sum(0, dtype=bias_dtype)
        return dx, dw, db, dy if needs_y else None, None, None


def _values(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an operand in high precision. Quantized operands are dequantized."""
    return x.dequantize(dtype) if isinstance(x, QuantizedTensor) else x.to(dtype)
