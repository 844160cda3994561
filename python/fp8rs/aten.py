"""What torch's operators do to the planes of a quantized tensor: one table for every format.

Views stay views: a slice, narrow or ``view`` shares the codes, so that what FSDP2 and DCP write
through it lands. What cannot be done over planes is left to the fallback, which dequantizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .formats import INPUT_DTYPES, matrix_shape
from .tensors import HANDLERS, Handler, Plane, QuantizedTensor

aten = torch.ops.aten

H = TypeVar("H", bound=Handler)


def implements(*funcs: Any) -> Callable[[H], H]:
    """Register a handler for overloads."""

    def register(handler: H) -> H:
        for func in funcs:
            HANDLERS[func] = handler
        return handler

    return register


def _share(t: QuantizedTensor, out: QuantizedTensor) -> QuantizedTensor:
    """``out`` stands for the same elements as ``t``: writes go where writes to ``t`` go."""
    if t._whole is not None:
        whole, part = t._whole
        shape = out.shape
        out._whole = (whole, lambda values: part(values).view(shape))
    return out


@implements(aten.detach.default, aten.alias.default)
def _detach(func: Any, t: QuantizedTensor) -> QuantizedTensor:
    out = t.like(t.rowwise, t.columnwise)
    out._whole = t._whole
    return out


@implements(aten.clone.default)
def _clone(func: Any, t: QuantizedTensor, *, memory_format: Any = None) -> QuantizedTensor:
    return t.map(lambda x: x.clone())


@implements(aten.contiguous.default)
def _contiguous(func: Any, t: QuantizedTensor, *, memory_format: Any = None) -> QuantizedTensor:
    return t


@implements(aten._to_copy.default)
def _to_copy(
    func: Any,
    t: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Any:
    dtype = t.dtype if dtype is None else dtype
    if dtype not in INPUT_DTYPES or layout not in (None, torch.strided):
        return NotImplemented
    # The logical dtype is a label: the codes lose nothing when it changes.
    moved = t.map(lambda x: aten._to_copy(x, device=device, non_blocking=non_blocking))
    if pin_memory:
        moved = moved.map(lambda x: x.pin_memory())
    return moved if dtype == t.dtype else moved.like(moved.rowwise, moved.columnwise, dtype=dtype)


@implements(aten._pin_memory.default)
def _pin(func: Any, t: QuantizedTensor, device: Any = None) -> QuantizedTensor:
    return t.map(lambda x: x.pin_memory())


@implements(aten.is_pinned.default)
def _is_pinned(func: Any, t: QuantizedTensor, device: Any = None) -> bool:
    return t.any_plane().data.is_pinned()


@implements(aten.record_stream.default)
def _record_stream(func: Any, t: QuantizedTensor, stream: Any) -> None:
    for plane in (t.rowwise, t.columnwise):
        if plane is not None:
            plane.data.record_stream(stream)
            plane.scale.record_stream(stream)


@implements(aten.copy_.default)
def _copy(func: Any, dst: Tensor, src: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(dst, QuantizedTensor):
        assert isinstance(src, QuantizedTensor)
        return dst.copy_(src.dequantize(), non_blocking=non_blocking)
    if isinstance(src, QuantizedTensor) and _same_planes(dst, src):
        for name in ("rowwise", "columnwise"):
            to, of = getattr(dst, name), getattr(src, name)
            if to is not None:
                to.data.copy_(of.data, non_blocking=non_blocking)
                to.scale.copy_(of.scale, non_blocking=non_blocking)
        return dst
    if src.device != dst.device:
        src = src.to(dst.device, non_blocking=non_blocking)
    return dst.quantize_(src.expand(dst.shape) if src.shape != dst.shape else src)


def _same_planes(dst: QuantizedTensor, src: QuantizedTensor) -> bool:
    """Whether copying bytes makes ``dst`` equal to ``src``."""
    if dst._whole is not None or dst.shape != src.shape:
        return False
    for name in ("rowwise", "columnwise"):
        to: Plane | None = getattr(dst, name)
        of: Plane | None = getattr(src, name)
        if to is not None and (
            of is None or of.format != to.format or of.data.dtype != to.data.dtype
        ):
            return False
    return True


# --- shape -----------------------------------------------------------------------------------


@implements(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(func: Any, t: QuantizedTensor, size: Any) -> QuantizedTensor:
    shape = _resolve(size, t.numel())
    if shape == t.shape:
        return _detach(func, t)
    keeps_matrix = matrix_shape(shape) == matrix_shape(t.shape)
    row, col = t.rowwise, t.columnwise
    if row is None and not keeps_matrix:
        t.plane("rowwise", f"view to {tuple(shape)}")
    if row is not None:
        if not (keeps_matrix or row.format.per_tensor):
            raise ValueError(
                f"view to {tuple(shape)} would cut the blocks of format {row.format.name!r}: "
                "the last dim must stay as it is"
            )
        row = Plane(row.data.view(shape), row.scale, row.format)
    # Where the matrix changes, the columnwise plane is left behind: it can be made again.
    return _share(t, t.like(row, col if keeps_matrix else None, shape=shape))


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

    flat = _view(func, t, (rows, cols))
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
    inner = 1
    for other in t.shape[dim + 1 : -1]:
        inner *= other

    row, col = t.rowwise, t.columnwise
    if row is not None:
        scale = _slice_scale(row, t, dim, start, stop, step, columnwise=False)
        row = Plane(aten.slice.Tensor(row.data, dim, start, stop, step), scale, row.format)
    if col is not None:
        scale = _slice_scale(col, t, dim, start, stop, step, columnwise=True)
        if dim == dims - 1:
            data = aten.slice.Tensor(col.data, 0, start, stop, step)
        elif dim == 0 and step == 1:
            data = col.data[:, start * inner : stop * inner]
        elif row is not None:
            data = None  # left behind: it can be made again
        else:
            t.plane("rowwise", f"a slice of dim {dim} with step {step}")
        col = None if data is None else Plane(data, scale, col.format)
    out = t.like(row, col, shape=shape)
    base_part = t._whole

    def part(values: Tensor) -> Tensor:
        return values[(slice(None),) * dim + (slice(start, stop, step),)]

    if base_part is None:
        out._whole = (t, part)
    else:
        whole, outer = base_part
        out._whole = (whole, lambda values: part(outer(values)))
    return out


def _slice_scale(
    plane: Plane,
    t: QuantizedTensor,
    dim: int,
    start: int,
    stop: int,
    step: int,
    *,
    columnwise: bool,
) -> Tensor:
    """The scales of a slice; ValueError where it would cut blocks that it does not begin."""
    if plane.format.per_tensor:
        return plane.scale
    axis = (dim == t.dim() - 1) != columnwise  # the axis of the plane's own 2-D view
    block = plane.format.block[int(axis)]
    if block == -1:
        return plane.scale
    if t.dim() > 2 or step != 1 or start % block:
        raise ValueError(
            f"a slice [{start}:{stop}:{step}] of dim {dim} does not start on a block boundary of "
            f"format {plane.format.name!r} (blocks of {block})"
        )
    blocks = slice(start // block, -(-stop // block))
    return plane.scale[:, blocks] if axis else plane.scale[blocks]


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
    if t._whole is not None:
        whole, part = t._whole
        out._whole = (whole, lambda values: part(values).t())
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


# --- new tensors are plain: an optimizer's state must not become quantized -----------------------


@implements(
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
)
def _new_like(func: Any, t: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("memory_format", None)
    like = torch.empty((), dtype=t.dtype, device=t.device).expand(t.shape)
    return func(like, *args, memory_format=torch.contiguous_format, **kwargs)


@implements(
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty_strided.default,
)
def _new(func: Any, t: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    return func(torch.empty((), dtype=t.dtype, device=t.device), *args, **kwargs)
