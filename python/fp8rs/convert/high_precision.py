"""Convert FP8 layers and experts back to the modules that they were before a conversion."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from fp8rs._torch import is_distributed
from fp8rs.convert.expert_selection import restore_experts
from fp8rs.convert.fp8_weights import check_can_be_replaced, dequantize_weight
from fp8rs.convert.options import fqn_of
from fp8rs.nn.expert_modules import Float8Experts, uses_registry
from fp8rs.nn.fp8_params import Float8Params, class_before_conversion, remove_fp8_params
from fp8rs.quantize.recipes import check_module
from fp8rs.tensor.quantized import QuantizedTensor

M = TypeVar("M", bound=nn.Module)


def convert_to_high_precision(module: M) -> M:
    """Convert the FP8 layers and experts of ``module`` back, in place.

    Use it after training, for inference in high precision and for tools that expect ``nn.Linear``,
    such as ``torchao.quantization.quantize_``.

    Layers become ``nn.Linear``, or the subclass of it that they were before the conversion. Experts
    become instances of their own class, with the experts implementation that the model's config
    selects. Layers that were built as ``fp8rs.nn.Linear`` become ``nn.Linear`` too. Modules,
    parameters, hooks, tied weights and gradients stay the same objects.

    Master weights keep their values. FP8 weights are dequantized to their logical dtype. This needs
    memory for one weight at a time, besides the result. Masters of an optimizer are not copied, and
    values of ``preserve_high_precision_init_val`` are dropped. Scales and histories of delayed
    scaling are removed. Create optimizers again if training continues, and monitors.

    ``module`` may be a part of a converted model. Without converted layers, nothing changes. All
    layers are checked before the first one is changed.

    Args:
        module: a model, or a part of it, that is not sharded.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``.
        ValueError: a layer is sharded or parallelized. Or its class or its forward was replaced
            after the conversion, for example by a parametrization.
        RuntimeError: a graph or a weak reference holds the tensor of an FP8 weight.
    """
    check_module("module", module)
    layers = []
    for name, layer in module.named_modules():
        if isinstance(layer, Float8Params):
            _check(layer, fqn_of(name))
            layers.append(layer)

    states = []
    for layer in layers:
        states.append(layer._fp8_state)
        for parameter in layer._parameters.values():
            if parameter is not None:
                dequantize_weight(parameter)
        if isinstance(layer, Float8Experts):
            restore_experts(layer)
        remove_fp8_params(layer)

    for state in dict.fromkeys(states):
        if all(layer is None for layer in state.layers()):
            state.detach()
    for part in module.modules():
        part.__dict__.pop("_fp8_left_out", None)
    return module


def _check(layer: Float8Params, fqn: str) -> None:
    """Check that a layer can be converted back, without changing it.

    Args:
        layer: the converted layer.
        fqn: its name, for messages.

    Raises:
        ValueError, RuntimeError: see `convert_to_high_precision`.
    """
    parameters: dict[str, Any] = layer._parameters  # a parameter may be any tensor subclass
    for name, parameter in parameters.items():
        fp8 = isinstance(parameter, QuantizedTensor)
        if is_distributed(parameter) or (fp8 and parameter._storage.gathered):
            raise ValueError(
                f"the {name} of {fqn} is sharded or parallelized, and only a whole model can be "
                "converted back. Load its full state dict into an unconverted model instead "
                "(torch.distributed.checkpoint.state_dict.get_model_state_dict with "
                "full_state_dict=True)"
            )
        if fp8:
            problem = f"the {name} of {fqn} cannot be dequantized"
            check_can_be_replaced(parameter, problem, "Free what holds it")
    if class_before_conversion(type(layer)) is None:
        raise ValueError(
            f"{fqn} is a {type(layer).__name__}, a class that was derived from that of a converted "
            "layer. Remove what has changed the class since the conversion, for example "
            "parametrizations by torch.nn.utils.parametrize.remove_parametrizations"
        )
    if "forward" in layer.__dict__ and not uses_registry(layer):
        raise ValueError(
            f"{fqn} has a forward that is an attribute of the instance and may call the converted "
            "class's. Remove it, for example by accelerate.hooks.remove_hook_from_module"
        )
