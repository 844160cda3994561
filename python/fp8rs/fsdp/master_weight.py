"""The sharded parameter: a high-precision tensor that FSDP2 asks for FP8 bytes.

A `MasterWeight` wraps the tensor that optimizers, checkpoints and collectives work on. It
behaves like that tensor; nothing is cached on it, because FSDP2 replaces the object on some
ranks and not on others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from . import hooks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .slot import WeightSlot

aten = torch.ops.aten


class MasterWeight(Tensor):
    """A high-precision weight (shard) that is gathered in FP8.

    Args:
        data: the plain tensor, float32, bfloat16 or float16; shared, not copied. Writes to
            the one are writes to the other.
        slot: what is known of the weight; every tensor derived from this one has it too.
        requires_grad: as in torch.
    """

    _data: Tensor
    _slot: WeightSlot
    # Where the storage does not show FSDP2's padding (a copy on another device does not),
    # the elements of the padded shard.
    _padded_numel: int | None

    @staticmethod
    def __new__(
        cls, data: Tensor, slot: WeightSlot, *, requires_grad: bool = False
    ) -> MasterWeight:
        if isinstance(data, MasterWeight):
            data = data._data
        self: MasterWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            layout=data.layout,
            device=data.device,
            requires_grad=requires_grad,
        )
        self._data = data.detach()
        self._slot = slot
        self._padded_numel = None
        return self

    # The C++ operators come straight to __torch_dispatch__.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def high_precision(self) -> Tensor:
        """The plain tensor, detached; it shares the memory."""
        return self._data

    @property
    def padded_numel(self) -> int:
        """Elements of the shard as FSDP2 pads it to the size of the longest one."""
        if self._padded_numel is not None:
            return self._padded_numel
        return self._data.untyped_storage().nbytes() // self._data.itemsize

    # `p.data = tensor` replaces a tensor's contents behind the dispatcher's back; without
    # this setter the wrapper would change its sizes and keep its old values.
    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, MasterWeight):
            value = MasterWeight(value, self._slot)
        # A shard stays as long as FSDP2 padded it, whatever memory it now has.
        padded = self.padded_numel if value.shape == self.shape else None
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._data = value._data
        self._padded_numel = padded

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MasterWeight({self._data!r}, requires_grad={self.requires_grad})"

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterWeight:
        if id(self) in memo:
            found: MasterWeight = memo[id(self)]
            return found
        data = self._data.clone(memory_format=torch.preserve_format)
        copy = MasterWeight(data, self._slot.copied(memo), requires_grad=self.requires_grad)
        if isinstance(self, nn.Parameter):
            copy._is_param = True
        if self.grad is not None:
            copy.grad = self.grad.clone()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle must be readable without this library: it holds the plain tensor.
        plain = self._data
        if isinstance(self, nn.Parameter):
            plain = nn.Parameter(plain, requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)

    def __tensor_flatten__(self) -> tuple[list[str], WeightSlot]:
        return ["_data"], self._slot

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], slot: WeightSlot, outer_size: Any, outer_stride: Any
    ) -> MasterWeight:
        return MasterWeight(inner["_data"], slot)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS.get(func, on_plain)
        return handler(func, args, kwargs or {})

    # What FSDP2 calls. The one-argument form lets data and scales have sizes of their own.

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:
        """The shard's bytes (flat uint8 tensors, equally long on all ranks) and metadata."""
        return hooks.pre_all_gather(self)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """The quantized weight over the gathered bytes; later calls refresh ``out``."""
        return hooks.post_all_gather(all_gather_outputs, metadata, param_dtype, out)


# FSDP2 asks for the signature at every gather; found anew each time it costs more than the hook.
MasterWeight.fsdp_pre_all_gather.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    MasterWeight.fsdp_pre_all_gather
)

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def on_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on the plain tensors. What it wrote to comes back as it was passed."""
    masters: dict[int, MasterWeight] = {}

    def unwrap(master: MasterWeight) -> Tensor:
        masters[id(master._data)] = master
        return master._data

    args, kwargs = tree_map_only(MasterWeight, unwrap, (args, kwargs))
    out = func(*args, **kwargs)
    return tree_map(lambda x: masters.get(id(x), x), out)


def keep(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on the plain tensor, and make its results master weights of the same slot."""
    master = args[0]
    if not isinstance(master, MasterWeight):
        return on_plain(func, args, kwargs)
    out = func(master._data, *args[1:], **kwargs)
    return tree_map_only(Tensor, lambda x: MasterWeight(x, master._slot), out)


def to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`.to()`: a master weight while it is a floating-point tensor, padded as it was."""
    dtype = kwargs.get("dtype")
    if dtype is not None and not dtype.is_floating_point:
        return on_plain(func, args, kwargs)
    out = keep(func, args, kwargs)
    if isinstance(out, MasterWeight):
        # With CPU offload FSDP2 copies the unpadded shard to the device before each gather.
        out._padded_numel = args[0].padded_numel
    return out


HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(
        (
            # Views that FSDP2, DTensor and DCP take: true views, so that writes land.
            aten.alias.default,
            aten.as_strided.default,
            aten.detach.default,
            aten.slice.Tensor,
            aten.split.Tensor,
            aten.split_with_sizes.default,
            aten.view.default,
            # New tensors that stand for the same weight: padding, to_empty, deepcopy.
            # zeros_like is not among them: it makes optimizer states.
            aten._pin_memory.default,
            aten.clone.default,
            aten.empty_like.default,
            aten.new_empty.default,
            aten.new_empty_strided.default,
            aten.new_zeros.default,
        ),
        keep,
    ),
    aten._to_copy.default: to_copy,
}


def split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`fully_shard` and `parallelize_module` cut the weight: every rank comes through here."""
    master = args[0]
    master._slot.on_shard()
    return keep(func, args, kwargs)


HANDLERS[aten.split.Tensor] = split
