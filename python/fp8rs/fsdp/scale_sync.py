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
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fp8rs._core import multi_rescale
from fp8rs._torch import is_traced
from fp8rs.quantize.formats import FP8_MAX
from fp8rs.quantize.planes import Plane
from fp8rs.quantize.spec import QuantSpec
from fp8rs.scaling.histories import ScaleChange, differs, raise_next_scales
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
#
# For each scale, a rank contributes three values, which are reduced with MAX:
# - needed: the scale that its own values need, 0 for zeros;
# - stored: the scale that it stores;
# - reversed: `_LARGEST_BITS` minus the bits of the stored scale, so that the maximum shows the
#   smallest stored scale.
# For scales per tensor, the amax of the values is reduced along with them, for delayed scaling.

#: The largest bits of a scale as int32.
_LARGEST_BITS = 0x7FFFFFFF


def _contribution(stored: Tensor, needed: Tensor) -> Tensor:
    """Return what a rank contributes to the common scales, (3, ...).

    Args:
        stored: the scales that this rank stores, fp32.
        needed: the scales that this rank's own values need, fp32 of the same shape.
    """
    reversed_bits = _LARGEST_BITS - stored.view(torch.int32)
    return torch.stack([needed, stored, reversed_bits.view(torch.float32)])


def _needed_scales(
    quant_spec: QuantSpec, handle: Float8ParamHandle, stored: Tensor, amax: Tensor
) -> Tensor:
    """Return the scales that a written shard's values need, fp32 of the shape of ``amax``.

    Pending values were quantized with a scale computed from them, so keep it. Without pending
    values, derive the scale from the stored codes.
    """
    if handle.pending is not None:
        needed = stored
    else:
        needed = quant_spec.keep_scale(stored, amax)
    return torch.where(amax == 0, 0.0, needed)


def _common_scales(needed: Tensor, stored: Tensor, reversed_bits: Tensor) -> Tensor:
    """Return the common scales, from the maxima of all contributions.

    If all ranks store the same scale, it stays. A rank that changed nothing therefore keeps its
    bytes, however small its own values are. Otherwise the common scale is the one that the largest
    value of all ranks needs.
    """
    largest_bits = stored.view(torch.int32)
    smallest_bits = _LARGEST_BITS - reversed_bits.view(torch.int32)
    all_equal = largest_bits == smallest_bits
    all_zeros = needed == 0
    return torch.where(all_equal | all_zeros, stored, needed)


@dataclass(eq=False, slots=True)
class CodesToRescale:
    """Codes whose scales may change.

    Attributes:
        codes: (rows, columns) of a matrix, or (batch, rows, columns).
        before: their scales, fp32, (scales,) of one matrix after the other.
        after: the new scales, likewise.
    """

    codes: Tensor
    before: Tensor
    after: Tensor


def _rescale(parts: Sequence[CodesToRescale], width: int | None) -> None:
    """Round codes to new scales. Codes whose scale stays are not read.

    Versions stay too, because values do not change and ranks synchronize in each forward. An
    earlier forward may still need the codes for its backward.

    Args:
        parts: the codes and their scales.
        width: columns per scale. None for one scale of each matrix.
    """
    parts_by_device: dict[torch.device, list[CodesToRescale]] = {}
    for part in parts:
        parts_by_device.setdefault(part.codes.device, []).append(part)
    for device, device_parts in parts_by_device.items():
        codes = [part.codes for part in device_parts]
        before = torch.cat([part.before for part in device_parts])
        after = torch.cat([part.after for part in device_parts])
        multi_rescale(codes, before.to(device), after.to(device), width)


# --- one scale per tensor -------------------------------------------------------------------------


