"""How FSDP2 pads the shards of FP8 weights.

FSDP2 calls ``new_zeros`` with the padded size, and copies this rank's part of the weight to the
front. Only that copy shows how long the shard is, and at which row of a block it begins. The planes
end with the shard. The padding stays in the memory behind them, where all-gathers use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fp8rs.tensor.copies import slices
from fp8rs.tensor.formats import split
from fp8rs.tensor.planes import Plane, zeros
from fp8rs.tensor.region import Region
from fp8rs.tensor.store import Store
from fp8rs.tensor.windows import Span


def allocate(like: Store, shape: Iterable[int], device: Any) -> Store:
    """Allocate planes of zeros for another shard of the weight that a store belongs to.

    The scale of a matrix with one scale per tensor is copied, because all shards have the same.

    Args:
        like: the store of the weight or a shard.
        shape: (rows, columns) or (E, N, K).
        device: the device of the planes.
    """
    size = torch.Size(shape)
    batch, (rows, cols) = split(size, like.batched)

    def plane(present: Plane | None, size: tuple[int, ...]) -> Plane | None:
        if present is None:
            return None
        if present.format.per_tensor and not batch:
            scale = present.scale.to(device, copy=True)
        else:
            scale_shape = present.format.scale_shape(size[-2], size[-1], batch)
            scale = zeros(present.scale, scale_shape, device)
        return Plane(zeros(present.data, size, device), scale, present.format)

    columnwise = plane(like.columnwise, (*batch, cols, rows))
    new = like.over(plane(like.rowwise, (*batch, rows, cols)), columnwise)
    if new.rowwise is not None:
        new.rowwise.data = new.rowwise.data.view(size)
    new.first_copy = copy_first
    return new


def copy_first(dst: Region, src: Region) -> bool:
    """Copy codes and scales of a part of another tensor to the front of an allocation.

    Afterwards, the store of ``dst`` consists of this part alone. Zeros stay in memory behind it.

    Returns:
        False, with nothing written, if ``dst`` or ``src`` is not a part in order, or ``dst`` does
        not begin with the allocation.

    Raises:
        ValueError: ``src`` has parts of rows, but the format needs whole rows.
    """
    store, source, to, part = dst.store, src.store, dst.box, src.box
    if to is None or part is None or any(span.start for span in to):
        return False
    if not all(span.length for span in to):
        return True  # an empty shard
    *batch, rows, cols = part
    if not store.format.per_tensor and cols.length != source.matrix[-1]:
        raise ValueError(
            f"a weight in format {store.format.name!r} is sharded by rows only: "
            "return Shard(0) from shard_placement_fn, or use a recipe with one scale per tensor"
        )
    for name, turned in (("rowwise", False), ("columnwise", True)):
        plane, given = getattr(store, name), getattr(source, name)
        if plane is not None and given is not None:
            data = plane.data.narrow(int(turned and not batch), 0, to[0].length)
            order = (cols, rows) if turned else (rows, cols)
            data.copy_(given.matrix[slices((*batch, *order))].reshape(data.shape))
            setattr(store, name, _with_scales_of(data, given, slices(batch), rows, int(turned)))
    store.first_copy = None
    return True


def _with_scales_of(data: Tensor, given: Plane, batch: Any, rows: Span, dim: int) -> Plane:
    """Return a plane of codes with the scales of the rows that they were copied from.

    Args:
        data: the codes.
        given: the plane that they were copied from.
        batch: the index of the matrices that were copied, of a batch.
        rows: the rows of each matrix that were copied.
        dim: the dimension of a matrix of the plane along which the rows lie.
    """
    block, start = given.format.block[dim], rows.start + given.lead[dim]
    scale, lead = given.scale[batch], 0
    if block != -1:
        lead, first, last = start % block, start // block, -(-(start + rows.length) // block)
        scale = scale.narrow(dim - 2, first, last - first)
    scale = scale.to(data.device, copy=True)
    return Plane(data, scale, given.format, (lead, 0) if dim == 0 else (0, lead))
