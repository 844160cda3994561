"""Room for a shard, whose scales and blocks the first copy into it tells.

FSDP2 pads shards so: it asks a parameter for zeros of the shard's padded size, and copies the rows
that this rank has into the first of them. Only that copy tells where in a block the shard begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fp8rs.tensor.formats import matrix_shape
from fp8rs.tensor.planes import Plane, zeros
from fp8rs.tensor.region import Region
from fp8rs.tensor.store import Store
from fp8rs.tensor.windows import Span


def blank(like: Store, shape: Iterable[int], device: Any) -> Store:
    """Room for another part of the parameter that a store is of, (rows, cols), codes 0.

    One scale a tensor is the parameter's from the start.
    """
    rows, cols = matrix_shape(torch.Size(shape))

    def plane(own: Plane | None, size: tuple[int, int]) -> Plane | None:
        if own is None:
            return None
        if own.format.per_tensor:
            scale = own.scale.to(device, copy=True)
        else:
            scale = zeros(own.scale, own.format.scale_shape(*size), device)
        return Plane(zeros(own.data, size, device), scale, own.format)

    new = like.over(plane(like.rowwise, (rows, cols)), plane(like.columnwise, (cols, rows)))
    new.blank = True
    return new


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
    to, at = ((box.rows.slice, box.cols.slice) for box in (mine, theirs))
    for name, dim in (("rowwise", 0), ("columnwise", 1)):
        own, given = getattr(store, name), getattr(of, name)
        if own is not None and given is not None:
            own.data[to[::-1] if dim else to] = given.matrix[at[::-1] if dim else at]
            setattr(store, name, _with_scales_of(own, given, theirs.rows, dim))
    store.blank = False
    return True


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
    scale = zeros(own.scale, size)
    first, last = start // block, -(-(start + rows.length) // block)
    scale.narrow(dim, 0, last - first).copy_(given.scale.narrow(dim, first, last - first))
    return Plane(own.data, scale, own.format, (lead, 0) if dim == 0 else (0, lead))