def _sync_tensors(quantizer: ShardQuantizer, shards: Sequence[LocalShard]) -> None:
    """Synchronize the scales of formats with one scale per tensor."""
    handles = [fp8_handle(shard) for shard in shards]
    planes: list[Plane] = []
    stored_scales: list[Tensor] = []  # (matrices,) views of the scales of each shard
    scales_on_mesh: list[Tensor] = []
    for shard in shards:
        plane = shard.data.planes[0]
        scale = plane.scale.view(-1)
        planes.append(plane)
        stored_scales.append(scale)
        scales_on_mesh.append(scale.to(shard.device))
    before = torch.cat(scales_on_mesh)

    # Find the common scales.
    contributions = _tensor_contributions(quantizer.quant_spec, shards, before)
    values_per_scale = contributions.shape[1]
    counts = [shard.matrices for shard in shards]
    sizes = [values_per_scale * count for count in counts]
    maxima = quantizer.reduce(shards, contributions.view(-1), sizes).view_as(contributions)
    needed, stored, reversed_bits, amaxes = maxima.unbind(1)
    after = _common_scales(needed, stored, reversed_bits)
    if is_traced(after):
        return
    before_per_shard = before.split(counts)
    after_per_shard = after.split(counts)
    amaxes_per_shard = amaxes.split(counts)

    # With delayed scaling, raise next scales to changed ones, and fit the histories of weights that
    # this rank wrote.
    changes: list[ScaleChange] = []
    for index, handle in enumerate(handles):
        slots = handle.slots
        if slots is not None:
            change = ScaleChange(
                slots, before_per_shard[index], after_per_shard[index], amaxes_per_shard[index]
            )
            changes.append(change)
    raise_next_scales(changes)
    for index, handle in enumerate(handles):
        if handle.unsynced:
            # A write to an empty shard has no values to keep. The other shards may have new ones.
            exact = handle.pending is not None or not shards[index].data.numel()
            handle.fit_history(after_per_shard[index], amaxes_per_shard[index], exact=exact)

    # Round the pending values, or else the codes, to the common scales.
    codes_to_rescale: list[CodesToRescale] = []
    for index, handle in enumerate(handles):
        plane = planes[index]
        scale = after_per_shard[index]
        if handle.pending is not None:
            _round_again(handle.pending, plane, scale)
        else:
            codes_to_rescale.append(CodesToRescale(plane.matrix, before_per_shard[index], scale))
    _rescale(codes_to_rescale, None)
    torch._foreach_copy_(stored_scales, list(after_per_shard))


def _round_again(values: Tensor, plane: Plane, scale: Tensor) -> None:
    """Replace the codes of a plane by values that are rounded with a new scale."""
    scale = scale.to(values.device).view(plane.scale.shape)
    codes = _quantize(values, scale, plane.data.dtype, True, False, None, plane.batched)[0]
    plane.data.view(torch.uint8).copy_(codes.view(torch.uint8))


def _tensor_contributions(
    quant_spec: QuantSpec, shards: Sequence[LocalShard], stored: Tensor
) -> Tensor:
    """Return what a rank contributes to the common scales, and the amaxes, (matrices, 4).

    The columns are needed, stored, reversed and amax.

    Args:
        quant_spec: how the weights are quantized.
        shards: the shards.
        stored: the scales of their matrices, fp32. Kernels are launched only for shards that were
            written, because all ranks synchronize in each forward.
    """
    needed = stored.clone()
    # The amaxes that the scales stand for. Pending values replace them by their own.
    amax_of_scale_1 = FP8_MAX[quant_spec.fp8_dtype] / 2**quant_spec.margin
    amaxes = stored * amax_of_scale_1
    empty_matrices: list[int] = []
    end = 0
    for shard in shards:
        start = end
        end += shard.matrices
        handle = fp8_handle(shard)
        if not shard.data.numel():
            empty_matrices += range(start, end)
            continue
        if not handle.unsynced:
            continue

        matrices = slice(start, end)
        scale = stored[matrices]
        if handle.pending is not None:
            amax = _multi_amax([handle.pending], shard.shard_spec.batched).to(scale.device)
            amaxes[matrices] = amax
        else:
            amax = _amaxes_of_codes(shard).to(scale.device) * scale
        needed[matrices] = _needed_scales(quant_spec, handle, scale, amax)

    contributions = torch.cat([_contribution(stored, needed), amaxes.view(1, -1)])
    if empty_matrices:  # the scales of empty shards do not count
        contributions[:, index_tensor(tuple(empty_matrices), contributions.device)] = 0
    return contributions.t().contiguous()


def _amaxes_of_codes(shard: LocalShard) -> Tensor:
    """Return the largest magnitudes (matrices,) of a shard's codes, fp32."""
    codes: Tensor = shard.data.planes[0].data
    magnitudes = codes.view(torch.uint8).reshape(shard.matrices, -1) & 0x7F
    return magnitudes.amax(1).view(codes.dtype).to(torch.float32)


# --- blocks that shard boundaries split -----------------------------------------------------------


