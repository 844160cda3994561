"""Synchronize the scales that shards of FP8 weights share.

Shards share the scale of a per-tensor format, and the scales of blocks that shard boundaries split.
A write quantizes the shard of this rank alone, with its own scales. The ranks synchronize the
scales at points that all of them reach:

- before an all-gather outside of a backward that finds a stale scale. In a forward of the root
  module all scales are stale, so all ranks synchronize once per forward;
- after an optimizer step. `fp8rs.optim` reduces the amaxes of all weights within the step;
- when a layer's state dict is taken or loaded, and after its ``reset_parameters``.

At these points, ranks take part whether or not they wrote. Either all of them run an all-reduce, or
none, because no scale is shared. One rank may therefore write alone. All ranks must call
``state_dict()``.

An all-gather outside of the root's forward is an exception. It synchronizes if this rank wrote
since the last all-gather, as with master weights. All ranks must make writes before it, or run a
forward first.

The all-reduce compares the stored scales. If all ranks store the same scale, it stays, and so do
all codes. Otherwise the common scale is the one that the largest value of all ranks needs. A rank
whose scale changes rounds its shard again. If its last write replaced the whole shard, it rounds
the values of that write, and the bytes equal the unsharded weight's. Otherwise it rounds its
codes. In-place arithmetic moves scales by powers of two (`QuantSpec.keep_scale`), so rounding codes
again is then exact except for subnormal numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from fp8rs._core import multi_rescale
from fp8rs._torch import is_traced
from fp8rs.quantize.planes import Plane
from fp8rs.quantize.spec import QuantSpec
from fp8rs.scaling.histories import differs, largest_code, raise_next_scales
from fp8rs.scaling.reductions import index_tensor

from .float8_shard import Float8ParamHandle
from .local_shard import LocalShard
from .shard_quantizer import BlockwiseShardQuantizer, ShardQuantizer

_multi_amax = torch.ops.fp8rs.multi_amax.default
_quantize = torch.ops.fp8rs.quantize.default


def sync_shards(quantizer: ShardQuantizer, shards: Sequence[LocalShard]) -> None:
    """Synchronize the scales of shards of FP8 weights, which other ranks share.

    One all-reduce per process group. All ranks call it with the same weights.
    """
    if isinstance(quantizer, BlockwiseShardQuantizer):
        _sync_split_blocks(quantizer, shards)
    else:
        _sync_tensors(quantizer, shards)
    for shard in shards:
        fp8_handle(shard).mark_synced()


def fp8_handle(shard: LocalShard) -> Float8ParamHandle:
    """Return the handle of an FP8 weight's shard."""
    return cast(Float8ParamHandle, shard.handle)


# --- the common scale -----------------------------------------------------------------------------

_LARGEST_BITS = 0x7FFFFFFF
"""Scales are reduced with MAX, as int32 bits. The maximum of this minus the bits is the minimum."""


def _contribution(scale: Tensor, wanted: Tensor) -> Tensor:
    """Return what a rank contributes to the common scales, (3, ...), to be reduced with MAX.

    Args:
        scale: the scales that this rank stores, fp32.
        wanted: the scales that this rank's own values need, fp32 of the same shape. 0 for zeros.
    """
    reversed_scale = (_LARGEST_BITS - scale.view(torch.int32)).view(torch.float32)
    return torch.stack([wanted, scale, reversed_scale])


def _wanted(
    quant_spec: QuantSpec, handle: Float8ParamHandle, scale: Tensor, amax: Tensor
) -> Tensor:
    """Return the scales that a written shard's values need, fp32 of the shape of ``amax``.

    The scales of pending values are computed from these already. Codes start from their scales.
    """
    needed = scale if handle.pending is not None else quant_spec.keep_scale(scale, amax)
    return torch.where(amax == 0, 0.0, needed)


def _common(wanted: Tensor, most: Tensor, reversed_least: Tensor) -> Tensor:
    """Return the common scales, from reduced contributions.

    If all ranks store the same scale, it stays. A rank that changed nothing therefore keeps its
    bytes, however small its own values are. Otherwise the common scale is the one that the largest
    value of all ranks needs.
    """
    equal = most.view(torch.int32) == _LARGEST_BITS - reversed_least.view(torch.int32)
    return torch.where(equal | (wanted == 0), most, wanted)


