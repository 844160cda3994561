"""How FSDP2 pads the shards of FP8 weights.

It asks a parameter for zeros of the shard's padded size, and copies the rows that this rank has
into the first of them. Only that copy tells where in a block the shard begins, and how many rows it
has: planes end there, and nothing but gathers knows of the padding in the memory behind them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fp8rs.tensor.formats import matrix_shape
from fp8rs.tensor.planes import Plane, zeros
from fp8rs.tensor.region import Region
from fp8rs.tensor.store import Store
from fp8rs.tensor.windows import Span


def room(like: Store, shape: Iterable[int], device: Any) -> Store:
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
    new.first_copy = begin_with
    return new


def begin_with(dst: Region, src: Region) -> bool:
    """Take the codes and scales of some rows of another tensor as ``dst``, the first rows.

    They are all that the store has from then on: codes of 0 stay in memory behind its planes.

    Raises:
        ValueError: they are no whole rows, but the format needs these.
    """
    store, of = dst.store, src.store
    mine, theirs = dst.rectangle, src.rectangle
    if mine is None or theirs is None or mine.transposed or theirs.transposed or mine.rows.start:
        return False
    if not mine.rows.length:
        return True  # an empty shard is a view of the room, of which it has nothing
    if not store.format.per_tensor and theirs.cols.length != of.matrix[1]:
        raise ValueError(
            f"a weight in format {store.format.name!r} is sharded by rows only: have "
            "shard_placement_fn give Shard(0), or use a recipe with one scale a tensor"
        )
    at = theirs.rows.slice, theirs.cols.slice
    for name, dim in (("rowwise", 0), ("columnwise", 1)):
        own, given = getattr(store, name), getattr(of, name)
        if own is not None and given is not None:
            data = own.data.narrow(dim, 0, mine.rows.length)
            data.copy_(given.matrix[at[::-1] if dim else at])
            setattr(store, name, _with_scales_of(data, given, theirs.rows, dim))
    store.first_copy = None
    return True


def _with_scales_of(data: Tensor, given: Plane, rows: Span, dim: int) -> Plane:
    """A plane of codes with the scales of some rows of another matrix, whose codes they are.

    Args:
        data: the codes.
        given: a plane of the other matrix.
        rows: of that matrix.
        dim: of the planes that the matrices' rows are.
    """
    block, start = given.format.block[dim], rows.start + given.lead[dim]
    scale, lead = given.scale, 0
    if block != -1:
        lead, first, last = start % block, start // block, -(-(start + rows.length) // block)
        scale = scale.narrow(dim, first, last - first)
    scale = scale.to(data.device, copy=True)
    return Plane(data, scale, given.format, (lead, 0) if dim == 0 else (0, lead))
