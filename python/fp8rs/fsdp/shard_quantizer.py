"""Quantize high-precision shards for their all-gathers: amaxes, one all-reduce, casts.

A `ShardQuantizer` works in two steps. `update_scales` computes what depends on other ranks: the
scales of per-tensor formats, or the amaxes of blocks that shard boundaries split. It runs one
all-reduce per process group for all shards together. `cast` quantizes shards without a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import cast

import torch
from torch import Tensor
from typing_extensions import override

from fp8rs.model.handle import ParamHandle
from fp8rs.model.shard_spec import ShardSpec
from fp8rs.quantize.cast import quantize_planes
from fp8rs.quantize.planes import Planes
from fp8rs.quantize.spec import QuantSpec
from fp8rs.scaling.delayed import DelayedScalingState
from fp8rs.scaling.reductions import MaximaRange, index_tensor, reduce_packed_
from fp8rs.scaling.streams import StreamDependency

from .layout import AllGatherLayout, flat_bytes
from .local_shard import LocalShard, set_scales, values_of

_block_amax = torch.ops.fp8rs.block_amax.default
_multi_amax = torch.ops.fp8rs.multi_amax.default
_multi_quantize = torch.ops.fp8rs.multi_quantize.default
_multi_quantize_delayed = torch.ops.fp8rs.multi_quantize_delayed.default
_quantize_blocks = torch.ops.fp8rs.quantize_blocks.default


def shard_quantizer(
    quant_spec: QuantSpec, delayed: DelayedScalingState | None = None
) -> ShardQuantizer:
    """Return the quantizer of weights.

    Args:
        quant_spec: how weights are quantized.
        delayed: the state of delayed scaling, or None for other recipes.
    """
    if delayed is not None:
        return DelayedShardQuantizer(quant_spec, delayed)
    if quant_spec.format.per_tensor:
        return TensorwiseShardQuantizer(quant_spec)
    return BlockwiseShardQuantizer(quant_spec)


class ShardQuantizer:
    """Base class of the quantizers. One serves all sharded weights of a model.

    Args:
        quant_spec: how weights are quantized.

    Attributes:
        layout: how quantized shards are gathered.
    """

    def __init__(self, quant_spec: QuantSpec) -> None:
        self.quant_spec = quant_spec
        self.layout = AllGatherLayout(quant_spec.format, quant_spec.fp8_dtype)

    def local_shard(self, handle: ParamHandle, data: Tensor | None = None) -> LocalShard:
        """Return a parameter's shard, with other values if ``data`` is given.

        Raises:
            ValueError: the format does not support this sharding. All ranks raise it.
        """
        shard_spec = handle.shard_spec
        format = self.layout.format
        if not format.per_tensor:
            largest_dim = 0
            if shard_spec.batched and not self.layout.columnwise:
                largest_dim = 1  # the rows of each matrix, if only one plane is gathered
            if shard_spec.shard_dim > largest_dim:
                raise ValueError(
                    f"shard_placement_fn puts {handle.fqn} on Shard({shard_spec.shard_dim}), but "
                    f"weights in format {format.name!r} are gathered by rows: use Shard(0)"
                )
        local = handle.local if data is None else data
        device = shard_spec.mesh_device(local.device)
        return LocalShard(handle, values_of(local), shard_spec, device)

    def split_rows(self, shard_spec: ShardSpec) -> tuple[int, ...]:
        """Return the rows of blocks of each matrix that shard boundaries split."""
        return self.layout.split_rows(shard_spec)

    def shares_scales(self, shard_spec: ShardSpec) -> bool:
        """Return whether several ranks have elements of one scale of a weight."""
        return self.layout.shares_scales(shard_spec)

    def reduce(
        self, shards: Sequence[LocalShard], values: Tensor, sizes: Sequence[int] = ()
    ) -> Tensor:
        """Reduce maxima of shards over their ranks, in place: one all-reduce per process group.

        Args:
            shards: the shards.
            values: maxima of the shards, fp32 and contiguous.
            sizes: number of maxima of each shard. By default, the number of its matrices.
        """
        if not sizes:
            sizes = [shard.matrices for shard in shards]
        ranges = []
        start = 0
        for shard, size in zip(shards, sizes, strict=True):
            if self.layout.format.per_tensor:
                groups = shard.shard_spec.matrix_groups
            else:
                # With tensor parallelism, blocks start at the edge of each rank's part.
                groups = shard.shard_spec.shard_groups
            ranges.append(MaximaRange(range(start, start + size), groups))
            start += size
        return reduce_packed_(values, ranges)

    def update_scales(self, shards: Sequence[LocalShard]) -> None:
        """Compute what ``cast`` needs from other ranks, and store it on the handles.

        Args:
            shards: all master weights whose scales are stale.
        """
        raise NotImplementedError

    def copy_scales(self, shards: Sequence[LocalShard]) -> None:
        """Copy scales of FP8 shards to the handles, unless they are gathered with the codes.

        With copies, a gathered weight stays valid if its shard is written later.
        """
        raise NotImplementedError

    def all_gather_inputs(self, shards: Sequence[LocalShard]) -> list[tuple[Tensor, ...]]:
        """Return the tensors to gather for each shard. Master weights are quantized.

        Args:
            shards: shards whose ``data`` is on the mesh's device.
        """
        masters = [shard for shard in shards if not shard.is_fp8]
        inputs_of_masters = self.cast(masters) if masters else []
        if len(masters) == len(shards):
            return inputs_of_masters

        inputs = []
        next_master = 0
        for shard in shards:
            if shard.is_fp8:
                inputs.append(self.layout.pack(shard.data.planes, shard.shard_spec))
            else:
                inputs.append(inputs_of_masters[next_master])
                next_master += 1
        return inputs

    def cast(self, shards: Sequence[LocalShard]) -> list[tuple[Tensor, ...]]:
        """Quantize master weights with the scales on their handles, and pack them."""
        raise NotImplementedError

    def record_gathered(self) -> None:
        """Record the amaxes of weights that an evaluation gathered and that are still gathered.

        Called when a forward in training mode begins. That forward uses these weights without a
        cast, so nothing else would record their amaxes.
        """

    def quantize(self, shards: Sequence[LocalShard]) -> list[Planes]:
        """Quantize values that are written to whole FP8 weights, with scales from these values."""
        raise NotImplementedError


# --- one scale per tensor -------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class ShardCast:
    """A shard to cast, and where to write its codes.

    Attributes:
        shard: the shard, in high precision.
        codes: its codes, in the buffer that FSDP2 gathers.
    """

    shard: LocalShard
    codes: Tensor


class TensorwiseShardQuantizer(ShardQuantizer):
    """Per-tensor scales, from the amaxes of all shards.

    A batched weight (E, N, K) has one scale for each matrix. Its shards on Shard(0) have whole
    matrices, so that their amaxes are not reduced.
    """

    @override
    def update_scales(self, shards: Sequence[LocalShard]) -> None:
        set_scales(shards, self.quant_spec.scale_from_amax(self._amaxes(shards)))

    @override
    def copy_scales(self, shards: Sequence[LocalShard]) -> None:
        scales = [shard.data.planes[0].scale.view(-1).to(shard.device) for shard in shards]
        set_scales(shards, torch.cat(scales))

    @override
    def cast(self, shards: Sequence[LocalShard]) -> list[tuple[Tensor, ...]]:
        specs = [shard.shard_spec for shard in shards]
        shapes = [shard.data.shape for shard in shards]
        padded_shards, codes = self.layout.allocate(specs, shapes, shards[0].device)
        casts = []
        for shard, shard_codes in zip(shards, codes, strict=True):
            casts.append(ShardCast(shard, shard_codes))
        self._cast_shards(casts)

        inputs: list[tuple[Tensor, ...]] = []
        for shard, padded_shard in zip(shards, padded_shards, strict=True):
            if shard.shard_spec.shards_batch:
                scales = _scale_of(shard).view(-1, 1)
                padded_scales = flat_bytes(scales, shard.shard_spec.padded_length, 1)
                inputs.append((padded_shard, padded_scales))
            else:
                inputs.append((padded_shard,))
        return inputs

    def _cast_shards(self, casts: Sequence[ShardCast]) -> None:
        """Quantize shards with the scales on their handles, in one launch."""
        values = [shard_cast.shard.data for shard_cast in casts]
        scales = torch.cat([_scale_of(shard_cast.shard).view(-1) for shard_cast in casts])
        codes = [shard_cast.codes for shard_cast in casts]
        _multi_quantize(values, scales, codes, True)

    @override
    def quantize(self, shards: Sequence[LocalShard]) -> list[Planes]:
        counts = [shard.matrices for shard in shards]
        amaxes = self._amaxes(shards)
        scales = self.quant_spec.scale_from_amax(amaxes)
        amaxes_per_shard = amaxes.split(counts)
        scales_per_shard = scales.split(counts)

        planes_per_shard = []
        for shard, amax, scale in zip(shards, amaxes_per_shard, scales_per_shard, strict=True):
            scale = scale.to(shard.data.device)
            if not shard.shard_spec.batched:
                scale = scale.view(())
            planes = quantize_planes(self.quant_spec, shard.data, True, False, scale=scale)
            planes_per_shard.append(planes)
            shard.handle.fit_history(scale, amax, exact=True)
        return planes_per_shard

    def _amaxes(self, shards: Sequence[LocalShard]) -> Tensor:
        """Return the amaxes (n,) of all matrices: one launch per device, one all-reduce."""
        device = shards[0].device
        amaxes_per_device = []
        # Offloaded shards are on the CPU, so measure each device's shards in one launch.
        for _, device_shards in groupby(shards, lambda shard: shard.data.device):
            values = [shard.data for shard in device_shards]
            amaxes_per_device.append(_multi_amax(values, True).to(device))
        if len(amaxes_per_device) == 1:
            return self.reduce(shards, amaxes_per_device[0])
        return self.reduce(shards, torch.cat(amaxes_per_device))


class DelayedShardQuantizer(TensorwiseShardQuantizer):
    """Per-tensor scales from the histories of delayed scaling. Batched weights have current ones.

    The cast of a forward records the amaxes and finds non-finite values. A shard with such values
    gets the scale NaN on this rank only, without a collective. The rank's loss becomes NaN, and so
    do the gradients of all ranks.
    """

    def __init__(self, quant_spec: QuantSpec, delayed: DelayedScalingState) -> None:
        super().__init__(quant_spec)
        self._delayed = delayed
        #: The amaxes of shards whose last cast was for an evaluation.
        self._unrecorded: dict[ParamHandle, UnrecordedAmax] = {}

    @override
    def update_scales(self, shards: Sequence[LocalShard]) -> None:
        batched = [shard for shard in shards if shard.shard_spec.batched]
        if batched:
            super().update_scales(batched)
        matrices = [shard for shard in shards if not shard.shard_spec.batched]
        if not matrices:
            return

        def measure(positions: list[int]) -> Tensor:
            return self._amaxes([matrices[position] for position in positions])

        scales = self._delayed.weight_scales(layers_of(matrices), matrices[0].device, measure)
        set_scales(matrices, scales)

    @override
    def _cast_shards(self, casts: Sequence[ShardCast]) -> None:
        # The forward has cast the values that a backward gathers, with the scales on the handles.
        if self._delayed.tracker.in_backward:
            super()._cast_shards(casts)
            return

        batched = [shard_cast for shard_cast in casts if shard_cast.shard.shard_spec.batched]
        if batched:
            super()._cast_shards(batched)
        matrices = [shard_cast for shard_cast in casts if not shard_cast.shard.shard_spec.batched]
        if matrices:
            self._cast_and_record(matrices)

    def _cast_and_record(self, casts: Sequence[ShardCast]) -> None:
        """Cast shards, replace scales of non-finite values, and record the amaxes."""
        shards = [shard_cast.shard for shard_cast in casts]
        codes = [shard_cast.codes for shard_cast in casts]
        device = shards[0].device
        layers = layers_of(shards)
        values = [shard.data for shard in shards]
        scales = torch.stack([_scale_of(shard) for shard in shards])

        if self._delayed.records_weights(layers):
            recorded = self._delayed.weight_amaxes(layers, device)
            used_scales = _multi_quantize_delayed(values, scales, recorded.values, codes)
            recorded.store()
            for shard in shards:
                self._unrecorded.pop(shard.handle, None)
        else:
            amaxes = torch.zeros_like(scales)
            used_scales = _multi_quantize_delayed(values, scales, amaxes, codes)
            ready = StreamDependency(device, [amaxes])
            for shard, amax in zip(shards, amaxes.unbind(), strict=True):
                self._unrecorded[shard.handle] = UnrecordedAmax(amax, ready)
        set_scales(shards, used_scales)

    @override
    def record_gathered(self) -> None:
        for handle, unrecorded in list(self._unrecorded.items()):
            if handle.is_sharded:
                continue  # its next cast records the amax
            del self._unrecorded[handle]
            if handle.state_if_any is None:
                continue  # the layer was removed or converted back
            amax = unrecorded.amax
            unrecorded.ready.wait()
            self._delayed.weight_amaxes([handle.index], amax.device).raise_to(amax)


@dataclass(eq=False, slots=True)
class UnrecordedAmax:
    """The amax of a weight that was cast for an evaluation.

    Attributes:
        amax: the amax (), fp32.
        ready: the cast that computed it.
    """

    amax: Tensor
    ready: StreamDependency


def layers_of(shards: Sequence[LocalShard]) -> list[int]:
    """Return the indices of the layers that shards belong to."""
    return [shard.handle.index for shard in shards]


def _scale_of(shard: LocalShard) -> Tensor:
    """Return the scale on the handle of a shard, whose format has one per matrix."""
    assert shard.handle.scale is not None
    return shard.handle.scale


# --- one scale per block or row -------------------------------------------------------------------
#
# A *grid* has one value for each block that a shard touches: (..., rows, columns of blocks), where
# leading dimensions are a batch's. A shard touches consecutive rows of blocks of each matrix. Some
# rows are *reduced* over the ranks: those that shard boundaries split, or all. Every rank
# contributes these rows of the whole matrix, with zeros in rows that its shard does not touch.


@dataclass(frozen=True, slots=True)
class ReducedRows:
    """The reduced rows of blocks that a shard touches.

    Attributes:
        in_grid: their indices in the shard's grid.
        in_reduced: their indices among all reduced rows of the matrix.
    """

    in_grid: tuple[int, ...]
    in_reduced: tuple[int, ...]

    def copy_from_grid(self, grid: Tensor, reduced: Tensor) -> None:
        """Copy the rows of a shard's grid to the reduced rows."""
        if self.in_grid:  # most shards of a weight touch no reduced row
            rows = grid.index_select(-2, index_tensor(self.in_grid, grid.device))
            reduced.index_copy_(-2, index_tensor(self.in_reduced, reduced.device), rows)

    def copy_to_grid(self, reduced: Tensor, grid: Tensor) -> None:
        """Copy the reduced rows to the rows of a shard's grid."""
        if self.in_grid:
            rows = reduced.index_select(-2, index_tensor(self.in_reduced, reduced.device))
            grid.index_copy_(-2, index_tensor(self.in_grid, grid.device), rows)


