"""Views as plain geometry: which elements of a quantized matrix a view has, and in which order.

Every view that aten has is a size, strides and an offset over the values of the whole tensor, laid
out contiguously. From that follows what a view can show of the planes, and what a write through it
concerns: one set of functions for all view operators and all formats. Nothing here knows the
tensor classes.
"""

from __future__ import annotations

import builtins
import math
from typing import NamedTuple

from torch import Tensor

from fp8rs.tensor.formats import BlockFormat, split
from fp8rs.tensor.planes import Plane


class Window(NamedTuple):
    """The elements of a view: as of ``values.as_strided(size, stride, offset)``.

    ``values`` stands for the contiguous values of the tensor that it is a view of.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.size)

    @property
    def last(self) -> int:
        """The place of the last element; there must be one."""
        steps = zip(self.size, self.stride, strict=True)
        return self.offset + sum((size - 1) * stride for size, stride in steps)

    def of(self, values: Tensor) -> Tensor:
        """The view of these contiguous ``values``."""
        return values.as_strided(self.size, self.stride, values.storage_offset() + self.offset)

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie next to each other, in order."""
        step = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1:
                if stride != step:
                    return False
                step *= size
        return True

    @property
    def dense(self) -> bool:
        """Whether the elements are a range, each of it once, in any order."""
        step = 1
        for stride, size in sorted(
            (stride, size) for size, stride in zip(self.size, self.stride, strict=True) if size != 1
        ):
            if stride != step:
                return False
            step *= size
        return True


