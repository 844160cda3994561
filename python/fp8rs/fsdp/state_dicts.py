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

from .float8_weight import Sharded


def register(linear: nn.Module) -> None:
    """Register the hook on a layer that is being sharded. It holds nothing, so copies work."""
    if make_plain not in linear._state_dict_hooks.values():
        linear.register_state_dict_post_hook(make_plain)


def make_plain(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Replace the entries of master weights by plain tensors.

    With ``keep_vars=True`` an entry remains the parameter itself.
    """
    for name in module._fp8_params:  # type: ignore[union-attr]
        key = prefix + name
        value = state_dict.get(key)
        local = own_part(value)
        if isinstance(local, Sharded):
            # Once for the model. Afterwards its weights have nothing left to synchronize.
            if (shards := local._handle.shards) is not None:
                shards.agree()
        elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            state_dict[key] = plain(value)


@torch.no_grad()
def plain(value: Tensor) -> Tensor:
    """The tensor without the `MasterWeight` in it; it shares the memory."""
    if isinstance(value, DTensor):
        local = getattr(local_tensor(value), "high_precision", None)
        if local is not None:
            return dtensor_like(value, local)
    return value
