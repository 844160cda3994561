"""The planes that quantized tensors are views of, and observers of writes to them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8rs._torch import is_traced, note_write
from fp8rs.quantize.cast import quantize_planes, requantize_plane
from fp8rs.quantize.formats import BlockFormat, split_batch
from fp8rs.quantize.planes import Box, Plane, Planes, as_bytes, transpose_dims
from fp8rs.quantize.spec import QuantSpec

#: Why a quantized tensor cannot be copied as the bytes of one storage, and what to do instead.
NO_SINGLE_MEMORY = (
    "its codes and scales are separate tensors (rowwise.data, rowwise.scale), so it has no single "
    "block of memory. Asynchronous saves of torch copy tensors as one block. To save a checkpoint "
    "in the background use fp8rs.checkpoint.async_save, or pass fp8rs.checkpoint.Model(model) to "
    "dcp.async_save in place of model.state_dict()"
)

#: A delayed scale to read and the amax to raise, each fp32 of one element.
Delayed = tuple[Tensor, Tensor]


class WriteKind(Enum):
    """What an operator wrote to a quantized tensor."""

    VALUES = auto()  #: values that do not depend on the previous ones (fills, random numbers)
    COPY = auto()  #: values of another tensor, which may be the previous ones (a broadcast, a load)
    MERGED_COPY = auto()  #: a copy, and the previous values of other elements of the same rows
    ARITHMETIC = auto()  #: the results of arithmetic on the dequantized values
    EXACT_ARITHMETIC = auto()  #: the results of arithmetic on the values before rounding
    CODES = auto()  #: codes and scales


#: Kinds of writes after which elements that did not change keep their codes.
_KEEPING_CODES = (WriteKind.MERGED_COPY, WriteKind.ARITHMETIC, WriteKind.EXACT_ARITHMETIC)


@dataclass(slots=True, eq=False)
class Write:
    """A write to a tensor that shares the planes of a weight.

    Attributes:
        kind: what is written. After arithmetic, elements that did not change keep their codes, and
            blocks without a changed element keep their scales. After other writes, this holds only
            if the values do not fill their blocks.
        values: the values to write, in the shape of the tensor. None for codes.
        exact_values: for exact arithmetic, the values before it, float32 in the shape of the
            tensor. For other kinds None.
        unchanged: for copies, where a value equals the dequantized one from before, in the shape of
            the tensor. For other kinds None.
        changed: for copies and arithmetic, whether any value differs from the one before. A bool ()
            on the device. For other kinds None.
        lost: for arithmetic on dequantized values, whether all its changes were lost to rounding. A
            bool () on the device. For other kinds None.
    """

    kind: WriteKind
    values: Tensor | None = None
    exact_values: Tensor | None = None
    unchanged: Tensor | None = None
    changed: Tensor | None = None
    lost: Tensor | None = None


class WriteObserver(Protocol):
    """Observes writes to the planes of a weight.

    Attributes:
        init_value: the values from before the first rounding, on the CPU, or None.
    """

    init_value: Tensor | None

    @property
    def detects_lost_writes(self) -> bool:
        """Whether to find out if arithmetic is lost to rounding."""

    def observes(self, storage: PlaneStorage) -> bool:
        """Return whether planes may belong to the weight, and not to a copy of it."""

    def exact_values(self, tensor: Any) -> Tensor | None:
        """Return the values that codes were rounded from: of a master, or from before conversion.

        Args:
            tensor: a tensor of consecutive elements that shares the weight's planes.

        Returns:
            float32 values in the shape of the tensor and on its device. None if they are not known.
        """

    def observe_write(self, tensor: Any, write: Write) -> None:
        """Notify that a tensor that shares the weight's planes was written.

        Called on every rank that writes, also on one with an empty shard.

        Args:
            tensor: the tensor that was written.
            write: what was written.
        """

    def forget_init(self) -> None:
        """Free the values from before the first rounding. Later writes do not keep any."""


@dataclass(slots=True, eq=False)
class PlaneStorage:
    """The planes that a tensor shares with its aliases and views.

    Attributes:
        rowwise, columnwise: the planes, of which at least one is not None.
        spec: how written values are quantized. None means the planes' format with default options.
        delayed: for delayed scaling, the scale to read and the amax to raise.
        observer: observes writes to a parameter's planes. Storages that are made from this one
            share it.
        padded: FSDP2 has allocated the planes of a shard with padding (`fp8rs.tensor.copies`). The
            first copy into them sets the size of the shard.
        gathered: FSDP2 has gathered the planes' bytes, and frees and refills their storage.
    """

    rowwise: Plane | None
    columnwise: Plane | None
    spec: QuantSpec | None = None
    delayed: Delayed | None = None
    observer: WriteObserver | None = None
    padded: bool = False
    gathered: bool = False

    def over(self, rowwise: Plane | None, columnwise: Plane | None) -> PlaneStorage:
        """Return a storage of other planes with this spec, delayed scale and observer."""
        return PlaneStorage(rowwise, columnwise, self.spec, self.delayed, self.observer)

    @property
    def active_observer(self) -> WriteObserver | None:
        """The observer, if these planes belong to its weight and not to a copy of it."""
        observer = self.observer
        if observer is None or not observer.observes(self):
            return None
        return observer

    @property
    def block_offset(self) -> int:
        """The number of rows by which the first blocks begin before the matrix."""
        offset = 0
        if self.rowwise is not None:
            offset = self.rowwise.block_offset[0]
        if self.columnwise is not None:
            offset = max(offset, self.columnwise.block_offset[1])
        return offset

    @property
    def any_plane(self) -> Plane:
        """The rowwise plane, or the columnwise one if the rowwise one is missing."""
        plane = self.rowwise if self.rowwise is not None else self.columnwise
        assert plane is not None
        return plane

    @property
    def format(self) -> BlockFormat:
        """The format of the planes."""
        return self.any_plane.format

    @property
    def matrix(self) -> tuple[int, ...]:
        """The shape (rows, cols) of one matrix, or (E, rows, cols) of a batch."""
        if self.rowwise is not None:
            batch, matrix = split_batch(self.rowwise.data.shape, self.rowwise.batched)
            return *batch, *matrix
        assert self.columnwise is not None
        return transpose_dims(self.columnwise.data.shape)

    @property
    def batched(self) -> bool:
        """Whether the planes have a batch of matrices."""
        return self.any_plane.batched

    @property
    def has_planes(self) -> tuple[bool, bool]:
        """Whether there is a rowwise plane, and whether there is a columnwise plane."""
        return self.rowwise is not None, self.columnwise is not None

    @property
    def shares_scale(self) -> bool:
        """Whether both planes have one and the same scale tensor."""
        row = self.rowwise
        col = self.columnwise
        return row is not None and col is not None and row.scale is col.scale

    def tensors(self) -> list[Tensor]:
        """Return the data and scales of all planes."""
        tensors: list[Tensor] = []
        for plane in (self.rowwise, self.columnwise):
            if plane is not None:
                tensors += plane.data, plane.scale
        return tensors

    @property
    def rows_and_row_size(self) -> tuple[int, int]:
        """The number of rows, and of elements per row. For a batch, matrices replace rows."""
        matrix = self.matrix
        return matrix[0], math.prod(matrix[1:])

    def rows_around(self, begin: int, end: int) -> slice:
        """Return the rows, or matrices of a batch, of all blocks with one of these elements."""
        height, row_size = self.rows_and_row_size
        if begin == 0 and end == height * row_size:
            return slice(0, height)

        # The rows of a block: a columnwise plane stores the transposed matrix.
        block_rows = []
        if self.rowwise is not None:
            block_rows.append(self.format.block[0])
        if self.columnwise is not None:
            block_rows.append(self.format.block[1])
        if not row_size or (-1 in block_rows and not self.batched):
            return slice(0, height)

        start = begin // row_size
        stop = -(-end // row_size)
        if self.batched:
            return slice(start, stop)
        # If the blocks of the two planes differ, the larger one consists of several smaller ones.
        block = max(block_rows)
        offset = self.block_offset
        start = (start + offset) // block * block - offset
        stop = -(-(stop + offset) // block) * block - offset
        return slice(max(start, 0), min(stop, height))

    def box(self, rows: slice) -> Box:
        """Return the box of whole rows, or of whole matrices of a batch."""
        return (rows, *(slice(0, n) for n in self.matrix[1:]))

    def box_of(self, view: Tensor) -> Box | None:
        """Return the part whose elements a view has, in order. None if they do not form a part."""
        row_size = self.rows_and_row_size[1]
        if not row_size:
            return None
        offset = view.storage_offset()
        first_row = offset // row_size
        first_col = offset % row_size
        if not first_col and not view.numel() % row_size and view.is_contiguous():
            return self.box(slice(first_row, first_row + view.numel() // row_size))

        shape = view.shape
        stride = view.stride()
        *_, height, cols = self.matrix
        matrices: Box = ()
        if self.batched:
            if len(shape) < 3 or stride[0] != row_size:
                return None
            # A row of the batch is a matrix. Find out where the view begins in each matrix.
            matrices = (slice(first_row, first_row + shape[0]),)
            first_row = first_col // cols
            first_col = first_col % cols
            shape = shape[1:]
            stride = stride[1:]
        elif len(shape) != 2:
            return None

        # The dimensions in front of the last one are rows.
        expected_stride = [cols * math.prod(shape[i + 1 : -1]) for i in range(len(shape) - 1)]
        end_row = first_row + math.prod(shape[:-1])
        end_col = first_col + shape[-1]
        if stride != (*expected_stride, 1) or end_col > cols or end_row > height:
            return None
        return *matrices, slice(first_row, end_row), slice(first_col, end_col)

    def planes_of(self, view: Tensor) -> Planes:
        """Return the planes of a view: see `QuantizedTensor.planes`."""
        box = self.box_of(view)
        if box is None or (self.batched and box != self.box(box[0])):
            return None, None
        row, col = self.part(box)
        first_row = box[-2].start
        first_col = box[-1].start
        row = _of_whole_blocks(row, (first_row, first_col))
        col = _of_whole_blocks(col, (first_col, first_row))

        box_shape = [span.stop - span.start for span in box]
        batch, matrix = split_batch(view.shape, self.batched)
        if self.batched and not batch and box_shape[0] == 1:  # one matrix of a batch
            row = row and row[0]
            col = col and col[0]
            box_shape = box_shape[1:]
        if box_shape != [*batch, *matrix]:  # the rows have another length
            return None, None

        if row is not None:
            return Plane(row.data.view(view.shape), row.scale, row.format, row.block_offset), col
        if self.rowwise is not None:
            # Where the planes differ, the tensor has the values of the rowwise one.
            return None, None
        return None, col

    def part(self, box: Box) -> Planes:
        """Return a part of the planes, over the same memory."""
        row = self.rowwise
        col = self.columnwise
        return row and row.part(box), col and col.part(transpose_dims(box))

    def rows(self, rows: slice) -> Planes:
        """Return whole rows of the planes, or whole matrices of a batch, over the same memory."""
        return self.part(self.box(rows))

    def read(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Dequantize whole rows, or whole matrices of a batch, into a new contiguous tensor."""
        row, col = self.rows(rows)
        shape = rows.stop - rows.start, *self.matrix[1:]
        if row is not None:
            return row.dequantize(dtype).view(shape)
        assert col is not None
        return col.dequantize(dtype).mT.contiguous().view(shape)

    def write(
        self,
        write: Write,
        offset: int,
        spec: QuantSpec,
        delayed: Delayed | None,
        observer: WriteObserver | None = None,
    ) -> bool:
        """Quantize the values of a write into consecutive elements.

        A block has one scale. The other elements of a block that is written in part keep their
        values: the scale stays, or changes by a power of two.

        Args:
            write: the values: float32, bfloat16 or float16, on the device of the planes. If there
                is an observer, what changed is filled in.
            offset: the first element to write. For a batch, whole matrices are written.
            spec: how to quantize, in the format of the planes.
            delayed: for delayed scaling, the scale to read and the amax to raise.
            observer: the observer of the weight that the planes belong to, or None. A copy of all
                of the weight's own values then changes no byte.

        Returns:
            Whether anything was written.

        Raises:
            RuntimeError: the storage was freed by a reshard.
        """
        self.any_plane.check_has_memory("this quantized tensor")
        if self.batched and not spec.batched:
            spec = replace(spec, batched=True)

        values = write.values
        assert values is not None
        numel = values.numel()
        height, row_size = self.rows_and_row_size
        rows = self.rows_around(offset, offset + numel)
        fills_rows = numel == (rows.stop - rows.start) * row_size
        keeps_codes = write.kind in _KEEPING_CODES
        # The ranks of a group reduce amaxes together, including ranks that write nothing.
        if not numel and spec.group is None and (keeps_codes or height * row_size):
            return False
        if not numel or is_traced(values):
            observer = None

        start = offset - rows.start * row_size
        elements = slice(start, start + numel)
        if observer is not None and write.kind in (WriteKind.COPY, WriteKind.MERGED_COPY):
            old_values = self.read(rows, values.dtype).view(-1)[elements]
            write.unchanged = old_values.view(values.shape) == values
            write.changed = ~write.unchanged.all()
        if keeps_codes or not fills_rows:
            self._merge(write, rows, elements, spec, delayed, observer)
        else:
            self._overwrite(write, values, rows, spec, delayed)
        return True

    def _merge(
        self,
        write: Write,
        rows: slice,
        elements: slice,
        spec: QuantSpec,
        delayed: Delayed | None,
        observer: WriteObserver | None,
    ) -> None:
        """Write some elements of rows. Other elements keep their values, and maybe their codes.

        Args:
            write: the values.
            rows: all rows, or matrices of a batch, of the blocks to write.
            elements: the elements of ``rows`` to write.
            spec: how to quantize.
            delayed: for delayed scaling, the scale to read and the amax to raise.
            observer: the observer to notify, or None.
        """
        values = write.values
        assert values is not None
        before = self.read(rows, values.dtype)
        after = values.reshape(-1)
        if after.numel() != before.numel():
            after = before.view(-1).clone()
            after[elements] = values.reshape(-1)
        if write.exact_values is not None:
            before.view(-1)[elements] = write.exact_values.reshape(-1)
        after = after.view(before.shape)
        changed = _differs(before, after)

        old = self.rows(rows)
        amax = None if delayed is None else delayed[1]
        new = self._requantized(old, after, changed, spec, amax)
        is_arithmetic = write.kind in (WriteKind.ARITHMETIC, WriteKind.EXACT_ARITHMETIC)
        if observer is not None and is_arithmetic:
            write.changed = changed.any()
            if write.kind is WriteKind.ARITHMETIC and observer.detects_lost_writes:
                write.lost = write.changed & _have_same_values(old, new)
        self.copy_planes_(old, new)

    def _overwrite(
        self, write: Write, values: Tensor, rows: slice, spec: QuantSpec, delayed: Delayed | None
    ) -> None:
        """Write all elements of rows, or of matrices of a batch, with new scales."""
        old = self.rows(rows)
        scale = None
        amax = None
        if delayed is not None:
            scale, amax = delayed
        new = quantize_planes(
            spec,
            values.reshape(rows.stop - rows.start, *self.matrix[1:]),
            *self.has_planes,
            scale=scale,
            amax=amax,
            declare_mutation=True,
            block_offset=0 if rows.start else self.block_offset,
        )
        if write.changed is not None and spec.group is None:
            # The values may have been rounded to a dtype that cannot represent the scale. A scale
            # that is computed from them would move the codes.
            new = _select_planes(~write.changed, old, new)
        self.copy_planes_(old, new)

    def _requantized(
        self,
        old: Planes,
        new_values: Tensor,
        changed: Tensor,
        spec: QuantSpec,
        delayed_amax: Tensor | None,
    ) -> Planes:
        """Return the planes of rows after a write. Blocks that do not change keep their bytes.

        Args:
            old: the planes of the rows before the write.
            new_values: the values after the write.
            changed: bool of that shape, whether the write changes an element.
            spec: how to quantize.
            delayed_amax: with delayed scaling, the amax to raise.
        """

        def requantized(plane: Plane, new_values: Tensor, changed: Tensor) -> Plane:
            old_values = plane.dequantize(torch.float32).view(new_values.shape)
            # If there are two planes, `changed` depends on the rowwise one. If only the columnwise
            # one has a NaN, the value replaces it when any element of its block changes.
            is_new = changed | old_values.isnan()
            values = torch.where(is_new, new_values.to(torch.float32), old_values)
            return requantize_plane(spec, plane, values, changed, delayed_amax)

        row, col = old
        if row is not None:
            row = requantized(row, new_values, changed)
        if col is not None:
            if row is not None and row.format.square:
                col = row.transposed("columnwise", "a write")
            else:
                col = requantized(col, new_values.mT, changed.mT)
        return row, col

    def copy_planes_(self, parts: Planes, planes: Planes, non_blocking: bool = False) -> None:
        """Copy the codes and scales of planes into parts of this storage's planes."""
        storage_planes = self.rowwise, self.columnwise
        for plane, part, new in zip(storage_planes, parts, planes, strict=True):
            if part is None:
                continue
            assert plane is not None and new is not None
            data = new.data
            if data.shape != part.data.shape:
                data = data.reshape(part.data.shape)
            part.data.copy_(data, non_blocking=non_blocking)
            # A compiled graph may have saved the codes. Below autograd, a part has its own version
            # counter, so increment the counter of the plane.
            note_write(plane.data)
            if not (plane is self.columnwise and self.shares_scale):
                part.scale.copy_(new.scale, non_blocking=non_blocking)


