"""Keeps a layer's FP8 weight FP8 when torch moves, loads or replaces parameters."""

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

#: Attributes that fp8rs and torch set on parameters (quantized tensors, masters, DTensors).
_INTERNAL_ATTRIBUTES = OWN_ATTRIBUTES | {"_data", "_handle", "_local_tensor", "_spec"}


def copy_attributes(before: dict[str, Any], parameter: Any) -> None:
    """Copy the attributes that a user has set on a parameter to the one that replaces it."""
    for name, value in before.items():
        if name not in _INTERNAL_ATTRIBUTES and name not in parameter.__dict__:
            setattr(parameter, name, value)


def is_fp8(weight: Any) -> bool:
    """Return whether a parameter, sharded or not, is an FP8 weight."""
    return isinstance(own_part(weight), QuantizedTensor)


def refuse_codes(module: nn.Module, state_dict: Any, prefix: str, *args: Any) -> None:
    """Refuse quantized weights, whose codes torch would copy as values: a load-state-dict pre-hook.

    Raises:
        TypeError: the state dict has FP8 codes, or the scales of a weight. Nothing is loaded.
    """
    found = []
    for name, layer in module.named_modules():
        if hasattr(layer, "_fp8_state"):
            key = f"{prefix}{name}.weight" if name else f"{prefix}weight"
            if _is_quantized(state_dict.get(key), key, state_dict):
                found.append(key)
    if found:
        raise TypeError(
            f"the state dict has {len(found)} quantized weights, the first of them {found[0]} of "
            f"{state_dict[found[0]].dtype}: load_state_dict would read their codes as values. "
            "Expected values in high precision. Load a checkpoint of fp8rs.checkpoint with "
            "fp8rs.checkpoint.load. For other files, multiply each code by its scale first"
        )


def _is_quantized(value: Any, key: str, state_dict: Any) -> bool:
    if not isinstance(value, torch.Tensor) or is_fp8(value):
        return False
    scales = (f"{key}_scale", f"{key}_scale_inv")
    return value.dtype in FP8_MAX or any(scale in state_dict for scale in scales)


def quantize_like(before: Any, parameter: Any) -> None:
    """Make a parameter FP8 if it replaces an FP8 weight, such as the part that a style shards.

    A part that starts inside a block arrives in high precision. Its blocks start where it does.

    Args:
        before: the parameter that is replaced.
        parameter: the new parameter. Only DTensors are changed.
    """
    whole, part = own_part(before), own_part(parameter)
    values = part is not parameter and not isinstance(part, QuantizedTensor)
    if isinstance(whole, QuantizedTensor) and values:
        with torch.no_grad():
            planes = quantize_planes(whole.spec, part.contiguous(), *whole._store.has)
        set_local_tensor(parameter, whole.like(*planes, shape=part.shape))


def copy_into_fp8_weight(layer: nn.Module, name: str, value: Any) -> Any:
    """Write a value to an FP8 weight, for ``load_state_dict(assign=True)``.

    Assigning the value would silently replace the FP8 weight by a plain one.

    Returns:
        What load_state_dict is to assign: the FP8 weight, or ``value`` if the parameter is not FP8.
    """
    weight: Any = layer._parameters[name]
    if not is_fp8(weight) or value.shape != weight.shape:
        return value  # torch raises for another shape
    if weight.is_meta and not value.is_meta:
        empty = torch.empty_like(weight.detach(), device=value.device)
        setattr(layer, name, nn.Parameter(empty, weight.requires_grad))
        weight = layer._parameters[name]
    with torch.no_grad():
        weight.copy_(value)
    return weight


@contextmanager
def preserve_attributes(layer: nn.Module, name: str) -> Iterator[None]:
    """Keep user attributes and hooks of an FP8 weight through ``Module._apply``."""
    weight: Any = layer._parameters[name]
    # torch may swap the attributes with the tensors, so copy them first.
    attributes = {} if weight is None else dict(weight.__dict__)
    hooks = hooks_of(weight) if is_fp8(weight) else (None, None)
    yield
    weight = layer._parameters[name]
    if is_fp8(weight):
        copy_attributes(attributes, weight)
        if any(hooks):
            set_hooks(weight, hooks)
