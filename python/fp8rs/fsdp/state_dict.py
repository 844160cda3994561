"""State-dict hook of sharded layers.

The entry of a master weight is a DTensor of the plain high-precision tensor, so that checkpoints
load into the unconverted model, without this library. It shares the weight's memory. A
`torch.distributed.checkpoint.load` into the state dict therefore loads the weight itself.

The entry of an FP8 weight is the quantized shard. Its scales are synchronized first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fp8rs._torch import dtensor_like, local_tensor, own_part

from .float8_shard import Float8Shard


def register(linear: nn.Module) -> None:
    """Register the hook on a layer that is being sharded."""
    if make_plain not in linear._state_dict_hooks.values():
        linear.register_state_dict_post_hook(make_plain)


def make_plain(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Replace the entries of master weights by plain tensors.

    With ``keep_vars=True`` an entry remains the parameter itself.
    """
    for name in module._fp8_params:  # type: ignore[union-attr]
        value = state_dict.get(prefix + name)
        local = own_part(value)
        if isinstance(local, Float8Shard):
            if (sync := local._handle.scale_sync) is not None:
                sync.sync_module(module)
        elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            state_dict[prefix + name] = plain(value)


@torch.no_grad()
def plain(value: Tensor) -> Tensor:
    """Return a DTensor without the `MasterWeight` in it. It shares the memory."""
    if isinstance(value, DTensor):
        local = getattr(local_tensor(value), "high_precision", None)
        if local is not None:
            return dtensor_like(value, local)
    return value
