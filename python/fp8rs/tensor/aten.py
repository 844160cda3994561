"""What torch's operators do to the planes of a quantized tensor: one table for every format.

Views are in :mod:`fp8rs.tensor.views`. What cannot be done over planes is left to
:func:`dequantized_call`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from fp8rs.tensor.formats import INPUT_DTYPES
from fp8rs.tensor.quantized import HANDLERS, Handler, QuantizedTensor

aten = torch.ops.aten

H = TypeVar("H", bound=Handler)


def implements(*funcs: Any) -> Callable[[H], H]:
    """Register a handler for overloads."""

    def register(handler: H) -> H:
        for func in funcs:
            HANDLERS[func] = handler
        return handler

    return register


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
    if (
        isinstance(src, QuantizedTensor)
        and src.shape == dst.shape
        and dst.copy_planes_(src, non_blocking=non_blocking)
    ):
        return dst
    if src.device != dst.device:
        src = src.to(dst.device, non_blocking=non_blocking)
    return dst.quantize_(src.expand(dst.shape) if src.shape != dst.shape else src)


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


# --- everything else --------------------------------------------------------------------------


def dequantized_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on dequantized arguments; quantize back those that it mutated.

    Lists (torch's foreach and fused optimizers) are taken apart too. The result is what ``func``
    gives, with mutated arguments in place of their dequantized stand-ins.
    """
    plain: dict[int, tuple[QuantizedTensor, Tensor]] = {}

    def dequantize(t: QuantizedTensor) -> Tensor:
        if id(t) not in plain:
            plain[id(t)] = (t, t.dequantize())
        return plain[id(t)][1]

    def mutated(value: Any) -> None:
        if isinstance(value, QuantizedTensor):
            written[id(value)] = value
        elif isinstance(value, (list, tuple)):
            for item in value:
                mutated(item)

    written: dict[int, QuantizedTensor] = {}
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if position < len(args):
            mutated(args[position])
        else:
            mutated(kwargs.get(argument.name))

    new_args, new_kwargs = tree_map_only(QuantizedTensor, dequantize, (args, kwargs))
    out = func(*new_args, **new_kwargs)
    if not written:
        return out
    stand_ins = {}
    for key, original in written.items():
        value = plain[key][1]
        original.quantize_(value)
        stand_ins[id(value)] = original
    return tree_map(lambda v: stand_ins.get(id(v), v) if isinstance(v, Tensor) else v, out)


from fp8rs.tensor import views as _aten_views  # noqa: E402,F401  (fills HANDLERS)
