"""A scale a block: codes and scales are gathered, and a weight's blocks are those of the whole.

A shard is quantized by itself where its rows align with the blocks. Where FSDP2's cut goes
through a block, the amaxes of the blocks so cut are reduced over the shards first, which
gives the bytes that the unsharded weight has; it costs a second read of the shard and a
part in the forward's one all-reduce.

Square blocks and whole rows need one plane. Blocks along the rows (1x32) have a columnwise
plane of their own, which is gathered too and put together by a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from fp8rs.quantize.quantizers import BlockQuantizer
from fp8rs.scaling.reductions import index_tensor
from fp8rs.tensor.quantized import Plane

from .layouts import Layout, Measured, Planes, Reduce, Shard

if TYPE_CHECKING:
    from fp8rs.scaling.state import ModelState

    from .master_weight import MasterWeight
    from .placement import Placement

_block_amax = torch.ops.fp8rs.block_amax.default
_quantize_blocks = torch.ops.fp8rs.quantize_blocks.default


class BlockLayout(Layout):
    """Scales per block. What is ``known`` of an offloaded shard are its reduced amaxes."""

    def __init__(self, state: ModelState) -> None:
        super().__init__(state)
        rows, cols = self.format.block
        #: Whether the columnwise plane cannot be made from the rowwise one.
        self.both = not self.format.square and cols != -1
        #: The height of what a cut through the rows may go through; 1: nothing.
        self.height = cols if self.both else rows
        self.cut_block = [self.height, 1] if self.both else [rows, cols]
        #: How scales come from amaxes, as where a weight is quantized whole.
        self.options = cast(BlockQuantizer, state.weight_quantizer).options()

    def check(self, shard: Shard) -> None:
        if shard.placement.dim != 0:
            raise ValueError(
                f"shard_placement_fn puts {shard.slot.name} on Shard({shard.placement.dim}), but "
                f"weights in format {self.format.name!r} are gathered by rows: use Shard(0)"
            )

    def groups(self, shard: Shard) -> tuple[Any, ...]:
        return shard.placement.shard_groups

    # --- blocks that are cut ---------------------------------------------------------------------

    def measure(self, shards: Sequence[Shard]) -> Measured | None:
        parts: list[Tensor] = []
        sizes: list[int] = []
        for shard in shards:
            cuts = self._cuts(shard)
            sizes.append(0)
            if cuts:
                first, grid = self._amaxes(shard)
                out = grid.new_zeros((len(cuts), grid.shape[1]))
                for i, row in enumerate(cuts):
                    if first <= row < first + grid.shape[0]:
                        out[i] = grid[row - first]
                parts.append(out.view(-1).to(shard.device))
                sizes[-1] = out.numel()
                shard.known = grid.to(shard.device)
        return Measured(torch.cat(parts), sizes) if parts else None

    def _cuts(self, shard: Shard) -> tuple[int, ...]:
        p = shard.placement
        return cut_rows(p.whole[0], p.padded, p.ranks, self.height)

    def _amaxes(self, shard: Shard) -> tuple[int, Tensor]:
        """The amaxes of the blocks that the shard touches, and the first one's row."""
        offset = self._offset(shard.placement)
        grid: Tensor = _block_amax(shard.data, self.cut_block, offset % self.height)
        return offset // self.height, grid

    def _offset(self, placement: Placement) -> int:
        """The shard's first row in the whole weight."""
        return min(placement.rank * placement.padded, placement.whole[0])

    # --- quantizing ------------------------------------------------------------------------------

    def quantize(
        self,
        shards: Sequence[Shard],
        measured: Tensor | None,
        precomputed: Any,
        record: bool,
        reduce: Reduce,
    ) -> None:
        start = 0
        for shard in shards:
            amax = shard.known
            if amax is not None:
                assert measured is not None
                cuts = self._cuts(shard)
                reduced = measured[start : start + len(cuts) * amax.shape[1]]
                start += reduced.numel()
                first = self._offset(shard.placement) // self.height
                for row, values in zip(cuts, reduced.view(len(cuts), -1), strict=True):
                    if first <= row < first + amax.shape[0]:
                        amax[row - first] = values
            if shard.offloaded:
                shard.known = (shard.placement, amax)
            else:
                shard.inputs = self._bytes(shard.data, shard.placement, amax)
                shard.known = None

    def quantize_offloaded(
        self, master: MasterWeight, inputs: tuple[Tensor, ...], known: Any
    ) -> tuple[Tensor, ...]:
        return self._bytes(master.high_precision, *known)

    def _bytes(self, data: Tensor, placement: Placement, amax: Tensor | None) -> tuple[Tensor, ...]:
        """Codes and scales of a shard as flat uint8 tensors, as long as those of any rank."""
        options = {**self.options, "row_offset": self._offset(placement) % self.height}
        if amax is not None and self.both:
            options["amax_columnwise"] = amax.t().contiguous()
        elif amax is not None:
            options["amax"] = amax
        row, row_scale, col, col_scale = _quantize_blocks(
            data,
            self.fp8_dtype,
            list(self.format.block),
            self.format.scale_dtype,
            True,
            self.both,
            **options,
        )
        padded, cols = placement.padded, placement.whole[1]
        made = [
            flat(row, padded, cols),
            flat(row_scale, self._scale_rows(placement), row_scale.shape[1]),
        ]
        if self.both:
            blocks = touched(placement.whole[0], padded, placement.ranks, self.height)
            made += [flat(col, cols, padded), flat(col_scale, cols, blocks)]
        return tuple(made)

    def _scale_rows(self, placement: Placement) -> int:
        """Rows of scales that a rank gathers for the rowwise plane."""
        height = self.format.block[0]
        return touched(placement.whole[0], placement.padded, placement.ranks, height)

    # --- the whole weight ------------------------------------------------------------------------

    def inner_tensors(self, placement: Placement, device: torch.device) -> list[Tensor]:
        if not self.both:
            return []
        rows, cols = placement.whole
        return [torch.empty((cols, rows), dtype=torch.uint8, device=device)]

    def assemble(
        self,
        outputs: Sequence[Tensor],
        inner: Sequence[Tensor],
        placement: Placement,
        known: Any,
        shape: torch.Size,
    ) -> Planes:
        rows, cols = shape
        p, format = placement, self.format
        codes = outputs[0].view(self.fp8_dtype)[: shape.numel()].view(shape)
        count, blocks_a_row = format.scale_shape(rows, cols)
        scale = outputs[1].view(format.scale_dtype).view(-1, blocks_a_row)
        scale = pick(scale, count, scale_order(rows, p.padded, p.ranks, format.block[0]))
        row = Plane(codes, scale, format)
        if not self.both:
            return row, None

        with _unsafe_preserve_version_counter(inner[0]):
            shards = outputs[2].view(p.ranks, cols, p.padded)
            for i, part in enumerate(inner[0].split(p.padded, 1)):
                part.copy_(shards[i, :, : part.shape[1]])
        # Gathered as (rank, column, block): bring the blocks to the front to choose among them.
        scale = outputs[3].view(format.scale_dtype).view(p.ranks, cols, -1)
        blocks = scale.view(torch.uint8).transpose(1, 2).reshape(-1, cols)
        order = scale_order(rows, p.padded, p.ranks, self.height)
        blocks = pick(blocks, -(-rows // self.height), order)
        scale = blocks.t().contiguous().view(format.scale_dtype)
        return row, Plane(inner[0].view(self.fp8_dtype), scale, format)


def flat(t: Tensor, rows: int, cols: int) -> Tensor:
    """A matrix as flat uint8, padded with zeros to (rows, cols) elements."""
    t = t.contiguous()
    if t.shape == (rows, cols):
        return t.view(-1).view(torch.uint8)
    full = torch.zeros((rows, cols * t.itemsize), dtype=torch.uint8, device=t.device)
    if t.numel():
        full[: t.shape[0], : t.shape[1] * t.itemsize] = t.view(torch.uint8)
    return full.view(-1)


def pick(scale: Tensor, count: int, order: tuple[int, ...] | None) -> Tensor:
    """``count`` rows of a matrix of scales, in an order that `scale_order` gave."""
    if order is None:
        return scale[:count]
    chosen = scale.view(torch.uint8).index_select(0, index_tensor(order, scale.device))
    return chosen.view(scale.dtype)


# Rows of blocks of the given height in a matrix that is cut into shards of ``padded`` rows.


@lru_cache(maxsize=1024)
def touched(rows: int, padded: int, ranks: int, height: int) -> int:
    """The most rows of blocks that any shard touches."""
    most = 0
    for start in range(0, min(rows, ranks * padded), max(padded, 1)):
        end = min(start + padded, rows)
        most = max(most, -(-end // height) - start // height)
    return most


@lru_cache(maxsize=1024)
def cut_rows(rows: int, padded: int, ranks: int, height: int) -> tuple[int, ...]:
    """Those rows of blocks that lie in more than one shard."""
    cuts = (k * padded for k in range(1, ranks))
    return tuple(sorted({cut // height for cut in cuts if cut < rows and cut % height}))


@lru_cache(maxsize=1024)
def scale_order(rows: int, padded: int, ranks: int, height: int) -> tuple[int, ...] | None:
    """Where each row of blocks is among those gathered: in the first shard that touches it.

    None where they are in order already: that is cheaper to pass on than to see, at each gather.
    """
    each = touched(rows, padded, ranks, height)
    order = []
    for block in range(-(-rows // height)):
        shard = block * height // padded
        order.append(shard * each + block - shard * padded // height)
    return None if order == list(range(len(order))) else tuple(order)
