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
        kind: what was written.
        values: the values that were written, in the shape of the tensor. None for codes.
        unchanged: for copies, where a value equals the dequantized one from before, in the shape of
            the tensor. For other kinds None.
        changed: for copies and arithmetic, whether any value differs from the one before. A bool ()
            on the device. For other kinds None.
        lost: for arithmetic on dequantized values, whether all its changes were lost to rounding. A
            bool () on the device. For other kinds None.
    """

    kind: WriteKind
    values: Tensor | None = None
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
        return observer if observer is not None and observer.observes(self) else None

    @property
    def block_offset(self) -> int:
        """The number of rows by which the first blocks begin before the matrix."""
        row, col = self.rowwise, self.columnwise
        return max(
            row.block_offset[0] if row is not None else 0,
            col.block_offset[1] if col is not None else 0,
        )

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
        row, col = self.rowwise, self.columnwise
        return row is not None and col is not None and row.scale is col.scale

    def tensors(self) -> list[Tensor]:
        """Return the data and scales of all planes."""
        planes = [p for p in (self.rowwise, self.columnwise) if p is not None]
        return [t for p in planes for t in (p.data, p.scale)]

    @property
    def rows_and_row_size(self) -> tuple[int, int]:
        """The number of rows, and of elements per row. For a batch, matrices replace rows."""
        matrix = self.matrix
        return matrix[0], math.prod(matrix[1:])

    def rows_around(self, begin: int, end: int) -> slice:
        """Return the rows, or matrices of a batch, of all blocks with one of these elements."""
        height, size = self.rows_and_row_size
        if begin == 0 and end == height * size:
            return slice(0, height)
        blocks = [
            block for block, has in zip(self.format.block, self.has_planes, strict=True) if has
        ]
        if not size or (-1 in blocks and not self.batched):
            return slice(0, height)
        start, stop = begin // size, -(-end // size)
        if self.batched:
            return slice(start, stop)
        block, offset = max(blocks), self.block_offset
        start = max((start + offset) // block * block - offset, 0)
        return slice(start, min(-(-(stop + offset) // block) * block - offset, height))

    def box(self, rows: slice) -> Box:
        """Return the box of whole rows, or of whole matrices of a batch."""
        return (rows, *(slice(0, n) for n in self.matrix[1:]))

    def box_of(self, view: Tensor) -> Box | None:
        """Return the part whose elements a view has, in order. None if they do not form a part."""
        shape, stride, size = view.shape, view.stride(), self.rows_and_row_size[1]
        if not size:
            return None
        first, rest = view.storage_offset() // size, view.storage_offset() % size
        if not rest and not view.numel() % size and view.is_contiguous():
            return self.box(slice(first, first + view.numel() // size))
        *_, height, cols = self.matrix
        matrices: Box = ()
        if self.batched:
            if len(shape) < 3 or stride[0] != size:
                return None
            matrices = (slice(first, first + shape[0]),)
            shape, stride, first, rest = shape[1:], stride[1:], rest // cols, rest % cols
        elif len(shape) != 2:
            return None
        # The dimensions in front of the last one are rows.
        steps = [cols * math.prod(shape[i + 1 : -1]) for i in range(len(shape) - 1)]
        end = first + math.prod(shape[:-1])
        if stride != (*steps, 1) or rest + shape[-1] > cols or end > height:
            return None
        return *matrices, slice(first, end), slice(rest, rest + shape[-1])

    def planes_of(self, view: Tensor) -> Planes:
        """Return the planes of a view: see `QuantizedTensor.planes`."""
        box = self.box_of(view)
        if box is None or (self.batched and box != self.box(box[0])):
            return None, None
        row, col = self.part(box)
        starts = box[-2].start, box[-1].start
        row, col = _of_whole_blocks(row, starts), _of_whole_blocks(col, starts[::-1])
        part = [span.stop - span.start for span in box]
        batch, matrix = split_batch(view.shape, self.batched)
        if self.batched and not batch and part[0] == 1:  # one matrix of a batch
            row, col = row and row[0], col and col[0]
            part = part[1:]
        if part != [*batch, *matrix]:  # the rows have another length
            return None, None
        if row is not None:
            return Plane(row.data.view(view.shape), row.scale, row.format, row.block_offset), col
        # Where the planes differ, the tensor has the values of the rowwise one.
        return None, col if self.rowwise is None else None

    def part(self, box: Box) -> Planes:
        """Return a part of the planes, over the same memory."""
        row, col = self.rowwise, self.columnwise
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
        offset: int,
        values: Tensor,
        spec: QuantSpec,
        delayed: Delayed | None,
        kind: WriteKind = WriteKind.VALUES,
        exact_values: Tensor | None = None,
        observer: WriteObserver | None = None,
    ) -> Write | None:
        """Quantize values into consecutive elements.

        A block has one scale. The other elements of a block that is written in part keep their
        values: the scale stays, or changes by a power of two.

        Args:
            offset: the first element to write. For a batch, whole matrices are written.
            values: float32, bfloat16 or float16, on the device of the planes.
            spec: how to quantize, in the format of the planes.
            delayed: for delayed scaling, the scale to read and the amax to raise.
            kind: what is written. After arithmetic, elements that did not change keep their codes,
                and blocks without a changed element keep their scales. After other writes, this
                holds only if the values do not fill their blocks.
            exact_values: for exact arithmetic, the values before it.
            observer: the observer of the weight that the planes belong to, or None. A copy of all
                of the weight's own values then changes no byte.

        Returns:
            What was written. None if nothing was.

        Raises:
            RuntimeError: the storage was freed by a reshard.
        """
        self.any_plane.check_has_memory("this quantized tensor")
        if self.batched and not spec.batched:
            spec = replace(spec, batched=True)
        count, (height, size) = values.numel(), self.rows_and_row_size
        rows = self.rows_around(offset, offset + count)
        first, end = rows.start * size, rows.stop * size
        whole = count == end - first
        keep = kind in _KEEPING_CODES
        # The ranks of a group reduce amaxes together, including ranks that write nothing.
        if not count and spec.group is None and (keep or height * size):
            return None

        write = Write(kind, values)
        written = slice(offset - first, offset - first + count)
        parts = self.rows(rows)
        observed = observer is not None and bool(count) and not is_traced(values)
        if observed and kind in (WriteKind.COPY, WriteKind.MERGED_COPY):
            before = self.read(rows, values.dtype).view(-1)
            write.unchanged = before[written].view(values.shape) == values
            write.changed = ~write.unchanged.all()

        if keep or not whole:
            before = self.read(rows, values.dtype)
            after = values.reshape(-1)
            if not whole:
                after = before.view(-1).clone()
                after[written] = values.reshape(-1)
            if exact_values is not None:
                before.view(-1)[written] = exact_values.reshape(-1)
            after = after.view(before.shape)
            changed = _differs(before, after)
            planes = self._requantized(rows, after, changed, spec, delayed)
            is_arithmetic = kind in (WriteKind.ARITHMETIC, WriteKind.EXACT_ARITHMETIC)
            if is_arithmetic and observed and observer is not None:
                changed_any = changed.any()
                write.changed = changed_any
                if kind is WriteKind.ARITHMETIC and observer.detects_lost_writes:
                    write.lost = changed_any & _have_same_values(parts, planes)
        else:
            scale, amax = (None, None) if delayed is None else delayed
            planes = quantize_planes(
                spec,
                values.reshape(rows.stop - rows.start, *self.matrix[1:]),
                *self.has_planes,
                scale=scale,
                amax=amax,
                declare_mutation=True,
                block_offset=0 if rows.start else self.block_offset,
            )
            if write.changed is not None and spec.group is None:
                # The values may have been rounded to a dtype that cannot represent the scale. A
                # scale that is computed from them would move the codes.
                planes = _select_planes(~write.changed, parts, planes)

        self.copy_planes_(parts, planes)
        return write

    def _requantized(
        self,
        rows: slice,
        new: Tensor,
        changed: Tensor,
        spec: QuantSpec,
        delayed: Delayed | None,
    ) -> Planes:
        """Return the planes of rows after a write. Blocks that do not change keep their bytes."""
        noted = None if delayed is None else delayed[1]

        def requantized(plane: Plane, new: Tensor, changed: Tensor) -> Plane:
            own = plane.dequantize(torch.float32).view(new.shape)
            # If there are two planes, `changed` depends on the rowwise one. If only the columnwise
            # one has a NaN, the value replaces it when any element of its block changes.
            values = torch.where(changed | own.isnan(), new.to(torch.float32), own)
            return requantize_plane(spec, plane, values, changed, noted)

        row, col = self.rows(rows)
        if row is not None:
            row = requantized(row, new, changed)
        if col is not None:
            if row is not None and row.format.square:
                col = row.transposed("columnwise", "a write")
            else:
                col = requantized(col, new.mT, changed.mT)
        return row, col

    def copy_planes_(self, parts: Planes, planes: Planes, non_blocking: bool = False) -> None:
        """Copy the codes and scales of planes into parts of this storage's planes."""
        wholes = self.rowwise, self.columnwise
        for whole, own, new in zip(wholes, parts, planes, strict=True):
            if own is None:
                continue
            assert whole is not None and new is not None
            data = new.data
            if data.shape != own.data.shape:
                data = data.reshape(own.data.shape)
            own.data.copy_(data, non_blocking=non_blocking)
            # A compiled graph may have saved the codes. Below autograd, a part has its own version
            # counter, so increment the counter of the whole plane.
            note_write(whole.data)
            if not (whole is self.columnwise and self.shares_scale):
                own.scale.copy_(new.scale, non_blocking=non_blocking)


def _of_whole_blocks(plane: Plane | None, starts: tuple[int, int]) -> Plane | None:
    """Return a part of a plane, or None if it begins within a block of the plane."""
    if plane is None or any(
        offset and start for offset, start in zip(plane.block_offset, starts, strict=True)
    ):
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
    row, col = old
    own, other = (row, new[0]) if row is not None else (col, new[1])
    assert own is not None and other is not None
    old_values = own.dequantize(torch.float32)
    new_values = other.dequantize(torch.float32)
    return ~_differs(old_values, new_values.view(old_values.shape)).any()


def _select_planes(keep_old: Tensor, old: Planes, new: Planes) -> Planes:
    """Return the old planes where ``keep_old``, a bool (), is true, and else the new ones."""

    def select(own: Tensor, other: Tensor) -> Tensor:
        selected = torch.where(keep_old, as_bytes(own), as_bytes(other).view(own.shape))
        return selected.view(own.dtype)

    planes: list[Plane | None] = []
    for own, other in zip(old, new, strict=True):
        if own is None or other is None:
            planes.append(None)
            continue
        data, scale = select(own.data, other.data), select(own.scale, other.scale)
        planes.append(Plane(data, scale, own.format, own.block_offset))
    return planes[0], planes[1]
