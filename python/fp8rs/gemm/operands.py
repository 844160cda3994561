"""Operand formats of a device's GEMMs, and the weight's plane for dgrad."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fp8rs.gemm.devices import capability, gpu_path
from fp8rs.quantize import formats
from fp8rs.quantize.formats import BlockFormat
from fp8rs.quantize.planes import Plane

_rebase = torch.ops.fp8rs.rebase.default
_transpose = torch.ops.fp8rs.transpose.default


def operand_format(format: BlockFormat, device: torch.device, emulate: bool) -> BlockFormat:
    """Return the format to quantize activations and gradients in on ``device``.

    It is the recipe's ``format``, except for MXFP8 on a GPU without MXFP8 GEMMs. There it has one
    power-of-two scale per row.
    """
    return formats.ROW if format.microscaled and rebases(device, emulate) else format


def dgrad_operand(row: Plane, emulate: bool, after: Tensor | None = None) -> Plane:
    """Return a weight's plane for dgrad, made from its rowwise plane without quantizing again.

    With square blocks it is the transpose. With one scale per row, the codes are transposed and the
    scales are 1. The row scales are multiplied into the gradient before it is quantized
    (`dgrad_column_scale`).

    Args:
        row: the rowwise plane.
        emulate: whether the recipe emulates its GEMMs.
        after: a tensor that compiled code computes before this.

    Raises:
        ValueError: the weight has blocks along its rows and needs a columnwise plane.
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


@functools.cache
def contracted_multiple(format: BlockFormat, device: torch.device) -> int:
    """Return the alignment at which the contracted dim of a GEMM needs no padding."""
    return max(16, format.block[1]) if device.type == "cuda" else 1


def rebases(device: torch.device, emulate: bool) -> bool:
    """Return whether a device has no MXFP8 GEMMs, so that MXFP8 planes are rebased."""
    if device.type != "cuda" or emulate:
        return False
    return gpu_path("mxfp8", capability(device.index))[0] != "native"


def rebased(plane: Plane, dim: int = 0, after: Tensor | None = None) -> Plane:
    """Return an MXFP8 plane rewritten to one power-of-two scale per row.

    Args:
        plane: the plane. One with a scale per row is returned as it is.
        dim: 0, or 1 for the plane of the transposed matrix.
        after: a tensor that compiled code computes before this.
    """
    if plane.format.per_row:
        return plane
    codes, scale = _rebase(plane.matrix, plane.scale, list(plane.format.block), dim, after)
    return Plane(codes, scale, formats.ROW)
