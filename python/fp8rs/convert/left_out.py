"""Record on the modules of a converted model why they stay in high precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fp8rs.convert.experts import is_expert
from fp8rs.nn.experts import batched_parameters
from fp8rs.nn.linear import Float8Linear

#: The reason for layers and experts that were added or replaced after the conversion.
NOT_SEEN = "not in the model when it was converted"


def record(root: nn.Module, left: dict[str, str]) -> None:
    """Record the reasons of a conversion.

    They are kept on the modules, and not by name, because wrappers change names.

    Args:
        root: the converted model.
        left: the reason for each linear layer and each batched parameter, by name.
    """
    for name, module, key in _candidates(root):
        if name in left:
            module.__dict__.setdefault("_fp8_left_out", {})[key] = left[name]


def recorded(root: nn.Module) -> dict[str, str]:
    """Return the reason for each linear layer and each weight of experts in high precision."""
    found = {}
    for name, module, key in _candidates(root):
        reason = module.__dict__.get("_fp8_left_out", {}).get(key)
        if reason or not key or is_expert(module, module._parameters[key]):
            found[name] = reason or NOT_SEEN
    return found


def _candidates(root: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Return linear layers, with an empty key, and batched parameters in high precision."""
    modules = list(root.named_modules())
    for name, module in modules:
        if isinstance(module, nn.Linear) and not isinstance(module, Float8Linear):
            yield name or "the root", module, ""
    for name, module in modules:
        for key in batched_parameters(module):
            if key not in getattr(module, "_fp8_params", ()):
                yield f"{name}.{key}".lstrip("."), module, key
