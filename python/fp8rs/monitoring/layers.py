"""Find the converted layers and experts of a model, with names without wrappers."""

from __future__ import annotations

from torch import nn

from fp8rs._torch import plain_name
from fp8rs.nn.fp8_params import Float8Params
from fp8rs.nn.linear import Float8Linear
from fp8rs.quantize.recipes import check_module

#: The name of a model that is itself a layer.
ROOT = "root"


def linear_layers(model: nn.Module) -> dict[str, Float8Linear]:
    """Return the converted layers by name, in model order.

    Raises:
        TypeError: ``model`` is not a module.
    """
    check_module("model", model)
    return {
        plain_name(name) or ROOT: module
        for name, module in model.named_modules()
        if isinstance(module, Float8Linear)
    }


def batched_weights(model: nn.Module) -> dict[str, tuple[Float8Params, str]]:
    """Return the converted weights of experts by name: the module, and the parameter's name."""
    return {
        plain_name(f"{name}.{key}".lstrip(".")): (module, key)
        for name, module in model.named_modules()
        if isinstance(module, Float8Params)
        for key in module._fp8_params
        if module.get_parameter(key).dim() > 2
    }


def no_layers() -> ValueError:
    """Return the error for a model that is not converted."""
    return ValueError("model has no FP8 layer: call fp8rs.convert_to_float8_training(model) first")
