"""Debug options of a layer: statistics of its operands, and GEMMs in high precision.

A layer reads its `Debug` in each call. Compilers treat it as a constant, so that changing it
selects or compiles another graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8rs._torch import allow_in_graph
from fp8rs.model.linear_spec import HighPrecision
from fp8rs.quantize.recipes import GEMMS

from .function import DelayedSlots, linear_call, run_linear
from .high_precision import high_precision_linear
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
    if all(call.spec.high_precision):
        return high_precision_linear(x, weight, bias, out_dtype)
    return run_linear(x, weight, bias, call)
