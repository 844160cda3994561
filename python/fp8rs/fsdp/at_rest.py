"""FP8 weights: shards whose codes and scales are what is kept, and gathered as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8rs.tensor.planes import Plane
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.spec import Planes
from fp8rs.tensor.windows import Rectangle, Span

from .layout import AllGatherLayout
from .param import LocalShard, set_scales
from .shard_spec import ShardSpec


def is_at_rest(shard: LocalShard) -> bool:
    """Whether the shard is quantized already."""
    return isinstance(shard.data, QuantizedTensor)


def copy_scales(layout: AllGatherLayout, shards: Sequence[LocalShard]) -> None:
    """Copy per-tensor scales to the handles: a gathered weight keeps its scale after a write."""
    if layout.format.per_tensor:
        set_scales(shards, torch.stack([scale_of(s).to(s.device) for s in shards]))


def inputs(layout: AllGatherLayout, local: Any, spec: ShardSpec) -> tuple[Tensor, ...]:
    """The tensors to gather of a shard."""
    row, col = planes_of(local)
    if local.numel() and local.shape[0] < spec.padded and spec.dim == 0:
        rows, cols = spec.padded, local.shape[1]
        row, col = _with_memory(row, (rows, cols)), _with_memory(col, (cols, rows))
    return layout.pack((row, col), spec)


def _with_memory(plane: Plane | None, size: tuple[int, int]) -> Plane | None:
    """A short shard's plane with what lies behind it, if that is as long as the longest's.

    FSDP2 keeps shards padded: what is gathered lies there already.
    """
    if plane is None:
        return None
    data, strides = plane.data, (size[1], 1)
    ends = data.storage_offset() + size[0] * size[1]
    if data.stride() != strides or ends > data.untyped_storage().nbytes():
        return plane
    return Plane(data.as_strided(size, strides), plane.scale, plane.format, plane.lead)


def scale_of(shard: LocalShard) -> Tensor:
    """The scale of a format with one a tensor."""
    data: Any = shard.data
    scale: Tensor = data._store.any_plane.scale
    return scale


def planes_of(local: QuantizedTensor) -> Planes:
    """The planes of a shard; those of an empty one too."""
    if local.numel():
        return local.planes
    row, col, cols = local._store.rowwise, local._store.columnwise, local.shape[1]
    return None if row is None else row.empty(0, cols), None if col is None else col.empty(cols, 0)


def put(local: QuantizedTensor, planes: Planes) -> None:
    """Write planes of a whole shard, which may be empty."""
    store = local._store
    if local.numel():
        store.put(planes, Rectangle(Span(0, local.shape[0]), Span(0, local.shape[1])))
    elif store.any_plane.format.per_tensor:
        row, col = planes
        plane = row if row is not None else col
        assert plane is not None
        store.any_plane.scale.copy_(plane.scale)
