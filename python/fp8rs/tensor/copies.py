"""Copies of codes and scales from one quantized tensor to another one of the same format.

FSDP2 allocates padded shards by ``new_zeros`` and fills them by one copy. These copies are
implemented here too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fp8rs.quantize.formats import split_batch
from fp8rs.quantize.planes import Box, Plane, zeros
from fp8rs.tensor.plane_storage import PlaneStorage, Write, WriteKind
from fp8rs.tensor.quantized import PLANES, QuantizedTensor


def copy_codes(dst: QuantizedTensor, src: QuantizedTensor, non_blocking: bool) -> bool:
    """Copy codes and scales if that makes ``dst`` equal to ``src`` and changes nothing else.

    A `LoadedShard` also accepts pieces that split blocks. The scales of these blocks are written.
    Their other elements keep their codes, not their values, until other pieces replace them.

    Returns:
        Whether ``dst`` is equal to ``src`` now. Otherwise nothing was written.

    Raises:
        ValueError: for a piece, the blocks of the source begin elsewhere.
    """
    storage, source, piece = dst._storage, src._storage, dst.loads_pieces
    same_codes = source.format is storage.format and src.fp8_dtype == dst.fp8_dtype
    if src.shape != dst.shape or not same_codes:
        return False
    if storage is source and dst.geometry == src.geometry:
        return True  # torch loads a state dict whose tensors were filled in place
    to, part, observer = dst.box, src.box, storage.active_observer
    if to is None or part is None or storage.batched != source.batched:
        return False
    # FSDP2 fills a padded shard by one copy, but does not copy into an empty shard.
    if storage.padded and (observer is None or dst.numel()) and not piece:
        return fill_shard(storage, to, source, part)
    size = storage.rows_and_row_size[1]
    if not piece and storage.box(storage.rows_around(to[0].start * size, to[0].stop * size)) != to:
        return False
    for each in (storage, source):
        each.any_plane.check_has_memory("this quantized tensor")
    parts, given = storage.part(to), source.part(part)
    planes: list[Plane | None] = []
    for name, own, new, other in zip(PLANES, parts, given, given[::-1], strict=True):
        if own is None:
            planes.append(None)
            continue
        if new is None and other is not None and other.format.square:
            new = other.transposed(name, "copy_")
        if new is None or own.matrix.shape != new.matrix.shape:
            return False
        if own.block_offset != new.block_offset:
            if not piece:
                return False
            raise ValueError(
                f"cannot load FP8 codes of format {own.format.name!r} into this layout: they were "
                "saved in blocks that begin at other rows or columns. Save and load with "
                "fp8rs.checkpoint.Model(model) in place of the model's state dict"
            )
        planes.append(new)
    row, col = planes
    storage.copy_planes_(parts, (row, col), non_blocking)
    if observer is not None:
        observer.observe_write(dst, Write(WriteKind.CODES))
    return True


# --- padded shards --------------------------------------------------------------------------------


# FSDP2 pads shards in the first forward. If that is in inference mode, later writes must not fail.
@torch.inference_mode(False)
def new_shard(like: PlaneStorage, shape: Iterable[int], device: Any) -> PlaneStorage:
    """Allocate planes of zeros for another shard of the weight that a storage belongs to.

    With one scale for one matrix, the scale is copied, because all shards have the same scale.

    Args:
        like: the storage of the weight or a shard.
        shape: (rows, columns) or (E, N, K).
        device: the device of the planes.
    """
    size = torch.Size(shape)
    batch, matrix = split_batch(size, like.batched)

    def plane(present: Plane | None, size: tuple[int, ...]) -> Plane | None:
        if present is None:
            return None
        if present.format.per_tensor and not batch:
            scale = present.scale.to(device, copy=True)
        else:
            rows, cols = (n + m for n, m in zip(size[-2:], present.block_offset, strict=True))
            scale = zeros(present.scale, present.format.scale_shape(rows, cols, batch), device)
        return Plane(zeros(present.data, size, device), scale, present.format, present.block_offset)

    columnwise = plane(like.columnwise, (*batch, *matrix[::-1]))
    new = like.over(plane(like.rowwise, (*batch, *matrix)), columnwise)
    if new.rowwise is not None:
        new.rowwise.data = new.rowwise.data.view(size)
    new.padded = True
    return new


@torch.inference_mode(False)
def fill_shard(storage: PlaneStorage, to: Box, source: PlaneStorage, part: Box) -> bool:
    """Copy codes and scales of a part of another storage to the front of a padded shard.

    FSDP2 calls ``new_zeros`` with the padded size, and copies this rank's part of the weight to the
    front. Only that copy shows how long the shard is, and at which row of a block it begins.
    Afterwards, the storage of the shard consists of this part only. The padding zeros behind it
    stay allocated.

    Args:
        storage: the storage of the padded shard.
        to: the part of ``storage`` to write.
        source: the storage to copy from.
        part: the part of ``source`` to copy.

    Returns:
        Whether ``to`` starts at the front of the shard. Otherwise nothing was written.

    Raises:
        ValueError: ``part`` has parts of rows, but the format needs whole rows.
    """
    if to[0].start:
        return False
    if any(span.start == span.stop for span in to):
        return True  # an empty shard
    if not storage.format.per_tensor and part[-1] != slice(0, source.matrix[-1]):
        raise ValueError(
            f"a weight in format {storage.format.name!r} is sharded by rows only: "
            "return Shard(0) from shard_placement_fn, or use a recipe with one scale per tensor"
        )
    for name, new in zip(PLANES, source.part(part), strict=True):
        plane = getattr(storage, name)
        if plane is not None and new is not None:
            dim = int(name == "columnwise" and not storage.batched)
            data = plane.data.narrow(dim, 0, to[0].stop)
            data.copy_(new.data.reshape(data.shape))
            scale = new.scale.to(data.device, copy=True)
            setattr(storage, name, Plane(data, scale, new.format, new.block_offset))
    storage.padded = False
    return True
