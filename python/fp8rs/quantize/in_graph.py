"""What a quantizer makes, as a function that compilers take into their graphs.

They do not look into the constructor of a tensor subclass, so that they have to call, as it is, a
function of tensors and plain constants that returns one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8rs._torch import constant_when_traced
from fp8rs.tensor import formats
from fp8rs.tensor.quantized import QuantizedTensor, wrap_planes
from fp8rs.tensor.spec import QuantSpec, quantize_planes
from fp8rs.tensor.store import Delayed


def quantized(
    x: Tensor,
    rowwise: bool,
    columnwise: bool,
    delayed: Delayed | None,
    format: str,
    *options: Any,
) -> QuantizedTensor:
    """A new tensor of the shape and dtype of ``x``, outside autograd.

    Args:
        x: fp32, bf16 or fp16.
        rowwise, columnwise: which planes.
        delayed: a scale to read, and the amax to write. Out of its graph the tensor brings copies
            of them: what is written to it there is in its amax, and not in this one.
        format: by name.
        options: the other fields of the `QuantSpec`, in their order.
    """
    spec = QuantSpec(formats.FORMATS[format], *options)
    scale, amax = (None, None) if delayed is None else delayed
    row, col = quantize_planes(
        spec, x.detach(), rowwise, columnwise, scale=scale, amax=amax, declared=True
    )
    return wrap_planes(row, col, shape=x.shape, dtype=x.dtype, spec=spec, delayed=delayed)


@constant_when_traced
def take_into_graphs() -> bool:
    """Have compilers put `quantized` into their graphs.

    Called while one traces, which has imported Dynamo: else that would take two seconds.
    """
    torch.compiler.allow_in_graph(quantized)
    return True
