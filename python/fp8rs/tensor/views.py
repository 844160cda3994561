"""Views of quantized tensors: they share the codes, so that a write through one lands.

FSDP2 and DCP write through ``view(-1)``, slices and narrows; users through ``t[:, 3]`` and
``t[None]``. Each is a :class:`~fp8rs.tensor.windows.Window` on the same store. Torch says, on the
meta device, which elements a view has.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fp8rs._torch import is_alias, no_torch_dispatch
from fp8rs.tensor.fallback import dequantized_call
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.table import implements
from fp8rs.tensor.windows import Window, whole

aten = torch.ops.aten

_META = torch.device("meta")


def _window(t: QuantizedTensor) -> Window:
    return whole(t.shape) if t._window is None else t._window


def _view_of(t: QuantizedTensor, window: Window) -> QuantizedTensor:
    """The view of the store of ``t`` that has these elements."""
    row = t._store.rowwise
    shape = row.data.shape if row is not None else t.shape if t._window is None else None
    whole = window.size == shape and window.contiguous and window.offset == 0
    return t.view_of(None if whole else window)


@implements(aten.detach.default, aten.alias.default)
def _detach(func: Any, t: QuantizedTensor) -> QuantizedTensor:
    return t.view_of(t._window)


@implements(aten.as_strided.default)
def _as_strided(
    func: Any, t: QuantizedTensor, size: Any, stride: Any, storage_offset: int | None = None
) -> QuantizedTensor:
    # Torch does not check the bounds of meta tensors. Older torch does not check signs either.
    offset = _window(t).offset if storage_offset is None else storage_offset
    view, numel = Window(tuple(size), tuple(stride), offset), math.prod(t._store.matrix)
    given = f"as_strided(size={view.size}, stride={view.stride}, storage_offset={offset})"
    if len(size) != len(stride) or min(offset, *size, *stride, 0) < 0:
        raise RuntimeError(f"{given}: sizes and strides must be as many, and none negative")
    if view.numel and view.last >= numel:
        raise ValueError(f"{given} reaches beyond a quantized tensor of {numel} elements")
    return _view_of(t, view)


def any_view(func: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
    """A view operator (one whose result may alias ``t``), as torch does it to a meta tensor.

    Raises:
        TypeError: the view would have another dtype.
    """
    if not isinstance(t, QuantizedTensor):
        return dequantized_call(func, t, *args, **kwargs)
    with no_torch_dispatch():  # keep this call out of traces
        like = _like(t)
        out = func(like, *args, **kwargs)
    several = not isinstance(out, Tensor)
    shown = out if several else (out,)
    if shown and not is_alias(shown[0], like):  # it copies: `reshape` may, `to` as a rule
        return func.decompose(t, *args, **kwargs)
    views = [_shown(func, t, x) for x in shown]
    return views if several else views[0]


def _like(t: QuantizedTensor) -> Tensor:
    """A tensor with the geometry of ``t``, on the meta device."""
    if t._window is None:
        # By keyword: torch tries the signatures with names of dimensions first, for a microsecond.
        return torch.empty(size=t.shape, dtype=t.dtype, device=_META)
    numel = math.prod(t._store.matrix)
    return t._window.of(torch.empty(numel, dtype=t.dtype, device=_META))


def _shown(func: Any, t: QuantizedTensor, like: Tensor) -> QuantizedTensor:
    """The view of the store of ``t`` that has the geometry of ``like``."""
    if like.dtype != t.dtype:
        raise TypeError(
            f"{func} would show the bytes of a quantized tensor as {like.dtype}. Its codes "
            "are rowwise.data and columnwise.data; .to() gives another dtype"
        )
    return _view_of(t, Window(tuple(like.shape), like.stride(), int(like.storage_offset())))
