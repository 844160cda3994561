"""Scales for rows and blocks of finite matrices, and packed scales."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oracle import tensorwise
from oracle.elements import EMAX, MAX, cast, power_of_2


def expand(
    grid: Tensor, block: tuple[int, int], shape: tuple[int, int], block_offset: int = 0
) -> Tensor:
    """Expand one value per block to one per element.

    The first block lacks ``block_offset`` rows.
    """
    for dim in (0, 1):
        if block[dim] == -1:
            grid = grid.expand(-1, shape[1]) if dim else grid.expand(shape[0], -1)
        else:
            grid = grid.repeat_interleave(block[dim], dim)
    return grid[block_offset : block_offset + shape[0], : shape[1]]


def block_amax(x: Tensor, block: tuple[int, int], block_offset: int = 0) -> Tensor:
    """Return the amax of each block of a matrix whose first block lacks ``block_offset`` rows."""
    rows, cols = x.shape
    block_rows = rows + block_offset if block[0] == -1 else block[0]
    block_cols = cols if block[1] == -1 else block[1]
    across = math.ceil(cols / block_cols)
    down = math.ceil((rows + block_offset) / block_rows)
    padded = x.new_zeros(down * block_rows, across * block_cols, dtype=torch.float32)
    padded[block_offset : block_offset + rows, :cols] = x.float().abs()
    return padded.view(down, block_rows, across, block_cols).amax((1, 3))


def e8m0_exponent(amax: Tensor, dtype: torch.dtype, rounding: str) -> Tensor:
    """Return the exponent of each block's scale by evaluating the defining inequality."""
    amax = amax.double()
    # amax = m * 2^e with m in [0.5, 1), so floor(log2(amax)) is e - 1.
    _, e = torch.frexp(amax)
    floor = e - 1 - EMAX[dtype]
    if rounding == "ceil":
        fits = amax <= MAX[dtype] * power_of_2(floor)
        floor = torch.where(fits, floor, floor + 1)
    floor = torch.where(amax == 0, torch.full_like(floor, -127), floor)
    return floor.clamp(-127, 127)


def quantize(
    x: Tensor,
    dtype: torch.dtype,
    block: tuple[int, int],
    *,
    rounding: str | None = None,
    power_2_scale: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return FP8 codes and float32 scales of a finite matrix.

    If ``rounding`` is given, scales are E8M0.
    """
    amax = block_amax(x, block)
    if rounding is not None:
        scale = power_of_2(e8m0_exponent(amax, dtype, rounding))
        return cast(x.double() / expand(scale, block, tuple(x.shape)), dtype), scale.float()
    scale = tensorwise.scale_from_amax(amax, dtype, power_2_scale)
    inverse = torch.ones_like(scale) / scale
    return cast(x.float() * expand(inverse, block, tuple(x.shape)), dtype), scale


def swizzle(scales: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Pack (lines, blocks) integers into the layout that cuBLAS defines.

    The matrix is padded with zeros to (128a, 4b) and divided into 128x4 tiles in row-major order.
    In a tile, row r and column c move to row r % 32 and column (r // 32) * 4 + c of a 32x16 array.
    """
    lines, blocks = scales.shape
    out = []
    for tile_row in range(-(-lines // 128)):
        for tile_col in range(-(-blocks // 4)):
            tile = [[0] * 16 for _ in range(32)]
            for r in range(128):
                for c in range(4):
                    line = tile_row * 128 + r
                    block = tile_col * 4 + c
                    if line < lines and block < blocks:
                        tile[r % 32][(r // 32) * 4 + c] = int(scales[line, block])
            out += [byte for row in tile for byte in row]
    return torch.tensor(out, dtype=dtype)
