"""The sharded parameter's local tensor: a high-precision shard that FSDP2 asks for FP8 bytes.

A parameter that is not sharded is the nn.Parameter that it was, whoever converted it: nothing of
this library is on it. When FSDP2 puts a sharded DTensor in its place, the layer makes the DTensor's
local tensor a `MasterWeight` over the same storage (`adopt`): what optimizers, checkpoints and
collectives work on is plain memory with a real pointer, and behaves so. Nothing is cached on it,
because FSDP2 replaces the object on some ranks and not on others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from fp8rs._torch import (
    disabled_torch_function,
    is_alias,
    is_traced,
    real_subclass,
    wrapper_subclass,
)

from . import hooks
from .param import ParamHandle, local_of

aten = torch.ops.aten


class MasterWeight(Tensor):
    """A high-precision shard that is gathered in FP8.

    Args:
        data: the plain tensor, float32, bfloat16 or float16; shared, not copied. Writes to
            the one are writes to the other.
        weight: whose shard it is; every tensor derived from this one has it too.
        requires_grad: as in torch.
    """

    _data: Tensor
    _weight: ParamHandle

    @staticmethod
    def __new__(
        cls, data: Tensor, weight: ParamHandle, *, requires_grad: bool = False
    ) -> MasterWeight:
        if isinstance(data, MasterWeight):
            data = data._data
        self: MasterWeight
        if is_traced(data):
            # Not detached: a trace must write to the tensor that it was given.
            self = wrapper_subclass(cls, data, requires_grad)
        else:
            data = data.detach()
            self = real_subclass(cls, data, requires_grad)
        self._data = data
        self._weight = weight
        return self

    fsdp_pre_all_gather = hooks.pre_all_gather
    fsdp_post_all_gather = hooks.post_all_gather

    # The C++ operators come straight to __torch_dispatch__.
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @property
    def high_precision(self) -> Tensor:
        """The plain tensor, detached; it shares the memory."""
        return self._data

    @property
    def shard(self) -> Tensor:
        """The same, under the name that gathers ask for."""
        return self._data

    # `p.data = tensor` replaces a tensor's contents behind the dispatcher's back.
    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        plain = value._data if isinstance(value, MasterWeight) else value
        Tensor.data.__set__(self, plain)  # type: ignore[attr-defined]
        self._data = plain.detach()
        self._weight.wrote()

    # torch refuses these of every subclass with a dispatch of its own.
    def numpy(self, *, force: bool = False) -> Any:
        """As of a plain tensor."""
        return self._data.numpy(force=force)

    def tolist(self) -> Any:
        """As of a plain tensor."""
        return self._data.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MasterWeight({self._data!r}, requires_grad={self.requires_grad})"

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterWeight:
        if id(self) in memo:
            found: MasterWeight = memo[id(self)]
            return found
        weight = self._weight.__deepcopy__(memo)
        copy = MasterWeight(self._data.clone(), weight, requires_grad=self.requires_grad)
        if self.grad is not None:
            copy.grad = self.grad.clone()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle must be readable without this library: it holds the plain tensor.
        return self._data.__reduce_ex__(protocol)

    # For torch.compile, of an optimizer's step say. What is traced has no memory, so no real
    # subclass can be made of it. Whose weight it is must not be written into a graph: one graph
    # serves all weights of a shape.

    @property
    def traced(self) -> bool:
        """Whether it stands for a master weight in a compiler's trace; what it gives is plain."""
        return is_traced(self._data)

    def __tensor_flatten__(self) -> tuple[list[str], ParamHandle]:
        return ["_data"], self._weight

    @classmethod
    def __metadata_guard__(cls, traced: ParamHandle, weight: ParamHandle) -> bool:
        return True

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], weight: ParamHandle, outer_size: Any, outer_stride: Any
    ) -> MasterWeight:
        return MasterWeight(inner["_data"], weight)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            note_writes(func, args, kwargs)
        out = on_plain(func, args, kwargs)
        first = args[0] if args else None
        if func not in STANDING_FOR or not isinstance(first, MasterWeight) or first.traced:
            return out
        weight = first._weight
        return tree_map_only(
            Tensor, lambda x: MasterWeight(x, weight) if x.is_floating_point() else x, out
        )


def note_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell the weights that ``func`` writes of it."""
    if func is aten.copy_.default and is_copied_elsewhere(*args[:2]):
        return
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, MasterWeight):
                    item._weight.wrote()


def is_copied_elsewhere(to: Any, values: Any) -> bool:
    """Whether a weight's values are copied to memory that is not the parameter's (yet).

    So FSDP2 pads a shard, at its first forward of a module or after a load: on some ranks only, so
    that for what is a write to them others would wait in vain.
    """
    if not (isinstance(to, MasterWeight) and isinstance(values, MasterWeight)):
        return False
    weight = to._weight
    if values._weight is not weight or to.traced or values.traced:
        return False
    local = local_of(weight.parameter)
    if not isinstance(local, MasterWeight):
        return False
    return not is_alias(local._data, to._data)


def on_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on the plain tensors. What it wrote to comes back as it was passed."""
    masters: dict[int, MasterWeight] = {}

    def unwrap(master: MasterWeight) -> Tensor:
        masters[id(master._data)] = master
        return master._data

    args, kwargs = tree_map_only(MasterWeight, unwrap, (args, kwargs))
    out = func(*args, **kwargs)
    return tree_map(lambda x: masters.get(id(x), x), out)


#: What gives tensors that stand for the same weight; all else gives plain ones. (zeros_like makes
#: optimizer states.)
STANDING_FOR = frozenset(
    (
        # Views that FSDP2, DTensor and DCP take: true views, so that writes land and are seen.
        aten.alias.default,
        aten.as_strided.default,
        aten.detach.default,
        aten.expand.default,
        aten.narrow.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.dim,
        aten.t.default,
        aten.transpose.int,
        aten.unbind.int,
        aten.unsqueeze.default,
        aten.view.default,
        # New tensors: `.to()`, padding, to_empty, deepcopy.
        aten._pin_memory.default,
        aten._to_copy.default,
        aten.clone.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.new_zeros.default,
    )
)
