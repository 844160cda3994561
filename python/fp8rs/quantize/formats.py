"""The table of quantized formats: one row is one way to scale a matrix.

A block shape and a scale dtype define a format. Tensors, all-gathers, layers and optimizers are
written for any of them. All formats but ``tensor`` are also in the crate's table
(``src/layout/formats.rs``). CONTRIBUTING.md lists what a new format needs. Each matrix of a batch
is scaled by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Self

from fp8rs.ops.shapes import block_count
from fp8rs.ops.shapes import split_batch as split_batch

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

#: Largest finite magnitude of each element type.
FP8_MAX: dict[torch.dtype, float] = {E4M3: 448.0, E5M2: 57344.0}

#: Largest magnitude that is rounded to the largest finite one, half a step above it.
FP8_BOUND: dict[torch.dtype, float] = {E4M3: 464.0, E5M2: 61440.0}

#: Dtypes that can be quantized.
INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Logical dtypes of quantized tensors. ``model.double()`` gives float64.
LOGICAL_DTYPES = (*INPUT_DTYPES, torch.float64)

#: Every format, by name.
FORMATS: dict[str, BlockFormat] = {}


@dataclass(frozen=True, eq=False, init=False)
class BlockFormat:
    """How a matrix of codes is divided into blocks, each with one scale.

    `Quantizer.format` and `Plane.format` are formats. A name is the shape of a block, such as
    ``1x128``, or ``tensor`` or ``row``.

    ``block`` is (rows, columns) of one scale; -1 means the whole extent. A columnwise plane is
    the transposed matrix stored contiguously, and ``block`` applies to *that* matrix, so both
    planes of a tensor have the same format.

    Formats are compared by identity, because every call of a layer compares formats. Each format
    has one object, which copies, unpickling and the constructor return. Compilers call the
    constructor with the fields of an object that they have traced.

    Attributes:
        square: the transposed matrix has the same codes and (transposed) scales.
        per_tensor: one scale serves the whole tensor, whatever its shape.
        per_row: one scale serves a whole row, so that a product's rows can be scaled by it.
        microscaled: the scales are E8M0: MXFP8.
    """

    name: str
    block: tuple[int, int]
    scale_dtype: torch.dtype
    if TYPE_CHECKING:
        # These are not fields at run time, because compilers would pass them to the constructor.
        square: bool = field(init=False, repr=False)
        per_tensor: bool = field(init=False, repr=False)
        per_row: bool = field(init=False, repr=False)
        microscaled: bool = field(init=False, repr=False)

    def __new__(cls, name: str, block: tuple[int, int], scale_dtype: torch.dtype) -> Self:
        """Return the registered format of this name, or make it if there is none."""
        # Look up the name only, because the numbers may be symbolic in a trace.
        registered: Any = FORMATS.get(name)
        if registered is not None:
            format: Self = registered
            return format
        self = super().__new__(cls)
        self.__dict__.update(
            name=name,
            block=block,
            scale_dtype=scale_dtype,
            square=block[0] == block[1],
            per_tensor=block == (-1, -1),
            per_row=block == (1, -1),
            microscaled=scale_dtype == torch.float8_e8m0fnu,
        )
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return format_named, (self.name,)

    def scale_shape(self, rows: int, cols: int, batch: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return the shape of the scales of a matrix (rows, cols), or of each matrix of a batch.

        Args:
            rows: rows of each matrix.
            cols: columns of each matrix.
            batch: ``(batch,)``, or ``()`` for one matrix.
        """
        if self.per_tensor:
            return batch
        block_rows, block_cols = self.block
        return *batch, block_count(rows, block_rows), block_count(cols, block_cols)


#: One fp32 scale for the whole tensor.
TENSOR = BlockFormat("tensor", (-1, -1), torch.float32)

#: One fp32 scale for each row.
ROW = BlockFormat("row", (1, -1), torch.float32)

#: fp32 scales for each 128 elements of a row, and for each square of 128 by 128.
BLOCK_1X128 = BlockFormat("1x128", (1, 128), torch.float32)
BLOCK_128X128 = BlockFormat("128x128", (128, 128), torch.float32)

#: MXFP8: E8M0 scales for each 32 elements of a row (OCP Microscaling Formats 1.0, section 5.2),
#: and for each square of 32 by 32, which is MXFP8 along both axes at once.
MX_1X32 = BlockFormat("1x32", (1, 32), torch.float8_e8m0fnu)
MX_32X32 = BlockFormat("32x32", (32, 32), torch.float8_e8m0fnu)

for _format in (TENSOR, ROW, BLOCK_1X128, BLOCK_128X128, MX_1X32, MX_32X32):
    FORMATS[_format.name] = _format


def format_named(name: str) -> BlockFormat:
    """Return the format of that name, or raise a ValueError that lists the known names."""
    try:
        return FORMATS[name]
    except KeyError:
        names = ", ".join(map(repr, FORMATS))
        raise ValueError(f"format {name!r} is not known; the names are {names}") from None


def format_of(block: object, scale_dtype: torch.dtype) -> BlockFormat:
    """Return the format with these blocks, or raise a ValueError that lists the known blocks."""
    blocks = []
    for format in FORMATS.values():
        if format.scale_dtype != scale_dtype or format.per_tensor:
            continue
        if isinstance(block, (tuple, list)) and tuple(block) == format.block:
            return format
        blocks.append(str(format.block))
    raise ValueError(f"block must be one of {', '.join(blocks)}, not {block!r}")


def check_fp8_dtype(dtype: torch.dtype, name: str = "fp8_dtype") -> torch.dtype:
    """Return ``dtype`` if it is an FP8 element type, else raise a TypeError with the name."""
    if dtype not in FP8_MAX:
        raise TypeError(f"{name} must be torch.float8_e4m3fn or torch.float8_e5m2, not {dtype!r}")
    return dtype
