"""Padded shards, which FSDP2 allocates by ``new_zeros`` and fills by one copy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fp8rs.tensor.formats import split
from fp8rs.tensor.planes import Plane, zeros
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.store import Store
from fp8rs.tensor.wrapper import PLANES


def new_shard(like: Store, shape: Iterable[int], device: Any) -> Store:
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
    new.padded = True
    return new


def fill_shard(dst: QuantizedTensor, src: QuantizedTensor) -> bool:
    """Copy codes and scales of a part of another tensor to the front of a padded shard.

    FSDP2 calls ``new_zeros`` with the padded size, and copies this rank's part of the weight to the
    front. Only that copy shows how long the shard is, and at which row of a block it begins.
    Afterwards, the store of ``dst`` consists of this part alone. Zeros stay in memory behind it.

    Returns:
        False, with nothing written, if ``dst`` or ``src`` is not a part in order, or ``dst`` does
        not begin with the allocation.

    Raises:
        ValueError: ``src`` has parts of rows, but the format needs whole rows.
    """
    store, source, to, part = dst._store, src._store, dst.box, src.box
    if to is None or part is None or store.batched != source.batched:
        return False
    if to[0].start:
        return False
    if not dst.numel():
        return True  # an empty shard
    if not store.format.per_tensor and part[-1] != slice(0, source.matrix[-1]):
        raise ValueError(
            f"a weight in format {store.format.name!r} is sharded by rows only: "
            "return Shard(0) from shard_placement_fn, or use a recipe with one scale per tensor"
        )
    for name, new in zip(PLANES, source.part(part), strict=True):
        plane = getattr(store, name)
        if plane is not None and new is not None:
            dim = int(name == "columnwise" and not store.batched)
            data = plane.data.narrow(dim, 0, to[0].stop)
            data.copy_(new.data.reshape(data.shape))
            scale = new.scale.to(data.device, copy=True)
            setattr(store, name, Plane(data, scale, new.format, new.lead))
    store.padded = False
    return True
