"""Quantize high-precision shards for their all-gathers: amaxes, one all-reduce, casts.

A `ShardQuantizer` works in two steps. `update_scales` computes what depends on other ranks: the
scales of per-tensor formats, or the amaxes of blocks that shard boundaries split. It runs one
all-reduce per process group for all shards together. `cast` quantizes shards without a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from fp8rs.model.handle import ParamHandle
from fp8rs.model.shard_spec import ShardSpec
from fp8rs.quantize.cast import quantize_planes
from fp8rs.quantize.planes import Planes
from fp8rs.quantize.spec import QuantSpec
from fp8rs.scaling.delayed import DelayedScalingState
from fp8rs.scaling.reductions import index_tensor, reduce_packed_
from fp8rs.scaling.streams import StreamDependency

from .layout import AllGatherLayout, flat_bytes
from .local_shard import LocalShard, set_scales, values_of

_block_amax = torch.ops.fp8rs.block_amax.default
_multi_amax = torch.ops.fp8rs.multi_amax.default
_multi_quantize = torch.ops.fp8rs.multi_quantize.default
_multi_quantize_delayed = torch.ops.fp8rs.multi_quantize_delayed.default
_quantize_blocks = torch.ops.fp8rs.quantize_blocks.default

#: Returns which rows of blocks of each matrix are reduced.
RowsOf = Callable[[ShardSpec], Sequence[int]]


def shard_quantizer(
    quant_spec: QuantSpec, histories: DelayedScalingState | None = None
) -> ShardQuantizer:
    """Return the quantizer of weights, with the histories of delayed scaling if there are any."""
    if histories is not None:
        return DelayedShardQuantizer(quant_spec, histories)
    per_tensor = quant_spec.format.per_tensor
    return (TensorwiseShardQuantizer if per_tensor else BlockwiseShardQuantizer)(quant_spec)


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
        # A batch may also be sharded along the rows of its matrices, if only one plane is gathered.
        last_dim = 1 if shard_spec.batched and not self.layout.columnwise else 0
        if not format.per_tensor and shard_spec.shard_dim > last_dim:
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
        parts = []
        start = 0
        for shard, size in zip(shards, sizes, strict=True):
            if self.layout.format.per_tensor:
                groups = shard.shard_spec.matrix_groups
            else:
                # With tensor parallelism, blocks start at the edge of each rank's part.
                groups = shard.shard_spec.shard_groups
            parts.append((range(start, start + size), groups))
            start += size
        return reduce_packed_(values, parts)

    def update_scales(self, shards: Sequence[LocalShard]) -> None:
        """Compute what ``cast`` needs from other ranks, and store it on the handles.

        Args:
            shards: all master weights that are sharded over the same ranks and have no valid scale.
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
        if len(masters) == len(shards):
            return self.cast(shards)

        inputs_of = {}
        if masters:
            inputs_of = dict(zip(masters, self.cast(masters), strict=True))
        for shard in shards:
            if shard.is_fp8:
                inputs_of[shard] = self.layout.pack(shard.data.planes, shard.shard_spec)
        return [inputs_of[shard] for shard in shards]

    def cast(self, shards: Sequence[LocalShard]) -> list[tuple[Tensor, ...]]:
        """Quantize master weights with the scales on their handles, and pack them."""
        raise NotImplementedError

    def record_gathered(self) -> None:
        """Record the amaxes of weights that an evaluation gathered and that are still gathered.

        Called when a forward in training mode begins. That forward uses these weights without a
        cast, so nothing else would record their amaxes.
        """

    def planes(self, shards: Sequence[LocalShard]) -> list[Planes]:
        """Quantize values that are written to whole FP8 weights, with scales from these values."""
        raise NotImplementedError


