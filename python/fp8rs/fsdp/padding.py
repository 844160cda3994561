"""How FSDP2 pads the shards of FP8 weights.

FSDP2 calls ``new_zeros`` with the padded size, and copies the rows of this rank into the first
rows. Only that copy shows how many rows the shard has, and at which row of a block it begins. The
planes end with these rows. The padding stays in the memory behind them, where all-gathers use it.
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


def allocate(like: Store, shape: Iterable[int], device: Any) -> Store:
    """Allocate planes of zeros for another shard of the weight that a store belongs to.

    A per-tensor scale is copied, because all shards have the same.

    Args:
        like: the store of the weight or a shard.
        shape: (rows, columns).
        device: the device of the planes.
    """
    rows, cols = matrix_shape(torch.Size(shape))

    def plane(present: Plane | None, size: tuple[int, int]) -> Plane | None:
        if present is None:
            return None
        if present.format.per_tensor:
            scale = present.scale.to(device, copy=True)
        else:
            scale = zeros(present.scale, present.format.scale_shape(*size), device)
        return Plane(zeros(present.data, size, device), scale, present.format)

    new = like.over(plane(like.rowwise, (rows, cols)), plane(like.columnwise, (cols, rows)))
    new.first_copy = copy_first_rows
    return new


def copy_first_rows(dst: Region, src: Region) -> bool:
    """Copy codes and scales of some rows of another tensor into the first rows of an allocation.

    Afterwards, the store of ``dst`` consists of these rows alone. Zeros stay in memory behind them.

    Returns:
        False, with nothing written, if ``dst`` or ``src`` is not a range of rows.

    Raises:
        ValueError: ``src`` has parts of rows, but the format needs whole rows.
    """
    store, source = dst.store, src.store
    mine, theirs = dst.rectangle, src.rectangle
    if mine is None or theirs is None or mine.transposed or theirs.transposed or mine.rows.start:
        return False
    if not mine.rows.length:
        return True  # an empty shard
    if not store.format.per_tensor and theirs.cols.length != source.matrix[1]:
        raise ValueError(
            f"a weight in format {store.format.name!r} is sharded by rows only: return Shard(0) "
            "from shard_placement_fn, or use a recipe with one scale per tensor"
        )
    at = theirs.rows.slice, theirs.cols.slice
    for name, dim in (("rowwise", 0), ("columnwise", 1)):
        plane, given = getattr(store, name), getattr(source, name)
        if plane is not None and given is not None:
            data = plane.data.narrow(dim, 0, mine.rows.length)
            data.copy_(given.matrix[at[::-1] if dim else at])
            setattr(store, name, _with_scales_of(data, given, theirs.rows, dim))
    store.first_copy = None
    return True


def _with_scales_of(data: Tensor, given: Plane, rows: Span, dim: int) -> Plane:
    """Return a plane of codes with the scales of the rows that they were copied from.

    Args:
        data: the codes.
        given: the plane that they were copied from.
        rows: the rows of the matrix that were copied.
        dim: the dimension of the planes along which the rows of the matrix lie.
    """
    block, start = given.format.block[dim], rows.start + given.lead[dim]
    scale, lead = given.scale, 0
    if block != -1:
        lead, first, last = start % block, start // block, -(-(start + rows.length) // block)
        scale = scale.narrow(dim, first, last - first)
    scale = scale.to(data.device, copy=True)
    return Plane(data, scale, given.format, (lead, 0) if dim == 0 else (0, lead))
