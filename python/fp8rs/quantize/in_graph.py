"""Quantize a tensor eagerly, or by one node of a compiled graph.

Dynamo does not trace the constructor of a tensor subclass. It can put a call of a function that
returns one into the graph, if all arguments are tensors or plain constants. A spec is therefore
passed by its key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8rs._torch import constant_when_traced
from fp8rs.tensor.quantized import QuantizedTensor, wrap
from fp8rs.tensor.spec import QuantSpec, quantize_planes
from fp8rs.tensor.store import Delayed, Store

_SPECS: dict[str, QuantSpec] = {}


def key_of(spec: QuantSpec) -> str:
    """Register a spec and return its key for `quantize`. Equal specs have equal keys."""
    key = repr(spec)
    _SPECS[key] = spec
    return key


def quantize(
    x: Tensor, rowwise: bool, columnwise: bool, delayed: Delayed | None, key: str
) -> QuantizedTensor:
    """Quantize a tensor. The result has its shape and dtype, and is detached from autograd.

    A result of a compiled graph holds copies of ``delayed``. Writes to it update the amax of the
    copy.

    Args:
        x: fp32, bf16 or fp16, without gradient.
        rowwise: whether the result has a rowwise plane.
        columnwise: whether the result has a columnwise plane.
        delayed: the scale () to use and the amax () to update, or None.
        key: the key of the spec.
    """
    spec = _SPECS[key]
    scale, amax = (None, None) if delayed is None else delayed
    row, col = quantize_planes(spec, x, rowwise, columnwise, scale=scale, amax=amax, declared=True)
    return wrap(Store(row, col, spec, delayed), x.shape, x.dtype)


@constant_when_traced
def allow_in_graph() -> None:
    """Make Dynamo put calls of `quantize` into its graphs.

    Call it while tracing, when Dynamo is already imported. Importing it takes two seconds.
    """
    torch.compiler.allow_in_graph(quantize)
