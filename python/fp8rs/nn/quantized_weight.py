"""Keeps a layer's FP8 weight valid through torch's operations on parameters of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fp8rs._torch import hooks_of, own_part, set_hooks, set_local_tensor
from fp8rs.tensor.formats import FP8_MAX
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.spec import quantize_planes
from fp8rs.tensor.wrapper import OWN_ATTRIBUTES

from . import buffers

#: Attributes of quantized tensors, master weights and DTensors.
_INTERNAL_ATTRIBUTES = OWN_ATTRIBUTES | {"_data", "_handle", "_local_tensor", "_spec"}


def copy_attributes(before: dict[str, Any], parameter: Any) -> None:
    """Copy attributes that users have set on a parameter to the one that replaces it."""
    for mark, value in before.items():
        if mark not in _INTERNAL_ATTRIBUTES and mark not in parameter.__dict__:
            setattr(parameter, mark, value)


def is_fp8(weight: Any) -> bool:
    """Whether a parameter, sharded or not, is an FP8 weight."""
    return isinstance(own_part(weight), QuantizedTensor)


def refuse_codes(module: nn.Module, state_dict: Any, prefix: str, *args: Any) -> None:
    """Load-state-dict pre-hook: refuse quantized weights, whose codes torch would copy as values.

    Raises:
        TypeError: the state dict has FP8 codes, or scales for a weight. Nothing was loaded.
    """
    found = []
    for name, layer in module.named_modules():
        if hasattr(layer, "_fp8_state"):
            keys = [f"{prefix}{name}.{p}" if name else prefix + p for p in layer._fp8_params]
            found += [k for k in keys if _is_quantized(state_dict.get(k), k, state_dict)]
    if found:
        raise TypeError(
            f"the state dict has {len(found)} quantized weights, the first of them {found[0]} of "
            f"{state_dict[found[0]].dtype}: load_state_dict would take their codes as values. "
            "Expected values in high precision. Load a checkpoint of fp8rs.checkpoint by "
            "fp8rs.checkpoint.load. In other files multiply each code by its scale first"
        )


def register_load_hooks(layer: nn.Module) -> None:
    """Register the hooks that load state dicts into a layer with FP8 parameters."""
    hooks: Any = layer._load_state_dict_pre_hooks.values()
    if _before_load not in (known.hook for known in hooks):
        layer.register_load_state_dict_pre_hook(_before_load)
        layer.register_load_state_dict_post_hook(_after_load)


def _before_load(layer: Any, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
    names = [name for name in layer._fp8_params if prefix + name in state_dict]
    if not names:
        return
    delayed = layer._fp8_state.delayed
    refuse_codes(layer, state_dict, prefix)
    buffers.reset(layer, delayed)
    for name in names if local_metadata.get("assign_to_params_buffers", False) else ():
        value = state_dict[prefix + name]
        if not value.is_meta:
            buffers.materialize(layer, delayed, value.device)
        state_dict[prefix + name] = copy_into_fp8_weight(layer, name, value)


def _after_load(layer: Any, incompatible: Any) -> None:
    state = layer._fp8_state
    for name in layer._fp8_params:
        weight = layer._parameters.get(name)
        if weight is not None and not weight.is_meta:
            buffers.materialize(layer, state.delayed, weight.device)
    if state.sharded_model is not None:
        state.sharded_model.scale_sync.sync_module(layer)


def _is_quantized(value: Any, key: str, state_dict: Any) -> bool:
    if not isinstance(value, torch.Tensor) or is_fp8(value):
        return False
    scales = (f"{key}_scale", f"{key}_scale_inv")
    return value.dtype in FP8_MAX or any(scale in state_dict for scale in scales)


def quantize_like(before: Any, parameter: Any) -> None:
    """Quantize the part that a parallel style takes from an FP8 weight, if it is not quantized.

    A part that starts inside a block arrives as values, because its own blocks start at its edge.

    Args:
        before: the parameter that is replaced.
        parameter: the new parameter, maybe a DTensor. It becomes FP8 if ``before`` is.
    """
    whole, part = own_part(before), own_part(parameter)
    values = part is not parameter and not isinstance(part, QuantizedTensor)
    if isinstance(whole, QuantizedTensor) and values:
        with torch.no_grad():
            planes = quantize_planes(whole.spec, part.contiguous(), *whole._store.has)
        own = whole.over(whole._store.over(*planes), part.shape, whole.dtype)
        set_local_tensor(parameter, own)


def copy_into_fp8_weight(layer: nn.Module, name: str, value: Any) -> Any:
    """Write to an FP8 weight what ``load_state_dict(assign=True)`` would assign to it.

    Assigning would replace it by a plain weight.

    Returns:
        The value to assign: the FP8 parameter itself, or ``value`` for other parameters.
    """
    weight: Any = layer._parameters[name]
    if not is_fp8(weight) or value.shape != weight.shape:
        return value  # torch reports a wrong shape
    if weight.is_meta and not value.is_meta:
        empty = torch.empty_like(weight.detach(), device=value.device)
        setattr(layer, name, nn.Parameter(empty, weight.requires_grad))
        weight = layer._parameters[name]
    with torch.no_grad():
        weight.copy_(value)
    return weight


@contextmanager
def preserve_attributes(layer: nn.Module, name: str) -> Iterator[None]:
    """Keep attributes and hooks of an FP8 weight while a function is applied to all tensors."""
    weight: Any = layer._parameters[name]
    marks = {} if weight is None else dict(weight.__dict__)
    hooks = hooks_of(weight) if is_fp8(weight) else (None, None)
    yield
    weight = layer._parameters[name]
    if is_fp8(weight):
        copy_attributes(marks, weight)
        if any(hooks):
            set_hooks(weight, hooks)
