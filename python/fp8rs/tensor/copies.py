"""Copies of codes and scales from one quantized tensor to another one of the same format.

FSDP2 allocates padded shards by ``new_zeros`` and fills them by one copy. These copies are
implemented here too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fp8rs.quantize.formats import split_batch
from fp8rs.quantize.planes import Box, Plane, zeros
from fp8rs.tensor.plane_storage import PlaneStorage, Write, WriteKind
from fp8rs.tensor.quantized import QuantizedTensor


def copy_codes(dst: QuantizedTensor, src: QuantizedTensor, non_blocking: bool) -> bool:
    """Copy codes and scales if that makes ``dst`` equal to ``src`` and changes nothing else.

    A `LoadedShard` also accepts pieces that split blocks. The scales of these blocks are written.
    Their other elements keep their codes, not their values, until other pieces replace them.

    Returns:
        Whether ``dst`` is equal to ``src`` now. Otherwise nothing was written.

    Raises:
        ValueError: for a piece, the blocks of the source begin elsewhere.
    """
    storage = dst._storage
    source = src._storage
    has_same_codes = source.format is storage.format and src.fp8_dtype == dst.fp8_dtype
    if src.shape != dst.shape or not has_same_codes:
        return False
    if storage is source and dst.geometry == src.geometry:
        return True  # torch loads a state dict whose tensors were filled in place
    dst_box = dst.box
    src_box = src.box
    if dst_box is None or src_box is None or storage.batched != source.batched:
        return False

    is_piece = dst.loads_pieces
    observer = storage.active_observer
    # FSDP2 fills a padded shard by one copy, but does not copy into an empty shard.
    if storage.padded and (observer is None or dst.numel()) and not is_piece:
        return fill_shard(storage, dst_box, source, src_box)
    if not is_piece:
        row_size = storage.rows_and_row_size[1]
        rows = storage.rows_around(dst_box[0].start * row_size, dst_box[0].stop * row_size)
        if storage.box(rows) != dst_box:
            return False
    storage.any_plane.check_has_memory("this quantized tensor")
    source.any_plane.check_has_memory("this quantized tensor")

    dst_planes = storage.part(dst_box)
    src_row, src_col = source.part(src_box)
    # A missing plane of the source is made from the other one, if that is exact.
    if dst_planes[0] is not None and src_row is None and _is_square(src_col):
        src_row = src_col.transposed("rowwise", "copy_")
    elif dst_planes[1] is not None and src_col is None and _is_square(src_row):
        src_col = src_row.transposed("columnwise", "copy_")

    for dst_plane, src_plane in zip(dst_planes, (src_row, src_col), strict=True):
        if dst_plane is None:
            continue
        if src_plane is None or dst_plane.matrix.shape != src_plane.matrix.shape:
            return False
        if dst_plane.block_offset != src_plane.block_offset:
            if not is_piece:
                return False
            raise ValueError(
                f"cannot load FP8 codes of format {dst_plane.format.name!r} into this layout: they "
                "were saved in blocks that begin at other rows or columns. Save and load with "
                "fp8rs.checkpoint.Model(model) in place of the model's state dict"
            )
    storage.copy_planes_(dst_planes, (src_row, src_col), non_blocking)
    if observer is not None:
        observer.observe_write(dst, Write(WriteKind.CODES))
    return True


def _is_square(plane: Plane | None) -> TypeGuard[Plane]:
    return plane is not None and plane.format.square


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

    def plane_like(plane: Plane | None, data_shape: tuple[int, ...]) -> Plane | None:
        if plane is None:
            return None
        if plane.format.per_tensor and not batch:
            scale = plane.scale.to(device, copy=True)
        else:
            rows = data_shape[-2] + plane.block_offset[0]
            cols = data_shape[-1] + plane.block_offset[1]
            scale = zeros(plane.scale, plane.format.scale_shape(rows, cols, batch), device)
        data = zeros(plane.data, data_shape, device)
        return Plane(data, scale, plane.format, plane.block_offset)

    row = plane_like(like.rowwise, (*batch, *matrix))
    if row is not None:
        row.data = row.data.view(size)
    col = plane_like(like.columnwise, (*batch, *matrix[::-1]))
    new = like.over(row, col)
    new.padded = True
    return new


@torch.inference_mode(False)
def fill_shard(storage: PlaneStorage, dst_box: Box, source: PlaneStorage, src_box: Box) -> bool:
    """Copy codes and scales of a part of another storage to the front of a padded shard.

    FSDP2 calls ``new_zeros`` with the padded size, and copies this rank's part of the weight to the
    front. Only that copy shows how long the shard is, and at which row of a block it begins.
    Afterwards, the storage of the shard consists of this part only. The padding zeros behind it
    stay allocated.

    Args:
        storage: the storage of the padded shard.
        dst_box: the part of ``storage`` to write.
        source: the storage to copy from.
        src_box: the part of ``source`` to copy.

    Returns:
        Whether ``dst_box`` starts at the front of the shard. Otherwise nothing was written.

    Raises:
        ValueError: ``src_box`` has parts of rows, but the format needs whole rows.
    """
    if dst_box[0].start:
        return False
    if any(span.start == span.stop for span in dst_box):
        return True  # an empty shard
    if not storage.format.per_tensor and src_box[-1] != slice(0, source.matrix[-1]):
        raise ValueError(
            f"a weight in format {storage.format.name!r} is sharded by rows only: "
            "return Shard(0) from shard_placement_fn, or use a recipe with one scale per tensor"
        )
    length = dst_box[0].stop  # rows, or matrices of a batch
    row, col = source.part(src_box)
    if storage.rowwise is not None and row is not None:
        storage.rowwise = _filled(storage.rowwise.data.narrow(0, 0, length), row)
    if storage.columnwise is not None and col is not None:
        # Rows of the matrix are columns of the transposed one.
        dim = 0 if storage.batched else 1
        storage.columnwise = _filled(storage.columnwise.data.narrow(dim, 0, length), col)
    storage.padded = False
    return True


def _filled(data: Tensor, source: Plane) -> Plane:
    """Copy the codes of a plane to ``data``, and return a plane of these with its scales."""
    data.copy_(source.data.reshape(data.shape))
    scale = source.scale.to(data.device, copy=True)
    return Plane(data, scale, source.format, source.block_offset)
