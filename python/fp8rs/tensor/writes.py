"""Writes to quantized tensors, as functions of a region and of what is written.

Scales belong to blocks, and a region may have parts of blocks. So a write first finds the rows and
columns of whole blocks that it concerns (:class:`Target`). If the region has all their elements,
the blocks are quantized again. Otherwise the other elements keep their values: scales stay, or move
by powers of two. The observer of a weight is notified of each write.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8rs._torch import note_write
from fp8rs.tensor import windows
from fp8rs.tensor.formats import INPUT_DTYPES
from fp8rs.tensor.planes import Plane
from fp8rs.tensor.region import Region
from fp8rs.tensor.spec import Planes, QuantSpec, quantize_planes, requantize_plane
from fp8rs.tensor.store import Delayed
from fp8rs.tensor.windows import Rectangle, Span
from fp8rs.tensor.wrapper import StoreTensor

# --- tensors -------------------------------------------------------------------------------------


def quantize(
    dst: StoreTensor, src: Any, spec: QuantSpec, delayed: Delayed | None, keep: bool = False
) -> None:
    """Quantize ``src`` (of the same shape, on the same device) into the planes of ``dst``.

    Args:
        dst: what is written.
        src: values, or another quantized tensor.
        spec: how, of the format of ``dst``.
        delayed: for delayed scaling, the scale to read and the amax to raise.
        keep: elements of a whole tensor too keep their codes' value where ``src`` has the same.

    Raises:
        TypeError, ValueError: ``src`` has another shape or device, or cannot be quantized.
    """
    if not isinstance(src, Tensor):
        raise TypeError(f"src must be a tensor, not {type(src).__name__}")
    if isinstance(src, StoreTensor):
        src = src.region.values(src.dtype)
    if src.shape != dst.shape:
        raise ValueError(f"src has shape {tuple(src.shape)}, but dst has {tuple(dst.shape)}")
    if src.device != dst.device:
        raise ValueError(f"src is on {src.device}, but dst is on {dst.device}")
    if src.dtype == dst.dtype == torch.float64:
        src = src.float()
    if src.dtype not in INPUT_DTYPES:
        raise TypeError(f"src must be float32, bfloat16 or float16, not {src.dtype}")
    if src.requires_grad:
        src = src.detach()
    if write(dst.region, src, spec, delayed, keep=keep):
        note_write(dst)
    if (observer := dst._store.active_observer) is not None:
        observer.observe_write(dst, src, exact=not keep)


# --- the blocks of a region ----------------------------------------------------------------------


class Target(NamedTuple):
    """The blocks that a write concerns.

    Attributes:
        box: their rows and columns; None is the whole matrix, written in order.
        filled: whether the region has all their elements.
    """

    box: Rectangle | None
    filled: bool


def target(region: Region) -> Target:
    """Return the blocks that a write to a region concerns.

    Raises:
        NotImplementedError: the region has parts of matrices of a batch, or mixes matrices.
    """
    if region.is_whole:
        return Target(None, True)
    window, matrix = region.window, region.store.matrix
    assert window is not None
    if window.numel == 0:
        return Target(Rectangle(Span(0, 0), Span(0, 0)), False)
    box = region.hull
    if is_box(box, region.rectangle):
        return Target(box, True)
    if len(matrix) == 3:
        raise NotImplementedError(
            f"cannot write through a view of shape {window.size} with strides {window.stride} of a "
            f"quantized batch of {matrix[0]} matrices {matrix[1:]}: it does not consist of whole "
            "matrices. Write ranges of the first dimension, or dequantize() the tensor, change the "
            "values and copy_() them back"
        )
    return Target(box, window.dense and window.numel == box.rows.length * box.cols.length)


def is_box(box: Rectangle, rectangle: Rectangle | None) -> bool:
    """Whether a box has just the rows and columns of a rectangle."""
    return rectangle is not None and rectangle[:2] == box[:2]


def laid_out(region: Region, values: Tensor, box: Rectangle | None) -> Tensor:
    """Return values of a region as the matrix or matrices of its box, with zeros elsewhere."""
    if box is None:
        return values.reshape(region.store.matrix)
    window = region.window
    assert window is not None
    if region.store.batched:
        *batch, rows, cols = box.rows.length, *region.store.matrix[1:]
    else:
        batch, rows, cols = [], box.rows.length, box.cols.length
    rectangle = region.rectangle
    if rectangle is not None and is_box(box, rectangle):
        if rectangle.transposed:
            return values.reshape(*batch, cols, rows).mT
        return values.reshape(*batch, rows, cols)
    matrix = values.new_zeros(rows, cols)
    if window.numel:
        windows.fill(matrix, values, windows.within(window, box, region.store.matrix))
    return matrix


# --- values --------------------------------------------------------------------------------------


def write(
    region: Region,
    values: Tensor,
    spec: QuantSpec,
    delayed: Delayed | None,
    *,
    keep: bool = False,
) -> bool:
    """Quantize values into a region; returns whether anything was written.

    Args:
        region: where.
        values: of its shape, float32, bfloat16 or float16, on its device.
        spec: how, of the region's format.
        delayed: for delayed scaling, the scale to read and the amax to raise.
        keep: what has the same value as before keeps its codes' value, also where all is written.
    """
    store = region.store
    store.any_plane.check_live("this quantized tensor")
    if store.batched and not spec.batched:
        spec = replace(spec, batched=True)
    box, filled = target(region)
    if not (values.numel() or (box is None and not keep) or spec.group is not None):
        return False  # (the ranks of a group quantize together, also one that writes nothing)
    if keep or not filled:
        made = requantized(region, values, Target(box, filled), spec, delayed)
    else:
        scale, amax = (None, None) if delayed is None else delayed
        lead = store.lead if store.batched or box is None or box.rows.start == 0 else 0
        matrix = laid_out(region, values, box)
        made = quantize_planes(
            spec, matrix, *store.has, scale=scale, amax=amax, declared=True, lead=lead
        )
    store.put(made, box)
    return True


def requantized(
    region: Region, values: Tensor, where: Target, spec: QuantSpec, delayed: Delayed | None
) -> Planes:
    """Return the planes of the blocks that a write concerns.

    Blocks without a changed element keep their bytes.
    """
    row, col = region.store.part(where.box)
    matrix = laid_out(region, values, where.box)
    changed = changes(region, values, where)
    noted = None if delayed is None else delayed[1]
    if row is not None:
        row = _requantized(row, matrix, changed, where.filled, spec, noted)
        if col is not None and row.format.square:
            return row, row.transposed("columnwise", "a write")
    if col is not None:
        col = _requantized(col, matrix.mT, changed.mT, where.filled, spec, noted)
    return row, col


def changes(region: Region, values: Tensor, where: Target) -> Tensor:
    """Return which elements of a write's box the write changes: bool, in the box's shape.

    NaN in the place of NaN is not a change, and neither is a zero of the other sign.
    """
    old = region.values(values.dtype)
    return laid_out(region, (values != old) & ~(values.isnan() & old.isnan()), where.box)


def _requantized(
    plane: Plane,
    values: Tensor,
    changed: Tensor,
    filled: bool,
    spec: QuantSpec,
    noted: Tensor | None,
) -> Plane:
    own = plane.dequantize(torch.float32).view(values.shape)
    taken = changed
    if filled:
        # `changed` compares with the plane that is read. Where only this plane has NaN, the
        # value replaces it as soon as something in the block changes.
        taken = changed | own.isnan()
    values = torch.where(taken, values.to(torch.float32), own)
    return requantize_plane(spec, plane, values, changed, noted)
