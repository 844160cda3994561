"""Find the converted layers and experts of a model, with names without wrappers."""

from __future__ import annotations

from torch import nn

from fp8rs._torch import plain_name
from fp8rs.nn.fp8_params import Float8Params
from fp8rs.nn.linear import Float8Linear
from fp8rs.quantize.recipes import check_module

#: The name of a model that is itself a layer.
ROOT = "root"


#: A converted module and the name of one of its weights of experts.
BatchedWeight = tuple[Float8Params, str]


def fp8_operands(model: nn.Module) -> tuple[dict[str, Float8Linear], dict[str, BatchedWeight]]:
    """Return the converted layers and weights of experts by name, in model order.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``model`` is not converted.
    """
    check_module("model", model)
    layers: dict[str, Float8Linear] = {}
    weights: dict[str, BatchedWeight] = {}
    for name, module in model.named_modules():
        if isinstance(module, Float8Linear):
            layers[plain_name(name) or ROOT] = module
        elif isinstance(module, Float8Params):
            for key in module._fp8_params:
                if module.get_parameter(key).dim() > 2:
                    weights[plain_name(f"{name}.{key}".lstrip("."))] = module, key
    if not layers and not weights:
        raise ValueError(
            "model has no FP8 layer: call fp8rs.convert_to_float8_training(model) first"
        )
    return layers, weights
