"""FP8 weights: parameters that are codes and scales, in the place of high-precision ones."""

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
    from fp8rs.fsdp.planes_owner import PlanesOwner


def check_weight(layer: nn.Linear, recipe: Recipe) -> None:
    """Raise what `quantize_weight` would, and change nothing.

    It quantizes the weight, for nobody: whether there is room for that is known only then. What a
    model has after its first weights are quantized is more room.

    Raises:
        RuntimeError: something refers to the parameter that cannot follow it.
    """
    weight = layer.weight
    if fits(weight, recipe):
        return
    try:
        check_can_become(weight)
    except RuntimeError as error:
        raise _held(error) from error
    new_weight(_values(weight), recipe)


def fits(weight: Tensor, recipe: Recipe) -> bool:
    """Whether a weight is quantized in the format that a recipe has weights in."""
    if not isinstance(weight, QuantizedTensor):
        return False
    spec = quant_spec(recipe, "weight")
    return (weight.format, weight.fp8_dtype) == (spec.format, spec.fp8_dtype)


def _values(weight: Tensor) -> Tensor:
    return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight.detach()


def quantize_weight(layer: nn.Linear, recipe: Recipe, keep_init: bool) -> None:
    """Make a layer's weight a quantized one, in place: the parameter stays the object that it is.

    Args:
        layer: its weight is high precision, or quantized already, by another recipe perhaps. It
            need not be converted yet.
        recipe: the weight's format is that of its recipe.
        keep_init: keep the values before quantizing, on the CPU.

    Raises:
        RuntimeError: something refers to the parameter that cannot follow it.
    """
    weight = layer.weight
    if fits(weight, recipe):
        own(layer, "weight").begin_history(_values(weight))
        return
    values = _values(weight)
    quantized = new_weight(values, recipe)
    init_value = values.to("cpu", copy=True) if keep_init and not values.is_meta else None
    largest = values.detach().abs().amax() if values.numel() else values.new_zeros(())
    del values
    try:
        become(weight, quantized)
    except RuntimeError as error:
        raise _held(error) from error
    owner = own(layer, "weight")
    owner.keep_init, owner.init_value = keep_init, init_value
    owner.begin_history(largest)


def _held(error: RuntimeError) -> RuntimeError:
    return RuntimeError(
        "a weight cannot become FP8 in place while something holds on to its tensor (a graph "
        "that has not been freed, a weak reference): convert before training with it. What was "
        f"found: {error}"
    )


def own(layer: nn.Module, name: str) -> PlanesOwner:
    """A parameter's planes are to know it: see `fp8rs.fsdp.own`."""
    from fp8rs.fsdp import own

    return own(layer, name)


def new_weight(values: Tensor, recipe: Recipe) -> QuantizedTensor:
    """A quantized weight with scales from the data: one plane, two where none gives the other."""
    spec = quant_spec(recipe, "weight")
    format = spec.format
    both = not format.square and not format.per_row
    with torch.inference_mode(False), torch.no_grad():
        row, col = quantize_planes(spec, values.contiguous(), True, both)
        return wrap_planes(row, col, shape=values.shape, dtype=values.dtype, spec=spec)


def high_precision_weight(layer: nn.Linear) -> None:
    """Undo `quantize_weight`, but for the rounding."""
    weight = layer.weight
    if isinstance(weight, QuantizedTensor):
        become(weight, weight.dequantize())
