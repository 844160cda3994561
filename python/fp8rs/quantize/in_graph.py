"""What a quantizer makes, as a function that compilers take into their graphs.

They do not look into the constructor of a tensor subclass, so that they have to call, as it is, a
function of tensors and plain constants that returns one.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from fp8rs._torch import constant_when_traced
from fp8rs.tensor import formats
from fp8rs.tensor.quantized import QuantizedTensor, wrap_planes
from fp8rs.tensor.spec import QuantSpec, quantize_planes
from fp8rs.tensor.store import Delayed

#: The fields of a spec, all of which a graph has as constants but the format, which is none.
OPTIONS = tuple(field.name for field in fields(QuantSpec) if field.name != "format")


def quantized(
    x: Tensor, rowwise: bool, columnwise: bool, delayed: Delayed | None, spec: QuantSpec
) -> QuantizedTensor:
    """A new tensor of the shape and dtype of ``x``, outside autograd; while a compiler traces.

    Args:
        x: fp32, bf16 or fp16.
        rowwise, columnwise: which planes.
        delayed: a scale to read, and the amax to write. Out of its graph the tensor brings copies
            of them: what is written to it there is in its amax, and not in this one.
        spec: how.
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
    """What `quantized` is in a graph, of tensors and constants: a format by name, and `OPTIONS`."""
    spec = QuantSpec(formats.FORMATS[format], **dict(zip(OPTIONS, options, strict=True)))
    scale, amax = (None, None) if delayed is None else delayed
    row, col = quantize_planes(
        spec, x.detach(), rowwise, columnwise, scale=scale, amax=amax, declared=True
    )
    return wrap_planes(row, col, shape=x.shape, dtype=x.dtype, spec=spec, delayed=delayed)


@constant_when_traced
def take_into_graphs() -> None:
    """Have compilers put `node` into their graphs.

    Called while one traces, which has imported Dynamo: else that would take two seconds.
    """
    torch.compiler.allow_in_graph(node)
