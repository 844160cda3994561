"""Operators of block formats: per row, 1x128 and 128x128 with float32 scales, MXFP8 1x32 and 32x32.

The rules of :mod:`fp8rs.ops.tensorwise` apply, and these:

- ``block`` is the (rows, columns) that share a scale, -1 for the whole extent. It is the same for
  both planes: rowwise blocks of (1, n) run along the rows of the matrix, columnwise blocks along
  the rows of its transpose, which the columnwise plane holds.
- Scales have the shape (rows of blocks, columns of blocks) of their plane's matrix. Scales of
  (1, 128) blocks have stride (1, rows), as ``torch._scaled_mm`` requires. All others are
  contiguous.
- Packed E8M0 scales are a vector of the 128x4 tiles that Blackwell's block-scaled GEMM reads, in
  row-major order. Each tile is 32 rows of 16 bytes. Padding bytes are 0.
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
    """Return the absolute maximum of each block: float32, (rows of blocks, columns of blocks)."""
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

    - ``scale_dtype`` is float32 for blocks (1, -1), (1, 128) and (128, 128), and float8_e8m0fnu for
      (1, 32) and (32, 32). ``rounding`` ("ceil", or "floor", the OCP rule) applies to E8M0,
      ``power_2_scale`` and ``amax_epsilon`` to float32.
    - ``packed`` writes E8M0 scales in the 128x4 layout.
    - ``row_offset`` is the index of the first row of ``x`` in the whole matrix, whose blocks are
      used. ``amax`` and ``amax_columnwise`` (float32, in the shape of the scales) replace the
      maxima of ``x``, so that a shard with a split block gets the bytes of the whole matrix. For
      square blocks, ``amax`` applies to both directions. Values must not be negative. This is not
      checked, because that would wait for the device.
    - ``column_scale`` (float32, one factor for each column of ``x``) is multiplied into the rowwise
      output only. It requires blocks of a whole row.

    Returns:
        Rowwise codes (the shape of ``x``), their scales, columnwise codes and their scales. Those
        that are not requested have the shape (0,).
    """
    row, col = room.codes(x, fp8_dtype, rowwise, columnwise, batched)
    row_scale, col_scale = (x.new_empty(0, dtype=scale_dtype) for _ in range(2))
    batch, (rows, cols) = room.split(x.shape, batched)
    down, across = block
    # Blocks along the rows of x start at row_offset, blocks along its columns at 0.
    if rowwise:
        grid = (rows if packed else block_count(rows, down, row_offset), block_count(cols, across))
        row_scale = _scales(x, scale_dtype, batch, grid, (down, across), packed)
    if columnwise:
        grid = (cols if packed else block_count(cols, down), block_count(rows, across, row_offset))
        col_scale = _scales(x, scale_dtype, batch, grid, (down, across), packed)
    return row, row_scale, col, col_scale


@in_rust
def pack_scales(scale: Tensor, rows: int, block_rows: int = 1) -> Tensor:
    """Pack the E8M0 scales (rows of blocks, columns of blocks) of a plane with ``rows`` rows.

    Each scale is repeated for the ``block_rows`` (1 or 32) rows of its block.
    """
    return scale.new_empty(_packed_size(rows, scale.shape[1]))


@in_rust
def unpack_scales(packed: Tensor, rows: int, blocks: int, block_rows: int = 1) -> Tensor:
    """Undo ``pack_scales`` and return the scales (rows of blocks, ``blocks``)."""
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
    """Rewrite MXFP8 codes with one power-of-two float32 scale per row or column.

    Axis 0 returns codes of the same shape with a scale per row. Axis 1 returns the transposed codes
    with a scale per row of the transpose. Scales have the shape (rows, 1). The largest blocks of a
    row keep their bits. Codes that become subnormal lose some.
    """
    batch, (rows, cols) = room.split(codes.shape, batched)
    out = codes.new_empty(codes.shape if axis == 0 else (*batch, cols, rows))
    return out, codes.new_empty((*batch, rows if axis == 0 else cols, 1), dtype=_F32)
