"""MasterWeight: the local tensor of a sharded high-precision parameter, gathered in FP8.

When FSDP2 puts a sharded DTensor on a converted module, the DTensor's local tensor becomes a
`MasterWeight` over the same storage (`fp8rs.fsdp.sharded_model`). Optimizers, checkpoints and
collectives see plain memory with a real pointer. Parameters that are not sharded remain plain.
FSDP2 may replace the tensor at any time, so it has no state of its own beyond its `ParamHandle`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from fp8rs._torch import (
    disabled_torch_function,
    is_alias,
    is_traced,
    real_subclass,
    wrapper_subclass,
)
from fp8rs.model.handle import ParamHandle
from fp8rs.tensor.fallback import written_arguments

from .hooks import PreAllGather, post_all_gather

aten = torch.ops.aten


class MasterWeight(Tensor):
    """A high-precision shard that is gathered in FP8.

    Args:
        data: the plain tensor, float32, bfloat16 or float16. Its memory is shared.
        handle: the parameter's handle, which views of this tensor have too.
        requires_grad: whether autograd records operations on it.

    Attributes:
        high_precision: the plain tensor, detached.
    """

    high_precision: Tensor
    _handle: ParamHandle

    @staticmethod
    def __new__(
        cls, data: Tensor, handle: ParamHandle, *, requires_grad: bool = False
    ) -> MasterWeight:
        """Wrap a plain tensor, or another parameter's `MasterWeight`, over its memory."""
        if isinstance(data, MasterWeight):
            data = data.high_precision
        self: MasterWeight
        if is_traced(data):
            # A detached tensor would hide the trace's writes from its input.
            self = wrapper_subclass(cls, data, requires_grad)
        else:
            data = data.detach()
            self = real_subclass(cls, data, requires_grad)
        self.high_precision = data
        self._handle = handle
        return self

    fsdp_pre_all_gather = property(PreAllGather)
    fsdp_post_all_gather = post_all_gather

    # Operators go to __torch_dispatch__ directly.
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    # `p.data = tensor` replaces a tensor's contents without the dispatcher.
    @property
    def data(self) -> Tensor:
        """The tensor without its autograd history. Assigning replaces its contents."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        plain = value.high_precision if isinstance(value, MasterWeight) else value
        Tensor.data.__set__(self, plain)  # type: ignore[attr-defined]
        self.high_precision = plain.detach()
        self._handle.mark_written()

    # torch does not support these for subclasses with a __torch_dispatch__.
    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array, like a plain tensor's ``numpy``."""
        return self.high_precision.numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists, like a plain tensor's ``tolist``."""
        return self.high_precision.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MasterWeight({self.high_precision!r}, requires_grad={self.requires_grad})"

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterWeight:
        handle = deepcopy(self._handle, memo)
        return MasterWeight(self.high_precision.clone(), handle, requires_grad=self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickles hold the plain tensor, so that they are readable without this library.
        return self.high_precision.__reduce_ex__(protocol)

    # For torch.compile, for example of an optimizer's step. Traced tensors have no memory, so they
    # cannot become real subclasses. The handle must not be part of the graph: one graph serves all
    # weights of a shape.

    @property
    def traced(self) -> bool:
        """Whether a compiler traces this tensor. Operators then return plain tensors."""
        return is_traced(self.high_precision)

    def __tensor_flatten__(self) -> tuple[list[str], ParamHandle]:
        return ["high_precision"], self._handle

    @classmethod
    def __metadata_guard__(cls, traced: ParamHandle, handle: ParamHandle) -> bool:
        return True

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], handle: ParamHandle, outer_size: Any, outer_stride: Any
    ) -> MasterWeight:
        return MasterWeight(inner["high_precision"], handle)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            note_writes(func, args, kwargs)
        out = on_plain(func, args, kwargs)
        first = args[0] if args else None
        keeps_class = func.is_view or func in NEW_TENSORS
        if not keeps_class or not isinstance(first, MasterWeight) or first.traced:
            return out
        handle = first._handle

        def wrap(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                return MasterWeight(value, handle)
            return value

        return mapped(wrap, out)


def note_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note an operator's writes to the memory of parameters on their handles."""
    for value in written_arguments(func, args, kwargs):
        # Foreach and fused operators write lists of tensors.
        tensors = value if isinstance(value, (list, tuple)) else (value,)
        for tensor in tensors:
            if isinstance(tensor, MasterWeight) and not is_copy(tensor):
                tensor._handle.mark_written()


def is_copy(tensor: MasterWeight) -> bool:
    """Whether the module holds a shard in other memory than this tensor's.

    FSDP2 pads shards in a copy, and users average copies or compute statistics in them, often on
    some ranks only. If a write to a copy made the scale stale, these ranks would join an all-reduce
    alone. While the module holds the gathered weight, every write counts.
    """
    local = None if tensor.traced else tensor._handle.local
    if not isinstance(local, MasterWeight):
        return False
    return not is_alias(local.high_precision, tensor.high_precision)


def on_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the plain tensors. Written tensors are returned as they were passed."""
    masters: dict[int, MasterWeight] = {}

    def unwrap(value: Any) -> Any:
        if not isinstance(value, MasterWeight):
            return value
        masters[id(value.high_precision)] = value
        return value.high_precision

    def wrap_again(value: Any) -> Any:
        return masters.get(id(value), value)

    plain_kwargs = {name: mapped(unwrap, value) for name, value in kwargs.items()}
    plain_args = mapped(unwrap, args)
    out = func(*plain_args, **plain_kwargs)
    return mapped(wrap_again, out)


def mapped(fn: Callable[[Any], Any], values: Any) -> Any:
    """Apply ``fn`` to a value, or to the items of nested lists and tuples.

    Operators have no other containers. For the lists of a fused optimizer, pytree takes longer.
    """
    if isinstance(values, (list, tuple)):
        return type(values)([mapped(fn, value) for value in values])
    return fn(values)


#: Operators whose results are MasterWeights of the same parameter, besides all views. `.to()`,
#: padding, to_empty and deepcopy use them. Others return plain tensors, such as zeros_like, which
#: creates optimizer states.
NEW_TENSORS = frozenset(
    (
        aten._pin_memory.default,
        aten._to_copy.default,
        aten.clone.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.new_zeros.default,
    )
)
