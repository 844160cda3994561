"""Views of quantized tensors: they share the codes, so that a write through one lands.

FSDP2 and DCP write through ``view(-1)``, slices and narrows. Where the planes of a view are all
that a write must change (a slice along block boundaries), it writes them alone. Else the view
knows the tensor that it is a :class:`~fp8rs.tensor.planes.Part` of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8rs.tensor.aten import aten, implements
from fp8rs.tensor.formats import matrix_shape
from fp8rs.tensor.planes import Part, Plane
from fp8rs.tensor.quantized import QuantizedTensor


@implements(aten.detach.default, aten.alias.default)
def _detach(func: Any, t: QuantizedTensor) -> QuantizedTensor:
    out = t.like(t.rowwise, t.columnwise)
    out._part = t._part
    return out


@implements(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(func: Any, t: QuantizedTensor, size: Any) -> QuantizedTensor:
    shape = _resolve(size, t.numel())
    if shape == t.shape:
        return _detach(func, t)
    row, col, format = t.rowwise, t.columnwise, t.any_plane().format
    keeps_matrix = matrix_shape(shape) == matrix_shape(t.shape)
    if not keeps_matrix and not format.per_tensor:
        raise ValueError(
            f"view to {tuple(shape)} would cut the blocks of format {format.name!r}: "
            "the last dim must stay as it is"
        )
    if row is None and not keeps_matrix:
        t.plane("rowwise", f"view to {tuple(shape)}")
    if row is not None:
        row = Plane(row.data.view(shape), row.scale, row.format)
    # Where the matrix changes, the columnwise plane is left behind: it can be made again. A write
    # through the view must reach it, and one that the tensor gets later.
    out = t.like(row, col if keeps_matrix else None, shape=shape)
    if t._part is not None:
        out._part = t._part.then(lambda x: x.view(shape), everything=True)
    elif not keeps_matrix:
        out._part = Part(t, lambda x: x.view(shape), everything=True)
    return out


def _resolve(size: Any, numel: int) -> torch.Size:
    size = list(size)
    if -1 in size:
        known = 1
        for extent in size:
            known *= 1 if extent == -1 else extent
        if known == 0 or numel % known:
            raise ValueError(f"shape {size} is invalid for a tensor of {numel} elements")
        size[size.index(-1)] = numel // known
    return torch.Size(size)


@implements(aten.as_strided.default)
def _as_strided(
    func: Any,
    t: QuantizedTensor,
    size: Any,
    stride: Any,
    storage_offset: int | None = None,
) -> QuantizedTensor:
    # FSDP2 narrows the gathered, padded rows to the parameter's own with it.
    size, stride = torch.Size(size), tuple(stride)
    offset = storage_offset or 0
    rows, cols = matrix_shape(t.shape)
    new_rows, new_cols = matrix_shape(size)
    whole_rows = new_cols == cols and (cols == 0 or offset % cols == 0)
    if stride != _contiguous_stride(size) or not whole_rows:
        raise ValueError(
            f"as_strided(size={tuple(size)}, stride={stride}, storage_offset={offset}) is not a "
            f"range of whole rows of a quantized tensor of shape {tuple(t.shape)}"
        )
    start = offset // cols if cols else 0
    if start + new_rows > rows:
        raise ValueError(
            f"as_strided(size={tuple(size)}, storage_offset={offset}) reaches beyond a quantized "
            f"tensor of shape {tuple(t.shape)}"
        )
    if (start, new_rows) == (0, rows):
        return _view(func, t, size)

    flat = t if t.dim() == 2 else _view(func, t, (rows, cols))
    return _view(func, _slice(func, flat, 0, start, start + new_rows), size)


def _contiguous_stride(size: torch.Size) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for extent in reversed(size):
        stride.append(step)
        step *= max(extent, 1)
    return tuple(reversed(stride))


@implements(aten.slice.Tensor)
def _slice(
    func: Any,
    t: QuantizedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> QuantizedTensor:
    dims = t.dim()
    dim = dim % dims if dims else 0
    extent = t.shape[dim]
    start, stop, _ = slice(start, end).indices(extent)
    stop = max(start, stop)
    if (start, stop, step) == (0, extent, 1):
        return _detach(func, t)
    shape = list(t.shape)
    shape[dim] = len(range(start, stop, step))
    cut = _cut(t, dim, start, stop, step)
    own = True
    row, col = t.rowwise, t.columnwise
    if row is not None:
        scale, own = _cut_scale(row, cut, dim, columnwise=False)
        row = Plane(aten.slice.Tensor(row.data, dim, start, stop, step), scale, row.format)
    if col is not None:
        scale, col_own = _cut_scale(col, cut, dim, columnwise=True)
        own = own and col_own
        if cut is not None:
            axis, *bounds, _ = cut
            col = Plane(aten.slice.Tensor(col.data, 1 - axis, *bounds), scale, col.format)
        elif row is not None:
            col = None  # left behind: it can be made again
        else:
            t.plane("rowwise", f"a slice of dim {dim} with step {step}")
    out = t.like(row, col, shape=shape)

    def take(x: Tensor) -> Tensor:
        return x[(slice(None),) * dim + (slice(start, stop, step),)]

    if t._part is not None:
        out._part = t._part.then(take, everything=False)
    elif not own:
        out._part = Part(t, take, everything=False)
    return out


#: The axis of the rowwise matrix that a slice cuts, with start, stop, step there and its extent.
Cut = tuple[int, int, int, int, int]


def _cut(t: QuantizedTensor, dim: int, start: int, stop: int, step: int) -> Cut | None:
    """A slice of a dim as a range of rows or columns of the matrix; None where it is none."""
    rows, cols = matrix_shape(t.shape)
    if dim == t.dim() - 1:
        return 1, start, stop, step, cols
    inner = 1
    for extent in t.shape[1:-1]:
        inner *= extent
    if dim == 0 and (step == 1 or inner == 1):
        return 0, start * inner, stop * inner, step, rows
    return None


def _cut_scale(plane: Plane, cut: Cut | None, dim: int, *, columnwise: bool) -> tuple[Tensor, bool]:
    """The scales of a slice, and whether no element outside it has them too.

    Raises:
        ValueError: it would begin within a block, or is no range of rows or columns.
    """
    if plane.format.per_tensor:
        return plane.scale, False
    if cut is None:
        raise ValueError(
            f"a slice of dim {dim} is no range of rows or columns of the matrix that format "
            f"{plane.format.name!r} cuts into blocks"
        )
    axis, start, stop, step, extent = cut
    if columnwise:
        axis = 1 - axis  # of the plane's own matrix
    block = plane.format.block[axis]
    if block == -1:
        return plane.scale, False
    if start >= stop:
        blocks = slice(0, 0)
    elif block == 1:
        blocks = slice(start, stop, step)
    elif step == 1 and start % block == 0:
        blocks = slice(start // block, -(-stop // block))
    else:
        raise ValueError(
            f"a slice [{start}:{stop}:{step}] of the matrix would cut blocks of format "
            f"{plane.format.name!r}: it must start at a multiple of {block}, with step 1"
        )
    scale = plane.scale[:, blocks] if axis else plane.scale[blocks]
    return scale, block == 1 or stop % block == 0 or stop == extent


@implements(aten.select.int)
def _select(func: Any, t: QuantizedTensor, dim: int, index: int) -> Any:
    # `t[i] = x` is a select and a copy_. Other selections are plain copies.
    if t.dim() < 2 or dim % t.dim() != 0:
        return NotImplemented
    index = range(t.shape[0])[index]  # IndexError where torch raises one
    row = _slice(func, t, 0, index, index + 1)
    return _view(func, row, t.shape[1:])


@implements(aten.split.Tensor)
def _split(func: Any, t: QuantizedTensor, size: int, dim: int = 0) -> list[QuantizedTensor]:
    extent = t.shape[dim]
    starts = range(0, extent, size) if extent else (0,)
    return [_slice(func, t, dim, s, min(s + size, extent)) for s in starts]


@implements(aten.split_with_sizes.default)
def _split_sizes(func: Any, t: QuantizedTensor, sizes: Any, dim: int = 0) -> list[QuantizedTensor]:
    out, start = [], 0
    for size in sizes:
        out.append(_slice(func, t, dim, start, start + size))
        start += size
    return out


@implements(aten.t.default)
def _t(func: Any, t: QuantizedTensor) -> Any:
    if t.dim() != 2:
        return NotImplemented
    rows, cols = t.shape
    out = t.like(t.columnwise, t.rowwise, shape=(cols, rows))
    if t._part is not None:
        out._part = t._part.then(lambda x: x.t(), everything=True)
    return out


@implements(aten.transpose.int)
def _transpose(func: Any, t: QuantizedTensor, dim0: int, dim1: int) -> Any:
    if t.dim() != 2:
        return NotImplemented
    return _detach(func, t) if dim0 % 2 == dim1 % 2 else _t(func, t)


@implements(aten.permute.default)
def _permute(func: Any, t: QuantizedTensor, dims: Any) -> Any:
    if t.dim() != 2:
        return NotImplemented
    return _transpose(func, t, 0, dims[0])
