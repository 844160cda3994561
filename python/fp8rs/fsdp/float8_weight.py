"""The local tensor of a sharded FP8 weight: a quantized tensor whose bytes FSDP2 gathers."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8rs.tensor.quantized import Float8Tensor, MXFP8Tensor, QuantizedTensor

from . import hooks
from .weight import Weight

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Sharded(QuantizedTensor):
    """What FSDP2 calls of a quantized shard. Its planes' owner is a `Weight`."""

    @property
    def _weight(self) -> Weight:
        weight = self._store.owner
        assert isinstance(weight, Weight)
        return weight

    @property
    def shard(self) -> Tensor:
        """This, under the name that gathers ask for."""
        return self

    # The one-argument form lets data and scales have sizes of their own.

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
Sharded.fsdp_pre_all_gather.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    Sharded.fsdp_pre_all_gather
)


class Float8Weight(Sharded, Float8Tensor):
    """A shard with fp32 scales."""


class MXFP8Weight(Sharded, MXFP8Tensor):
    """A shard with E8M0 scales."""


#: The class of a shard, by the dtype of its scales.
SHARD_TYPES: dict[torch.dtype, type[Sharded]] = {
    torch.float32: Float8Weight,
    torch.float8_e8m0fnu: MXFP8Weight,
}


def sharded(local: QuantizedTensor, weight: Weight) -> Sharded:
    """The shard of a weight, over the planes of ``local``."""
    local._store.owner = weight
    shard: Any = local.view_of(local._window)
    shard.__class__ = SHARD_TYPES[local.format.scale_dtype]
    found: Sharded = shard
    return found