@lru_cache(maxsize=1024)
def reduced_rows_of(rows: tuple[int, ...], first_row: int, count: int) -> ReducedRows:
    """Return which of the reduced rows of a matrix a shard touches.

    Args:
        rows: the reduced rows of blocks of the matrix.
        first_row: the first row of blocks that the shard touches.
        count: the number of rows of blocks that it touches.
    """
    in_grid = []
    in_reduced = []
    for index, row in enumerate(rows):
        if first_row <= row < first_row + count:
            in_grid.append(row - first_row)
            in_reduced.append(index)
    return ReducedRows(tuple(in_grid), tuple(in_reduced))


@dataclass(eq=False, slots=True)
class BlockAmaxes:
    """The amaxes of a shard's blocks after the reduction.

    Attributes:
        grid: the amaxes of the blocks that the shard touches.
        reduced: the amaxes of the reduced rows of the whole matrix.
    """

    grid: Tensor
    reduced: Tensor


class BlockwiseShardQuantizer(ShardQuantizer):
    """One scale per block or row, with the blocks of the whole weight.

    If no shard boundary splits a block, shards are quantized without a collective. Otherwise the
    amaxes of split blocks are reduced first, so that the bytes equal the unsharded weight's. For a
    batched weight on Shard(1), the amaxes of all blocks are reduced, because scales cannot be
    gathered with the codes (`fp8rs.fsdp.layout`).
    """

    def __init__(self, quant_spec: QuantSpec) -> None:
        super().__init__(quant_spec)
        #: The shape of blocks whose amaxes are reduced, in the plane whose blocks are split.
        self.split_block = list(quant_spec.format.block)
        if self.layout.columnwise:
            self.split_block = [self.layout.height, 1]

    @override
    def update_scales(self, shards: Sequence[LocalShard]) -> None:
        rows_per_shard = [self.gathered_rows(shard.shard_spec) for shard in shards]
        for shard, amaxes in zip(shards, self._amaxes(shards, rows_per_shard), strict=True):
            handle = shard.handle
            if amaxes is None:
                handle.amaxes = None
                continue
            handle.amaxes = amaxes.grid
            if self.layout.gathers_codes_alone(shard.shard_spec):
                handle.scale = self._scales_of(amaxes.reduced)

    @override
    def copy_scales(self, shards: Sequence[LocalShard]) -> None:
        shards = [s for s in shards if self.layout.gathers_codes_alone(s.shard_spec)]
        rows_per_shard = [self.gathered_rows(shard.shard_spec) for shard in shards]
        grids = [shard.data.planes[0].scale.to(torch.float32) for shard in shards]
        reduced_scales = self.reduce_rows(shards, grids, rows_per_shard)
        for shard, scales in zip(shards, reduced_scales, strict=True):
            shard.handle.scale = scales.to(self.layout.format.scale_dtype)

    @override
    def cast(self, shards: Sequence[LocalShard]) -> list[tuple[Tensor, ...]]:
        inputs = []
        for shard in shards:
            planes = self._quantize(shard, shard.handle.amaxes)
            inputs.append(self.layout.pack(planes, shard.shard_spec))
        return inputs

    @override
    def quantize(self, shards: Sequence[LocalShard]) -> list[Planes]:
        rows_per_shard = [self.split_rows(shard.shard_spec) for shard in shards]
        planes_per_shard = []
        for shard, amaxes in zip(shards, self._amaxes(shards, rows_per_shard), strict=True):
            planes_per_shard.append(self._quantize(shard, None if amaxes is None else amaxes.grid))
        return planes_per_shard

    def _quantize(self, shard: LocalShard, grid_amaxes: Tensor | None) -> Planes:
        """Quantize a shard, with reduced amaxes of its blocks if shard boundaries split some."""
        block_amaxes = None
        if grid_amaxes is not None:
            grid_amaxes = grid_amaxes.to(shard.data.device)
            if self.layout.columnwise:
                block_amaxes = {"amax_columnwise": grid_amaxes.t().contiguous()}
            else:
                block_amaxes = {"amax": grid_amaxes}
        return quantize_planes(
            self.quant_spec,
            shard.data,
            True,
            self.layout.columnwise,
            block_offset=self.block_offset(shard),
            block_amaxes=block_amaxes,
        )

    def _scales_of(self, amaxes: Tensor) -> Tensor:
        """Return the scales of blocks with these amaxes, as the operators compute them."""
        quant_spec = self.quant_spec
        if not quant_spec.format.microscaled:
            return quant_spec.scale_from_amax(amaxes)
        # Quantize one block of 1x32 zeros with each amax.
        zeros = amaxes.new_zeros(()).expand(amaxes.numel(), 32)
        _, scale, _, _ = _quantize_blocks(
            zeros,
            quant_spec.fp8_dtype,
            (1, 32),
            quant_spec.format.scale_dtype,
            **quant_spec.block_options,
            amax=amaxes.view(-1, 1),
        )
        return cast(Tensor, scale.view(amaxes.shape))

    # --- blocks of several ranks -----------------------------------------------------------------

    def gathered_rows(self, shard_spec: ShardSpec) -> tuple[int, ...]:
        """Return the rows of blocks of each matrix whose amaxes are reduced for an all-gather.

        If codes are gathered without scales, these are all rows.
        """
        if self.layout.gathers_codes_alone(shard_spec):
            return tuple(range(self.layout.format.scale_shape(*shard_spec.matrix_shape)[0]))
        return self.split_rows(shard_spec)

    def _amaxes(
        self, shards: Sequence[LocalShard], rows_per_shard: Sequence[tuple[int, ...]]
    ) -> list[BlockAmaxes | None]:
        """Return the amaxes of the blocks of shards. None for a shard without reduced rows."""
        indices = [index for index, rows in enumerate(rows_per_shard) if rows]
        reduced_shards = [shards[index] for index in indices]
        reduced_rows = [rows_per_shard[index] for index in indices]
        grids = [self.block_amaxes(shard, shard.data) for shard in reduced_shards]
        reduced_amaxes = self.reduce_rows(reduced_shards, grids, reduced_rows)

        amaxes: list[BlockAmaxes | None] = [None] * len(shards)
        for index, grid, reduced in zip(indices, grids, reduced_amaxes, strict=True):
            shard = shards[index]
            grid = grid.to(shard.device)
            self.reduced_rows(shard, grid, rows_per_shard[index]).copy_to_grid(reduced, grid)
            amaxes[index] = BlockAmaxes(grid, reduced)
        return amaxes

    def block_amaxes(self, shard: LocalShard, values: Tensor) -> Tensor:
        """Return the amaxes of the blocks that a shard with these values touches."""
        offset = self.block_offset(shard)
        return cast(Tensor, _block_amax(values, self.split_block, offset, shard.shard_spec.batched))

    def block_offset(self, shard: LocalShard) -> int:
        """Return how many rows of the shard's first row of blocks are on the ranks before it."""
        return shard.shard_spec.row_offset % self.layout.height

    def reduced_rows(self, shard: LocalShard, grid: Tensor, rows: tuple[int, ...]) -> ReducedRows:
        """Return the reduced rows of blocks that a shard touches.

        Args:
            shard: the shard.
            grid: its grid.
            rows: the reduced rows of blocks of the whole matrix.
        """
        first_row = shard.shard_spec.row_offset // self.layout.height
        return reduced_rows_of(rows, first_row, grid.shape[-2])

    def reduce_rows(
        self,
        shards: Sequence[LocalShard],
        grids: Sequence[Tensor],
        rows_per_shard: Sequence[tuple[int, ...]],
    ) -> list[Tensor]:
        """Reduce values of blocks over the ranks.

        Args:
            shards: the shards.
            grids: for each shard, a value per block that it touches, fp32.
            rows_per_shard: for each shard, the rows of blocks of the whole matrix to reduce.

        Returns:
            For each shard the values of these rows, on the mesh's device.
        """
        if not shards:
            return []
        contributions = []
        for shard, grid, rows in zip(shards, grids, rows_per_shard, strict=True):
            contribution = grid.new_zeros((*grid.shape[:-2], len(rows), grid.shape[-1]))
            self.reduced_rows(shard, grid, rows).copy_from_grid(grid, contribution)
            contributions.append(contribution.to(shard.device))

        sizes = [contribution.numel() for contribution in contributions]
        packed = torch.cat([contribution.view(-1) for contribution in contributions])
        reduced_parts = self.reduce(shards, packed, sizes).split(sizes)
        reduced = []
        for part, contribution in zip(reduced_parts, contributions, strict=True):
            reduced.append(part.view_as(contribution))
        return reduced