def contiguous_stride(size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of that size."""
    stride: list[int] = []
    step = 1
    for extent in reversed(size):
        stride.append(step)
        step *= extent if extent > 1 else 1
    return tuple(reversed(stride))


def whole(size: tuple[int, ...]) -> Window:
    """All elements of a contiguous tensor of that size."""
    return Window(tuple(size), contiguous_stride(size), 0)


class Span(NamedTuple):
    """``length`` rows or columns from ``start`` on, ``step`` apart."""

    start: int
    length: int
    step: int = 1

    @property
    def stop(self) -> int:
        """One beyond the last."""
        return self.start + (self.length - 1) * self.step + 1 if self.length else self.start

    @property
    def slice(self) -> builtins.slice:
        """The slice that selects these."""
        return builtins.slice(self.start, self.stop, self.step)


#: Shape (rows, cols) of a matrix, or (E, rows, cols) of a batch. Functions of this module read a
#: batch as a matrix (E, rows * cols), each row of which is one block.
Shape = tuple[int, ...]


def _as_rows(matrix: Shape) -> tuple[int, int]:
    return matrix[0], math.prod(matrix[1:])


class Rectangle(NamedTuple):
    """Rows and columns of a matrix, or whole matrices of a batch.

    Attributes:
        rows: the rows. For a batch, the matrices.
        cols: the columns. For a batch, all elements of a matrix.
        transposed: the view's own rows are columns of the matrix, or of each matrix.
    """

    rows: Span
    cols: Span
    transposed: bool = False


def rectangle(window: Window, matrix: Shape) -> Rectangle | None:
    """The rectangle of the matrix that the window's own 2-D view is; None where it is none."""
    if len(matrix) == 3:
        return _matrices(window, matrix)
    rows, cols = matrix
    size, stride, offset = window
    if not rows or not cols:
        return None
    m = math.prod(size[:-1])
    n = size[-1] if size else 1
    collapsed = _collapse(size[:-1], stride[:-1])
    if collapsed is None:
        return None
    outer = collapsed  # of rows of the view; 0 where there is but one
    inner = stride[-1] if n > 1 else 0
    if n > 1 and inner == 0:
        return None
    row, col = offset // cols, offset % cols
    if outer % cols == 0 and col + max(n - 1, 0) * inner < cols:
        box = Rectangle(Span(row, m, outer // cols or 1), Span(col, n, inner or 1))
    elif inner % cols == 0 and col + max(m - 1, 0) * outer < cols:
        box = Rectangle(Span(row, n, inner // cols or 1), Span(col, m, outer or 1), True)
    else:
        return None
    return box if box.rows.stop <= rows else None


def _matrices(window: Window, matrix: Shape) -> Rectangle | None:
    """Return the matrices of a batch that a window has in order; None if it cuts or mixes some."""
    size, stride, offset = window
    cols = math.prod(matrix[1:])
    if not cols or offset % cols or window.numel % cols:
        return None
    box = Rectangle(Span(offset // cols, window.numel // cols), Span(0, cols))
    if window.contiguous:
        return box
    if size[-2:] != matrix[:0:-1]:
        return None
    turned = Window((*size[:-2], *size[:-3:-1]), (*stride[:-2], *stride[:-3:-1]), offset)
    return box._replace(transposed=True) if turned.contiguous else None


def _collapse(size: tuple[int, ...], stride: tuple[int, ...]) -> int | None:
    """The one stride of dims taken together, 0 for a single element; None where there is none."""
    first = expected = 0
    for extent, step in zip(reversed(size), reversed(stride), strict=True):
        if extent == 1:
            continue
        if first == 0:
            if step == 0:
                return None
            first = step
        elif step != expected:
            return None
        expected = step * extent
    return first


def part(plane: Plane, box: Rectangle, columnwise: bool = False) -> Plane | None:
    """Return the plane of some rows and columns of a matrix; None if that would cut blocks.

    The last blocks may extend beyond the part.

    Args:
        plane: a plane of the matrix, or of a batch.
        box: rows and columns of the matrix.
        columnwise: whether the plane is the columnwise one.
    """
    if plane.batched:
        return plane if box.rows == Span(0, plane.data.shape[0]) else plane[box.rows.slice]
    rows, cols = (box.cols, box.rows) if columnwise else (box.rows, box.cols)
    matrix = plane.matrix
    extent = tuple(matrix.shape)
    if rows == Span(0, extent[0]) and cols == Span(0, extent[1]):
        return plane
    data = matrix[rows.slice, cols.slice]
    if plane.format.per_tensor:
        return Plane(data, plane.scale, plane.format)
    block, lead = plane.format.block, plane.lead
    indices = _blocks(rows, block[0], lead[0]), _blocks(cols, block[1], lead[1])
    if indices[0] is None or indices[1] is None:
        return None
    left = [n * (not s.start and bool(s.length)) for n, s in zip(lead, (rows, cols), strict=True)]
    return Plane(data, plane.scale[indices], plane.format, (left[0], left[1]))


def _blocks(span: Span, block: int, lead: int = 0) -> slice | None:
    """Return the blocks of a span. None if it begins within a block or leaves elements out.

    A span that begins with the whole may begin within a block, ``lead`` elements from its start.
    """
    if block == -1:
        return slice(None)
    if span.length == 0:
        return slice(0, 0)
    if block == 1:
        return span.slice
    begins_within = (span.start + lead) % block and span.start
    if begins_within or (span.step != 1 and span.length > 1):
        return None
    return slice((span.start + lead) // block, -(-(span.stop + lead) // block))


def shown(
    row: Plane | None, col: Plane | None, window: Window, matrix: Shape
) -> tuple[Plane | None, Plane | None]:
    """Return the planes of a view: parts of the rowwise and columnwise planes of a ``matrix``.

    They share the codes. None stands for one that is not there, or that would cut blocks; with one
    scale a tensor, any view of a rowwise plane has a rowwise plane.
    """
    box = rectangle(window, matrix)
    batched = len(matrix) == 3
    if box is None:
        if batched or row is None or not row.format.per_tensor or not row.data.is_contiguous():
            return None, None
        return Plane(window.of(row.data), row.scale, row.format), None
    own = None if row is None else part(row, box)
    other = None if col is None else part(col, box, columnwise=True)
    if box.transposed:
        own, other = other, own
    if batched:
        rows_and_cols = matrix[:0:-1] if box.transposed else matrix[1:]
        batch, own_matrix = split(window.size, True)
        if (*batch, *own_matrix) != (box.rows.length, *rows_and_cols):
            if box.rows.length != 1 or split(window.size, False)[1] != rows_and_cols:
                return None, None
            own, other = (None if p is None else p[0] for p in (own, other))
    if own is not None and own.data.shape != window.size:
        own = Plane(own.data.view(window.size), own.scale, own.format, own.lead)
    if other is not None and other.data.dim() != 2:
        other = Plane(other.matrix, other.scale, other.format, other.lead)
    return own, other


def hull(
    window: Window,
    matrix: Shape,
    format: BlockFormat,
    planes: tuple[bool, bool],
    lead: int = 0,
) -> Rectangle:
    """The least range of rows and columns with all elements of the window and no block cut.

    Args:
        window: which elements.
        matrix: rows and columns of the whole.
        format: the blocks.
        planes: whether there is a rowwise plane, and a columnwise one: both have blocks.
        lead: rows that the first blocks have in front of the matrix.
    """
    rows, cols = _as_rows(matrix)
    box = rectangle(window, matrix)
    if box is not None:
        span_rows, span_cols = box.rows, box.cols
    else:
        first_row, last_row = window.offset // cols, window.last // cols
        span_rows, span_cols = Span(first_row, last_row - first_row + 1), Span(0, cols)
    if len(matrix) == 3:
        return Rectangle(span_rows, span_cols)
    down, across = format.block
    row, col = planes
    down_and_across = [(down, across)] * row + [(across, down)] * col
    return Rectangle(
        _aligned(span_rows, rows, [block[0] for block in down_and_across], lead),
        _aligned(span_cols, cols, [block[1] for block in down_and_across]),
    )


def _aligned(span: Span, extent: int, blocks: list[int], lead: int = 0) -> Span:
    if -1 in blocks:
        return Span(0, extent)
    block = max(blocks)  # a format has blocks of 1 and one other length
    start = max((span.start + lead) // block * block - lead, 0)
    return Span(start, min(-(-(span.stop + lead) // block) * block - lead, extent) - start)


def within(window: Window, box: Rectangle, matrix: Shape) -> Window:
    """The window as one of the contiguous values of a ``box`` that has all its elements."""
    cols = _as_rows(matrix)[1]
    row, col = window.offset // cols, window.offset % cols
    offset = (row - box.rows.start) * box.cols.length + col - box.cols.start
    if box.cols == Span(0, cols):
        return Window(window.size, window.stride, offset)
    rows_and_cols = rectangle(window, matrix)
    assert rows_and_cols is not None
    dims = len(window.size)
    stride = [0] * dims
    for dim, (size, step) in enumerate(zip(window.size, window.stride, strict=True)):
        down = (dim == dims - 1) == rows_and_cols.transposed
        if size > 1:
            stride[dim] = step // cols * box.cols.length if down else step
    return Window(window.size, tuple(stride), offset)


def fill(values: Tensor, src: Tensor, window: Window) -> None:
    """Write ``src`` into a window of a contiguous matrix of ``values``, in place.

    Raises:
        RuntimeError: the window has an element more than once.
    """
    box = rectangle(window, (values.shape[0], values.shape[1]))
    if box is None:
        window.of(values).copy_(src)
        return
    # By slices: a compiler does not follow writes through as_strided.
    part = values[box.rows.slice, box.cols.slice]
    if box.transposed:
        part = part.t()
    part.copy_(src.reshape(part.shape))
