"""The operators of block formats: per row, 1x128 and 128x128 in float32, MXFP8's 1x32 and 32x32.

What :mod:`fp8rs.ops` says of all operators holds here too. Beyond that:

- ``block`` is (rows, columns) of one scale, -1 for the whole extent. It means the same in both
  directions: rowwise blocks of (1, n) run along the rows of the matrix, columnwise ones along the
  rows of its transpose, which is what the columnwise plane holds.
- Scales have one element for each block of their plane's matrix: (rows of blocks, columns of
  blocks). Those of (1, 128) lie with the rows next to each other (stride (1, rows)), as
  ``torch._scaled_mm`` wants them; all others are contiguous.
- Packed E8M0 scales are a vector: the 128x4 tiles of Blackwell's block-scaled GEMM, row-major, each
  as 32 rows of 16 bytes, with byte 0 for padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8rs import _core
from fp8rs.ops import room
from fp8rs.ops.define import Operation, operator
from fp8rs.ops.room import matrix, matrix_shape

_F32 = torch.float32
_E8M0 = torch.float8_e8m0fnu


def _pair(block: Sequence[int]) -> tuple[int, int]:
    room.check_pair(block)
    for size in block:
        if size != -1 and size < 1:
            raise ValueError(
                f"block is {list(block)}; each size must be at least 1, or -1 for the whole extent"
            )
    return block[0], block[1]


def _count(extent: int, size: int, offset: int = 0) -> int:
    """Blocks of ``size`` that ``extent`` elements from ``offset`` on touch."""
    if size == -1:
        return 1
    begin = offset % size
    if begin and not extent:  # not asked of extents at large: a traced one may not be known
        return 0
    return -(-(begin + extent) // size)


def _packed_size(rows: int, blocks: int) -> int:
    return -(-rows // 128) * 128 * -(-blocks // 4) * 4


def _new_scale(
    x: Tensor, dtype: torch.dtype, grid: tuple[int, int], block: tuple[int, int], packed: bool
) -> Tensor:
    """Room for a plane's scales, by its grid of blocks; packed, ``grid`` starts with its rows."""
    if packed:
        return x.new_empty(_packed_size(*grid), dtype=dtype)
    if block == (1, 128):
        return x.new_empty((grid[1], grid[0]), dtype=dtype).t()
    return x.new_empty(grid, dtype=dtype)


@operator("block_amax(Tensor x, int[] block, int row_offset=0) -> Tensor")
def block_amax(x: Tensor, block: Sequence[int], row_offset: int = 0) -> Operation:
    """The absolute maximum of each block: float32, (rows of blocks, columns of blocks)."""
    shape = _pair(block)
    rows, cols = matrix_shape(x)
    grid = (_count(rows, shape[0], row_offset), _count(cols, shape[1]))
    out = x.new_empty(grid, dtype=_F32)
    return out, lambda: _core.block_amax(matrix(x), *shape, out, row_offset)