def _of_whole_blocks(plane: Plane | None, starts: tuple[int, int]) -> Plane | None:
    """Return a part of a plane, or None if it begins within a block of the plane."""
    if plane is None:
        return None
    for offset, start in zip(plane.block_offset, starts, strict=True):
        if offset and start:
            return None
    return plane


def _differs(old: Tensor, new: Tensor) -> Tensor:
    """Return where values differ.

    A NaN that replaces a NaN is not a change, and neither is a zero of the other sign.
    """
    return (new != old) & ~(new.isnan() & old.isnan())


def _have_same_values(old: Planes, new: Planes) -> Tensor:
    """Return whether planes have the same values, as a bool () on the device.

    Codes and scales may differ, because a scale may have changed by a power of two. If there are
    two planes, a tensor has the values of the rowwise one.
    """
    index = 0 if old[0] is not None else 1
    old_plane = old[index]
    new_plane = new[index]
    assert old_plane is not None and new_plane is not None
    old_values = old_plane.dequantize(torch.float32)
    new_values = new_plane.dequantize(torch.float32)
    return ~_differs(old_values, new_values.view(old_values.shape)).any()


def _select_planes(keep_old: Tensor, old: Planes, new: Planes) -> Planes:
    """Return the old planes where ``keep_old``, a bool (), is true, and else the new ones."""

    def select(old_tensor: Tensor, new_tensor: Tensor) -> Tensor:
        new_bytes = as_bytes(new_tensor).view(old_tensor.shape)
        return torch.where(keep_old, as_bytes(old_tensor), new_bytes).view(old_tensor.dtype)

    planes: list[Plane | None] = []
    for old_plane, new_plane in zip(old, new, strict=True):
        if old_plane is None or new_plane is None:
            planes.append(None)
            continue
        data = select(old_plane.data, new_plane.data)
        scale = select(old_plane.scale, new_plane.scale)
        planes.append(Plane(data, scale, old_plane.format, old_plane.block_offset))
    return planes[0], planes[1]
