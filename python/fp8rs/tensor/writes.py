"""Writes to quantized tensors, as functions of a region and of what is written.

Scales belong to blocks, and a region may have parts of blocks. So a write first finds the rows and
columns of whole blocks that it concerns (:class:`Target`). Where the region is all of them, they
are quantized anew; where there are neighbours, these keep their values: their scales stay, or move
by powers of two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8rs.tensor import windows
from fp8rs.tensor.planes import Plane
from fp8rs.tensor.region import Region
from fp8rs.tensor.spec import Planes, QuantSpec, quantize_planes, requantize_plane
from fp8rs.tensor.store import Delayed
from fp8rs.tensor.windows import Rectangle, Span


class Target(NamedTuple):
    """The blocks that a write concerns.

    Attributes:
        box: their rows and columns; None is the whole matrix, written in order.
        filled: whether the region has all their elements.
    """

    box: Rectangle | None
    filled: bool


def target(region: Region) -> Target:
    """The blocks that a write to a region concerns."""
    if region.is_whole:
        return Target(None, True)
    window, (rows, cols) = region.window, region.store.matrix
    assert window is not None
    if window.numel == 0:
        return Target(Rectangle(Span(0, rows), Span(0, cols)), False)
    box = region.hull
    if _is(box, region.rectangle):
        return Target(box, True)
    return Target(box, window.dense and window.numel == box.rows.length * box.cols.length)


def _is(box: Rectangle, rectangle: Rectangle | None) -> bool:
    """Whether a box has just the rows and columns of a rectangle."""
    return rectangle is not None and rectangle[:2] == box[:2]


def laid_out(region: Region, values: Tensor, box: Rectangle | None) -> Tensor:
    """Values of a region as the matrix of its box; beside them are zeros."""
    if box is None:
        return values.reshape(region.store.matrix)
    window = region.window
    assert window is not None
    rows, cols = box.rows.length, box.cols.length
    rectangle = region.rectangle
    if rectangle is not None and _is(box, rectangle):
        turned = rectangle.transposed
        return values.reshape(cols, rows).t() if turned else values.reshape(rows, cols)
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
    rest_is_padding: bool = False,
) -> bool:
    """Quantize values into a region; returns whether anything was written.

    Args:
        region: where.
        values: of its shape, float32, bfloat16 or float16, on its device.
        spec: how, of the region's format.
        delayed: for delayed scaling, the scale to read and the amax to raise.
        keep: what has the same value as before keeps its codes' value, also where all is written.
        rest_is_padding: elements of the store that are not in the region need not keep their value.
    """
    store = region.store
    store.any_plane.check_live("this quantized tensor")
    box, filled = target(region)
    if not (values.numel() or (box is None and not keep) or spec.group is not None):
        return False  # (the ranks of a group quantize together, also one that writes nothing)
    if keep or not (filled or rest_is_padding):
        made = requantized(region, values, Target(box, filled), spec, delayed)
    else:
        scale, amax = (None, None) if delayed is None else delayed
        lead = store.lead if box is None or box.rows.start == 0 else 0
        matrix = laid_out(region, values, box)
        made = quantize_planes(
            spec, matrix, *store.has, scale=scale, amax=amax, declared=True, lead=lead
        )
    store.put(made, box)
    return True


def requantized(
    region: Region, values: Tensor, where: Target, spec: QuantSpec, delayed: Delayed | None
) -> Planes:
    """The planes of a write's blocks, with all that it leaves as it was."""
    row, col = region.store.part(where.box)
    matrix = laid_out(region, values, where.box)
    changed = changes(region, values, where)
    noted = None if delayed is None else delayed[1]
    if row is not None:
        row = _requantized(row, matrix, changed, where.filled, spec, noted)
        if col is not None and row.format.square:
            return row, row.transposed("columnwise", "a write")
    if col is not None:
        turned = None if changed is None else changed.t()
        col = _requantized(col, matrix.t(), turned, where.filled, spec, noted)
    return row, col


def changes(region: Region, values: Tensor, where: Target) -> Tensor | None:
    """Which elements of a write's box it changes; None where the values say all there is to know.

    They do not in float16, which has not the range of all scales; nor of the second plane of oblong
    blocks, which has values of its own.
    """
    store = region.store
    one_plane = store.has != (True, True) or store.format.square
    if where.filled and values.dtype != torch.float16 and one_plane:
        return None
    old = region.values(values.dtype)
    return laid_out(region, (values != old) & ~(values.isnan() & old.isnan()), where.box)


def _requantized(
    plane: Plane,
    values: Tensor,
    changed: Tensor | None,
    filled: bool,
    spec: QuantSpec,
    noted: Tensor | None,
) -> Plane:
    if changed is not None:
        own = plane.dequantize(torch.float32).view(values.shape)
        if filled:  # a NaN is none to keep where the other plane, which was read, has none
            changed = changed | own.isnan()
        values = torch.where(changed, values.to(torch.float32), own)
    return requantize_plane(spec, plane, values, noted)


# --- codes and scales ----------------------------------------------------------------------------


def copy_planes(
    dst: Region, src: Region, *, rest_is_padding: bool = False, non_blocking: bool = False
) -> bool:
    """Take over the codes and scales of ``src`` (same shape, format and element type).

    Args:
        dst: where they go.
        src: what is taken.
        rest_is_padding: as for :func:`write`.
        non_blocking: as for ``copy_``.

    Returns:
        False, with nothing written, where that does not make the values equal: ``src`` lacks a
        plane that cannot be made from its other one, ``dst`` shares its scales with other elements,
        or blocks begin elsewhere in the two.
    """
    store = dst.store
    if store.lead != src.store.lead:
        return False
    found = planes_for(dst, src, rest_is_padding)
    if found is None:
        return False
    made = completed(found[0], store.has)
    if made is None:
        return False
    store.put(made, found[1], non_blocking)
    return True


