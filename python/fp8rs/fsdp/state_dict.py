"""State dicts of sharded layers hold plain tensors, those of FP8 weights quantized ones.

Checkpoints must load into the unconverted model, without this library. So the entries are
the inner high-precision tensors themselves (DTensors of them), sharing their memory: what
`torch.distributed.checkpoint` loads into a state dict's tensors is loaded into the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fp8rs._torch import dtensor_like, local_tensor, own_part

from .float8_shard import Float8Shard


def register(linear: nn.Module) -> None:
    """Register the hook on a layer that is being sharded. It holds nothing, so copies work."""
    if make_plain not in linear._state_dict_hooks.values():
        linear.register_state_dict_post_hook(make_plain)


def make_plain(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """State-dict hook: replace the weight's entry by the plain tensor.

    With ``keep_vars=True`` the entry is the parameter itself, and stays.
    """
    key = prefix + "weight"
    value = state_dict.get(key)
    local = own_part(value)
    if isinstance(local, Float8Shard):
        if (sync := local._handle.scale_sync) is not None:
            sync.sync_if_written()
        return
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        state_dict[key] = plain(value)


@torch.no_grad()
def plain(value: Tensor) -> Tensor:
    """The tensor without the `MasterWeight` in it; it shares the memory."""
    if isinstance(value, DTensor):
        local = getattr(local_tensor(value), "high_precision", None)
        if local is not None:
            return dtensor_like(value, local)
    return value
