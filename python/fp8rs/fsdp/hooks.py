"""What FSDP2 calls before and after an all-gather: methods of both kinds of local tensor."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8rs._torch import own_part
from fp8rs.tensor.formats import INPUT_DTYPES
from fp8rs.tensor.quantized import QuantizedTensor, wrap_planes

from .gathered import Shard
from .model import of
from .param import ParamHandle

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# The one-argument form lets data and scales have sizes of their own.
def pre_all_gather(self: Any, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Shard]:
    """The shard's bytes (flat uint8 tensors, equally long on all ranks) and metadata."""
    weight: ParamHandle = self._weight
    shard = of(weight.state).passes.gather(weight, self.shard)
    return shard.inputs, shard


def post_all_gather(
    self: Any,
    all_gather_outputs: tuple[Tensor, ...],
    metadata: Shard,
    param_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Build the quantized weight over the gathered bytes, or have ``out`` show the new ones.

    Returns, the first time, the weight and the tensors beside the gathered ones that hold its
    bytes, for FSDP2 to free and allocate with them.
    """
    outputs, shard = all_gather_outputs, metadata
    assert shard.ready is not None
    shard.ready.used_here()
    # With one rank FSDP2 passes the first tensor only; the others are as they were handed over.
    outputs = (*outputs, *shard.inputs[len(outputs) :])
    codec, placement = shard.codec, shard.placement
    shape = torch.Size(placement.whole)
    # In inference too: what is made or written here, a training forward writes next.
    with torch.inference_mode(False), torch.no_grad():
        if out is not None:
            local = own_part(out)
            assert isinstance(local, QuantizedTensor)
            inner = codec.inner_of((local.rowwise, local.columnwise))
            local.rowwise, local.columnwise = codec.decode(
                outputs, inner, placement, shard.scale, shape
            )
            return None
        if param_dtype not in INPUT_DTYPES:
            raise TypeError(
                f"{shard.weight.fqn} is to be gathered as {param_dtype}, by "
                "MixedPrecisionPolicy(param_dtype=...) or its own dtype; FP8 layers compute in "
                "float32, bfloat16 or float16"
            )
        inner = codec.inner_tensors(placement, outputs[0].device)
        planes = codec.decode(outputs, inner, placement, shard.scale, shape)
        weight = wrap_planes(*planes, shape=shape, dtype=param_dtype)
        weight._store.gathered = True
        return weight, tuple(inner)


# FSDP2 asks for the signature at every gather; found anew each time it costs more than the hook.
pre_all_gather.__signature__ = inspect.signature(pre_all_gather)  # type: ignore[attr-defined]
