"""What a pickle of a quantized tensor holds.

Plain parts, so that ``torch.load(weights_only=True)`` takes it, and bytes, because pickle alone
does not take FP8 tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8rs.tensor import formats
from fp8rs.tensor.planes import Plane, as_bytes
from fp8rs.tensor.spec import QuantSpec
from fp8rs.tensor.store import Delayed, Store
from fp8rs.tensor.windows import Window
from fp8rs.tensor.wrapper import OWN_ATTRIBUTES, StoreTensor, tensor_over


def parts(t: StoreTensor) -> tuple[Any, ...]:
    """The arguments of :func:`rebuild`.

    A view becomes a tensor of its own, or stays one where it has no planes of its own.
    """
    store, window, planes = t._store, t._window, t.planes
    if planes == (None, None):
        planes = store.rowwise, store.columnwise
    else:
        window = None
    return (
        *(
            None
            if p is None
            else (as_bytes(p.data), p.data.dtype, as_bytes(p.scale), p.format.name, p.lead)
            for p in planes
        ),
        tuple(t.shape),
        t.dtype,
        t.requires_grad,
        isinstance(t, torch.nn.Parameter),
        None if store.spec is None else store.spec.without_group(),
        store.delayed,
        None if window is None else tuple(window),
        {name: value for name, value in t.__dict__.items() if name not in OWN_ATTRIBUTES},
    )


def rebuild(
    rowwise: Any,
    columnwise: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
    spec: QuantSpec | None,
    delayed: Delayed | None,
    window: Any,
    attributes: dict[str, Any],
) -> Tensor:
    """What pickles of quantized tensors call."""

    def plane(held: Any) -> Plane | None:
        if held is None:
            return None
        codes, fp8_dtype, scale, name, lead = held
        format = formats.FORMATS[name]
        return Plane(codes.view(fp8_dtype), scale.view(format.scale_dtype), format, lead)

    store = Store(plane(rowwise), plane(columnwise), spec, delayed)
    if window is None:
        t = tensor_over(store, torch.Size(shape), dtype)
    else:
        t = tensor_over(store, torch.Size(store.matrix), dtype).view_of(Window(*window))
    new: Tensor = torch.nn.Parameter(t, requires_grad) if is_parameter else t
    new.requires_grad_(requires_grad)
    new.__dict__.update(attributes)
    return new


torch.serialization.add_safe_globals([rebuild, QuantSpec, formats.format_named])
