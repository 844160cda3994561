"""Regions: a store, and the elements of it that a quantized tensor has, in their order."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fp8rs.tensor import windows
from fp8rs.tensor.planes import Plane
from fp8rs.tensor.spec import Planes
from fp8rs.tensor.store import Store
from fp8rs.tensor.windows import Rectangle, Span, Window


class Region(NamedTuple):
    """Some elements of a store's matrix.

    Attributes:
        store: the planes.
        window: which elements; None is all of them, in order.
        shape: the logical shape.
    """

    store: Store
    window: Window | None
    shape: torch.Size

    @property
    def planes(self) -> Planes:
        """The planes of these elements, which share memory with the store's; None cuts blocks."""
        store = self.store
        if self.window is None:
            return store.rowwise, store.columnwise
        return windows.shown(store.rowwise, store.columnwise, self.window, store.matrix)

    @property
    def rectangle(self) -> Rectangle | None:
        """The rows and columns that these are; None where they are none."""
        window = windows.whole(self.shape) if self.window is None else self.window
        return windows.rectangle(window, self.store.matrix)

    @property
    def box(self) -> tuple[Span, ...] | None:
        """The rows and columns that these are in order, after the matrices of a batch.

        None if they are other elements, or in another order.
        """
        window, matrix = self.window, self.store.matrix
        if window is None:
            return tuple(Span(0, n) for n in matrix)
        box = self.rectangle
        if not self.store.batched or box is not None:
            if box is None or box.transposed:
                return None
            return (box.rows, *(Span(0, n) for n in matrix[1:])) if matrix[2:] else box[:2]
        size, stride, offset = window
        numel = math.prod(matrix[1:])
        if not size or (size[0] > 1 and stride[0] != numel) or not numel:
            return None
        first = offset // numel
        part = windows.rectangle(Window(size[1:], stride[1:], offset % numel), matrix[1:])
        if part is None or part.transposed:
            return None
        return Span(first, size[0]), part.rows, part.cols

    @property
    def hull(self) -> Rectangle:
        """The least rows and columns with all of these that cut no block."""
        store = self.store
        window = windows.whole(self.shape) if self.window is None else self.window
        return windows.hull(window, store.matrix, store.format, store.has, store.lead)

    @property
    def is_whole(self) -> bool:
        """Whether these are all elements of the matrix, in order."""
        window = self.window
        if window is None:
            return True
        return window.contiguous and window.numel == math.prod(self.store.matrix)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized elements as a plain contiguous tensor.

        Args:
            dtype: float32, bfloat16, float16 or float64.

        Raises:
            RuntimeError: the storage was freed by a reshard.
        """
        if dtype == torch.float64:  # which fp32 holds exactly
            return self.values(torch.float32).double()
        row, col = self.planes
        plane = row if row is not None else col
        if plane is None:
            return self._read(dtype)
        plane.check_live("this quantized tensor")
        values = plane.dequantize(dtype)
        return values if row is not None else values.mT.contiguous().view(self.shape)

    def _read(self, dtype: torch.dtype) -> Tensor:
        """The values of elements that have no planes."""
        store, window = self.store, self.window
        assert window is not None
        if window.numel == 0:
            return torch.empty(self.shape, dtype=dtype, device=store.any_plane.data.device)
        store.any_plane.check_live("this quantized tensor")
        box = self.hull
        values = store.read(box, dtype)
        part = windows.within(window, box, store.matrix).of(values)
        if part.numel() < values.numel():  # which are not to be kept for a part of them
            return part.clone(memory_format=torch.contiguous_format)
        return part.contiguous()

    def made(self, name: str, operation: str) -> Plane:
        """The plane of that name, made from the other one.

        Raises:
            ValueError: the blocks are not square.
        """
        row, col = self.planes
        if name == "columnwise":
            assert row is not None
            return row.transposed(name, operation)
        assert col is not None
        made = col.transposed(name, operation)
        return Plane(made.data.view(self.shape), made.scale, made.format, made.lead)

    def update_usage(self, rowwise: bool | None, columnwise: bool | None) -> None:
        """Make (True) or drop (False) planes of the whole store; None leaves a plane as it is.

        Raises:
            ValueError: no plane would be left, or the missing plane cannot be made.
        """
        store = self.store
        kept: list[Plane | None] = []
        for name, plane, wanted in (
            ("rowwise", store.rowwise, rowwise),
            ("columnwise", store.columnwise, columnwise),
        ):
            if wanted and plane is None:
                plane = self.made(name, f"update_usage({name}=True)")
            kept.append(None if wanted is False else plane)
        if kept == [None, None]:
            raise ValueError("update_usage(rowwise, columnwise) would leave no plane")
        store.rowwise, store.columnwise = kept
