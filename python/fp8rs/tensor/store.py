"""The planes that quantized tensors are views of, and observers of writes to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8rs._torch import note_write
from fp8rs.tensor import windows
from fp8rs.tensor.formats import BlockFormat, split
from fp8rs.tensor.planes import Plane
from fp8rs.tensor.spec import Planes, QuantSpec
from fp8rs.tensor.windows import Rectangle

#: Why a quantized tensor cannot be copied as the bytes of one storage, and what to do instead.
NO_SINGLE_MEMORY = (
    "its codes and scales are separate tensors (rowwise.data, rowwise.scale), so it has no single "
    "block of memory. Asynchronous saves of torch copy tensors as one block. To save a checkpoint "
    "in the background use fp8rs.checkpoint.async_save, or pass fp8rs.checkpoint.Model(model) to "
    "dcp.async_save in place of model.state_dict()"
)

#: A delayed scale to read and the amax to raise, each fp32 of one element.
Delayed = tuple[Tensor, Tensor]


class WriteObserver(Protocol):
    """Observes writes to the planes of a weight, and allocates planes for its shards.

    Attributes:
        init_value: the values from before the first rounding, on the CPU, or None.
    """

    init_value: Tensor | None

    def observes(self, store: Store) -> bool:
        """Return whether planes may belong to the weight, and not to a copy of it."""

    def observe_write(self, tensor: Any, values: Tensor | None, exact: bool) -> None:
        """Notify that a tensor that shares the weight's planes was written.

        Called on every rank that writes, also on one with an empty shard.

        Args:
            tensor: the tensor that was written.
            values: the values that were written to it. None if codes and scales were copied.
            exact: whether each value was rounded by itself: see `fp8rs.tensor.writes.quantize`.
        """

    def allocate(self, like: Store, shape: Iterable[int], device: Any) -> Store:
        """Allocate planes of zeros for another shard of the weight that ``like`` belongs to."""

    def forget_init(self) -> None:
        """Free the values from before the first rounding, and keep no others."""


class Store:
    """The planes that a tensor shares with its aliases and views.

    Attributes:
        rowwise, columnwise: the planes; one of them at least.
        spec: how what is written is quantized; None is the planes' format without options.
        delayed: for delayed scaling, the scale to read and the amax to write.
        observer: observes writes to a parameter's planes. New tensors of the parameter have it too.
        first_copy: for a shard that was just allocated, copies codes and scales of the first tensor
            that is written to it.
        gathered: FSDP2 has gathered the planes' bytes, and frees and refills them.
    """

    __slots__ = ("columnwise", "delayed", "first_copy", "gathered", "observer", "rowwise", "spec")

    def __init__(
        self,
        rowwise: Plane | None,
        columnwise: Plane | None,
        spec: QuantSpec | None = None,
        delayed: Delayed | None = None,
    ) -> None:
        self.rowwise = rowwise
        self.columnwise = columnwise
        self.spec = spec
        self.delayed = delayed
        self.observer: WriteObserver | None = None
        self.first_copy: Callable[[Any, Any], bool] | None = None
        self.gathered = False

    def over(self, rowwise: Plane | None, columnwise: Plane | None) -> Store:
        """Return a store of other planes with this specification and observer."""
        new = Store(rowwise, columnwise, self.spec, self.delayed)
        new.observer = self.observer
        return new

    @property
    def active_observer(self) -> WriteObserver | None:
        """The observer, if these planes belong to its weight and not to a copy of it."""
        observer = self.observer
        return observer if observer is not None and observer.observes(self) else None

    @property
    def lead(self) -> int:
        """Rows that the first blocks have in front of the matrix."""
        row, col = self.rowwise, self.columnwise
        return max(row.lead[0] if row is not None else 0, col.lead[1] if col is not None else 0)

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
            batch, matrix = split(self.rowwise.data.shape, self.rowwise.batched)
            return *batch, *matrix
        assert self.columnwise is not None
        shape = self.columnwise.data.shape
        return *shape[:-2], shape[-1], shape[-2]

    @property
    def batched(self) -> bool:
        """Whether the planes have a batch of matrices."""
        return self.any_plane.batched

    @property
    def has(self) -> tuple[bool, bool]:
        """Whether there is a rowwise plane, and a columnwise one."""
        return self.rowwise is not None, self.columnwise is not None

    @property
    def one_scale(self) -> bool:
        """Whether both planes have one and the same scale tensor."""
        row, col = self.rowwise, self.columnwise
        return row is not None and col is not None and row.scale is col.scale

    def tensors(self) -> list[Tensor]:
        """The data and scales of all planes."""
        planes = [p for p in (self.rowwise, self.columnwise) if p is not None]
        return [t for p in planes for t in (p.data, p.scale)]

    def read(self, box: Rectangle, dtype: torch.dtype) -> Tensor:
        """The values of some rows and columns, which cut no block: a new contiguous matrix."""
        shape = box.rows.length, box.cols.length
        if self.rowwise is not None:
            part = windows.part(self.rowwise, box)
            assert part is not None
            return part.dequantize(dtype).view(shape)
        assert self.columnwise is not None
        part = windows.part(self.columnwise, box, columnwise=True)
        assert part is not None
        return part.dequantize(dtype).mT.contiguous().view(shape)

    def part(self, box: Rectangle | None) -> Planes:
        """The planes of some rows and columns, which cut no block, or of all: they share memory."""
        row, col = self.rowwise, self.columnwise
        if box is None:
            return row, col
        if row is not None:
            data = row.data.view(self.matrix)  # of a copy what is written would be lost
            row = windows.part(Plane(data, row.scale, row.format, row.lead), box)
        return row, None if col is None else windows.part(col, box, columnwise=True)

    def put(self, planes: Planes, box: Rectangle | None = None, non_blocking: bool = False) -> None:
        """Write planes of some rows and columns, which cut no block, or of all."""
        wholes = self.rowwise, self.columnwise
        parts = zip(wholes, self.part(box), planes, (False, True), strict=True)
        for whole, own, new, turned in parts:
            if own is None:
                continue
            assert new is not None and whole is not None
            data = new.data
            if data.shape != own.data.shape:
                data = data.reshape(own.data.shape)
            own.data.copy_(data, non_blocking=non_blocking)
            # A compiled graph may have saved them. Below autograd a part has a version of its own.
            note_write(whole.data)
            if not (turned and self.one_scale):
                own.scale.copy_(new.scale, non_blocking=non_blocking)
