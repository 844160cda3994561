"""Which operands a device's GEMMs take: what is quantized for them, and a weight's for dgrad."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8rs.gemm.devices import capability, gpu_path
from fp8rs.tensor import formats
from fp8rs.tensor.formats import BlockFormat
from fp8rs.tensor.planes import Plane

_rebase = torch.ops.fp8rs.rebase.default
_transpose = torch.ops.fp8rs.transpose.default


def operand_format(format: BlockFormat, device: torch.device, emulate: bool) -> BlockFormat:
    """What an activation or gradient of a recipe's ``format`` is quantized in on ``device``.

    Itself, but for MXFP8 on a GPU without MXFP8 GEMMs, where it is one power-of-two scale a row.
    """
    return formats.ROW if format.microscaled and rebases(device, emulate) else format


def dgrad_operand(row: Plane, emulate: bool, after: Tensor | None = None) -> Plane:
    """A weight's plane for dgrad from its rowwise one, without quantizing again.

    Where blocks are square it is the transpose. With one scale a row the codes are transposed and
    the scales are 1. The row scales are multiplied into the gradient before it is quantized
    (:func:`dgrad_column_scale`).

    Args:
        row: the rowwise plane.
        emulate: the recipe's.
        after: a tensor that a compiler must have before this is computed.

    Raises:
        ValueError: the weight has blocks along its rows; it needs a columnwise plane.
    """
    if row.format.per_row:
        codes = _transpose(row.matrix, after)
        return Plane(codes, row.scale.new_ones((codes.shape[0], 1)), row.format)
    if row.format == formats.MX_32X32 and rebases(row.data.device, emulate):
        return rebased(row, 1, after)
    return row.transposed("columnwise", "dgrad", after)


def dgrad_column_scale(format: BlockFormat, scale: Tensor) -> Tensor | None:
    """Return the column scale for the gradient that dgrad quantizes: the weight's row scales.

    Return None if the weight's plane for dgrad has its own scales.
    """
    return scale.view(1, -1) if format.per_row else None


def contracted_multiple(format: BlockFormat, device: torch.device) -> int:
    """What a GEMM's contracted dim is to be a multiple of, lest operands be copied to pad them."""
    return max(16, format.block[1]) if device.type == "cuda" else 1


def rebases(device: torch.device, emulate: bool) -> bool:
    """Whether MXFP8 planes are rewritten for one power of two a row: a GPU without their GEMMs."""
    if device.type != "cuda" or emulate:
        return False
    return gpu_path("mxfp8", capability(device.index))[0] != "native"


def rebased(plane: Plane, dim: int = 0, after: Tensor | None = None) -> Plane:
    """An MXFP8 plane with one power-of-two scale a row.

    Args:
        plane: as it is if it has a scale a row already.
        dim: 0, or 1 for the plane of the transposed matrix.
        after: a tensor that a compiler must have before this is computed.
    """
    if plane.format.per_row:
        return plane
    codes, scale = _rebase(plane.matrix, plane.scale, list(plane.format.block), dim, after)
    return Plane(codes, scale, formats.ROW)
