"""Planes of a shard to the bytes that FSDP2 gathers, and gathered bytes to the whole's planes.

A codec knows one block format and where a shard lies; nothing of where planes come from. What goes
over the wire are flat uint8 tensors, equally long on all ranks. Square blocks and whole rows need
one plane. Blocks along the rows (1x32) have a columnwise plane of their own, which is gathered too
and put together by a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8rs._torch import preserve_version_counter
from fp8rs.scaling.reductions import index_tensor
from fp8rs.tensor.formats import BlockFormat
from fp8rs.tensor.planes import Plane
from fp8rs.tensor.spec import Planes

from .cuts import scale_order, touched
from .placement import Placement


class Codec:
    """How weights of one format are gathered.

    Args:
        format: of the weight's planes.
        fp8_dtype: of their codes.
    """

    def __init__(self, format: BlockFormat, fp8_dtype: torch.dtype) -> None:
        self.format, self.fp8_dtype = format, fp8_dtype
        rows, cols = format.block
        #: Whether the columnwise plane cannot be made from the rowwise one.
        self.both = not format.square and cols != -1
        #: The height of what a cut through the rows may go through; 1: nothing.
        self.height = cols if self.both else max(rows, 1)

    # --- a shard ---------------------------------------------------------------------------------

    def encode(self, planes: Planes, placement: Placement) -> tuple[Tensor, ...]:
        """The planes of a shard as flat uint8 tensors, as long as those of any rank.

        One scale a tensor is not among them: every rank has it.
        """
        row, col = planes
        assert row is not None
        extents = self.extents(placement)
        if self.format.per_tensor:
            return (flat(row.data.reshape(1, -1), *extents[0]),)
        made = [row.data, row.scale]
        if self.both:
            assert col is not None
            made += [col.data, col.scale]
        return tuple(flat(t, *extent) for t, extent in zip(made, extents, strict=True))

    def extents(self, placement: Placement) -> tuple[tuple[int, int], ...]:
        """Rows and columns, in elements, of each matrix that is gathered of a shard.

        These are the rowwise codes and scales, and the columnwise ones where they are gathered; of
        one scale a tensor the codes, in one row.
        """
        if self.format.per_tensor:
            return ((1, placement.padded_numel),)
        (rows, cols), padded, ranks = placement.whole, placement.padded, placement.ranks
        scale_rows = touched(rows, padded, ranks, self.format.block[0])
        row = (padded, cols), (scale_rows, self.format.scale_shape(rows, cols)[1])
        if not self.both:
            return row
        return (*row, (cols, padded), (cols, touched(rows, padded, ranks, self.height)))

    def nbytes(self, placement: Placement) -> int:
        """What a shard hands over to be gathered: the bytes of what `encode` gives."""
        sizes = (self.fp8_dtype.itemsize, self.format.scale_dtype.itemsize)
        extents = self.extents(placement)
        return sum(rows * cols * sizes[i % 2] for i, (rows, cols) in enumerate(extents))

    def room(self, buffer: Tensor, shape: torch.Size) -> Tensor:
        """Where the codes of a shard of ``shape`` are in the first of its gathered tensors."""
        return buffer[: shape.numel()].view(self.fp8_dtype).view(shape)

    # --- the whole weight ------------------------------------------------------------------------

    def inner_tensors(self, placement: Placement, device: torch.device) -> list[Tensor]:
        """Storage beside the gathered tensors that a whole weight needs; FSDP2 frees it too."""
        if not self.both:
            return []
        rows, cols = placement.whole
        blocks = cols, -(-rows // self.height) * self.format.scale_dtype.itemsize
        return [
            torch.empty(shape, dtype=torch.uint8, device=device) for shape in ((cols, rows), blocks)
        ]

    def inner_of(self, planes: Planes) -> list[Tensor]:
        """The same, of a whole weight that was decoded into them."""
        col = planes[1]
        return [t.view(torch.uint8) for t in (col.data, col.scale)] if self.both and col else []

    def decode(
        self,
        outputs: Sequence[Tensor],
        inner: Sequence[Tensor],
        placement: Placement,
        scale: Tensor | None,
        shape: torch.Size,
    ) -> Planes:
        """The planes of the whole weight over the gathered tensors.

        Args:
            outputs: what was gathered, each the ranks' tensors one after the other.
            inner: what `inner_tensors` gave, with memory.
            placement: the shard's.
            scale: of formats with one scale a tensor.
            shape: of the weight.
        """
        format = self.format
        codes = self.room(outputs[0], shape)
        if format.per_tensor:
            assert scale is not None
            return Plane(codes, scale, format), None
        rows, cols = shape
        padded, ranks = placement.padded, placement.ranks
        count, blocks_a_row = format.scale_shape(rows, cols)
        scale = outputs[1].view(format.scale_dtype).view(-1, blocks_a_row)
        scale = pick(scale, count, scale_order(rows, padded, ranks, format.block[0]))
        row = Plane(codes, scale, format)
        if not self.both:
            return row, None

        with preserve_version_counter(inner[0]):
            shards = outputs[2].view(ranks, cols, padded)
            for i, part in enumerate(inner[0].split(padded, 1)):
                part.copy_(shards[i, :, : part.shape[1]])
        # Gathered as (rank, column, block): bring the blocks to the front to choose among them.
        scale = outputs[3].view(format.scale_dtype).view(ranks, cols, -1)
        blocks = scale.view(torch.uint8).transpose(1, 2).reshape(-1, cols)
        order = scale_order(rows, padded, ranks, self.height)
        blocks = pick(blocks, -(-rows // self.height), order)
        with preserve_version_counter(inner[1]):
            inner[1].copy_(blocks.t())
        scale = inner[1].view(format.scale_dtype)
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