# --- one scale per tensor -------------------------------------------------------------------------


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
        buffers, codes = self.layout.allocate(specs, shapes, shards[0].device)
        for shard, buffer in zip(shards, buffers, strict=True):
            numel = shard.data.numel()
            if numel < buffer.numel():
                buffer[numel:].zero_()  # padding is gathered too
        self._cast_into(shards, codes)

        inputs: list[tuple[Tensor, ...]] = []
        for shard, buffer in zip(shards, buffers, strict=True):
            if shard.shard_spec.shards_batch:
                assert shard.handle.scale is not None
                scales = shard.handle.scale.view(-1, 1)
                inputs.append((buffer, flat_bytes(scales, shard.shard_spec.padded_length, 1)))
            else:
                inputs.append((buffer,))
        return inputs

    def _cast_into(self, shards: Sequence[LocalShard], codes: Sequence[Tensor]) -> None:
        scales = torch.hstack([_scale_of(shard) for shard in shards])
        _multi_quantize([shard.data for shard in shards], scales, codes, True)

    @override
    def planes(self, shards: Sequence[LocalShard]) -> list[Planes]:
        amaxes = self._amaxes(shards)
        scales = self.quant_spec.scale_from_amax(amaxes)
        counts = [shard.matrices for shard in shards]
        planes_per_shard: list[Planes] = []
        for shard, amax, scale in zip(
            shards, amaxes.split(counts), scales.split(counts), strict=True
        ):
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

    def __init__(self, quant_spec: QuantSpec, histories: DelayedScalingState) -> None:
        super().__init__(quant_spec)
        self._histories = histories
        #: The amaxes of shards whose last cast was for an evaluation, and the casts.
        self._unrecorded: dict[ParamHandle, tuple[Tensor, StreamDependency]] = {}

    @override
    def update_scales(self, shards: Sequence[LocalShard]) -> None:
        batched = [shard for shard in shards if shard.shard_spec.batched]
        if batched:
            super().update_scales(batched)
        single = [shard for shard in shards if not shard.shard_spec.batched]
        if single:
            set_scales(single, self._scales(single))

    def _scales(self, shards: Sequence[LocalShard]) -> Tensor:
        """Return scales (n,) from the histories, and from the values of weights without a history.

        The measured amax begins the history, also for a layer that never runs.
        """
        _, slots = self._recorded(shards)
        scales = self._histories.pack(shards[0].device).scale[slots, 0, 0].clone()
        # The host knows which scales are not 0.
        indices = []
        for index, shard in enumerate(shards):
            module: Any = shard.handle.module
            if not module.fp8_ready[0]:
                indices.append(index)
        if not indices:
            return scales

        new_shards = [shards[index] for index in indices]
        amaxes = self._amaxes(new_shards)
        finite = amaxes.isfinite()
        positions = index_tensor(tuple(indices), scales.device)
        current_scales = self.quant_spec.scale_from_amax(amaxes)
        has_history = (scales[positions] > 0) & finite
        scales[positions] = torch.where(has_history, scales[positions], current_scales)

        if self._histories.records(shard.handle.module for shard in shards):
            recorded, slots = self._recorded(new_shards)
            recorded[slots] = torch.where(finite, recorded[slots].maximum(amaxes), recorded[slots])
        return scales

    def _cast_into(self, shards: Sequence[LocalShard], codes: Sequence[Tensor]) -> None:
        # The forward has cast the values that a backward gathers, with the scales on the handles.
        if self._histories.tracker.in_backward:
            super()._cast_into(shards, codes)
            return
        batched = [index for index, shard in enumerate(shards) if shard.shard_spec.batched]
        if batched:
            super()._cast_into([shards[i] for i in batched], [codes[i] for i in batched])
            single = [index for index in range(len(shards)) if index not in batched]
            shards = [shards[i] for i in single]
            codes = [codes[i] for i in single]
        if shards:
            self._cast_and_record(shards, codes)

    def _cast_and_record(self, shards: Sequence[LocalShard], codes: Sequence[Tensor]) -> None:
        """Cast shards, replace scales of non-finite values, and record the amaxes."""
        scales = torch.stack([_scale_of(shard) for shard in shards])
        recorded, slots = self._recorded(shards)
        records = self._histories.records(shard.handle.module for shard in shards)
        amaxes = recorded[slots] if records else torch.zeros_like(scales)
        used_scales = _multi_quantize_delayed(
            [shard.data for shard in shards], scales, amaxes, codes
        )
        set_scales(shards, used_scales)

        if records:
            for shard in shards:
                self._unrecorded.pop(shard.handle, None)
            if not isinstance(slots, slice):
                recorded[slots] = amaxes
            return
        ready = StreamDependency(shards[0].device, [amaxes])
        for shard, amax in zip(shards, amaxes.unbind(), strict=True):
            self._unrecorded[shard.handle] = amax, ready

    @override
    def record_gathered(self) -> None:
        for handle, (amax, ready) in list(self._unrecorded.items()):
            if handle.is_sharded:
                continue  # its next cast records the amax
            if handle.state_if_any is None:
                del self._unrecorded[handle]  # the layer was removed or converted back
                continue
            ready.wait()
            recorded, slot = self._histories.pack(amax.device).weight_amaxes([handle.index])
            recorded[slot] = recorded[slot].maximum(amax)
            del self._unrecorded[handle]

    def _recorded(self, shards: Sequence[LocalShard]) -> tuple[Tensor, Any]:
        """Return the recorded amaxes of all weights (layers,), and the shards' places in them."""
        pack = self._histories.pack(shards[0].device)
        return pack.weight_amaxes([shard.handle.index for shard in shards])


