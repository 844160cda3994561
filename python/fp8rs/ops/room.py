"""What operators read arguments as, and the shapes of what they give."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def matrix(x: Tensor) -> Tensor:
    """``x``, or a copy if its leading dimensions do not collapse into one stride."""
    if x.dim() < 3 or x.is_contiguous() or x.numel() == 0:
        return x
    span = None
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if span is not None and span != stride:
            return x.contiguous()
        span = size * stride
    return x


def matrix_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """The 2-D view of ``shape``: (product of the leading dims, last dim); () is (1, 1)."""
    if len(shape) == 2:
        return shape[0], shape[1]
    if len(shape) == 0:
        return 1, 1
    return math.prod(shape[:-1]), shape[-1]


def block_count(extent: int, size: int, offset: int = 0) -> int:
    """Blocks of ``size`` (-1: all) that ``extent`` elements from ``offset`` on touch."""
    if size == -1:
        return 1
    begin = offset % size
    if begin and not extent:  # not asked of extents at large: a traced one may not be known
        return 0
    return -(-(begin + extent) // size)


def codes(
    x: Tensor, fp8_dtype: torch.dtype, rowwise: bool, columnwise: bool
) -> tuple[Tensor, Tensor]:
    """Of the shape of ``x``, and of the transposed matrix; (0,) for one that is not asked for."""
    rows, cols = matrix_shape(x.shape)
    return (
        x.new_empty(x.shape if rowwise else 0, dtype=fp8_dtype),
        x.new_empty((cols, rows) if columnwise else 0, dtype=fp8_dtype),
    )


def scalar(x: Tensor) -> Tensor:
    """One float32 where ``x`` is."""
    return x.new_empty((), dtype=torch.float32)