def _rescale(parts: Sequence[tuple[Tensor, Tensor, Tensor]], width: int | None) -> None:
    """Round codes to new scales. Codes whose scale stays are not read.

    Versions stay too, because values do not change and ranks synchronize in each forward. An
    earlier forward may still need the codes for its backward.

    Args:
        parts: the codes (rows, columns) of a matrix, or (batch, rows, columns), their scales and
            the new scales, both fp32 (blocks,) of one matrix after the other.
        width: columns per scale. None for one scale of each matrix.
    """
    by_device: dict[torch.device, list[Any]] = {}
    for part in parts:
        by_device.setdefault(part[0].device, []).append(part)
    for device, members in by_device.items():
        codes, scales, new = zip(*members, strict=True)
        old = torch.cat(scales).to(device)
        multi_rescale(codes, old, torch.cat(new).to(device), width)


# --- one scale per tensor -------------------------------------------------------------------------


def _sync_tensors(quantizer: ShardQuantizer, shards: Sequence[LocalShard]) -> None:
    rows = [shard.data.planes[0] for shard in shards]
    own = [row.scale.view(-1) for row in rows]
    stored = torch.cat([scale.to(s.device) for scale, s in zip(own, shards, strict=True)])
    contributions = _tensor_contributions(quantizer.quant_spec, shards, stored)
    counts = [shard.matrices for shard in shards]
    reduced = quantizer.reduce(shards, contributions.view(-1), [4 * n for n in counts])
    *maxima, amaxes = reduced.view(-1, 4).unbind(1)
    common = _common(*maxima)
    if is_traced(common):
        return
    scales, before = common.split(counts), stored.split(counts)
    amaxes_of_shards = amaxes.split(counts)
    raise_next_scales([s.handle.slots for s in shards], scales, amaxes_of_shards, before)
    each = zip(shards, rows, scales, before, amaxes_of_shards, strict=True)
    parts = []
    for shard, row, scale, old, amax in each:
        handle = fp8_handle(shard)
        values = handle.pending
        if handle.unsynced:
            # A write to an empty shard has no values to keep. The other shards may have new ones.
            exact = values is not None or not shard.data.numel()
            handle.fit_history(scale, amax, exact=exact)
        if values is not None:
            scale = scale.to(values.device).view(row.scale.shape)
            made = _quantize(values, scale, row.data.dtype, True, False, None, row.batched)[0]
            row.data.view(torch.uint8).copy_(made.view(torch.uint8))
        else:
            parts.append((row.matrix, old, scale))
    _rescale(parts, None)
    torch._foreach_copy_(own, list(scales))


def _tensor_contributions(
    quant_spec: QuantSpec, shards: Sequence[LocalShard], stored: Tensor
) -> Tensor:
    """Return contributions to the common scales and amaxes of the values, (matrices, 4).

    Args:
        quant_spec: how the weights are quantized.
        shards: the shards.
        stored: the scales of their matrices, fp32. Kernels are launched only for shards that were
            written, because all ranks synchronize in each forward.
    """
    wanted, amaxes = stored.clone(), stored * largest_code(quant_spec)
    empty: list[int] = []
    ends = accumulate(shard.matrices for shard in shards)
    for shard, end in zip(shards, ends, strict=True):
        handle, places = fp8_handle(shard), range(end - shard.matrices, end)
        at = slice(places.start, places.stop)
        if not shard.data.numel():
            empty += places
        elif handle.unsynced:
            scale = stored[at]
            if handle.pending is not None:
                amax = amaxes[at] = _multi_amax([handle.pending], shard.shard_spec.batched)
            else:
                codes = shard.data.planes[0].data
                magnitudes = codes.view(torch.uint8).reshape(len(places), -1) & 0x7F
                largest = magnitudes.amax(1).view(codes.dtype)
                amax = largest.to(scale.device, torch.float32) * scale
            wanted[at] = _wanted(quant_spec, handle, scale, amax.to(scale.device))
    found = torch.cat([_contribution(stored, wanted), amaxes.view(1, -1)])
    if empty:  # the scales of empty shards do not count
        found[:, index_tensor(tuple(empty), found.device)] = 0
    return found.t().contiguous()