def _scale_of(shard: LocalShard) -> Tensor:
    """Return the scale on the handle of a shard, whose format has one per matrix."""
    assert shard.handle.scale is not None
    return shard.handle.scale


# --- one scale per block or row -------------------------------------------------------------------


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
        self.split_block = (
            [self.layout.height, 1] if self.layout.columnwise else list(quant_spec.format.block)
        )

    @override
    def update_scales(self, shards: Sequence[LocalShard]) -> None:
        amaxes = self._amaxes(shards, self.reduced_rows)
        for shard in shards:
            shard.handle.amaxes, reduced = amaxes.get(shard, (None, None))
            if reduced is not None and self.layout.gathers_codes_alone(shard.shard_spec):
                shard.handle.scale = self._scales_of(reduced)

    @override
    def copy_scales(self, shards: Sequence[LocalShard]) -> None:
        shards = [s for s in shards if self.layout.gathers_codes_alone(s.shard_spec)]
        grids = [s.data.planes[0].scale.to(torch.float32) for s in shards]
        reduced = self.reduce_rows(shards, grids, self.reduced_rows)
        for shard, scales in zip(shards, reduced, strict=True):
            shard.handle.scale = scales.to(self.layout.format.scale_dtype)

    @override
    def cast(self, shards: Sequence[LocalShard]) -> list[tuple[Tensor, ...]]:
        planes = [self._quantize(s, s.handle.amaxes) for s in shards]
        return [self.layout.pack(p, s.shard_spec) for p, s in zip(planes, shards, strict=True)]

    @override
    def planes(self, shards: Sequence[LocalShard]) -> list[Planes]:
        amaxes = self._amaxes(shards, self.split_rows)
        return [self._quantize(s, amaxes.get(s, (None,))[0]) for s in shards]

    def _quantize(self, shard: LocalShard, amaxes: Tensor | None) -> Planes:
        """Quantize a shard, with reduced amaxes of its blocks if shard boundaries split some."""
        both, reduced = self.layout.columnwise, None
        if amaxes is not None:
            amaxes = amaxes.to(shard.data.device)
            reduced = {"amax_columnwise": amaxes.t().contiguous()} if both else {"amax": amaxes}
        block_offset = self.block_offset(shard)
        return quantize_planes(
            self.quant_spec, shard.data, True, both, block_offset=block_offset, block_amaxes=reduced
        )

    def _scales_of(self, amaxes: Tensor) -> Tensor:
        """Return the scales of blocks with these amaxes, as the operators compute them."""
        quant_spec = self.quant_spec
        if not quant_spec.format.microscaled:
            return quant_spec.scale_from_amax(amaxes)
        zeros = amaxes.new_zeros(()).expand(amaxes.numel(), 32)
        options: dict[str, Any] = {**quant_spec.block_options, "amax": amaxes.view(-1, 1)}
        dtypes = quant_spec.fp8_dtype, quant_spec.format.scale_dtype
        scale = _quantize_blocks(zeros, dtypes[0], (1, 32), dtypes[1], **options)[1]
        return cast(Tensor, scale.view(amaxes.shape))

    # --- blocks of several ranks -----------------------------------------------------------------

    def reduced_rows(self, shard_spec: ShardSpec) -> tuple[int, ...]:
        """Return the rows of blocks of each matrix whose amaxes are reduced for an all-gather.

        If codes are gathered without scales, these are all rows.
        """
        if self.layout.gathers_codes_alone(shard_spec):
            return tuple(range(self.layout.format.scale_shape(*shard_spec.matrix_shape)[0]))
        return self.split_rows(shard_spec)

    def _amaxes(
        self, shards: Sequence[LocalShard], rows_of: RowsOf
    ) -> dict[LocalShard, tuple[Tensor, Tensor]]:
        """Return the amaxes of the blocks of shards that have rows of blocks to reduce.

        Returns:
            For each of these shards, the amaxes of its own blocks and of the reduced rows.
        """
        shards = [s for s in shards if rows_of(s.shard_spec)]
        grids = [self.block_amaxes(s, s.data) for s in shards]
        reduced = self.reduce_rows(shards, grids, rows_of)
        found = {}
        for shard, grid, rows in zip(shards, grids, reduced, strict=True):
            own = grid.to(shard.device)
            places, indices = self.places(shard, own, rows_of)
            copy_rows(rows, indices, own, places)
            found[shard] = own, rows
        return found

    def block_amaxes(self, shard: LocalShard, values: Tensor) -> Tensor:
        """Return the amaxes of the blocks that a shard with these values touches."""
        offset, batched = self.block_offset(shard), shard.shard_spec.batched
        return cast(Tensor, _block_amax(values, self.split_block, offset, batched))

    def block_offset(self, shard: LocalShard) -> int:
        """Return how many rows of the shard's first row of blocks are on the ranks before it."""
        return shard.shard_spec.row_offset % self.layout.height

    def places(
        self, shard: LocalShard, grid: Tensor, rows_of: RowsOf
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return which rows of a shard's grid are among the rows to reduce, and their indices.

        Args:
            shard: the shard.
            grid: (..., rows, columns of blocks) that the shard touches.
            rows_of: the rows to reduce.
        """
        first, count = shard.shard_spec.row_offset // self.layout.height, grid.shape[-2]
        rows = enumerate(rows_of(shard.shard_spec))
        found = {row - first: i for i, row in rows if 0 <= row - first < count}
        return tuple(found), tuple(found.values())

    def reduce_rows(
        self, shards: Sequence[LocalShard], grids: Sequence[Tensor], rows_of: RowsOf
    ) -> list[Tensor]:
        """Reduce values of blocks over the ranks.

        Args:
            shards: the shards.
            grids: for each, a value per block that it touches: fp32 (..., rows, columns of blocks).
            rows_of: the rows of blocks to reduce.

        Returns:
            For each shard the values of these rows, on the mesh's device.
        """
        if not shards:
            return []
        parts: list[Tensor] = []
        for shard, grid in zip(shards, grids, strict=True):
            rows = len(rows_of(shard.shard_spec))
            part = grid.new_zeros((*grid.shape[:-2], rows, grid.shape[-1]))
            places, indices = self.places(shard, grid, rows_of)
            copy_rows(grid, places, part, indices)
            parts.append(part.to(shard.device))
        sizes = [part.numel() for part in parts]
        reduced = self.reduce(shards, torch.cat([part.view(-1) for part in parts]), sizes)
        return [r.view_as(p) for p, r in zip(parts, reduced.split(sizes), strict=True)]


def copy_rows(src: Tensor, src_rows: tuple[int, ...], dst: Tensor, rows: tuple[int, ...]) -> None:
    """Copy rows (dimension -2) of one tensor to rows of another."""
    if rows:  # most shards of a weight touch no reduced row
        chosen = src.index_select(-2, index_tensor(src_rows, src.device))
        dst.index_copy_(-2, index_tensor(rows, dst.device), chosen)
