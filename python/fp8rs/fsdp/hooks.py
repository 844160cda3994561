"""What FSDP2 calls before and after an all-gather."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8rs._torch import disabled_torch_function, local_tensor
from fp8rs.tensor.formats import INPUT_DTYPES
from fp8rs.tensor.quantized import QuantizedTensor, wrap_planes

from . import passes
from .gathered import Gathered
from .weight import Local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def pre_all_gather(local: Local) -> tuple[tuple[Tensor, ...], Any]:
    """The shard's bytes for the gather at hand, and what to make of them afterwards."""
    gathered = passes.of(local._weight.state).gather(local)
    return gathered.inputs, gathered


def post_all_gather(
    outputs: tuple[Tensor, ...],
    gathered: Gathered,
    param_dtype: torch.dtype,
    out: Tensor | None,
) -> Any:
    """Build the weight over the gathered bytes, or have ``out`` show the new ones.

    Returns, the first time, the weight and the tensors beside the gathered ones that hold its
    bytes, for FSDP2 to free and allocate with them.
    """
    gathered.made_on.used_here()
    # With one rank FSDP2 passes the first tensor only; the others are as they were handed over.
    outputs = (*outputs, *gathered.inputs[len(outputs) :])
    codec, placement = gathered.codec, gathered.placement
    if out is None:
        if param_dtype not in INPUT_DTYPES:
            raise TypeError(
                f"{gathered.shard.weight.fqn} is to be gathered as {param_dtype}, by "
                "MixedPrecisionPolicy(param_dtype=...) or its own dtype; FP8 layers compute in "
                "float32, bfloat16 or float16"
            )
        with torch.inference_mode(False):
            inner = codec.inner_tensors(placement, outputs[0].device)
        return GatheredBytes(outputs, inner, gathered, param_dtype), tuple(inner)
    local = local_tensor(out) if isinstance(out, DTensor) else out
    assert isinstance(local, QuantizedTensor)
    # In inference too: what is made or written here, a training forward writes next.
    with torch.inference_mode(False), torch.no_grad():
        inner = codec.inner_of((local.rowwise, local.columnwise))
        local.rowwise, local.columnwise = codec.decode(
            outputs, inner, placement, gathered.scale, local.shape
        )
    return None


class Hooked:
    """What FSDP2 calls of a sharded parameter's local tensor, of either kind."""

    __slots__ = ()

    # The one-argument form lets data and scales have sizes of their own.

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:
        """The shard's bytes (flat uint8 tensors, equally long on all ranks) and metadata."""
        return pre_all_gather(cast(Local, self))

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """The quantized weight over the gathered bytes; later calls refresh ``out``."""
        return post_all_gather(all_gather_outputs, metadata, param_dtype, out)


# FSDP2 asks for the signature at every gather; found anew each time it costs more than the hook.
Hooked.fsdp_pre_all_gather.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    Hooked.fsdp_pre_all_gather
)


class GatheredBytes(Tensor):
    """What a first gather returns: FSDP2 takes the weight out of it by `as_strided`.

    Only that call tells the weight's true size: the gathered rows are padded, and the hooks do
    not know of the parameter that they belong to.
    """

    @staticmethod
    def __new__(
        cls,
        outputs: tuple[Tensor, ...],
        inner: list[Tensor],
        gathered: Gathered,
        param_dtype: torch.dtype,
    ) -> GatheredBytes:
        self: GatheredBytes = torch.Tensor._make_wrapper_subclass(
            cls, (outputs[0].numel(),), dtype=param_dtype, device=outputs[0].device
        )
        self._parts = (outputs, inner, gathered, param_dtype)
        return self

    _parts: tuple[tuple[Tensor, ...], list[Tensor], Gathered, torch.dtype]

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten.as_strided.default:
            raise NotImplementedError(f"{func} of gathered bytes that are no weight yet")
        outputs, inner, gathered, param_dtype = args[0]._parts
        shape = torch.Size(args[1])
        with torch.inference_mode(False), torch.no_grad():
            planes = gathered.codec.decode(
                outputs, inner, gathered.placement, gathered.scale, shape
            )
        weight = wrap_planes(*planes, shape=shape, dtype=param_dtype)
        weight._store.gathered = True
        return weight
