"""What quantized tensors are views of: planes in a store, and whom those of a weight belong to."""

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

#: What a delayed scale is read from and the amax written to, each fp32 of one element.
Delayed = tuple[Tensor, Tensor]


class Owner(Protocol):
    """Whom the planes of a weight belong to. It is told of writes, and may take them over.

    What it is told of are quantized tensors: the weight, or others over its planes.

    Attributes:
        init_value: the values before the first rounding, on the CPU, where they are kept.
    """

    init_value: Tensor | None

    def write(self, tensor: Any, values: Tensor, keep: bool) -> bool:
        """``values`` are about to be written; True if they have been, with other ranks' shards.

        Called on every rank that writes, on those with an empty shard too.

        Args:
            tensor: what is written.
            values: what to.
            keep: what they leave as it was is to keep its value: see `QuantSpec.keep_scale`.
        """

    def take(self, tensor: Any, src: Any) -> bool:
        """As `write`, of the codes and scales of another tensor of this format and shape."""

    def has(self, store: Store) -> bool:
        """Whether these are the planes of the weight, or may be: not those of a copy."""

    def wrote(self, tensor: Any = None) -> None:
        """``tensor`` has been written; None: the planes were, with the scales of all ranks."""

    def room(self, like: Store, shape: Iterable[int], device: Any) -> Store:
        """Room for another part of the weight that ``like`` is of, in the place of zeros."""

    def forget_init(self) -> None:
        """Free the values from before the first rounding, and keep no others."""


class Store:
    """The planes that a tensor shares with its aliases and views.

    Attributes:
        rowwise, columnwise: the planes; one of them at least.
        spec: how what is written is quantized; None is the planes' format without options.
        delayed: for delayed scaling, the scale to read and the amax to write.
        owner: of a parameter's planes; new tensors that stand for the parameter have it too.
        first_copy: of room for a shard: takes the first tensor that is copied into a region of it,
            with its scales.
        gathered: FSDP2 has gathered the planes' bytes, and frees and refills them: they are no
            parameter's own.
    """

    __slots__ = ("columnwise", "delayed", "first_copy", "gathered", "owner", "rowwise", "spec")

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
        self.owner: Owner | None = None
        self.first_copy: Callable[[Any, Any], bool] | None = None
        self.gathered = False

    def over(self, rowwise: Plane | None, columnwise: Plane | None) -> Store:
        """Other planes that stand for the same: with this specification and owner."""
        new = Store(rowwise, columnwise, self.spec, self.delayed)
        new.owner = self.owner
        return new

    @property
    def told(self) -> Owner | None:
        """The owner, if these planes are its weight's and not those of a copy."""
        owner = self.owner
        return owner if owner is not None and owner.has(self) else None

    @property
    def lead(self) -> int:
        """Rows that the first blocks have in front of the matrix."""
        row, col = self.rowwise, self.columnwise
        return max(row.lead[0] if row is not None else 0, col.lead[1] if col is not None else 0)

    @property
    def any_plane(self) -> Plane:
        """The rowwise plane, or the columnwise one where there is no rowwise."""
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
        *batch, cols, rows = self.columnwise.data.shape
        return *batch, rows, cols

    @property
    def batched(self) -> bool:
        """Whether the planes are those of a batch of matrices."""
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
