"""The table of torch's operators on quantized tensors.

An operator without a row is handled by its schema (`classify`). If it returns a view, the result is
a view of the same storage. If it writes an argument, it runs on dequantized values, which are then
quantized. Any other operator runs on dequantized values. Collectives are in
`fp8rs.tensor.collectives`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8rs._torch import is_alias, no_torch_dispatch
from fp8rs.quantize.formats import FP8_MAX, INPUT_DTYPES, LOGICAL_DTYPES
from fp8rs.quantize.planes import zeros
from fp8rs.tensor import collectives
from fp8rs.tensor.copies import copy_codes, new_shard
from fp8rs.tensor.fallback import dequantized_call, foreach_call, quantized_in
from fp8rs.tensor.plane_storage import WriteKind
from fp8rs.tensor.quantized import QuantizedTensor

aten = torch.ops.aten

Handler = Callable[..., Any]


class Handlers(dict[Any, Handler]):
    """Maps an operator to its handler, which is called as handler(func, *args, **kwargs)."""

    def __missing__(self, func: Any) -> Handler:
        handler = self[func] = classify(func)
        return handler


HANDLERS = QuantizedTensor.handlers = Handlers()


def implements(*funcs: Any) -> Callable[[Handler], Handler]:
    """Register a handler for overloads."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(funcs, handler))
        return handler

    return register


@implements(aten.clone.default)
def _clone(func: Any, tensor: QuantizedTensor, *, memory_format: Any = None) -> Any:
    if tensor.planes == (None, None):
        return tensor.dequantize()
    return tensor.map(lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x.clone())


@implements(aten._to_copy.default)
def _to_copy(
    func: Any,
    tensor: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    pin_memory: bool | None = None,
    memory_format: Any = None,
    **options: Any,
) -> Any:
    dtype = tensor.dtype if dtype is None else dtype
    plain = dtype not in LOGICAL_DTYPES or layout not in (None, torch.strided)
    if plain or tensor.planes == (None, None):
        return func(
            tensor.dequantize(), dtype=dtype, layout=layout, pin_memory=pin_memory, **options
        )

    def move(x: Tensor) -> Tensor:
        x = func(x, **options)
        return x.pin_memory() if pin_memory else x

    # The dtype changes the logical dtype only. The codes stay.
    return tensor.map(lambda x: move(x.contiguous()), move, dtype)


