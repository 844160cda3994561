"""State-dict hooks of converted modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fp8rs._torch import dtensor_like, own_part

from .float8_shard import Float8Shard
from .master_weight import MasterWeight


@torch.no_grad()
def make_plain(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """State-dict hook: replace the entries of master weights by DTensors of plain tensors.

    Checkpoints then load into the unconverted model, without this library. The tensors share the
    weights' memory, so `torch.distributed.checkpoint.load` into the state dict loads the weights.
    With ``keep_vars=True`` an entry remains the parameter itself. The entry of an FP8 weight is the
    quantized shard, whose scales are synchronized first.
    """
    state: Any = module._fp8_state
    names: Any = module._fp8_params
    entries = [state_dict.get(prefix + name) for name in names]
    if any(isinstance(own_part(entry), Float8Shard) for entry in entries):
        state.sharded_model.sync_module(module)

    for name, value in zip(names, entries, strict=True):
        local = own_part(value)
        is_parameter = isinstance(value, (MasterWeight, nn.Parameter))
        if isinstance(local, MasterWeight) and not is_parameter:
            state_dict[prefix + name] = dtensor_like(value, local.high_precision)
