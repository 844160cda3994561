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
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fp8rs._torch import is_alias, preserve_version_counter
from fp8rs.model.shard_spec import ShardSpec
from fp8rs.quantize.formats import BlockFormat, split_batch
from fp8rs.quantize.planes import Plane, Planes, as_bytes
from fp8rs.scaling.reductions import index_tensor
from fp8rs.scaling.streams import StreamDependency
from fp8rs.tensor.plane_storage import PlaneStorage

#: Bytes between the starts of shards in one buffer, as an allocator would align them.
ALIGNMENT = 256


class Extent(NamedTuple):
    """The size of one tensor of a packed shard, with padding.

    Attributes:
        rows: number of rows.
        cols: number of columns, in elements.
        dtype: dtype of the elements: codes or scales.
    """

    rows: int
    cols: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.rows * self.cols * self.dtype.itemsize


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
        self.format = format
        self.fp8_dtype = fp8_dtype
        block_rows, block_cols = format.block  # -1 for all rows or columns
        has_whole_rows = block_cols == -1
        self.columnwise = not format.square and not has_whole_rows
        # A block of the columnwise plane lies along a column of the weight.
        self.height = block_cols if self.columnwise else max(block_rows, 1)
        #: The results of `extents`, because all-gathers read them.
        self._extents: WeakKeyDictionary[ShardSpec, list[Extent]] = WeakKeyDictionary()

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

    def gathers_codes_alone(self, spec: ShardSpec) -> bool:
        """Whether every rank has the scales of the whole weight."""
        return not spec.shards_batch and (self.format.per_tensor or spec.batched)

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
            The shards as flat uint8, with padding of zeros, and the codes of the shapes in them, as
            views that are not initialized.
        """
        padded_numels = [spec.padded_numel for spec in specs]
        sizes = [-(-numel // ALIGNMENT) * ALIGNMENT for numel in padded_numels]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)

        memory_of_shards = buffer.split_with_sizes(sizes)

        padded_shards = []
        codes = []
        for memory, padded_numel, shape in zip(
            memory_of_shards, padded_numels, shapes, strict=True
        ):
            padded_shard = first_elements(memory, padded_numel)
            numel = shape.numel()
            if numel < padded_numel:
                padded_shard[numel:].zero_()  # padding is gathered too
            padded_shards.append(padded_shard)
            codes.append(self.codes(padded_shard, shape))
        return padded_shards, codes

    def codes(self, buffer: Tensor, shape: torch.Size) -> Tensor:
        """Return the codes of shape ``shape`` in a flat uint8 buffer, as a view."""
        return first_elements(buffer, shape.numel()).view(self.fp8_dtype).view(shape)

    def pack(self, planes: Planes, spec: ShardSpec) -> tuple[Tensor, ...]:
        """Return the planes of a shard as flat uint8 tensors, as long as on any other rank.

        Scales that every rank has are not included.
        """
        if self.gathers_codes_alone(spec):
            row = planes[0]
            assert row is not None
            return (flat_bytes(row.data.reshape(1, -1), 1, spec.padded_numel),)

        gathered_planes = planes if self.columnwise else planes[:1]
        tensors = tensors_of(gathered_planes)
        packed = []
        for tensor, extent in zip(tensors, self.extents(spec), strict=True):
            if spec.batched:
                # One row for each matrix. Scales per tensor (E,) have one column.
                tensor = tensor.view(-1, 1) if tensor.dim() == 1 else tensor.flatten(1)
            packed.append(flat_bytes(tensor, extent.rows, extent.cols))
        return tuple(packed)

    def extents(self, spec: ShardSpec) -> list[Extent]:
        """Return the sizes of the tensors of a packed shard.

        These are the rowwise codes and scales, then the columnwise ones if they are gathered. A
        batched weight has one row for each matrix. Codes that are gathered alone are in one row.
        """
        extents = self._extents.get(spec)
        if extents is None:
            extents = self._compute_extents(spec)
            self._extents[spec] = extents
        return extents

    def _compute_extents(self, spec: ShardSpec) -> list[Extent]:
        if self.gathers_codes_alone(spec):
            return [Extent(1, spec.padded_numel, self.fp8_dtype)]
        if spec.batched:
            return self._extents_of_batch(spec)

        padded_rows = spec.padded_length
        scale_dtype = self.format.scale_dtype
        rows, cols = spec.unsharded_shape
        # A shard has whole rows, and the scales of all blocks that it touches.
        block_height = self.format.block[0]
        scale_rows = block_rows(rows, padded_rows, spec.num_shards, block_height)
        scale_cols = self.format.scale_shape(rows, cols)[1]
        codes = Extent(padded_rows, cols, self.fp8_dtype)
        scales = Extent(scale_rows, scale_cols, scale_dtype)
        if not self.columnwise:
            return [codes, scales]

        # The columnwise plane is transposed, so that the shard has whole columns of it.
        scales_per_col = block_rows(rows, padded_rows, spec.num_shards, self.height)
        columnwise_codes = Extent(cols, padded_rows, self.fp8_dtype)
        columnwise_scales = Extent(cols, scales_per_col, scale_dtype)
        return [codes, scales, columnwise_codes, columnwise_scales]

    def _extents_of_batch(self, spec: ShardSpec) -> list[Extent]:
        """Return the extents of a shard of whole matrices, with one row for each matrix."""
        padded_batch = spec.padded_length
        rows, cols = spec.matrix_shape
        plane_shapes = [(rows, cols)]
        if self.columnwise:
            plane_shapes.append((cols, rows))

        extents = []
        for plane_shape in plane_shapes:
            scales_per_matrix = prod(self.format.scale_shape(*plane_shape))
            extents.append(Extent(padded_batch, rows * cols, self.fp8_dtype))
            extents.append(Extent(padded_batch, scales_per_matrix, self.format.scale_dtype))
        return extents

    def nbytes(self, spec: ShardSpec) -> int:
        """Return the bytes of a packed shard."""
        return sum(extent.nbytes for extent in self.extents(spec))

    # --- unsharded weights -----------------------------------------------------------------------

    def inner_tensors(self, planes: Planes, spec: ShardSpec) -> tuple[Tensor, ...]:
        """Return the tensors of an unsharded weight besides the gathered ones.

        FSDP2 frees and allocates their memory.
        """
        rowwise, columnwise = planes
        assert rowwise is not None
        if self.gathers_codes_alone(spec):
            return ()  # every rank has the scales, which are not freed
        if spec.num_shards == 1:
            # FSDP2 owns the rowwise codes. `_copy_all_but_codes` has copied the others.
            return (rowwise.scale, *tensors_of([columnwise]))
        if spec.batched:
            return ()  # the planes are views of the gathered tensors
        # The columnwise plane is assembled by a copy.
        return tuple(tensors_of([columnwise]))

    def planes_of_last_unshard(
        self, last: PlaneStorage, outputs: Sequence[Tensor], spec: ShardSpec, scale: Tensor | None
    ) -> Planes | None:
        """Return the planes of the last unshard if FSDP2 gathered into their memory, else None.

        Building equal planes from the outputs takes several times as long. Comparing storages
        suffices, because the views of `unpack` begin where an output begins.
        """
        if self.gathers_codes_alone(spec):
            assert scale is not None
            row = last.rowwise
            if row is None or not is_alias(row.data, outputs[0]):
                return None
            return Plane(row.data, scale, self.format), None

        planes = last.rowwise, last.columnwise
        tensors = tensors_of(planes)
        if len(tensors) != len(outputs) or not all(map(is_alias, tensors, outputs)):
            return None
        return planes

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
        if self.gathers_codes_alone(spec):
            assert scale is not None
            codes = self.codes(outputs[0], torch.Size(spec.unsharded_shape))
            return Plane(codes, scale, self.format), None

        has_whole_weight = spec.num_shards == 1
        if has_whole_weight:
            outputs = self._copy_all_but_codes(outputs, last)
        if has_whole_weight or spec.batched:
            return self._view_planes(outputs, spec)

        row = self._join_rows(outputs[0], outputs[1], spec)
        if not self.columnwise:
            return row, None
        columnwise = last.columnwise if last else None
        if columnwise is None:
            columnwise = self._new_columnwise(spec, outputs[0].device)
        self._join_columns(columnwise, outputs[2], outputs[3], spec)
        return row, columnwise

    def _copy_all_but_codes(
        self, outputs: Sequence[Tensor], last: PlaneStorage | None
    ) -> tuple[Tensor, ...]:
        """Copy the tensors of one rank that FSDP2 has not copied: all but the rowwise codes.

        They may be the tensors of an FP8 shard itself. Writes to the shard would change them.
        """
        rowwise_codes, *others = outputs
        copies: Sequence[Tensor] = ()
        if last is not None:
            copies = last.tensors()[1:]  # all but the rowwise codes
        if len(copies) != len(others):  # at first, and after `update_usage`
            copies = [torch.empty_like(other) for other in others]

        flat_copies = tuple(copy.view(-1).view(torch.uint8) for copy in copies)
        with preserve_version_counter(flat_copies):
            torch._foreach_copy_(flat_copies, others)
        return rowwise_codes, *flat_copies

    def _view_planes(self, outputs: Sequence[Tensor], spec: ShardSpec) -> Planes:
        """Return the planes of a batch of whole matrices, or of a shard that is the whole weight.

        The gathered tensors are the planes, maybe with padding at their ends.
        """
        batch, (rows, cols) = split_batch(spec.unsharded_shape, spec.batched)
        codes = self.codes(outputs[0], torch.Size(spec.unsharded_shape))
        row = Plane(codes, self._scales(outputs[1], batch, rows, cols), self.format)
        if not self.columnwise:
            return row, None
        codes = self.codes(outputs[2], torch.Size((*batch, cols, rows)))
        return row, Plane(codes, self._scales(outputs[3], batch, cols, rows), self.format)

    def _scales(self, output: Tensor, batch: tuple[int, ...], rows: int, cols: int) -> Tensor:
        """Return the gathered scales of a batch of (rows, cols) matrices, or of one matrix."""
        shape = self.format.scale_shape(rows, cols, batch)
        return output.view(self.format.scale_dtype)[: prod(shape)].view(shape)

    def _join_rows(self, codes_output: Tensor, scales_output: Tensor, spec: ShardSpec) -> Plane:
        """Return the rowwise plane of a weight. Codes are a view, because shards are rows."""
        rows, cols = spec.unsharded_shape
        codes = self.codes(codes_output, torch.Size((rows, cols)))
        scale_rows, scale_cols = self.format.scale_shape(rows, cols)
        gathered_scales = scales_output.view(self.format.scale_dtype).view(-1, scale_cols)
        order = scale_order(rows, spec.padded_length, spec.num_shards, self.format.block[0])
        return Plane(codes, select_rows(gathered_scales, scale_rows, order), self.format)

    def _new_columnwise(self, spec: ShardSpec, device: torch.device) -> Plane:
        """Allocate a columnwise plane."""
        rows, cols = spec.unsharded_shape
        codes = torch.empty((cols, rows), dtype=self.fp8_dtype, device=device)
        scale_shape = self.format.scale_shape(cols, rows)
        scale = torch.empty(scale_shape, dtype=self.format.scale_dtype, device=device)
        return Plane(codes, scale, self.format)

    def _join_columns(
        self, columnwise: Plane, codes_output: Tensor, scales_output: Tensor, spec: ShardSpec
    ) -> None:
        """Copy the ranks' columns of codes and of scales into a columnwise plane.

        Args:
            columnwise: the plane, with codes (cols, rows) of a weight (rows, cols).
            codes_output: the gathered codes, (ranks, cols, padded rows of a shard).
            scales_output: the gathered scales, (ranks, cols, blocks of a shard).
            spec: how the weight is sharded.
        """
        rows, cols = spec.unsharded_shape
        padded = spec.padded_length
        ranks = spec.num_shards
        shards = codes_output.view(self.fp8_dtype).view(ranks, cols, padded)

        # Make rows of blocks (ranks * blocks, cols), to select them.
        scales = scales_output.view(self.format.scale_dtype).view(ranks, cols, -1)
        gathered_blocks = as_bytes(scales).transpose(1, 2).reshape(-1, cols)
        order = scale_order(rows, padded, ranks, self.height)
        blocks = select_rows(gathered_blocks, -(-rows // self.height), order)

        with preserve_version_counter((columnwise.data, columnwise.scale)):
            # The last shards may be empty, so there may be fewer columns than shards.
            columns_of_shards = columnwise.data.split(padded, 1)
            for shard, columns in zip(shards, columns_of_shards, strict=False):
                columns.copy_(shard[:, : columns.shape[1]])
            as_bytes(columnwise.scale).copy_(blocks.t())


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


def first_elements(buffer: Tensor, count: int) -> Tensor:
    """Return the first elements of a flat tensor.

    A slice takes the host 4 us, even if it selects all elements.
    """
    return buffer if buffer.numel() == count else buffer[:count]


def tensors_of(planes: Iterable[Plane | None]) -> list[Tensor]:
    """Return the codes and scales of planes."""
    tensors = []
    for plane in planes:
        if plane is not None:
            tensors.append(plane.data)
            tensors.append(plane.scale)
    return tensors


def flat_bytes(matrix: Tensor, rows: int, cols: int) -> Tensor:
    """Return a matrix as flat uint8, padded with zeros to (rows, cols) elements."""
    matrix = matrix.contiguous()
    if matrix.shape == (rows, cols):
        return matrix.view(-1).view(torch.uint8)

    itemsize = matrix.itemsize
    padded = torch.zeros((rows, cols * itemsize), dtype=torch.uint8, device=matrix.device)
    if matrix.numel():
        padded[: matrix.shape[0], : matrix.shape[1] * itemsize] = matrix.view(torch.uint8)
    return padded.view(-1)


def select_rows(scales: Tensor, count: int, order: tuple[int, ...] | None) -> Tensor:
    """Return ``count`` rows of a matrix of scales, in the order that `scale_order` returned."""
    if order is None:
        return scales[:count]
    rows = index_tensor(order, scales.device)
    return as_bytes(scales).index_select(0, rows).view(scales.dtype)


# --- blocks at shard boundaries -------------------------------------------------------------------
#
# A matrix of `rows` rows has shards of `padded` rows and blocks of `height` rows.


@lru_cache(maxsize=1024)
def block_rows(rows: int, padded: int, ranks: int, height: int) -> int:
    """Return the largest number of rows of blocks that a shard touches."""
    largest = 0
    for start in range(0, min(rows, ranks * padded), max(padded, 1)):
        end = min(start + padded, rows)
        first_block = start // height
        end_block = -(-end // height)
        largest = max(largest, end_block - first_block)
    return largest


@lru_cache(maxsize=1024)
def split_block_rows(rows: int, padded: int, ranks: int, height: int) -> tuple[int, ...]:
    """Return the rows of blocks that lie in more than one shard."""
    split_rows = set()
    for rank in range(1, ranks):
        boundary = rank * padded
        if boundary < rows and boundary % height:
            split_rows.add(boundary // height)
    return tuple(sorted(split_rows))


@lru_cache(maxsize=1024)
def scale_order(rows: int, padded: int, ranks: int, height: int) -> tuple[int, ...] | None:
    """Return the index of each row of blocks among the gathered ones, in the first shard with it.

    None if the gathered rows are in order, so that they need not be selected.
    """
    rows_per_shard = block_rows(rows, padded, ranks, height)
    order = []
    for block in range(-(-rows // height)):
        shard = block * height // padded
        first_block = shard * padded // height
        order.append(shard * rows_per_shard + block - first_block)
    in_order = order == list(range(len(order)))
    return None if in_order else tuple(order)
