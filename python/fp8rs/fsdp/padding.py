"""How FSDP2 pads the shards of FP8 weights.

FSDP2 calls ``new_zeros`` with the padded size, and copies the rows of this rank into the first
rows. Only that copy shows how many rows the shard has, and at which row of a block it begins. The
planes end with these rows. The padding stays in the memory behind them, where all-gathers use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fp8rs.tensor.formats import matrix_shape
from fp8rs.tensor.planes import Plane, zeros
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.store import Store


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


def copy_first_rows(dst: QuantizedTensor, src: QuantizedTensor) -> bool:
    """Copy codes and scales of some rows of another tensor into the first rows of an allocation.

    Afterwards, the store of ``dst`` consists of these rows alone. Zeros stay in memory behind them.

    Returns:
        False, with nothing written, if ``dst`` or ``src`` is not a range of rows.

    Raises:
        ValueError: ``src`` has parts of rows, but the format needs whole rows.
    """
    store, source = dst._store, src._store
    mine, theirs = dst.box, src.box
    if mine is None or theirs is None or mine.rows.start:
        return False
    count = mine.rows.stop
    if not count:
        return True  # an empty shard
    if not store.format.per_tensor and theirs.cols != slice(0, source.matrix[1]):
        raise ValueError(
            f"a weight in format {store.format.name!r} is sharded by rows only: return Shard(0) "
            "from shard_placement_fn, or use a recipe with one scale per tensor"
        )
    for name, part, dim in zip(("rowwise", "columnwise"), source.part(theirs), (0, 1), strict=True):
        plane = getattr(store, name)
        if plane is not None and part is not None:
            data = plane.data.narrow(dim, 0, count)
            data.copy_(part.data)
            scale = part.scale.to(data.device, copy=True)
            setattr(store, name, Plane(data, scale, part.format, part.lead))
    store.first_copy = None
    return True
