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

from fp8rs import _core
from fp8rs.ops.tensorwise import _fake, _matrix, _matrix_shape, _operator, _or_empty, _planes

_F32 = torch.float32
_E8M0 = torch.float8_e8m0fnu


def _pair(block: Sequence[int]) -> tuple[int, int]:
    if len(block) != 2:
        raise ValueError(f"block is {list(block)}; it must be two sizes, -1 for the whole extent")
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
    return -(-(offset % size + extent) // size) if extent else 0


def _packed_size(rows: int, blocks: int) -> int:
    return -(-rows // 128) * 128 * -(-blocks // 4) * 4


def _new_scale(x: Tensor, dtype: torch.dtype, grid: tuple[int, int], block: object) -> Tensor:
    if block == (1, 128):
        return x.new_empty((grid[1], grid[0]), dtype=dtype).t()
    return x.new_empty(grid, dtype=dtype)


@_operator("block_amax(Tensor x, int[] block, int row_offset=0) -> Tensor")
def _block_amax(x: Tensor, block: Sequence[int], row_offset: int = 0) -> Tensor:
    out = _new_amax(x, block, row_offset)
    _core.block_amax(_matrix(x), block[0], block[1], out, row_offset)
    return out


def _new_amax(x: Tensor, block: Sequence[int], row_offset: int = 0) -> Tensor:
    block_rows, block_cols = _pair(block)
    rows, cols = _matrix_shape(x)
    grid = (_count(rows, block_rows, row_offset), _count(cols, block_cols))
    return x.new_empty(grid, dtype=_F32)


def _new_planes(
    x: Tensor,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    scale_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    packed: bool,
    row_offset: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Room for what is asked for: codes and scales of both directions."""
    shape = _pair(block)
    if scale_dtype is not _F32 and scale_dtype is not _E8M0:
        raise TypeError(
            f"scale_dtype is {scale_dtype}; it must be torch.float32 or torch.float8_e8m0fnu"
        )
    row, col = _planes(x, fp8_dtype, rowwise, columnwise)
    rows, cols = _matrix_shape(x)
    row_scale = col_scale = None
    # The blocks along a dimension: the rows of x are cut from row_offset on, its columns from 0.
    if row is not None:
        grid = (_count(rows, shape[0], row_offset), _count(cols, shape[1]))
        if packed:
            row_scale = x.new_empty(_packed_size(rows, grid[1]), dtype=scale_dtype)
        else:
            row_scale = _new_scale(x, scale_dtype, grid, shape)
    if col is not None:
        grid = (_count(cols, shape[0]), _count(rows, shape[1], row_offset))
        if packed:
            col_scale = x.new_empty(_packed_size(cols, grid[1]), dtype=scale_dtype)
        else:
            col_scale = _new_scale(x, scale_dtype, grid, shape)
    return row, row_scale, col, col_scale


@_operator(
    "quantize_blocks(Tensor x, ScalarType fp8_dtype, int[] block, ScalarType scale_dtype,"
    " bool rowwise=True, bool columnwise=False, *, str rounding='ceil', bool power_2_scale=False,"
    " float amax_epsilon=0.0, bool packed=False, int row_offset=0, Tensor? amax=None,"
    " Tensor? amax_columnwise=None, Tensor? fold=None, Tensor? after=None)"
    " -> (Tensor rowwise, Tensor rowwise_scale, Tensor columnwise, Tensor columnwise_scale)"
)
def _quantize_blocks(
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
    fold: Tensor | None = None,
    after: Tensor | None = None,
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
    - ``fold`` (float32, one factor for each column of ``x``) multiplies what goes into the rowwise
      output, and only that. It goes with blocks of a whole row.

    Returns rowwise codes (the shape of ``x``) and their scales, columnwise codes and theirs; what
    is not asked for has the shape (0,).
    """
    planes = _new_planes(x, fp8_dtype, block, scale_dtype, rowwise, columnwise, packed, row_offset)
    _core.quantize_blocks(
        _matrix(x),
        block[0],
        block[1],
        *planes,
        rounding=rounding,
        power_2_scale=power_2_scale,
        amax_epsilon=amax_epsilon,
        packed=packed,
        row_offset=row_offset,
        amax=amax,
        amax_columnwise=amax_columnwise,
        fold=fold,
    )
    return _all(x, fp8_dtype, scale_dtype, planes)


@_fake("quantize_blocks")
def _(
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
    fold: Tensor | None = None,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    planes = _new_planes(x, fp8_dtype, block, scale_dtype, rowwise, columnwise, packed, row_offset)
    return _all(x, fp8_dtype, scale_dtype, planes)


def _all(
    x: Tensor,
    fp8_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    planes: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row, row_scale, col, col_scale = planes
    return (
        _or_empty(x, fp8_dtype, row),
        _or_empty(x, scale_dtype, row_scale),
        _or_empty(x, fp8_dtype, col),
        _or_empty(x, scale_dtype, col_scale),
    )


@_operator("pack_scales(Tensor scale, int rows, int block_rows=1) -> Tensor")
def _pack_scales(scale: Tensor, rows: int, block_rows: int = 1) -> Tensor:
    """E8M0 scales (rows of blocks, columns of blocks) of a plane with ``rows`` rows, packed.

    A scale repeats for each of its ``block_rows`` (1 or 32) rows.
    """
    out = _new_packed(scale, rows, block_rows)
    _core.pack_scales(scale, rows, block_rows, out)
    return out


def _new_packed(scale: Tensor, rows: int, block_rows: int = 1) -> Tensor:
    if scale.dim() != 2:
        raise ValueError(f"scale has {scale.dim()} dimensions; it must have 2")
    return scale.new_empty(_packed_size(rows, scale.shape[1]))


@_operator("unpack_scales(Tensor packed, int rows, int blocks, int block_rows=1) -> Tensor")
def _unpack_scales(packed: Tensor, rows: int, blocks: int, block_rows: int = 1) -> Tensor:
    """Undo ``pack_scales``: the scales (rows of blocks, ``blocks``)."""
    out = _new_unpacked(packed, rows, blocks, block_rows)
    _core.unpack_scales(packed, rows, block_rows, out)
    return out


def _new_unpacked(packed: Tensor, rows: int, blocks: int, block_rows: int = 1) -> Tensor:
    if block_rows not in (1, 32):
        raise ValueError(f"block_rows is {block_rows}; it must be 1 or 32")
    return packed.new_empty((_count(rows, block_rows), blocks))


@_operator(
    "rebase(Tensor codes, Tensor scale, int[] block, int axis, Tensor? after=None)"
    " -> (Tensor codes, Tensor scale)"
)
def _rebase(
    codes: Tensor, scale: Tensor, block: Sequence[int], axis: int, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """MXFP8 codes rewritten for one power-of-two float32 scale a row or a column.

    Axis 0 gives codes of the same shape and a scale for each row of the matrix, axis 1 the
    transposed codes and a scale for each of their rows; scales have the shape (rows, 1). The
    largest blocks of a row keep their bits; codes pushed into the subnormals lose some.
    """
    out, scale_out = _new_rebased(codes, scale, block, axis, after)
    _core.rebase(_matrix(codes), scale, block[0], block[1], axis, out, scale_out)
    return out, scale_out


def _new_rebased(
    codes: Tensor, scale: Tensor, block: Sequence[int], axis: int, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    _pair(block)
    if axis not in (0, 1):
        raise ValueError(f"axis is {axis}; it must be 0 or 1")
    rows, cols = _matrix_shape(codes)
    if axis == 0:
        return codes.new_empty(codes.shape), codes.new_empty((rows, 1), dtype=_F32)
    return codes.new_empty((cols, rows)), codes.new_empty((cols, 1), dtype=_F32)


_fake("block_amax")(_new_amax)
_fake("pack_scales")(_new_packed)
_fake("unpack_scales")(_new_unpacked)
_fake("rebase")(_new_rebased)
