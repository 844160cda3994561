"""FP8 weights: parameters that hold codes and scales instead of high-precision values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8rs._torch import become, check_can_become
from fp8rs.quantize.recipes import Recipe, quant_spec
from fp8rs.tensor.plane_storage import PlaneStorage
from fp8rs.tensor.quantized import QuantizedTensor, wrap
from fp8rs.tensor.spec import quantize_planes


def check_weight(
    module: nn.Module, parameter: str, name: str, recipe: Recipe, fp8_weights: bool
) -> None:
    """Check that a weight can be converted, without changing it.

    Args:
        module: the module of the weight.
        parameter: the name of the weight in the module.
        name: the module's name, for messages.
        recipe: the recipe to convert to.
        fp8_weights: whether weights become FP8.

    Raises:
        ValueError: the weight is FP8 in another format, and would not be quantized again.
        RuntimeError: the weight would become FP8, but a graph or a weak reference holds its tensor.
    """
    weight = module._parameters[parameter]
    assert weight is not None
    if has_format(weight, recipe):
        return
    if fp8_weights:
        try:
            check_can_become(weight)
        except RuntimeError as error:
            raise RuntimeError(
                f"the {parameter} of {name} cannot become FP8 in place while something holds its "
                "tensor (a graph that has not been freed, or a weak reference). Convert the model "
                f"before training with it. Found: {error}"
            ) from error
    elif isinstance(weight, QuantizedTensor):
        raise ValueError(
            f"the {parameter} of {name} is already FP8, in format {weight.format.name!r}, but "
            f"weights of recipe {recipe.name!r} have another format. To quantize it again, pass "
            "fp8_weights=True"
        )


def has_format(weight: Tensor, recipe: Recipe) -> bool:
    """Return whether a weight is already quantized in the format of a recipe's weights."""
    if not isinstance(weight, QuantizedTensor):
        return False
    spec = quant_spec(recipe, "weight")
    return (weight.format, weight.fp8_dtype) == (spec.format, spec.fp8_dtype)


def quantize_weight(module: nn.Module, name: str, recipe: Recipe, keep_init: bool) -> Tensor:
    """Quantize a parameter in place. It stays the same object.

    Args:
        module: the module of the parameter. It may be converted later.
        name: the name of the parameter (N, K) or (E, N, K) in the module. It is in high precision,
            or quantized in any format.
        recipe: the recipe whose weight format is used.
        keep_init: whether to keep the values before quantization on the CPU.

    Returns:
        The amax of the weight, of shape ().

    Raises:
        RuntimeError: a graph or a weak reference holds the parameter's tensor.
    """
    from fp8rs.fsdp.float8_shard import handle_for

    weight: Any = module.get_parameter(name)
    values = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight.detach()
    amax = values.abs().amax() if values.numel() else values.new_zeros(())
    if has_format(weight, recipe):
        return amax
    quantized = new_weight(values, recipe)
    init_value = values.to("cpu", copy=True) if keep_init and not values.is_meta else None
    del values
    become(weight, quantized)
    handle: Any = handle_for(module, name)
    handle.keep_init, handle.init_value = keep_init, init_value
    return amax


def new_weight(values: Tensor, recipe: Recipe) -> QuantizedTensor:
    """Quantize the values of a weight, with scales from the data.

    The result has a rowwise plane. It also has a columnwise plane if that cannot be derived from
    the rowwise one.

    Args:
        values: high-precision values (out_features, in_features) or (E, N, K).
        recipe: the recipe whose weight format is used.
    """
    spec = quant_spec(recipe, "weight")
    format = spec.format
    both = not format.square and not format.per_row
    with torch.inference_mode(False), torch.no_grad():
        row, col = quantize_planes(spec, values.contiguous(), True, both)
        return wrap(PlaneStorage(row, col, spec), values.shape, values.dtype)


def dequantize_weight(layer: nn.Linear) -> None:
    """Dequantize a layer's weight in place."""
    weight = layer.weight
    if isinstance(weight, QuantizedTensor):
        become(weight, weight.dequantize())