def planes_for(
    dst: Region, src: Region, rest_is_padding: bool
) -> tuple[Planes, Rectangle | None] | None:
    """The planes that make ``dst`` equal to ``src``, and the rows and columns that they are of."""
    if rest_is_padding and dst.window is not None:
        rows = Span(0, dst.shape[0])
        return src.planes, Rectangle(rows, Span(0, dst.store.matrix[1]))
    if dst.is_whole and src.is_whole and dst.store.matrix == src.store.matrix:
        return (src.store.rowwise, src.store.columnwise), None
    if dst.store.format.per_tensor:
        return (arranged(dst, src), None), None
    if dst.window is None:
        return src.planes, None
    rectangle = dst.rectangle
    if rectangle is None or dst.window.numel == 0 or not _is(dst.hull, rectangle):
        return None
    row, col = src.planes
    return ((col, row) if rectangle.transposed else (row, col)), dst.hull


def completed(planes: Planes, wanted: tuple[bool, bool]) -> Planes | None:
    """Planes with those that are wanted and can be made of the others; None if one cannot be."""
    row, col = planes
    plane = row if row is not None else col
    if plane is None:
        return None
    wants_row, wants_col = wanted
    lacks_row, lacks_col = wants_row and row is None, wants_col and col is None
    if (lacks_row or lacks_col) and not plane.format.square:
        return None
    if lacks_row:
        row = plane.transposed("rowwise", "copy_")
    if lacks_col:
        col = plane.transposed("columnwise", "copy_")
    return row, col


def arranged(dst: Region, src: Region) -> Plane | None:
    """The rowwise plane of all of a store, of which ``dst`` has the codes of ``src``.

    For one scale a tensor; None where ``dst`` has not all elements of the store.
    """
    row, matrix = src.rowwise_of_shape(), dst.store.matrix
    if row is None:
        return None
    codes, window = row.data.view(torch.uint8), dst.window
    if window is None:
        codes = codes.reshape(matrix)
    elif window.numel != matrix[0] * matrix[1] or not window.dense:
        return None
    else:
        given, codes = codes, torch.empty(matrix, dtype=torch.uint8, device=row.data.device)
        window.of(codes).copy_(given)
    return Plane(codes.view(row.data.dtype), row.scale, row.format)


# --- room for a shard ----------------------------------------------------------------------------


def begin_with(dst: Region, src: Region) -> bool:
    """Take the codes and scales of some rows of another tensor as the first rows of ``dst``.

    Scales and where blocks begin are ``src``'s from then on: only this first copy tells where in a
    block a shard begins.

    Raises:
        ValueError: they are no whole rows, but the format needs these.
    """
    store, of = dst.store, src.store
    mine, theirs = dst.rectangle, src.rectangle
    if mine is None or theirs is None or mine.transposed or theirs.transposed:
        return False
    if not store.format.per_tensor and theirs.cols.length != of.matrix[1]:
        raise ValueError(
            f"a weight in format {store.format.name!r} is sharded by rows only: have "
            "shard_placement_fn give Shard(0), or use a recipe with one scale a tensor"
        )
    if store.rowwise is not None and of.rowwise is not None:
        _copy_codes(store.rowwise, mine.rows, mine.cols, of.rowwise, theirs.rows, theirs.cols)
        store.rowwise = _with_scales_of(store.rowwise, of.rowwise, theirs.rows, 0)
    if store.columnwise is not None and of.columnwise is not None:
        _copy_codes(store.columnwise, mine.cols, mine.rows, of.columnwise, theirs.cols, theirs.rows)
        store.columnwise = _with_scales_of(store.columnwise, of.columnwise, theirs.rows, 1)
    store.blank = False
    return True


def _copy_codes(
    own: Plane, rows: Span, cols: Span, given: Plane, given_rows: Span, given_cols: Span
) -> None:
    own.data[rows.slice, cols.slice] = given.matrix[given_rows.slice, given_cols.slice]


def _with_scales_of(own: Plane, given: Plane, rows: Span, dim: int) -> Plane:
    """A plane with the scales of some rows of another matrix, for its first rows.

    Args:
        own: the plane, which may have more rows: theirs have scales of 0.
        given: a plane of the other matrix.
        rows: of that matrix.
        dim: of the planes that the matrices' rows are.
    """
    block, extent = given.format.block[dim], own.matrix.shape[dim]
    if block == -1:
        return Plane(own.data, given.scale.to(own.scale.device, copy=True), own.format)
    start = rows.start + given.lead[dim]
    lead = start % block
    size = list(own.scale.shape)
    size[dim] = -(-(lead + extent) // block) if extent else 0
    # Bytes: not all devices fill E8M0 tensors.
    scale = torch.zeros([*size, own.scale.itemsize], dtype=torch.uint8, device=own.scale.device)
    scale = scale.view(own.scale.dtype).squeeze(-1)
    first, last = start // block, -(-(start + rows.length) // block)
    scale.narrow(dim, 0, last - first).copy_(given.scale.narrow(dim, first, last - first))
    return Plane(own.data, scale, own.format, (lead, 0) if dim == 0 else (0, lead))
