"""Saves quantized tensors in state dicts with torch.distributed.checkpoint (DCP).

DCP saves each shard as one tensor, whose pickle holds codes and scales. It loads a shard in pieces,
one for each saved shard that overlaps it (`fp8rs.tensor.copies.copy_codes`). A block may get its
codes from several pieces, which must then have the same scale. If tensor parallelism splits blocks,
each rank has its own scales. Saving such a tensor raises an error.
"""

from __future__ import annotations

from typing import Any

from fp8rs._torch import is_distributed, own_part, write_item
from fp8rs.quantize.planes import Plane


def write_items(fqn: str, tensor: Any) -> list[Any]:
    """Return DCP's write items for this rank's part, which are the same as for a plain tensor.

    Args:
        fqn: the name of the tensor.
        tensor: the quantized tensor, or a DTensor of quantized tensors.

    Raises:
        ValueError: tensor parallelism splits blocks, so that other layouts cannot read the parts.
    """
    storage = own_part(tensor)._storage
    for plane, transposed in ((storage.rowwise, False), (storage.columnwise, True)):
        if plane is not None and splits_blocks(tensor, plane, transposed):
            raise ValueError(
                f"{fqn} is an FP8 weight, and tensor parallelism splits its blocks of format "
                f"{plane.format.name!r} over ranks: each rank has scales of its own, which a "
                "checkpoint of the whole weight cannot hold. Pass fp8rs.checkpoint.Model(model) in "
                "place of the model's state dict: it saves such weights in high precision"
            )
    return [write_item(fqn, tensor)]


def splits_blocks(value: Any, plane: Plane, transposed: bool) -> bool:
    """Return whether tensor parallelism splits blocks of the whole tensor into smaller ones.

    Args:
        value: the quantized tensor, or a DTensor of quantized tensors.
        plane: one of its planes.
        transposed: whether ``plane`` is the columnwise one.
    """
    if not is_distributed(value):
        return False
    shard_dims = []  # (dimension of the mesh, dimension of the tensor)
    for mesh_dim, placement in enumerate(value.placements):
        if not placement.is_replicate():
            shard_dims.append((mesh_dim, placement.dim))
    observer: Any = own_part(value)._storage.observer
    if observer is not None and observer.is_sharded:
        if plane.format.per_tensor:
            return False
        # Ranks of FSDP2 share the scales of blocks that shards split.
        shard_dims = shard_dims[1:]

    # The extent of a block along each dimension of the tensor.
    part_shape = list(value.shape)
    rows, cols = plane.format.block[::-1] if transposed else plane.format.block
    if plane.batched:
        block = [1, *[rows] * (len(part_shape) - 2), cols]
    else:
        block = [rows, cols]

    for mesh_dim, dim in shard_dims:
        length = -(-part_shape[dim] // value.device_mesh.size(mesh_dim))
        if length < part_shape[dim] and (block[dim] < 0 or length % block[dim]):
            return True
        part_shape[dim] = length
    return False