def _sync_split_blocks(quantizer: BlockwiseShardQuantizer, shards: Sequence[LocalShard]) -> None:
    """Synchronize the scales of blocks that shard boundaries split."""
    height, width = quantizer.split_block
    rows_per_shard = [quantizer.split_rows(shard.shard_spec) for shard in shards]
    grids = [_block_contributions(quantizer, shard) for shard in shards]
    maxima_per_shard = quantizer.reduce_rows(shards, grids, rows_per_shard)

    codes_to_rescale: list[CodesToRescale] = []
    for index, shard in enumerate(shards):
        needed, stored, reversed_bits = maxima_per_shard[index].unbind()
        common = _common_scales(needed, stored, reversed_bits)  # (..., split rows, columns)
        if is_traced(common):
            return

        # The codes (..., rows, columns) and scales (..., rows, columns of blocks) of the shard.
        plane = _split_plane(quantizer, shard)
        codes = plane.matrix
        scales = plane.scale
        if quantizer.layout.columnwise:
            codes = codes.t()
            scales = scales.t()

        # Change the scales of each split row of blocks, and round its pending values or its codes.
        split_rows = quantizer.reduced_rows(shard, grids[index], rows_per_shard[index])
        for grid_row, common_row in zip(split_rows.in_grid, split_rows.in_reduced, strict=True):
            # The first row of blocks may begin on the rank before.
            first_row = grid_row * height - quantizer.block_offset(shard)
            rows = slice(max(first_row, 0), first_row + height)
            row_codes = codes[..., rows, :]

            row_scales = scales.select(-2, grid_row)
            before = row_scales.to(torch.float32, copy=True)
            after = common.select(-2, common_row).to(codes.device)
            if fp8_handle(shard).pending is None:
                part = CodesToRescale(row_codes, before.view(-1), after.reshape(-1))
                codes_to_rescale.append(part)
            else:
                values = _values(quantizer, shard)[..., rows, :]
                _round_blocks(values, row_codes, differs(after, before), after, width)
            row_scales.copy_(after.to(row_scales.dtype))
    _rescale(codes_to_rescale, width)


def _split_plane(quantizer: BlockwiseShardQuantizer, shard: LocalShard) -> Plane:
    """Return the plane whose blocks shard boundaries split."""
    row, columnwise = shard.data.planes
    return cast(Plane, columnwise if quantizer.layout.columnwise else row)


def _values(quantizer: BlockwiseShardQuantizer, shard: LocalShard) -> Tensor:
    """Return the values of a shard (..., rows, columns), pending ones if there are any."""
    pending = fp8_handle(shard).pending
    if pending is not None:
        return pending.view(shard.data._storage.matrix)
    values = _split_plane(quantizer, shard).dequantize(torch.float32)
    return values.t() if quantizer.layout.columnwise else values


def _block_contributions(quantizer: BlockwiseShardQuantizer, shard: LocalShard) -> Tensor:
    """Return contributions for each block of a shard, (3, ..., rows, columns of blocks)."""
    handle = fp8_handle(shard)
    stored = _split_plane(quantizer, shard).scale.to(torch.float32)
    if quantizer.layout.columnwise:
        stored = stored.t().contiguous()
    if not handle.unsynced:
        return _contribution(stored, stored)
    amax = quantizer.block_amaxes(shard, _values(quantizer, shard))
    return _contribution(stored, _needed_scales(quantizer.quant_spec, handle, stored, amax))


def _round_blocks(
    values: Tensor, codes: Tensor, changed: Tensor, scale: Tensor, width: int
) -> None:
    """Round values (..., rows, columns) of one row of blocks whose ``scale`` (..., blocks) changed.

    A block has ``width`` columns. Blocks that already have their common scale keep their codes.
    """

    def of_columns(block_values: Tensor) -> Tensor:
        columns = block_values.repeat_interleave(width, -1)
        return columns[..., : values.shape[-1]].unsqueeze(-2)

    # Devices that flush subnormals would compute an infinite inverse of the smallest E8M0 scale.
    factor = of_columns((1.0 / scale).clamp(max=2.0**127))
    unit_scale = scale.new_ones(())
    rounded = _quantize(values.to(torch.float32) * factor, unit_scale, codes.dtype)[0]
    stored = codes.view(torch.uint8)
    stored.copy_(torch.where(of_columns(changed), rounded.view(torch.uint8), stored))
