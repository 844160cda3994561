"""What a quantizer makes: eagerly, and in a compiler's graph.

Compilers do not look into the constructor of a tensor subclass. They put a call of a function that
returns one into their graphs, as it is, if its arguments are tensors and plain constants.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from fp8rs._torch import constant_when_traced
from fp8rs.tensor import formats
from fp8rs.tensor.quantized import TENSOR_TYPES, QuantizedTensor
from fp8rs.tensor.spec import QuantSpec, quantize_planes
from fp8rs.tensor.store import Delayed, Store

#: The fields of a spec, all of which a graph has as constants but the format, which is none.
OPTIONS = tuple(field.name for field in fields(QuantSpec) if field.name != "format")


def quantized(
    x: Tensor, rowwise: bool, columnwise: bool, delayed: Delayed | None, spec: QuantSpec
) -> QuantizedTensor:
    """A new tensor of the shape and dtype of ``x``, outside autograd.

    Args:
        x: fp32, bf16 or fp16; no gradient is asked of it.
        rowwise, columnwise: which planes.
        delayed: a scale to read, and the amax to write.
        spec: how.
    """
    scale, amax = (None, None) if delayed is None else delayed
    row, col = quantize_planes(spec, x, rowwise, columnwise, scale=scale, amax=amax, declared=True)
    of = TENSOR_TYPES[spec.format.scale_dtype]
    return of.over(Store(row, col, spec, delayed), x.shape, x.dtype)


def quantized_in_graph(
    x: Tensor, rowwise: bool, columnwise: bool, delayed: Delayed | None, spec: QuantSpec
) -> QuantizedTensor:
    """`quantized`, while a compiler traces.

    Out of its graph the tensor brings copies of ``delayed``: what is written to it there is in its
    own amax, and not in this one.
    """
    take_into_graphs()
    options = [getattr(spec, name) for name in OPTIONS]
    return node(x, rowwise, columnwise, delayed, spec.format.name, *options)


def node(
    x: Tensor,
    rowwise: bool,
    columnwise: bool,
    delayed: Delayed | None,
    format: str,
    *options: Any,
) -> QuantizedTensor:
    """`quantized` of tensors and constants: the spec by its format's name and its `OPTIONS`."""
    spec = QuantSpec(formats.FORMATS[format], **dict(zip(OPTIONS, options, strict=True)))
    return quantized(x.detach(), rowwise, columnwise, delayed, spec)


@constant_when_traced
def take_into_graphs() -> None:
    """Have compilers put `node` into their graphs.

    Called while one traces, which has imported Dynamo: else that would take two seconds.
    """
    torch.compiler.allow_in_graph(node)