@operator(
    "quantize_blocks(Tensor x, ScalarType fp8_dtype, int[] block, ScalarType scale_dtype,"
    " bool rowwise=True, bool columnwise=False, *, str rounding='ceil', bool power_2_scale=False,"
    " float amax_epsilon=0.0, bool packed=False, int row_offset=0, Tensor? amax=None,"
    " Tensor? amax_columnwise=None, Tensor? fold=None, Tensor? after=None)"
    " -> (Tensor rowwise, Tensor rowwise_scale, Tensor columnwise, Tensor columnwise_scale)"
)
def quantize_blocks(
    x: Tensor,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    scale_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
    *,
    packed: bool = False,
    row_offset: int = 0,
    after: Tensor | None = None,
    **options: Any,
) -> Operation:
    """Quantize with a scale for each block, in one or both directions from one read.

    - ``scale_dtype`` float32 goes with blocks (1, -1), (1, 128) and (128, 128), float8_e8m0fnu with
      (1, 32) and (32, 32). ``rounding`` ("ceil" or "floor"; "floor" is the OCP rule) is E8M0's,
      ``power_2_scale`` and ``amax_epsilon`` are float32's.
    - ``packed`` writes E8M0 scales in the 128x4 layout.
    - ``row_offset`` is the row of the whole matrix that row 0 of ``x`` is: blocks are those of the
      whole matrix. ``amax`` and ``amax_columnwise`` (float32, shaped as the scales; of square
      blocks the first serves both directions) replace the maxima of ``x``, so that a shard that
      cuts a block gets the whole matrix's bytes. They must not be negative, which is not checked,
      because that would wait for the device.
    - ``fold`` (float32, one factor for each column of ``x``) multiplies what goes into the rowwise
      output, and only that. It goes with blocks of a whole row.

    Returns rowwise codes (the shape of ``x``) and their scales, columnwise codes and theirs; what
    is not asked for has the shape (0,).
    """
    shape = _pair(block)
    if scale_dtype is not _F32 and scale_dtype is not _E8M0:
        raise TypeError(
            f"scale_dtype is {scale_dtype}; it must be torch.float32 or torch.float8_e8m0fnu"
        )
    row, col = room.codes(x, fp8_dtype, rowwise, columnwise)
    rows, cols = matrix_shape(x)
    row_scale = col_scale = None
    # The blocks along a dimension: the rows of x are cut from row_offset on, its columns from 0.
    if row is not None:
        lines = rows if packed else _count(rows, shape[0], row_offset)
        row_scale = _new_scale(x, scale_dtype, (lines, _count(cols, shape[1])), shape, packed)
    if col is not None:
        lines = cols if packed else _count(cols, shape[0])
        across = _count(rows, shape[1], row_offset)
        col_scale = _new_scale(x, scale_dtype, (lines, across), shape, packed)
    outputs = (
        room.or_empty(x, fp8_dtype, row),
        room.or_empty(x, scale_dtype, row_scale),
        room.or_empty(x, fp8_dtype, col),
        room.or_empty(x, scale_dtype, col_scale),
    )
    given: dict[str, Any] = {"packed": packed, "row_offset": row_offset, **options}
    return outputs, lambda: _core.quantize_blocks(
        matrix(x), *shape, row, row_scale, col, col_scale, **given
    )


@operator("pack_scales(Tensor scale, int rows, int block_rows=1) -> Tensor")
def pack_scales(scale: Tensor, rows: int, block_rows: int = 1) -> Operation:
    """E8M0 scales (rows of blocks, columns of blocks) of a plane with ``rows`` rows, packed.

    A scale repeats for each of its ``block_rows`` (1 or 32) rows.
    """
    if scale.dim() != 2:
        raise ValueError(f"scale has {scale.dim()} dimensions; it must have 2")
    out = scale.new_empty(_packed_size(rows, scale.shape[1]))
    return out, lambda: _core.pack_scales(scale, rows, block_rows, out)


@operator("unpack_scales(Tensor packed, int rows, int blocks, int block_rows=1) -> Tensor")
def unpack_scales(packed: Tensor, rows: int, blocks: int, block_rows: int = 1) -> Operation:
    """Undo ``pack_scales``: the scales (rows of blocks, ``blocks``)."""
    if block_rows not in (1, 32):
        raise ValueError(f"block_rows is {block_rows}; it must be 1 or 32")
    out = packed.new_empty((_count(rows, block_rows), blocks))
    return out, lambda: _core.unpack_scales(packed, rows, block_rows, out)


@operator(
    "rebase(Tensor codes, Tensor scale, int[] block, int axis, Tensor? after=None)"
    " -> (Tensor codes, Tensor scale)"
)
def rebase(
    codes: Tensor, scale: Tensor, block: Sequence[int], axis: int, after: Tensor | None = None
) -> Operation:
    """MXFP8 codes rewritten for one power-of-two float32 scale a row or a column.

    Axis 0 gives codes of the same shape and a scale for each row of the matrix, axis 1 the
    transposed codes and a scale for each of their rows; scales have the shape (rows, 1). The
    largest blocks of a row keep their bits; codes pushed into the subnormals lose some.
    """
    shape = _pair(block)
    if axis not in (0, 1):
        raise ValueError(f"axis is {axis}; it must be 0 or 1")
    rows, cols = matrix_shape(codes)
    out = codes.new_empty(codes.shape if axis == 0 else (cols, rows))
    scale_out = codes.new_empty((rows if axis == 0 else cols, 1), dtype=_F32)
    return (out, scale_out), lambda: _core.rebase(
        matrix(codes), scale, *shape, axis, out, scale_out
    )
