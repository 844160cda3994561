"""Install local tensors with all-gather hooks when FSDP2 puts sharded parameters on a module.

A state-dict hook of the module takes them out again. The entry of a master weight is a DTensor of
the plain high-precision tensor, so that checkpoints load into the unconverted model, without this
library. It shares the weight's memory. A `torch.distributed.checkpoint.load` into the state dict
therefore loads the weight itself. The entry of an FP8 weight is the quantized shard. Its scales are
synchronized first.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from fp8rs._torch import dtensor_like, local_tensor, own_part, set_local_tensor
from fp8rs.nn.fp8_params import copy_attributes
from fp8rs.tensor.quantized import QuantizedTensor

from .float8_shard import Float8Shard, handle_for, wrap_shard
from .master_weight import MasterWeight
from .param import local_of
from .shard_spec import local_part


def needs_wrapping(module: nn.Module, name: str, parameter: Any) -> bool:
    """Whether a sharded parameter of a module is FP8 and has no all-gather hooks of the module."""
    local = local_tensor(parameter)
    if isinstance(local, QuantizedTensor):
        # With tensor parallelism, an unsharded weight is a DTensor too.
        eligible = not local._store.gathered
    else:
        eligible = local.dtype.is_floating_point
    known = local_of(parameter)
    if known is None or not eligible:
        return eligible
    other = known._handle._module()
    # A tied parameter has the handle of one of its modules.
    return other is not module and (other is None or other._parameters.get(name) is not parameter)


def unconverted_modules(root: nn.Module) -> list[tuple[str, weakref.ref[nn.Module]]]:
    """Return the modules of a model that have parameters and are not converted, by name."""
    return [
        (name or type(module).__name__, weakref.ref(module))
        for name, module in root.named_modules()
        if module._parameters and not hasattr(module, "_fp8_params")
    ]


def tied_modules(
    others: Iterable[tuple[str, weakref.ref[nn.Module]]],
    module: nn.Module,
    name: str,
    parameter: Any,
) -> list[str]:
    """Return the names of modules that have a converted module's parameter as theirs.

    Args:
        others: the `unconverted_modules` of the model.
        module: the converted module.
        name: the parameter's name in the module.
        parameter: the parameter that FSDP2 puts on the module.
    """
    own = {id(parameter), id(module._parameters.get(name))}  # tied modules are set one by one
    return [
        other
        for other, reference in others
        if (part := reference()) is not None
        and any(id(p) in own for p in part._parameters.values() if p is not None)
    ]


def wrap_sharded_param(module: nn.Module, name: str, parameter: Any) -> None:
    """Give a sharded parameter a local tensor with all-gather hooks, over the same memory.

    The DTensor remains the same object, with the attributes that users set on the parameter before.

    Args:
        module: a converted module.
        name: the parameter's name.
        parameter: the DTensor.
    """
    local, handle = local_tensor(parameter), handle_for(module, name, parameter)
    if isinstance(local, QuantizedTensor):
        shard = wrap_shard(local)
        if (kept := shard._handle.init_value) is not None and kept.shape != local.shape:
            shard._handle.init_value = local_part(kept, parameter)
        set_local_tensor(parameter, shard)
    else:
        set_local_tensor(parameter, MasterWeight(local, handle))
    handle.invalidate_scale()
    cast(Any, module)._fp8_params[name] = handle
    before = module._parameters.get(name)
    if before is not None:
        copy_attributes(before.__dict__, parameter)
    if make_plain not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(make_plain)


@torch.no_grad()
def make_plain(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Replace the entries of master weights by DTensors of plain tensors, which share the memory.

    With ``keep_vars=True`` an entry remains the parameter itself.
    """
    for name in module._fp8_params:  # type: ignore[union-attr]
        value = state_dict.get(prefix + name)
        local = own_part(value)
        if isinstance(local, Float8Shard):
            if (sharded_model := local._handle.sharded_model) is not None:
                sharded_model.sync_module(module)
        elif isinstance(local, MasterWeight) and not isinstance(
            value, (MasterWeight, nn.Parameter)
        ):
            state_dict[prefix + name] = dtensor_like(value, local.high_precision)
