"""State dicts of converted layers: plain tensors out, and no silent loss on the way in.

Checkpoints must load into the unconverted model, without this library. So the entries are
the inner high-precision tensors themselves (DTensors of them where sharded), sharing their
memory: what `torch.distributed.checkpoint` loads into a state dict's tensors is loaded into
the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def register(linear: nn.Module) -> None:
    """Register both hooks on a converted layer. The functions hold nothing, so copies work."""
    linear.register_state_dict_post_hook(make_plain)
    linear.register_load_state_dict_post_hook(restore)


def make_plain(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """State-dict hook: replace the weight's entry by the plain tensor.

    With ``keep_vars=True`` the entry is the parameter itself, and stays.
    """
    key = prefix + "weight"
    value = state_dict.get(key)
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        state_dict[key] = plain(value)


@torch.no_grad()
def plain(value: Tensor) -> Tensor:
    """The tensor without the `MasterWeight` in it; it shares the memory."""
    from .master_weight import MasterWeight

    if isinstance(value, MasterWeight):
        return value.high_precision
    if isinstance(value, DTensor) and isinstance(value._local_tensor, MasterWeight):
        return DTensor.from_local(
            value._local_tensor.high_precision,
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    return value


def restore(module: nn.Module, incompatible_keys: Any = None) -> None:
    """Wrap a plain parameter that `load_state_dict(assign=True)`, or unpickling, has put in.

    As a load hook it is registered at conversion, so it runs before FSDP2's own, which takes
    the parameter that it finds.
    """
    from .slot import WeightSlot, local_master, wrap_parameter

    parameter = module._parameters.get("weight")
    if parameter is None or local_master(parameter) is not None:
        return
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    if local.dtype.is_floating_point and local.itemsize > 1:
        module._parameters["weight"] = wrap_parameter(parameter, WeightSlot(module))
