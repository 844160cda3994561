"""Layout of all-gathered weights: planes to flat uint8 buffers and back, and split blocks.

Every rank passes equally long flat uint8 tensors to the all-gather. Square blocks and whole rows
need one plane. Blocks along the rows (1x32) have a columnwise plane of their own, which is gathered
too and assembled by a copy. A block that a shard boundary splits has its scale on every rank that
holds a part of it, and the first of them is used.

A batched weight (E, N, K) is gathered in one of two ways. On Shard(0), each rank passes codes and
scales of its matrices, and the gathered tensors are the planes. On Shard(1), FSDP2 concatenates
the ranks' tensors along dimension 1, so they must have the shard's shape. Ranks pass codes only,
and every rank has all scales already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from fp8rs._torch import is_alias, preserve_version_counter
from fp8rs.model.shard_spec import ShardSpec
from fp8rs.quantize.formats import BlockFormat, split_batch
from fp8rs.quantize.planes import Plane, Planes
from fp8rs.scaling.reductions import index_tensor
from fp8rs.scaling.streams import StreamDependency
from fp8rs.tensor.plane_storage import PlaneStorage

#: Bytes between the starts of shards in one buffer, as an allocator would align them.
ALIGNMENT = 256


class AllGatherLayout:
    """How weights of one format are laid out in all-gather buffers.

    Args:
        format: block format of the weight's planes.
        fp8_dtype: dtype of their codes.

    Attributes:
        columnwise: whether the columnwise plane is gathered too, because it cannot be derived from
            the rowwise one.
        height: number of rows of a block. A shard boundary can split blocks if it is above 1.
    """

    def __init__(self, format: BlockFormat, fp8_dtype: torch.dtype) -> None:
        self.format, self.fp8_dtype = format, fp8_dtype
        rows, cols = format.block
        self.columnwise = not format.square and cols != -1
        self.height = cols if self.columnwise else max(rows, 1)

    def split_rows(self, spec: ShardSpec) -> tuple[int, ...]:
        """Return the rows of blocks of each matrix that shard boundaries split."""
        if spec.shards_batch:
            return ()
        padded_rows = spec.padded_length * spec.rows_per_index
        return split_block_rows(spec.matrix_shape[0], padded_rows, spec.num_shards, self.height)

    def shares_scales(self, spec: ShardSpec) -> bool:
        """Return whether several ranks have elements of one scale of a weight."""
        if self.format.per_tensor:
            return bool(spec.matrix_groups)
        return bool(self.split_rows(spec))

    # --- shards ----------------------------------------------------------------------------------

    def allocate(
        self, specs: Sequence[ShardSpec], shapes: Sequence[torch.Size], device: torch.device
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Allocate the codes of shards with one scale per tensor, in one buffer.

        Args:
            specs: how the parameters are sharded.
            shapes: the shapes of the shards without padding.
            device: where to allocate.

        Returns:
            The shards with padding, as flat uint8, and the codes of the shapes in them, as views.
        """
        lengths = [spec.padded_numel for spec in specs]
        sizes = [-(-length // ALIGNMENT) * ALIGNMENT for length in lengths]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        parts = zip(buffer.split_with_sizes(sizes), lengths, strict=True)
        padded = [part[:length] for part, length in parts]
        return padded, [self.codes(*part) for part in zip(padded, shapes, strict=True)]

    def codes(self, buffer: Tensor, shape: torch.Size) -> Tensor:
        """Return the codes of shape ``shape`` in a flat uint8 buffer, as a view."""
        return buffer[: shape.numel()].view(self.fp8_dtype).view(shape)

    def pack(self, planes: Planes, spec: ShardSpec) -> tuple[Tensor, ...]:
        """Return the planes of a shard as flat uint8 tensors, as long as on any other rank.

        Scales that every rank has are not included.
        """
        extents, made = self.extents(spec), tensors_of(planes[: 1 + self.columnwise])
        if self.gathers_codes_alone(spec):
            return (flat(made[0].reshape(1, -1), *extents[0]),)
        if spec.batched:
            made = [t.view(-1, 1) if t.dim() == 1 else t.flatten(1) for t in made]
        return tuple(flat(t, *extent) for t, extent in zip(made, extents, strict=True))

    def gathers_codes_alone(self, spec: ShardSpec) -> bool:
        """Whether every rank has the scales of the whole weight."""
        return not spec.shards_batch and (self.format.per_tensor or spec.batched)

    def extents(self, spec: ShardSpec) -> tuple[tuple[int, int], ...]:
        """Return the rows and columns, in elements, of each matrix of a packed shard.

        These are the rowwise codes and scales, then the columnwise ones if they are gathered. A
        batched weight has one row for each matrix. Codes that are gathered alone are in one row.
        """
        if self.gathers_codes_alone(spec):
            return ((1, spec.padded_numel),)
        padded, ranks = spec.padded_length, spec.num_shards
        if spec.batched:
            codes = (padded, prod(spec.matrix_shape))
            directions = (spec.matrix_shape, spec.matrix_shape[::-1])[: 1 + self.columnwise]
            shapes = (self.format.scale_shape(*direction) for direction in directions)
            return tuple(e for shape in shapes for e in (codes, (padded, prod(shape))))
        rows, cols = spec.unsharded_shape
        scale_rows = block_rows(rows, padded, ranks, self.format.block[0])
        row = (padded, cols), (scale_rows, self.format.scale_shape(rows, cols)[1])
        if not self.columnwise:
            return row
        return (*row, (cols, padded), (cols, block_rows(rows, padded, ranks, self.height)))

    def nbytes(self, spec: ShardSpec) -> int:
        """Return the bytes of a packed shard."""
        sizes = (self.fp8_dtype.itemsize, self.format.scale_dtype.itemsize)
        extents = self.extents(spec)
        return sum(rows * cols * sizes[i % 2] for i, (rows, cols) in enumerate(extents))

    # --- unsharded weights -----------------------------------------------------------------------

    def inner_tensors(self, planes: Planes, spec: ShardSpec) -> tuple[Tensor, ...]:
        """Return the tensors of an unsharded weight besides the gathered ones.

        FSDP2 frees and allocates their memory.
        """
        if spec.num_shards == 1 and not self.gathers_codes_alone(spec):
            return tuple(tensors_of(planes)[1:])
        return () if spec.batched else tuple(tensors_of(planes[1:]))

    def refilled(
        self, last: PlaneStorage, outputs: Sequence[Tensor], spec: ShardSpec, scale: Tensor | None
    ) -> Planes | None:
        """Return the planes of the last unshard if FSDP2 gathered into their memory, else None.

        Building equal planes from the outputs takes several times as long. Comparing storages
        suffices, because the views of `unpack` begin where an output begins.
        """
        planes = last.rowwise, last.columnwise
        tensors = tensors_of(planes)
        if self.gathers_codes_alone(spec):
            assert scale is not None
            same = is_alias(tensors[0], outputs[0])
            return (Plane(tensors[0], scale, self.format), None) if same else None
        same = len(tensors) == len(outputs) and all(map(is_alias, tensors, outputs))
        return planes if same else None

    def unpack(
        self,
        outputs: Sequence[Tensor],
        spec: ShardSpec,
        scale: Tensor | None,
        last: PlaneStorage | None = None,
    ) -> Planes:
        """Return the planes of the unsharded weight, over the gathered tensors.

        Args:
            outputs: the gathered tensors, each with the ranks' tensors one after the other.
            spec: how the weight is sharded.
            scale: the scales of the whole weight, if every rank has them.
            last: the storage of the last unshard. Its `inner_tensors` are written again.
        """
        format = self.format
        codes = self.codes(outputs[0], torch.Size(spec.unsharded_shape))
        if self.gathers_codes_alone(spec):
            assert scale is not None
            return Plane(codes, scale, format), None
        if spec.num_shards == 1:
            # FSDP2 has copied the first tensor alone. The others may be an FP8 shard's own, so that
            # writes to the shard would change them.
            own = last.tensors()[1:] if last else []
            if len(own) + 1 != len(outputs):  # at first, and after `update_usage`
                own = list(map(torch.empty_like, outputs[1:]))
            memory = tuple(t.view(-1).view(torch.uint8) for t in own)
            with preserve_version_counter(memory):
                torch._foreach_copy_(memory, list(outputs[1:]))
            outputs = outputs[0], *memory
        batch, (rows, cols) = split_batch(spec.unsharded_shape, spec.batched)
        if batch or spec.num_shards == 1:
            row = Plane(codes, self._scales(outputs[1], batch, rows, cols), format)
            if not self.columnwise:
                return row, None
            codes = self.codes(outputs[2], torch.Size((*batch, cols, rows)))
            return row, Plane(codes, self._scales(outputs[3], batch, cols, rows), format)
        padded, ranks = spec.padded_length, spec.num_shards
        count, blocks_a_row = format.scale_shape(rows, cols)
        scale = outputs[1].view(format.scale_dtype).view(-1, blocks_a_row)
        scale = pick(scale, count, scale_order(rows, padded, ranks, format.block[0]))
        row = Plane(codes, scale, format)
        if not self.columnwise:
            return row, None

        columnwise = last.columnwise if last else None
        if columnwise is None:
            codes = torch.empty((cols, rows), dtype=self.fp8_dtype, device=codes.device)
            blocks = codes.new_empty(format.scale_shape(cols, rows), dtype=format.scale_dtype)
            columnwise = Plane(codes, blocks, format)
        shards = outputs[2].view(self.fp8_dtype).view(ranks, cols, padded)
        # Gathered as (rank, column, block). Blocks come first to be selected.
        scale = outputs[3].view(format.scale_dtype).view(ranks, cols, -1)
        blocks = scale.view(torch.uint8).transpose(1, 2).reshape(-1, cols)
        order = scale_order(rows, padded, ranks, self.height)
        blocks = pick(blocks, -(-rows // self.height), order)
        with preserve_version_counter((columnwise.data, columnwise.scale)):
            for shard, part in zip(shards, columnwise.data.split(padded, 1), strict=False):
                part.copy_(shard[:, : part.shape[1]])
            columnwise.scale.view(torch.uint8).copy_(blocks.t())
        return row, columnwise

    def _scales(self, output: Tensor, batch: tuple[int, ...], rows: int, cols: int) -> Tensor:
        """Return the gathered scales of a batch of (rows, cols) matrices, or of one matrix."""
        shape = self.format.scale_shape(rows, cols, batch)
        return output.view(self.format.scale_dtype)[: prod(shape)].view(shape)


@dataclass(eq=False, slots=True)
class AllGatherMetadata:
    """All-gather inputs of a shard, and what the post-all-gather hook needs besides the outputs.

    Attributes:
        layout: how weights of the parameter's format are gathered.
        shard_spec: how the parameter is sharded.
        scale: the scales on the parameter's handle.
        inputs: the tensors to gather. With one rank, FSDP2 passes on the first alone.
        ready: the work that wrote ``scale`` and ``inputs``.
    """

    layout: AllGatherLayout
    shard_spec: ShardSpec
    scale: Tensor | None
    inputs: tuple[Tensor, ...]
    ready: StreamDependency


def tensors_of(planes: Iterable[Plane | None]) -> list[Tensor]:
    """Return the codes and scales of planes."""
    return [t for plane in planes if plane is not None for t in (plane.data, plane.scale)]


def flat(t: Tensor, rows: int, cols: int) -> Tensor:
    """Return a matrix as flat uint8, padded with zeros to (rows, cols) elements."""
    t = t.contiguous()
    if t.shape == (rows, cols):
        return t.view(-1).view(torch.uint8)
    full = torch.zeros((rows, cols * t.itemsize), dtype=torch.uint8, device=t.device)
    if t.numel():
        full[: t.shape[0], : t.shape[1] * t.itemsize] = t.view(torch.uint8)
    return full.view(-1)


def pick(scale: Tensor, count: int, order: tuple[int, ...] | None) -> Tensor:
    """Return ``count`` rows of a matrix of scales, in the order that `scale_order` gave."""
    if order is None:
        return scale[:count]
    chosen = scale.view(torch.uint8).index_select(0, index_tensor(order, scale.device))
    return chosen.view(scale.dtype)


# --- blocks at shard boundaries -------------------------------------------------------------------
#
# A matrix of `rows` rows has shards of `padded` rows and blocks of `height` rows.


@lru_cache(maxsize=1024)
def block_rows(rows: int, padded: int, ranks: int, height: int) -> int:
    """Return the largest number of rows of blocks that a shard touches."""
    most = 0
    for start in range(0, min(rows, ranks * padded), max(padded, 1)):
        end = min(start + padded, rows)
        most = max(most, -(-end // height) - start // height)
    return most


@lru_cache(maxsize=1024)
def split_block_rows(rows: int, padded: int, ranks: int, height: int) -> tuple[int, ...]:
    """Return the rows of blocks that lie in more than one shard."""
    boundaries = (k * padded for k in range(1, ranks))
    return tuple(sorted({row // height for row in boundaries if row < rows and row % height}))


@lru_cache(maxsize=1024)
def scale_order(rows: int, padded: int, ranks: int, height: int) -> tuple[int, ...] | None:
    """Return where each row of blocks is among the gathered ones: in the first shard that has it.

    None if the gathered rows are in order, so that they need not be selected.
    """
    each = block_rows(rows, padded, ranks, height)
    order = []
    for block in range(-(-rows // height)):
        shard = block * height // padded
        order.append(shard * each + block - shard * padded // height)
    return None if order == list(range(len(order))) else tuple(order)
