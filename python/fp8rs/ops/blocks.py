"""Operators of block formats, which have a scale for each row or block of a matrix.

The rules of `fp8rs.ops.tensorwise` hold here too. In addition:

- ``block`` is (rows, columns) of one scale, with -1 for the whole extent. Together with the dtype
  of scales, it is a row of the crate's table of formats. It means the same in both directions:
  rowwise blocks of (1, n) run along the rows of the matrix, columnwise blocks along the rows of its
  transpose, which is the columnwise plane's matrix.
- Scales have one element for each block of their plane's matrix: (rows of blocks, columns of
  blocks). Scales that are stored by columns, such as those of 1x128, have stride (1, rows), which
  ``torch._scaled_mm`` requires. All others are contiguous.
- Packed E8M0 scales are a vector of the 128x4 tiles of Blackwell's block-scaled GEMM, row-major,
  each as 32 rows of 16 bytes, padded with 0 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8rs._core import block_formats
from fp8rs.ops.define import native_op
from fp8rs.ops.shapes import allocate_codes, block_count, split_batch

_F32 = torch.float32

#: (block, dtype of scales) of the formats whose scales are stored by columns. It is not a set,
#: because the sizes of a block may be symbolic in a trace.
_STORED_BY_COLUMNS = [
    (format["block"], getattr(torch, format["scale_dtype"]))
    for format in block_formats()
    if format["scales_by_columns"]
]


def _packed_size(rows: int, columns: int) -> int:
    return -(-rows // 128) * 128 * -(-columns // 4) * 4


def _scales(
    x: Tensor,
    dtype: torch.dtype,
    batch: tuple[int, ...],
    grid: tuple[int, int],
    block: tuple[int, int],
    packed: bool,
) -> Tensor:
    """Allocate scales for a grid of blocks. If ``packed``, ``grid`` starts with the rows."""
    if packed:
        return x.new_empty(_packed_size(*grid), dtype=dtype)
    if (block, dtype) in _STORED_BY_COLUMNS:
        return x.new_empty((*batch, grid[1], grid[0]), dtype=dtype).transpose(-1, -2)
    return x.new_empty((*batch, *grid), dtype=dtype)


@native_op
def block_amax(
    x: Tensor, block: Sequence[int], row_offset: int = 0, batched: bool = False
) -> Tensor:
    """Compute the absolute maximum of each block: float32, (rows of blocks, columns of blocks)."""
    batch, (rows, cols) = split_batch(x.shape, batched)
    grid = (block_count(rows, block[0], row_offset), block_count(cols, block[1]))
    return x.new_empty((*batch, *grid), dtype=_F32)


@native_op
def quantize_blocks(
    x: Tensor,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    scale_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
    *,
    rounding: str = "ceil",
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    divide: bool = False,
    packed: bool = False,
    row_offset: int = 0,
    amax: Tensor | None = None,
    amax_columnwise: Tensor | None = None,
    column_scale: Tensor | None = None,
    after: Tensor | None = None,
    batched: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize with a scale for each block, in one or both directions from one read.

    Args:
        x: the values.
        fp8_dtype: dtype of the codes.
        block: the block of a format.
        scale_dtype: float32 or float8_e8m0fnu.
        rowwise: whether to make rowwise codes and scales.
        columnwise: whether to make columnwise codes and scales.
        rounding: "ceil" or "floor" for E8M0 scales. "floor" is the rule of the OCP specification.
        power_2_scale: round float32 scales up to powers of two.
        amax_epsilon: lower bound of the maxima that float32 scales are computed from.
        divide: divide by the rowwise scales, and do not multiply by their reciprocals. A few codes
            differ. Requires blocks of a whole row. The columnwise output does not depend on it.
        packed: write E8M0 scales in the 128x4 layout.
        row_offset: the row of the whole matrix that row 0 of ``x`` corresponds to. Block boundaries
            refer to the whole matrix.
        amax: replaces the maxima of ``x``, so that a shard that splits a block gets the bytes of
            the whole matrix. float32, in the shape of the rowwise scales. With square blocks,
            ``amax`` applies to both directions. It must not be negative, which is not checked,
            because it would synchronize with the device.
        amax_columnwise: replaces the maxima of columnwise blocks; float32, in the shape of the
            columnwise scales, not negative.
        column_scale: float32, one factor for each column of ``x``, multiplied into the rowwise
            output only. Requires blocks of a whole row.
        after: see `fp8rs.ops.tensorwise`.
        batched: see `fp8rs.ops.tensorwise`.

    Returns:
        Rowwise codes (the shape of ``x``), their scales, columnwise codes, and their scales. A
        result that is not requested has the shape (0,).
    """
    row, col = allocate_codes(x, fp8_dtype, rowwise, columnwise, batched)
    row_scale = x.new_empty(0, dtype=scale_dtype)
    col_scale = x.new_empty(0, dtype=scale_dtype)
    batch, (rows, cols) = split_batch(x.shape, batched)
    block_rows, block_cols = block
    # Rows of x are divided into blocks as if row_offset rows preceded them, columns from column 0.
    if rowwise:
        grid = (
            rows if packed else block_count(rows, block_rows, row_offset),
            block_count(cols, block_cols),
        )
        row_scale = _scales(x, scale_dtype, batch, grid, (block_rows, block_cols), packed)
    if columnwise:
        grid = (
            cols if packed else block_count(cols, block_rows),
            block_count(rows, block_cols, row_offset),
        )
        col_scale = _scales(x, scale_dtype, batch, grid, (block_rows, block_cols), packed)
    return row, row_scale, col, col_scale


@native_op
def pack_scales(scale: Tensor, rows: int, block_rows: int = 1) -> Tensor:
    """Pack E8M0 scales (rows of blocks, columns of blocks) of a plane with ``rows`` rows.

    A scale is repeated for each of the ``block_rows`` (1 or 32) rows of its block.
    """
    return scale.new_empty(_packed_size(rows, scale.shape[1]))


@native_op
def rebase(
    codes: Tensor,
    scale: Tensor,
    block: Sequence[int],
    axis: int,
    after: Tensor | None = None,
    batched: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rewrite MXFP8 codes for one power-of-two float32 scale per row or per column.

    Axis 0 returns codes of the same shape and a scale for each row. Axis 1 returns the transposed
    codes and a scale for each of their rows. Scales have the shape (rows, 1). The blocks with the
    largest scale of a row keep their bits. Codes that become subnormal lose bits.
    """
    batch, (rows, cols) = split_batch(codes.shape, batched)
    if axis == 0:
        return codes.new_empty(codes.shape), codes.new_empty((*batch, rows, 1), dtype=_F32)
    new_scale = codes.new_empty((*batch, cols, 1), dtype=_F32)
    return codes.new_empty((*batch, cols, rows)), new_scale
