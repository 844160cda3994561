"""The converted layers of a model, under names that wrappers do not change."""

from __future__ import annotations

from torch import nn

from fp8rs._torch import plain_name
from fp8rs.nn.linear import Float8Linear

#: A model that is itself a layer.
ROOT = "root"


def layers_of(model: nn.Module) -> dict[str, Float8Linear]:
    """The converted layers by name, in the model's order.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: it has no converted layer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    found = {
        plain_name(name) or ROOT: module
        for name, module in model.named_modules()
        if isinstance(module, Float8Linear)
    }
    if not found:
        raise ValueError(
            "model has no FP8 layer: call fp8rs.convert_to_float8_training(model) first"
        )
    return found
