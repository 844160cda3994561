"""Shards to planes with a scale a block or a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8rs.tensor.planes import Plane
from fp8rs.tensor.spec import Planes, QuantSpec, plane_leads

from .gathered import Pass, Shard
from .maker import Maker
from .param import ParamHandle
from .placement import Placement

_block_amax = torch.ops.fp8rs.block_amax.default
_quantize_blocks = torch.ops.fp8rs.quantize_blocks.default


class BlockMaker(Maker):
    """A scale a block: blocks are those of the whole weight.

    A shard is quantized by itself where its rows align with the blocks. Where FSDP2's cut goes
    through a block, the amaxes of the blocks so cut are reduced over the shards first, which
    gives the bytes that the unsharded weight has; it costs a second read of the shard and a
    part in the forward's one all-reduce.
    """

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__(spec)
        self.height = self.codec.height
        #: The blocks whose amaxes ranks compare: those of the plane that the cuts go through.
        self.cut_block = [self.height, 1] if self.codec.both else list(spec.format.block)

    def check(self, weight: ParamHandle, placement: Placement) -> None:
        if placement.dim != 0:
            raise ValueError(
                f"shard_placement_fn puts {weight.fqn} on Shard({placement.dim}), but "
                f"weights in format {self.spec.format.name!r} are gathered by rows: use Shard(0)"
            )

    def groups(self, shard: Shard) -> tuple[Any, ...]:
        return shard.placement.shard_groups

    def size(self, shard: Shard) -> int:
        width = self.cut_block[1]
        return len(self.cuts(shard.placement)) * -(-shard.placement.whole[1] // width)

    def make(self, shards: Sequence[Shard], precomputed: Tensor | None, record: bool) -> Pass:
        self._measure(shards)

        def cast(places: Sequence[int]) -> None:
            for shard in (shards[place] for place in places):
                if not shard.offloaded:
                    shard.inputs = self.make_offloaded(shard.data, shard)

        return Pass(shards, cast)

    def make_offloaded(self, data: Tensor, shard: Shard) -> tuple[Tensor, ...]:
        return self.codec.encode(self._planes(data, shard), shard.placement)

    def planes(self, shards: Sequence[Shard]) -> list[Planes]:
        self._measure(shards)
        return [self._planes(shard.data, shard) for shard in shards]

    def _planes(self, data: Tensor, shard: Shard) -> Planes:
        spec, both, offset = self.spec, self.codec.both, shard.placement.offset
        options: dict[str, Any] = {**spec.block_options, "row_offset": offset % self.height}
        if shard.amaxes is not None:
            amaxes = shard.amaxes.to(data.device)
            options["amax_columnwise" if both else "amax"] = (
                amaxes.t().contiguous() if both else amaxes
            )
        row, row_scale, col, col_scale = _quantize_blocks(
            data, spec.fp8_dtype, spec.format.block, spec.format.scale_dtype, True, both, **options
        )
        down, along = plane_leads(spec.format, offset)
        return (
            Plane(row, row_scale, spec.format, down),
            Plane(col, col_scale, spec.format, along) if both else None,
        )

    # --- blocks that are cut ---------------------------------------------------------------------

    def _measure(self, shards: Sequence[Shard]) -> None:
        """Find the amaxes of shards whose blocks are cut, reduced as far as they are."""
        cut = [shard for shard in shards if self.cuts(shard.placement)]
        if not cut:
            return
        grids = [_block_amax(s.data, self.cut_block, s.placement.offset % self.height) for s in cut]
        for shard, grid, rows in zip(cut, grids, self.reduce_cut(cut, grids), strict=True):
            shard.amaxes = grid.to(shard.device)
            for place, common in zip(self._places(shard), rows, strict=True):
                if 0 <= place < grid.shape[0]:
                    shard.amaxes[place] = common

    def _places(self, shard: Shard) -> list[int]:
        """Where rows of blocks that are cut lie, from the first one that a shard touches on."""
        first = shard.placement.offset // self.height
        return [row - first for row in self.cuts(shard.placement)]

    def reduce_cut(self, shards: Sequence[Shard], grids: Sequence[Tensor]) -> list[Tensor]:
        """Reduce over the ranks what shards have of rows of blocks that are cut.

        Args:
            shards: with such rows.
            grids: of each a value for each block that it touches: fp32 (rows, columns of blocks).

        Returns:
            For each shard the rows of `cuts`, on the mesh's device.
        """
        parts: list[Tensor] = []
        for shard, grid in zip(shards, grids, strict=True):
            places = self._places(shard)
            part = grid.new_zeros((len(places), grid.shape[1]))
            for i, place in enumerate(places):
                if 0 <= place < grid.shape[0]:
                    part[i] = grid[place]
            parts.append(part.to(shard.device))
        reduced = self.reduce(shards, torch.cat([part.view(-1) for part in parts]))
        sizes = [part.numel() for part in parts]
        return [r.view_as(p) for p, r in zip(parts, reduced.split(sizes), strict=True)]
