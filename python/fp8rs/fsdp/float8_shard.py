"""Float8Shard: the local tensor of a sharded FP8 weight, gathered as it is stored."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from fp8rs.tensor.planes import Plane
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.spec import Planes

from . import hooks
from .float8_param import Float8ParamHandle
from .layout import AllGatherLayout
from .param import LocalShard, set_scales
from .quantize import BlockwiseShardQuantizer, ShardQuantizer
from .shard_spec import ShardSpec


class Float8Shard(QuantizedTensor):
    """A quantized shard. Its codes and scales are the bytes that FSDP2 gathers."""

    fsdp_pre_all_gather = hooks.pre_all_gather
    fsdp_post_all_gather = hooks.post_all_gather

    @property
    def _handle(self) -> Float8ParamHandle:
        handle = self._store.observer
        assert isinstance(handle, Float8ParamHandle)
        return handle

    @property
    def _is_weight(self) -> bool:
        """Whether this object is the local tensor of the parameter, and not a view or a copy."""
        return self._handle.in_place and self is self._handle.parameter_part

    @property
    def shard(self) -> Tensor:
        """The shard as all-gathers read it."""
        return self


def wrap_shard(local: QuantizedTensor, handle: Float8ParamHandle) -> Float8Shard:
    """Return a shard over the planes of ``local``. The handle observes its writes."""
    local._store.observer = handle
    shard: Any = local.view_of(local.geometry)
    shard.__class__ = Float8Shard
    found: Float8Shard = shard
    return found


# --- planes --------------------------------------------------------------------------------------


def is_fp8(shard: LocalShard) -> bool:
    """Return whether a shard is stored quantized."""
    return isinstance(shard.data, QuantizedTensor)


def planes_of(local: QuantizedTensor) -> Planes:
    """Return the planes of a shard, also of an empty one."""
    if local.numel() or local._store.batched:
        return local.planes
    row, col, cols = local._store.rowwise, local._store.columnwise, local.shape[1]
    return None if row is None else row.empty(0, cols), None if col is None else col.empty(cols, 0)


def write_planes(local: QuantizedTensor, planes: Planes) -> None:
    """Write the planes of a whole shard. An empty shard of one matrix stores its scale alone."""
    store = local._store
    if local.numel():
        store.put(store.rows(slice(0, local.shape[0])), planes)
    elif store.format.per_tensor and not store.batched:
        row, col = planes
        plane = row if row is not None else col
        assert plane is not None
        store.any_plane.scale.copy_(plane.scale)


def scales_of(shard: LocalShard) -> Tensor:
    """Return the scales (n,) of the n matrices of a shard of a per-tensor format."""
    row = planes_of(cast(QuantizedTensor, shard.data))[0]
    assert row is not None
    return row.scale.view(-1)


# --- all-gathers ---------------------------------------------------------------------------------


def copy_scales(quantizer: ShardQuantizer, shards: Sequence[LocalShard]) -> None:
    """Copy scales that are not gathered to the handles: a gathered weight keeps them after a write.

    These are one scale per tensor, and all scales of batched weights on Shard(1).
    """
    if quantizer.layout.format.per_tensor:
        set_scales(shards, torch.cat([scales_of(s).to(s.device) for s in shards]))
        return
    assert isinstance(quantizer, BlockwiseShardQuantizer)
    by_rows = [s for s in shards if quantizer.layout.gathers_codes_alone(s.spec)]
    own = [planes_of(cast(QuantizedTensor, s.data))[0] for s in by_rows]
    grids = [plane.scale.to(torch.float32) for plane in own if plane is not None]
    for shard, scales in zip(by_rows, quantizer.whole_grids(by_rows, grids), strict=True):
        shard.handle.scale = scales.to(quantizer.layout.format.scale_dtype)


def all_gather_inputs(layout: AllGatherLayout, local: Any, spec: ShardSpec) -> tuple[Tensor, ...]:
    """Return the tensors to gather for a shard. They share its memory where possible."""
    row, col = planes_of(local)
    if local.numel() and local.shape[0] < spec.padded and spec.dim == 0:
        rest = tuple(local.shape[1:])
        row = _with_padding(row, (spec.padded, *rest))
        turned = (spec.padded, *spec.matrix[::-1]) if spec.batched else (*rest, spec.padded)
        col = _with_padding(col, turned)
    return layout.pack((row, col), spec)


def _with_padding(plane: Plane | None, size: tuple[int, ...]) -> Plane | None:
    """Return a short shard's plane with the padding that lies behind it in memory.

    FSDP2 keeps shards padded, so this needs no copy. A plane without padding is returned as it is.
    """
    if plane is None:
        return None
    data = plane.data
    strides = tuple(prod(size[i + 1 :]) for i in range(len(size)))
    end = data.storage_offset() + prod(size)
    if data.stride() != strides or end > data.untyped_storage().nbytes():
        return plane
    return Plane(data.as_strided(size, strides), plane.scale, plane.format, plane.lead)