@implements(aten.to.device, aten.to.dtype, aten.to.dtype_layout, aten.to.other)
@implements(aten.pin_memory.default)
def _decompose(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    # In inference mode, torch does not decompose these operators itself.
    return func.decompose(tensor, *args, **kwargs)


@implements(aten._pin_memory.default)
def _pin(func: Any, tensor: QuantizedTensor, device: Any = None) -> Any:
    if tensor.planes == (None, None):
        return tensor.dequantize().pin_memory()
    # FSDP2 may pin shards in inference mode, and later forwards write the scales.
    with torch.inference_mode(False):
        return tensor.map(lambda x: x.pin_memory())


@implements(aten.is_pinned.default)
def _is_pinned(func: Any, tensor: QuantizedTensor, device: Any = None) -> bool:
    return tensor._storage.any_plane.data.is_pinned()


@implements(aten.record_stream.default)
def _record_stream(func: Any, tensor: QuantizedTensor, stream: Any) -> None:
    for x in tensor._storage.tensors():
        x.record_stream(stream)


@implements(aten.copy_.default)
def _copy(func: Any, dst: Tensor, src: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(dst, QuantizedTensor):
        assert isinstance(src, QuantizedTensor)
        return dst.copy_(src.dequantize(), non_blocking=non_blocking)
    dst.check_writable()
    if isinstance(src, QuantizedTensor) and copy_codes(dst, src, non_blocking):
        return dst
    if src.dtype in FP8_MAX:
        raise TypeError(
            f"cannot copy {src.dtype} into a quantized tensor of shape {tuple(dst.shape)}: codes "
            "without their scales are not its values. Expected values in high precision, or "
            "another quantized tensor. Multiply the codes by their scales first"
        )

    # Otherwise quantize the values, in a shape, on a device and in a dtype that can be written.
    if isinstance(src, QuantizedTensor):
        src = src.dequantize()
    if src.device != dst.device:
        # `write` reads the values at once, so a copy to the CPU must have finished.
        src = src.to(dst.device, non_blocking=non_blocking and not dst.is_cpu)
    if src.dtype not in INPUT_DTYPES:
        src = src.to(torch.float32)
    if src.shape != dst.shape:
        src = src.expand(dst.shape)
    dst.write(src, dst.spec, dst._storage.delayed, WriteKind.COPY)
    return dst


@implements(aten.detach_.default)
def _detach_(func: Any, tensor: QuantizedTensor) -> QuantizedTensor:
    return tensor  # autograd has detached it


# --- views ----------------------------------------------------------------------------------------

_META = torch.device("meta")


@implements(aten.detach.default, aten.alias.default)
def _detach(func: Any, tensor: QuantizedTensor) -> QuantizedTensor:
    return tensor.view_of(tensor.geometry)


def any_view(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a view of ``tensor`` with the geometry that a view operator gives a meta tensor.

    Raises:
        TypeError: the view would have another dtype.
    """
    if not isinstance(tensor, QuantizedTensor):
        return dequantized_call(func, tensor, *args, **kwargs)
    with no_torch_dispatch():  # keep this call out of traces
        # Pass the size by keyword. Otherwise torch tries signatures with names of dimensions first,
        # which takes a microsecond.
        geometry = tensor.geometry
        if geometry is None:
            like = torch.empty(size=tensor.shape, dtype=tensor.dtype, device=_META)
        else:
            size = (math.prod(tensor._storage.matrix),)
            like = torch.empty(size=size, dtype=tensor.dtype, device=_META).as_strided(*geometry)
        out = func(like, *args, **kwargs)

    # Operators such as `split` return several views.
    is_list = not isinstance(out, Tensor)
    meta_views = out if is_list else (out,)
    if meta_views and not is_alias(meta_views[0], like):
        # A copy, for example of `reshape` or `to`.
        return func.decompose(tensor, *args, **kwargs)
    for meta_view in meta_views:
        if meta_view.dtype != tensor.dtype:
            raise TypeError(
                f"{func} would show the bytes of a quantized tensor as {meta_view.dtype}. Its "
                "codes are rowwise.data and columnwise.data; .to() gives another dtype"
            )
    views = [_view_like(tensor, meta_view) for meta_view in meta_views]
    return views if is_list else views[0]


def _view_like(tensor: QuantizedTensor, like: Tensor) -> QuantizedTensor:
    """Return the view with the geometry of ``like``, or an alias if that is the whole storage."""
    row = tensor._storage.rowwise
    storage_shape = None
    if row is not None:
        storage_shape = row.data.shape
    elif not tensor._is_storage_view:
        storage_shape = tensor.shape

    offset = int(like.storage_offset())
    if like.shape == storage_shape and not offset and like.is_contiguous():
        return tensor.view_of(None)
    return tensor.view_of((tuple(like.shape), like.stride(), offset))


# --- new tensors ---------------------------------------------------------------------------------
# New tensors are plain, so that an optimizer's state is not quantized. Tensors by which FSDP2 and
# `to_empty` replace a parameter are quantized.


@implements(aten.empty_like.default)
def _empty_like(
    func: Any, tensor: QuantizedTensor, *, dtype: Any = None, device: Any = None, **kwargs: Any
) -> Any:
    # DTensor scatters parts, which are views, into tensors from empty_like of the first part.
    may_be_part = tensor._storage.observer is not None or tensor._is_storage_view
    if not may_be_part or dtype not in (None, tensor.dtype) or tensor.planes == (None, None):
        return _plain(func, tensor, dtype=dtype, device=device, **kwargs)

    def empty_scale(scale: Tensor) -> Tensor:
        # A part that is scattered into the tensor keeps the scale of the weight (`collectives`).
        # A weight itself that `to_empty` replaces does not.
        is_part = tensor._is_storage_view or tensor._storage.active_observer is None
        if is_part and not scale.is_meta:
            return scale.to(device, copy=True)
        return zeros(scale, scale.shape, device)

    # A write of some rows reads the others, and an uninitialized code may be NaN.
    return tensor.map(lambda codes: zeros(codes, codes.shape, device), empty_scale)


@implements(aten.new_zeros.default)
def _new_zeros(func: Any, tensor: QuantizedTensor, size: Any, **options: Any) -> Any:
    # Only FSDP2 calls new_zeros with a parameter's trailing dimensions.
    has_same_rows = len(size) == tensor.dim() >= 2 and tuple(size[1:]) == tensor.shape[1:]
    is_shard = isinstance(tensor, torch.nn.Parameter) and has_same_rows
    if is_shard and tensor._storage.active_observer is None:
        raise TypeError(
            f"fully_shard was given a quantized parameter of shape {tuple(tensor.shape)} that does "
            "not belong to a layer: it can shard only weights of layers that fp8rs has converted "
            "(convert_to_float8_training(..., fp8_weights=True), quantized_init), and not what a "
            "layer's weight is computed from (pruning, parametrizations). Dequantize it first, or "
            "keep it as a buffer"
        )
    is_plain = tensor._storage.observer is None or options.get("dtype") not in (None, tensor.dtype)
    if is_plain or len(size) != tensor.dim():
        return _plain(func, tensor, size, **options)
    storage = new_shard(tensor._storage, size, options.get("device") or tensor.device)
    return tensor.over(storage, size, tensor.dtype)


def _plain(func: Any, tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    """Return a new plain tensor."""
    like = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    if any(argument.name == "memory_format" for argument in func._schema.arguments):
        kwargs["memory_format"] = torch.contiguous_format
    return func(like, *args, **kwargs)


for _name in ("zeros", "ones", "full", "rand", "randn"):
    HANDLERS[getattr(aten, f"{_name}_like").default] = _plain
for _name in ("empty", "ones", "full", "empty_strided"):
    HANDLERS[getattr(aten, f"new_{_name}").default] = _plain


# --- everything else --------------------------------------------------------------------------


def classify(func: Any) -> Handler:
    """Return the handler of an operator without a row in the table."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator
        return _not_implemented
    namespace, _, name = schema.name.partition("::")
    if namespace == "c10d":
        return collectives.collective
    if namespace == "_c10d_functional":
        return collectives.functional
    if torch.Tag.inplace_view in func.tags or name in _RESHAPING:
        return _refuse
    if schema.is_mutable:
        # Foreach and fused operators take lists of independent tensors.
        return foreach_call if "foreach" in name or name.startswith("_fused") else dequantized_call
    if any(result.alias_info is not None for result in schema.returns):
        return any_view
    return foreach_call if name.startswith("_foreach") else dequantized_call


@implements(aten.erfinv_.default)
def _erfinv_(func: Any, tensor: QuantizedTensor) -> Any:
    raise NotImplementedError(
        "erfinv_ of a quantized tensor: it would turn numbers that were rounded to the ends of "
        "(-1, 1) to infinity. Older torch's nn.init.trunc_normal_ does that: draw into a plain "
        "tensor and copy_() it, or initialize before converting"
    )


#: Operators that change the shape or storage in place, and that torch does not tag as such.
_RESHAPING = ("set_", "resize_", "resize_as_", "_resize_output_", "as_strided_", "set_data")


def _not_implemented(func: Any, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented


def _refuse(func: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(args[0], QuantizedTensor) and "set_" not in func._schema.name:
        return dequantized_call(func, *args, **kwargs)
    raise NotImplementedError(
        f"{func} would give a quantized tensor another shape or storage in place, or a plain "
        "tensor the storage of a quantized one. Take a view or a new tensor. Write values by "
        "copy_() or quantize_(), read them by dequantize(), and share planes by assigning a "
        "quantized tensor to .data"
    )


@implements(aten._foreach_copy_.default)
def _foreach_copy(func: Any, self: Any, src: Any, non_blocking: bool = False) -> None:
    for dst in quantized_in(self):
        dst.check_writable()
    for dst, value in zip(self, src, strict=True):
        dst.copy_(value, non_blocking=non_blocking)
