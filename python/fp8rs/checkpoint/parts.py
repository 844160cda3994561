"""The plain tensors of a quantized tensor in a checkpoint: codes and scales, sharded as stored.

The plain tensors share memory with the quantized tensor, so that loading them loads the weight.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.multiprocessing.reductions import reduce_tensor

from fp8rs._torch import (
    disabled_torch_function,
    dtensor_like,
    is_distributed,
    local_shape_and_offset,
    own_part,
)
from fp8rs.quantize.formats import INPUT_DTYPES, split_batch
from fp8rs.quantize.planes import Plane
from fp8rs.tensor.dcp import splits_blocks
from fp8rs.tensor.plane_storage import Write, WriteKind
from fp8rs.tensor.quantized import QuantizedTensor

#: Suffix of a weight's name for its scales.
SCALE = "_scale"
#: Suffix of a weight's name for its columnwise plane.
COLUMNWISE = "_columnwise"


class PlainPart(Tensor):
    """Base class of plain tensors that define how DCP saves and loads them.

    Operators return plain tensors. Torch's checkpoint stager creates a new tensor and sets its
    storage and attributes, so ``new_empty`` keeps the class.
    """

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    def new_empty(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``new_empty`` of a plain tensor, with this class."""
        return super().new_empty(*args, **kwargs).as_subclass(type(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(
            "cannot copy the state dict of fp8rs.checkpoint.Model tensor by tensor, as "
            "BlockingAsyncStager and FileSystemWriter do in dcp.async_save. Pass only "
            "checkpoint_id to it, or use fp8rs.checkpoint.async_save"
        )


class Codes(PlainPart):
    """FP8 codes of a weight. DCP saves them as a plain tensor.

    DCP casts loaded values to the dtype of the destination. High-precision values would become
    codes without scales, so they are quantized into the weight instead.
    """

    #: The weight, of the same shape. High-precision values are written to it.
    weight: WeightRef

    def __get_tensor_shard__(self, index: MetadataIndex) -> Codes:
        return self

    def narrow(self, dim: int, start: int, length: int) -> Codes:  # type: ignore[override]
        """Narrow the codes and the weight."""
        weight = self.weight.tensor.narrow(dim, start, length)
        return codes_of(weight, super().narrow(dim, start, length))

    def detach(self) -> Codes:
        """Return an alias of the codes with the same weight."""
        return codes_of(self.weight.tensor, super().detach())

    def copy_(self, src: Tensor, non_blocking: bool = False) -> Codes:
        """Copy codes, or quantize values into the weight.

        Raises:
            TypeError: ``src`` has codes of another format, or integers.
        """
        if src.dtype == self.dtype:
            super().copy_(src, non_blocking)
            observer = self.weight.tensor._storage.observer
            if observer is not None:  # other ranks may load and quantize values
                observer.observe_write(self.weight.tensor, Write(WriteKind.CODES))
        elif src.dtype in INPUT_DTYPES:
            self.weight.tensor.copy_(src)
        else:
            raise TypeError(
                f"cannot load {src.dtype} into FP8 codes of {self.dtype}: expected these codes or "
                "values in float32, bfloat16 or float16. Convert the model with the recipe of the "
                "checkpoint"
            )
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class WeightRef:
    """Holds the weight of `Codes`. A staged copy has no weight."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightRef:
        return WeightRef(None)


def codes_of(weight: Any, codes: Tensor) -> Codes:
    """Return `Codes` over the memory of ``codes``, of the same shape as ``weight``."""
    subclass = codes.as_subclass(Codes)
    subclass.weight = WeightRef(weight)
    return subclass


class Part(PlainPart):
    """This rank's part of a tensor whose sharding no DTensor placement describes.

    This applies to scales of blocks that a shard boundary splits, and to columnwise planes. It is
    the local tensor of a DTensor, which forwards DCP's requests to it.
    """

    #: Where the part begins in the whole tensor.
    begin: tuple[int, ...]
    #: Number of leading indices along each dimension that another rank writes. Their blocks begin
    #: there.
    shared: tuple[int, ...]

    def _chunk(self, skip: tuple[int, ...]) -> ChunkStorageMetadata:
        """Return the chunk behind a number of leading indices along each dimension."""
        offsets = [begin + count for begin, count in zip(self.begin, skip, strict=True)]
        sizes = [size - count for size, count in zip(self.shape, skip, strict=True)]
        return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))

    def __create_write_items__(self, fqn: str, tensor: Tensor) -> list[WriteItem]:
        chunk = self._chunk(self.shared)
        if not all(chunk.sizes):
            return []
        data = TensorWriteData(
            chunk=chunk, properties=TensorProperties.create_from_tensor(self), size=tensor.size()
        )
        index = MetadataIndex(fqn, chunk.offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk((0,) * self.dim())] if self.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        shard = self.as_subclass(Tensor)
        if index.offset is None:
            return shard
        for dim, offset in enumerate(index.offset):
            start = offset - self.begin[dim]
            shard = shard.narrow(dim, start, shard.shape[dim] - start)
        return shard


def as_part(local: Tensor, begin: tuple[int, ...], shared: tuple[int, ...]) -> Part:
    """Return a `Part` over the memory of a tensor."""
    part = local.as_subclass(Part)
    part.begin = begin
    part.shared = shared
    return part


def _for_other_process(value: PlainPart) -> Any:
    """Pickle a part for `dcp.async_save`, which may write in another process.

    multiprocessing can send FP8 tensors, but not their subclasses.
    """
    plain = value.as_subclass(Tensor)
    if isinstance(value, Part):
        return as_part, (plain, value.begin, value.shared)
    return reduce_tensor(plain)


for _kind in (Codes, Part):
    ForkingPickler.register(_kind, _for_other_process)


def distribute_like(value: Tensor, local: Tensor) -> Tensor:
    """Return a tensor with the local tensor ``local`` that is distributed as ``value``."""
    if not is_distributed(value):
        return local
    part = own_part(value)
    if isinstance(part, Part):
        local = as_part(local, part.begin, part.shared)
    return dtensor_like(value, local)


def parts_of(value: Tensor) -> dict[str, Tensor] | None:
    """Return the plain tensors of a quantized tensor by suffix of its name.

    Returns None if tensor parallelism splits blocks, because these have no common scale.
    """
    local: QuantizedTensor = own_part(value)
    storage = local._storage
    row, col = local.planes
    parts: dict[str, Tensor] = {}
    if storage.rowwise is not None:
        if splits_blocks(value, storage.rowwise, False):
            return None
        assert row is not None
        codes = codes_of(local.__get_tensor_shard__(), row.data)
        row = Plane(codes, row.scale, row.format, row.block_offset)
        whole_codes, scales = _tensors_of(value, row, False)
        parts[""] = whole_codes
        parts[SCALE] = scales

    # With square blocks, the columnwise plane has the same codes, transposed.
    is_derived = storage.rowwise is not None and storage.format.square
    if storage.columnwise is not None and not is_derived:
        if splits_blocks(value, storage.columnwise, True):
            return None
        assert col is not None
        whole_codes, scales = _tensors_of(value, col, True)
        parts[COLUMNWISE] = whole_codes
        parts[COLUMNWISE + SCALE] = scales
    return parts


def _tensors_of(value: Tensor, plane: Plane, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a plane as tensors of the whole weight.

    Args:
        value: the weight.
        plane: a plane of this rank's part of the weight.
        transposed: whether it is the columnwise plane.
    """
    if not is_distributed(value):
        return plane.data, plane.scale
    format = plane.format
    dtensor: Any = value
    _, start = local_shape_and_offset(tuple(value.shape), dtensor.device_mesh, dtensor.placements)
    batch, (rows, cols) = split_batch(value.shape, plane.batched)
    begin_batch = start[: len(batch)]

    # Dimensions between the batch and the columns are rows, in order.
    begin_row = 0
    for dim in range(len(batch), value.dim() - 1):
        begin_row = begin_row * value.shape[dim] + start[dim]
    begin_col = start[-1]

    codes: Tensor = plane.data
    if transposed:
        rows, cols = cols, rows
        begin_row, begin_col = begin_col, begin_row
        # The placements of the weight do not describe its transpose.
        part = as_part(codes, (*begin_batch, begin_row, begin_col), (0,) * codes.dim())
        whole_codes = dtensor_like(value, part, (*batch, rows, cols))
    else:
        whole_codes = dtensor_like(value, codes)

    if format.per_tensor:
        if not batch or not _is_sharded_along(dtensor, 0):
            return whole_codes, plane.scale.view(batch)  # all ranks have all scales
        scales = as_part(plane.scale, begin_batch, (0,))
        return whole_codes, dtensor_like(value, scales, batch)

    block_rows, block_cols = format.block  # -1 for all rows or columns
    begin_block_row = begin_row // block_rows if block_rows > 0 else 0
    begin_block_col = begin_col // block_cols if block_cols > 0 else 0
    # Another rank writes the scale of a block that begins on it.
    shared = [0] * len(batch)
    for offset in plane.block_offset:
        shared.append(int(offset > 0))
    begin_scale = (*begin_batch, begin_block_row, begin_block_col)
    scales = as_part(plane.scale, begin_scale, tuple(shared))
    return whole_codes, dtensor_like(value, scales, format.scale_shape(rows, cols, batch))


def _is_sharded_along(dtensor: Any, dim: int) -> bool:
    """Return whether a DTensor is sharded along a dimension."""
    for placement in dtensor.placements:
        if not placement.is_replicate() and placement.dim == dim:
            return True
    return False
