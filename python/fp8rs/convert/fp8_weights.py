"""FP8 weights: parameters that hold codes and scales instead of high-precision values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8rs._core import UnsupportedError
from fp8rs._torch import become, check_can_become, dtensor_like, is_distributed, own_part
from fp8rs.quantize.cast import quantize_planes
from fp8rs.quantize.recipes import Recipe, quant_spec
from fp8rs.tensor.plane_storage import PlaneStorage
from fp8rs.tensor.quantized import OWN_ATTRIBUTES, QuantizedTensor, is_fp8, wrap


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
        ValueError: the weight is FP8 in another format, and would not be quantized again. Or it
            would become FP8, but several ranks have parts of one of its matrices.
        RuntimeError: the weight would become FP8, but a graph or a weak reference holds its tensor,
            or no kernel quantizes it.
    """
    weight = module._parameters[parameter]
    assert weight is not None
    if has_format(weight, recipe):
        return
    if not fp8_weights:
        if is_fp8(weight):
            raise ValueError(
                f"the {parameter} of {name} is already FP8, in format "
                f"{own_part(weight).format.name!r}, but weights of recipe {recipe.name!r} have "
                "another format. To quantize it again, pass fp8_weights=True"
            )
        return

    described = f"the {parameter} of {name}"
    if is_distributed(weight):
        _check_has_whole_matrices(weight, described)
    remedy = "Convert the model before training with it"
    check_can_be_replaced(weight, f"{described} cannot become FP8", remedy)
    _check_can_be_quantized(weight, described, recipe)


def check_can_be_replaced(weight: nn.Parameter, problem: str, remedy: str) -> None:
    """Check that `fp8rs._torch.become` can replace the tensor of a weight.

    Args:
        weight: the weight.
        problem: what cannot be done otherwise, for messages.
        remedy: what to do, for messages.

    Raises:
        RuntimeError: a graph or a weak reference holds the tensor.
    """
    try:
        check_can_become(weight)
    except RuntimeError as error:
        raise RuntimeError(
            f"{problem} in place while something holds its tensor (a graph that has not been "
            f"freed, or a weak reference). {remedy}. Found: {error}"
        ) from error


def _check_has_whole_matrices(weight: Any, described: str) -> None:
    """Check that no matrix of a DTensor is split between ranks, which would share its scales.

    Expert parallelism gives each rank whole matrices of a batch.
    """
    # Import it only for DTensors: torch.distributed.tensor takes seconds to import.
    from fp8rs.model.shard_spec import ShardSpec

    if ShardSpec.from_dtensor(weight).matrix_groups:
        raise ValueError(
            f"{described} is a DTensor with placements {tuple(weight.placements)}, and "
            "fp8_weights=True quantizes whole matrices. Convert before parallelizing, or with "
            "fp8_weights=False"
        )


def _check_can_be_quantized(weight: nn.Parameter, described: str, recipe: Recipe) -> None:
    """Check by quantizing one row of each matrix that the device has a kernel for the weight.

    Other libraries have tensor subclasses that only their own operators support.
    """
    local = own_part(weight)
    if isinstance(local, QuantizedTensor):
        return
    try:
        new_weight(local.detach()[..., :1, :], recipe)
    except UnsupportedError:
        raise  # the message names the device and the reason
    except (RuntimeError, TypeError, ValueError) as error:
        kind = type(local).__name__
        raise RuntimeError(
            f"{described}, a {kind} on {local.device}, cannot be quantized for fp8_weights=True. "
            f"Exclude it with filter_fqns, or pass fp8_weights=False. Found: {error}"
        ) from error


def has_format(weight: Tensor, recipe: Recipe) -> bool:
    """Return whether a weight is already quantized in the format of a recipe's weights."""
    local = own_part(weight)
    if not isinstance(local, QuantizedTensor):
        return False
    spec = quant_spec(recipe, "weight")
    return (local.format, local.fp8_dtype) == (spec.format, spec.fp8_dtype)


def quantize_weight(module: nn.Module, name: str, recipe: Recipe, keep_init: bool) -> Tensor:
    """Quantize a parameter in place. It stays the same object.

    Args:
        module: the module of the parameter. It may be converted later.
        name: the name of the parameter (N, K) or (E, N, K) in the module. It is in high precision,
            or quantized in any format. Of a DTensor, this rank's matrices are quantized.
        recipe: the recipe whose weight format is used.
        keep_init: whether to keep the values before quantization on the CPU.

    Returns:
        The amax of the weight, of shape ().

    Raises:
        RuntimeError: a graph or a weak reference holds the parameter's tensor.
    """
    from fp8rs.fsdp.float8_shard import handle_for

    weight: Any = module.get_parameter(name)
    local = own_part(weight)
    values = local.dequantize() if isinstance(local, QuantizedTensor) else local.detach()
    amax = values.abs().amax() if values.numel() else values.new_zeros(())
    if has_format(weight, recipe):
        return amax

    quantized: Tensor = new_weight(values, recipe)
    if is_distributed(weight):
        quantized = dtensor_like(weight, quantized)
    init_value = values.to("cpu", copy=True) if keep_init and not values.is_meta else None
    del values, local  # so that `become` frees the memory
    become(weight, quantized)
    handle: Any = handle_for(module, name)
    handle.keep_init = keep_init
    handle.init_value = init_value
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
    needs_columnwise = not format.square and not format.per_row
    with torch.inference_mode(False), torch.no_grad():
        row, col = quantize_planes(spec, values.contiguous(), True, needs_columnwise)
        return wrap(PlaneStorage(row, col, spec), values.shape, values.dtype)


def dequantize_weight(weight: Tensor) -> None:
    """Dequantize a weight in place to its logical dtype, if it is FP8. It stays the same object."""
    if isinstance(weight, QuantizedTensor):
        become(weight, weight.dequantize())
        for name in OWN_ATTRIBUTES:
            weight.__dict__.pop(name, None)  # the storage would keep the codes alive
