"""The plain tensors of a quantized tensor in a checkpoint: codes and scales, sharded as stored.

The plain tensors share memory with the quantized tensor, so that loading them loads the weight.
"""

from __future__ import annotations

from itertools import accumulate
from multiprocessing.reduction import ForkingPickler
from operator import mul
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

#: Suffixes of a weight's name for its scales and for a second plane.
SCALE, COLUMNWISE = "_scale", "_columnwise"


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
    made = codes.as_subclass(Codes)
    made.weight = WeightRef(weight)
    return made


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
        begin = [b + n for b, n in zip(self.begin, skip, strict=True)]
        sizes = [size - n for size, n in zip(self.shape, skip, strict=True)]
        return ChunkStorageMetadata(offsets=torch.Size(begin), sizes=torch.Size(sizes))

    def __create_write_items__(self, fqn: str, whole: Tensor) -> list[WriteItem]:
        chunk = self._chunk(self.shared)
        if not all(chunk.sizes):
            return []
        data = TensorWriteData(
            chunk=chunk, properties=TensorProperties.create_from_tensor(self), size=whole.size()
        )
        index = MetadataIndex(fqn, chunk.offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk((0,) * self.dim())] if self.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        found = self.as_subclass(Tensor)
        if index.offset is not None:
            for dim, (asked, begin) in enumerate(zip(index.offset, self.begin, strict=True)):
                found = found[(slice(None),) * dim + (slice(asked - begin, None),)]
        return found


def as_part(local: Tensor, begin: tuple[int, ...], shared: tuple[int, ...]) -> Part:
    """Return a `Part` over the memory of a tensor."""
    made = local.as_subclass(Part)
    made.begin, made.shared = begin, shared
    return made


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
    own = own_part(value)
    if isinstance(own, Part):
        local = as_part(local, own.begin, own.shared)
    return dtensor_like(value, local)


def parts_of(value: Tensor) -> dict[str, Tensor] | None:
    """Return the plain tensors of a quantized tensor by suffix of its name.

    Returns None if tensor parallelism splits blocks, because these have no common scale.
    """
    local: QuantizedTensor = own_part(value)
    planes = {"": local._storage.rowwise, COLUMNWISE: local._storage.columnwise}
    shown = dict(zip(planes, local.planes, strict=True))
    if planes[""] is not None and planes[""].format.square:
        del planes[COLUMNWISE]  # the same codes, transposed
    found: dict[str, Tensor] = {}
    for suffix, plane in planes.items():
        if plane is None:
            continue
        transposed = suffix == COLUMNWISE
        if splits_blocks(value, plane, transposed):
            return None
        plane = shown[suffix]
        assert plane is not None
        if not transposed:
            data = codes_of(local.__get_tensor_shard__(), plane.data)
            plane = Plane(data, plane.scale, plane.format, plane.block_offset)
        found[suffix], found[suffix + SCALE] = _tensors_of(value, plane, transposed)
    return found


def _tensors_of(value: Tensor, plane: Plane, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a plane as tensors of the whole weight."""
    codes, scale, format = plane.data, plane.scale, plane.format
    if not is_distributed(value):
        return codes, scale
    sharded: Any = value
    _, start = local_shape_and_offset(tuple(value.shape), sharded.device_mesh, sharded.placements)
    batch, (rows, cols) = split_batch(value.shape, plane.batched)
    first, above = start[: len(batch)], start[len(batch) : -1]
    # Rows of dimensions between the batch and the columns are counted in order.
    below = accumulate(value.shape[-2 : len(batch) : -1], mul, initial=1)
    begin = sum(map(mul, reversed(above), below)), start[-1]
    if transposed:
        (rows, cols), begin = (cols, rows), begin[::-1]
        part = as_part(codes, (*first, *begin), (0,) * codes.dim())
        whole = dtensor_like(value, part, (*batch, rows, cols))
    else:
        whole = dtensor_like(value, codes)
    is_batch_sharded = batch and any(p.dim == 0 for p in sharded.placements if not p.is_replicate())
    if format.per_tensor and not is_batch_sharded:  # all ranks have all scales
        return whole, scale.view(batch)
    if not format.per_tensor:
        first += tuple(b // n if n > 0 else 0 for b, n in zip(begin, format.block, strict=True))
    shared = [0] * len(batch) + [int(n > 0) for n in plane.block_offset]
    own = as_part(scale, first, tuple(shared[: scale.dim()]))
    return whole, dtensor_like(value, own, format.scale_shape(rows, cols, batch))
