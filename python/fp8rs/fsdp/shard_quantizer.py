"""Quantize high-precision shards for their all-gathers: amaxes, one all-reduce, casts.

A `ShardQuantizer` works in two steps. `update_scales` computes what depends on other ranks: the
scales of per-tensor formats, or the amaxes of blocks that shard boundaries split. It runs one
all-reduce per process group for all shards together. `cast` quantizes shards without a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from fp8rs.model.shard_spec import ShardSpec
from fp8rs.quantize.cast import quantize_planes
from fp8rs.quantize.planes import Planes
from fp8rs.quantize.spec import QuantSpec
from fp8rs.scaling.delayed import DelayedScalingState
from fp8rs.scaling.reductions import index_tensor, reduce_packed_
from fp8rs.scaling.streams import StreamDependency

from .layout import AllGatherLayout, flat, split_block_rows
from .param import LocalShard, ParamHandle, set_scales

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
        shard_spec, format = handle.shard_spec, self.layout.format
        last = int(shard_spec.batched and not self.layout.columnwise)
        if not format.per_tensor and shard_spec.shard_dim > last:
            raise ValueError(
                f"shard_placement_fn puts {handle.fqn} on Shard({shard_spec.shard_dim}), but "
                f"weights in format {format.name!r} are gathered by rows: use Shard(0)"
            )
        local = handle.local if data is None else data
        data = getattr(local, "high_precision", local)
        return LocalShard(handle, data, shard_spec, shard_spec.mesh_device(local.device))

    def split_rows(self, shard_spec: ShardSpec) -> tuple[int, ...]:
        """Return the rows of blocks of each matrix that shard boundaries split."""
        if shard_spec.shards_batch:
            return ()
        padded = shard_spec.padded_length * shard_spec.rows_per_index
        return split_block_rows(
            shard_spec.matrix_shape[0], padded, shard_spec.num_shards, self.layout.height
        )

    def shares_scales(self, shard_spec: ShardSpec) -> bool:
        """Return whether several ranks have elements of one scale of a weight."""
        if self.layout.format.per_tensor:
            return bool(shard_spec.matrix_groups)
        return bool(self.split_rows(shard_spec))

    def reduce(
        self, shards: Sequence[LocalShard], values: Tensor, sizes: Sequence[int] = ()
    ) -> Tensor:
        """Reduce maxima of shards over their ranks, in place: one all-reduce per process group.

        Args:
            shards: the shards.
            values: maxima of the shards, fp32 and contiguous.
            sizes: number of maxima of each shard. By default, the number of its matrices.
        """
        ends = list(accumulate(sizes or [shard.matrices for shard in shards]))
        specs = [shard.shard_spec for shard in shards]
        if self.layout.format.per_tensor:
            groups = [spec.matrix_groups for spec in specs]
        else:  # with tensor parallelism, blocks start at the edge of each rank's part
            groups = [spec.shard_groups for spec in specs]
        return reduce_packed_(values, zip(map(range, [0, *ends], ends), groups, strict=True))

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
        masters, pack = [s for s in shards if not s.is_fp8], self.layout.pack
        cast = iter(self.cast(masters) if masters else ())
        return [pack(s.data.planes, s.shard_spec) if s.is_fp8 else next(cast) for s in shards]

    def cast(self, shards: Sequence[LocalShard]) -> list[tuple[Tensor, ...]]:
        """Quantize master weights with the scales on their handles, and pack them."""
        raise NotImplementedError

    def record_gathered(self, handles: Iterable[ParamHandle]) -> None:
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
        scales = [s.data.planes[0].scale.view(-1).to(s.device) for s in shards]
        set_scales(shards, torch.cat(scales))

    @override
    def cast(self, shards: Sequence[LocalShard]) -> list[tuple[Tensor, ...]]:
        buffers, codes = self.layout.allocate(
            [s.shard_spec for s in shards], [s.data.shape for s in shards], shards[0].device
        )
        for shard, buffer in zip(shards, buffers, strict=True):
            if (numel := shard.data.numel()) < buffer.numel():
                buffer[numel:].zero_()  # padding is gathered too
        self._cast_into(shards, codes)
        return [
            (b, flat(s.handle.scale.view(-1, 1), s.shard_spec.padded_length, 1))
            if s.shard_spec.shards_batch
            else (b,)
            for b, s in zip(buffers, shards, strict=True)
        ]

    def _cast_into(self, shards: Sequence[LocalShard], codes: Sequence[Tensor]) -> None:
        scales = torch.hstack([s.handle.scale for s in shards])
        _multi_quantize([s.data for s in shards], scales, codes, True)

    @override
    def planes(self, shards: Sequence[LocalShard]) -> list[Planes]:
        amaxes = self._amaxes(shards)
        scales = self.quant_spec.scale_from_amax(amaxes)
        counts = [shard.matrices for shard in shards]
        each = zip(shards, amaxes.split(counts), scales.split(counts), strict=True)
        made: list[Planes] = []
        for shard, amax, scale in each:
            scale = scale.to(shard.data.device)
            scale = scale if shard.shard_spec.batched else scale.view(())
            made.append(quantize_planes(self.quant_spec, shard.data, True, False, scale=scale))
            shard.handle.fit_history(scale, amax, exact=True)
        return made

    def _amaxes(self, shards: Sequence[LocalShard]) -> Tensor:
        """Return the amaxes (n,) of all matrices: one launch per device, one all-reduce."""
        by_device = groupby((s.data for s in shards), lambda data: data.device)
        found = [_multi_amax(list(values), True).to(shards[0].device) for _, values in by_device]
        return self.reduce(shards, found[0] if len(found) == 1 else torch.cat(found))


class DelayedShardQuantizer(TensorwiseShardQuantizer):
    """Per-tensor scales from the histories of delayed scaling. Batched weights have current ones.

    The cast of a forward records the amaxes and finds non-finite values. A shard with such values
    gets the scale NaN on this rank only, without a collective. The rank's loss becomes NaN, and so
    do the gradients of all ranks.
    """

    def __init__(self, quant_spec: QuantSpec, histories: DelayedScalingState) -> None:
        super().__init__(quant_spec)
        self._histories = histories

    @override
    def update_scales(self, shards: Sequence[LocalShard]) -> None:
        if batched := [s for s in shards if s.shard_spec.batched]:
            super().update_scales(batched)
        if single := [s for s in shards if not s.shard_spec.batched]:
            set_scales(single, self._scales(single))

    def _scales(self, shards: Sequence[LocalShard]) -> Tensor:
        """Return scales (n,) from the histories, and from the values of weights without a history.

        The measured amax begins the history, also for a layer that never runs.
        """
        slots = self._recorded(shards)[1]
        scales = self._histories.pack(shards[0].device).scale[slots, 0, 0].clone()
        modules: list[Any] = [shard.handle.module for shard in shards]
        # The host knows which scales are not 0.
        if places := [i for i, module in enumerate(modules) if not module.fp8_ready[0]]:
            new = [shards[i] for i in places]
            amaxes = self._amaxes(new)
            finite, at = amaxes.isfinite(), index_tensor(tuple(places), scales.device)
            known = (scales[at] > 0) & finite
            scales[at] = torch.where(known, scales[at], self.quant_spec.scale_from_amax(amaxes))
            if self._histories.records(modules):
                recorded, slots = self._recorded(new)
                seen = recorded[slots]
                recorded[slots] = torch.where(finite, seen.maximum(amaxes), seen)
        return scales

    def _cast_into(self, shards: Sequence[LocalShard], codes: Sequence[Tensor]) -> None:
        pairs = list(zip(shards, codes, strict=True))
        # The forward has cast the values that a backward gathers.
        again = self._histories.tracker.in_backward
        if known := [pair for pair in pairs if again or pair[0].shard_spec.batched]:
            super()._cast_into(*zip(*known, strict=True))
        if len(known) == len(pairs):
            return
        shards, codes = zip(*(p for p in pairs if not p[0].shard_spec.batched), strict=True)
        scales = torch.stack([s.handle.scale for s in shards])
        recorded, slots = self._recorded(shards)
        record = self._histories.records(s.handle.module for s in shards)
        amaxes = recorded[slots] if record else torch.zeros_like(scales)
        used = _multi_quantize_delayed([s.data for s in shards], scales, amaxes, codes)
        set_scales(shards, used)
        ready = StreamDependency(shards[0].device, [*(s.handle.scale for s in shards), amaxes])
        for shard, amax in zip(shards, amaxes.unbind(), strict=True):
            shard.handle.ready = ready
            shard.handle.unrecorded = None if record else amax
        if record and not isinstance(slots, slice):
            recorded[slots] = amaxes

    @override
    def record_gathered(self, handles: Iterable[ParamHandle]) -> None:
        for handle in handles:
            amax = handle.unrecorded
            if amax is not None and handle.local is None:
                assert handle.ready is not None
                handle.ready.wait()
                recorded, slot = self._histories.pack(amax.device).weight_amaxes([handle.index])
                recorded[slot] = recorded[slot].maximum(amax)
                handle.unrecorded = None

    def _recorded(self, shards: Sequence[LocalShard]) -> tuple[Tensor, Any]:
        """Return the recorded amaxes of all weights (layers,), and the shards' places in them."""
        pack = self._histories.pack(shards[0].device)
        return pack.weight_amaxes([s.handle.index for s in shards])


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
