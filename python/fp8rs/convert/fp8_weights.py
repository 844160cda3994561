"""FP8 weights: parameters that hold codes and scales instead of high-precision values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fp8rs._torch import become, check_can_become
from fp8rs.quantize.recipes import Recipe
from fp8rs.quantize.spec import quant_spec
from fp8rs.tensor.quantized import QuantizedTensor, wrap_planes
from fp8rs.tensor.spec import quantize_planes

if TYPE_CHECKING:
    from fp8rs.fsdp.float8_param import Float8ParamHandle


def check_weight(layer: nn.Linear, recipe: Recipe) -> None:
    """Check that `quantize_weight` can replace a layer's weight, without changing anything.

    Raises:
        RuntimeError: a graph or a weak reference holds the parameter's tensor.
    """
    if fits(layer.weight, recipe):
        return
    try:
        check_can_become(layer.weight)
    except RuntimeError as error:
        raise RuntimeError(
            "a weight cannot become FP8 in place while something holds on to its tensor (a graph "
            "that has not been freed, a weak reference): convert before training with it. "
            f"Found: {error}"
        ) from error


def fits(weight: Tensor, recipe: Recipe) -> bool:
    """Return whether a weight is already quantized in the format of a recipe's weights."""
    if not isinstance(weight, QuantizedTensor):
        return False
    spec = quant_spec(recipe, "weight")
    return (weight.format, weight.fp8_dtype) == (spec.format, spec.fp8_dtype)


def quantize_weight(layer: nn.Linear, recipe: Recipe, keep_init: bool) -> Tensor:
    """Replace a layer's weight by a quantized one. The parameter stays the same object.

    Args:
        layer: a layer with a high-precision weight, or one quantized by any recipe. It may be
            converted later.
        recipe: the recipe whose weight format is used.
        keep_init: keep the values before quantization on the CPU.

    Returns:
        The largest absolute value of the weight, of shape ().

    Raises:
        RuntimeError: a graph or a weak reference holds the parameter's tensor.
    """
    weight = layer.weight
    values = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight.detach()
    largest = values.abs().amax() if values.numel() else values.new_zeros(())
    if fits(weight, recipe):
        return largest
    check_weight(layer, recipe)
    quantized = new_weight(values, recipe)
    init_value = values.to("cpu", copy=True) if keep_init and not values.is_meta else None
    del values
    become(weight, quantized)
    handle = register_handle(layer, "weight")
    handle.keep_init, handle.init_value = keep_init, init_value
    return largest


def register_handle(layer: nn.Module, name: str) -> Float8ParamHandle:
    """Return the handle of a layer's quantized parameter: see `fp8rs.fsdp.register_handle`."""
    from fp8rs.fsdp import register_handle

    return register_handle(layer, name)


def new_weight(values: Tensor, recipe: Recipe) -> QuantizedTensor:
    """Quantize values (out_features, in_features) with scales from the data.

    The result has one plane, or two if neither plane determines the other.
    """
    spec = quant_spec(recipe, "weight")
    format = spec.format
    both = not format.square and not format.per_row
    with torch.inference_mode(False), torch.no_grad():
        row, col = quantize_planes(spec, values.contiguous(), True, both)
        return wrap_planes(row, col, shape=values.shape, dtype=values.dtype, spec=spec)


def high_precision_weight(layer: nn.Linear) -> None:
    """Replace a quantized weight by its dequantized values."""
    weight = layer.weight
    if isinstance(weight, QuantizedTensor):
        become(weight, weight.dequantize())
