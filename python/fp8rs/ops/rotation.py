"""The operator that rotates heads by the angles of their positions."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8rs.ops.define import native_op


@native_op
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Rotate the two halves of each head in float32.

    Each product and each sum is rounded once, and the result is rounded to the dtype of ``x``. CPU
    and CUDA give the same bytes.

    Args:
        x: (..., heads * channels), float32, bfloat16 or float16. All other dimensions together are
            rows.
        cos: (positions, channels), float32, contiguous. Row r of ``x`` is at position r modulo the
            number of positions, which divides the number of rows.
        sin: like ``cos``.
        back: multiply by the transposed matrix, which computes the gradient.

    Returns:
        The shape and dtype of ``x``, contiguous.
    """
    return torch.empty_like(x, memory_format=torch.contiguous_format)