# --- blocks that shard boundaries split -----------------------------------------------------------


def _sync_split_blocks(quantizer: BlockwiseShardQuantizer, shards: Sequence[LocalShard]) -> None:
    grids = [_block_contributions(quantizer, shard) for shard in shards]
    contributions = [grid[i] for i in range(3) for grid in grids]
    reduced = quantizer.reduce_rows([*shards] * 3, contributions, quantizer.split_rows)
    codes: list[tuple[Tensor, Tensor, Tensor]] = []
    height, width = quantizer.split_block
    for i, shard in enumerate(shards):
        common = _common(*reduced[i :: len(shards)])
        if is_traced(common):
            return
        plane = _split_plane(quantizer, shard)
        data, scales = plane.matrix, plane.scale
        if quantizer.layout.columnwise:
            data, scales = data.t(), scales.t()
        places, indices = quantizer.places(shard, grids[i], quantizer.split_rows)
        for place, row in zip(places, indices, strict=True):
            start = place * height - quantizer.block_offset(shard)
            rows = slice(max(start, 0), start + height)
            scale, stored = common.select(-2, row).to(data.device), scales.select(-2, place)
            before = stored.to(torch.float32, copy=True)
            if fp8_handle(shard).pending is None:
                codes.append((data[..., rows, :], before.view(-1), scale.reshape(-1)))
            else:
                values = _values(quantizer, shard)[..., rows, :]
                changed = differs(scale, before)
                _round_blocks(values, data[..., rows, :], changed, scale, width)
            stored.copy_(scale.to(stored.dtype))
    _rescale(codes, width)


def _split_plane(quantizer: BlockwiseShardQuantizer, shard: LocalShard) -> Plane:
    """Return the plane whose blocks shard boundaries split."""
    return cast(Plane, shard.data.planes[quantizer.layout.columnwise])


def _values(quantizer: BlockwiseShardQuantizer, shard: LocalShard) -> Tensor:
    """Return the values of a shard (..., rows, columns), pending ones if there are any."""
    pending = fp8_handle(shard).pending
    if pending is not None:
        return pending.view(shard.data._storage.matrix)
    values = _split_plane(quantizer, shard).dequantize(torch.float32)
    return values.t() if quantizer.layout.columnwise else values


def _block_contributions(quantizer: BlockwiseShardQuantizer, shard: LocalShard) -> Tensor:
    """Return contributions for each block of a shard, (3, ..., rows, columns of blocks)."""
    scales, handle = _split_plane(quantizer, shard).scale.to(torch.float32), fp8_handle(shard)
    if quantizer.layout.columnwise:
        scales = scales.t().contiguous()
    if not handle.unsynced:
        return _contribution(scales, scales)
    amax = quantizer.block_amaxes(shard, _values(quantizer, shard))
    return _contribution(scales, _wanted(quantizer.quant_spec, handle, scales, amax))


def _round_blocks(
    values: Tensor, codes: Tensor, changed: Tensor, scale: Tensor, width: int
) -> None:
    """Round values (..., rows, columns) of one row of blocks whose ``scale`` (..., blocks) changed.

    A block has ``width`` columns. Blocks that already have their common scale keep their codes.
    """

    def expand_scale(x: Tensor) -> Tensor:
        x = x.repeat_interleave(width, -1)
        return x[..., : values.shape[-1]].unsqueeze(-2)

    # Devices that flush subnormals would compute an infinite inverse of the smallest E8M0 scale.
    factor = expand_scale((1.0 / scale).clamp(max=2.0**127))
    one = scale.new_ones(())
    rounded = _quantize(values.to(torch.float32) * factor, one, codes.dtype)[0].view(torch.uint8)
    old = codes.view(torch.uint8)
    old.copy_(torch.where(expand_scale(changed), rounded, old))
