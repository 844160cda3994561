"""Find the converted layers of a model, with names without wrappers."""

from __future__ import annotations

from torch import nn

from fp8rs._torch import plain_name
from fp8rs.nn.linear import Float8Linear

#: The name of a model that is itself a layer.
ROOT = "root"


def layers_of(model: nn.Module) -> dict[str, Float8Linear]:
    """Return the converted layers by name, in model order.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``model`` has no converted layer.
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
