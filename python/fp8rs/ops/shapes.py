"""Helpers that map shapes of tensors to matrices and blocks, and that allocate outputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rows_and_columns(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """Return (product of the leading dims, last dim) of ``shape``. () is (1, 1)."""
    if len(shape) == 2:
        return shape[0], shape[1]
    if len(shape) == 0:
        return 1, 1
    return math.prod(shape[:-1]), shape[-1]


def block_count(extent: int, size: int, offset: int = 0) -> int:
    """Count the blocks of ``size`` (-1: all) that ``extent`` elements from ``offset`` touch."""
    if size == -1:
        return 1
    begin = offset % size
    if begin and not extent:  # in this order, because a traced extent may be unknown
        return 0
    return -(-(begin + extent) // size)


def split_batch(
    shape: torch.Size | tuple[int, ...], batched: bool
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Split a shape into its batch dimension and the shape of each of its matrices.

    Args:
        shape: the shape of a tensor.
        batched: read three or more dimensions as a batch along the first one.

    Returns:
        ``(batch,)``, or ``()`` for one matrix; and ``(rows, cols)``.
    """
    if batched and len(shape) > 2:
        return (shape[0],), rows_and_columns(shape[1:])
    return (), rows_and_columns(shape)


def allocate_codes(
    x: Tensor, fp8_dtype: torch.dtype, rowwise: bool, columnwise: bool, batched: bool = False
) -> tuple[Tensor, Tensor]:
    """Allocate rowwise and columnwise codes; one that is not requested has the shape ``(0,)``."""
    batch, (rows, cols) = split_batch(x.shape, batched)
    return (
        x.new_empty(x.shape if rowwise else 0, dtype=fp8_dtype),
        x.new_empty((*batch, cols, rows) if columnwise else 0, dtype=fp8_dtype),
    )


def allocate_scalars(x: Tensor, batched: bool = False) -> Tensor:
    """Allocate one float32 for ``x``, or one for each matrix of a batch."""
    return x.new_empty(split_batch(x.shape, batched)[0], dtype=torch.float32)
