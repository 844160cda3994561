"""What a quantizer makes, eagerly and in a compiler's graph.

Compilers do not look into the constructor of a tensor subclass. They put a call of a function that
returns one into their graphs, as it is, if its arguments are tensors and plain constants: so a spec
is given by its key.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fp8rs._torch import constant_when_traced
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.spec import QuantSpec, quantize_planes
from fp8rs.tensor.store import Delayed, Store
from fp8rs.tensor.wrapper import TENSOR_TYPES

_SPECS: dict[str, QuantSpec] = {}


def key_of(spec: QuantSpec) -> str:
    """What `quantized` finds a spec by: equal for equal ones."""
    key = repr(spec)
    _SPECS[key] = spec
    return key


def quantized(
    x: Tensor, rowwise: bool, columnwise: bool, delayed: Delayed | None, key: str
) -> QuantizedTensor:
    """A new tensor of the shape and dtype of ``x``, outside autograd.

    Out of a compiler's graph it brings copies of ``delayed``: what is written to it there is in its
    own amax, and not in this one.

    Args:
        x: fp32, bf16 or fp16; no gradient is asked of it.
        rowwise, columnwise: which planes.
        delayed: a scale to read, and the amax to write.
        key: of the spec that says how.
    """
    spec = _SPECS[key]
    scale, amax = (None, None) if delayed is None else delayed
    row, col = quantize_planes(spec, x, rowwise, columnwise, scale=scale, amax=amax, declared=True)
    kind = cast(type[QuantizedTensor], TENSOR_TYPES[spec.format.scale_dtype])
    return kind.over(Store(row, col, spec, delayed), x.shape, x.dtype)


@constant_when_traced
def take_into_graphs() -> None:
    """Have compilers put `quantized` into their graphs.

    Called while one traces, which has imported Dynamo: else that would take two seconds.
    """
    torch.compiler.allow_in_graph(quantized)
