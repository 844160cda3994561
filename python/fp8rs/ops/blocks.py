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

import torch
from torch import Tensor

from fp8rs.ops import room
from fp8rs.ops.define import in_rust
from fp8rs.ops.room import block_count

_F32 = torch.float32


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
    if block == (1, 128):
        return x.new_empty((*batch, grid[1], grid[0]), dtype=dtype).transpose(-1, -2)
    return x.new_empty((*batch, *grid), dtype=dtype)


@in_rust
def block_amax(
    x: Tensor, block: Sequence[int], row_offset: int = 0, batched: bool = False
) -> Tensor:
    """The absolute maximum of each block: float32, (rows of blocks, columns of blocks)."""
    batch, (rows, cols) = room.split(x.shape, batched)
    grid = (block_count(rows, block[0], row_offset), block_count(cols, block[1]))
    return x.new_empty((*batch, *grid), dtype=_F32)


@in_rust
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
    packed: bool = False,
    row_offset: int = 0,
    amax: Tensor | None = None,
    amax_columnwise: Tensor | None = None,
    column_scale: Tensor | None = None,
    after: Tensor | None = None,
    batched: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    - ``column_scale`` (float32, one factor for each column of ``x``) is multiplied into the rowwise
      output only. It requires blocks of a whole row.

    Returns rowwise codes (the shape of ``x``) and their scales, columnwise codes and theirs; what
    is not asked for has the shape (0,).
    """
    row, col = room.codes(x, fp8_dtype, rowwise, columnwise, batched)
    row_scale, col_scale = (x.new_empty(0, dtype=scale_dtype) for _ in range(2))
    batch, (rows, cols) = room.split(x.shape, batched)
    down, across = block
    # The blocks along a dimension: the rows of x are cut from row_offset on, its columns from 0.
    if rowwise:
        grid = (rows if packed else block_count(rows, down, row_offset), block_count(cols, across))
        row_scale = _scales(x, scale_dtype, batch, grid, (down, across), packed)
    if columnwise:
        grid = (cols if packed else block_count(cols, down), block_count(rows, across, row_offset))
        col_scale = _scales(x, scale_dtype, batch, grid, (down, across), packed)
    return row, row_scale, col, col_scale


@in_rust
def pack_scales(scale: Tensor, rows: int, block_rows: int = 1) -> Tensor:
    """E8M0 scales (rows of blocks, columns of blocks) of a plane with ``rows`` rows, packed.

    A scale repeats for each of its ``block_rows`` (1 or 32) rows.
    """
    return scale.new_empty(_packed_size(rows, scale.shape[1]))


@in_rust
def unpack_scales(packed: Tensor, rows: int, blocks: int, block_rows: int = 1) -> Tensor:
    """Undo ``pack_scales``: the scales (rows of blocks, ``blocks``)."""
    return packed.new_empty((room.block_count(rows, block_rows), blocks))


@in_rust
def rebase(
    codes: Tensor,
    scale: Tensor,
    block: Sequence[int],
    axis: int,
    after: Tensor | None = None,
    batched: bool = False,
) -> tuple[Tensor, Tensor]:
    """MXFP8 codes rewritten for one power-of-two float32 scale a row or a column.

    Axis 0 gives codes of the same shape and a scale for each row of the matrix, axis 1 the
    transposed codes and a scale for each of their rows; scales have the shape (rows, 1). The
    largest blocks of a row keep their bits; codes pushed into the subnormals lose some.
    """
    batch, (rows, cols) = room.split(codes.shape, batched)
    out = codes.new_empty(codes.shape if axis == 0 else (*batch, cols, rows))
    return out, codes.new_empty((*batch, rows if axis == 0 else cols, 1), dtype=_F32)
