"""Swap a model's linear layers for FP8 ones, in place."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from fp8rs.convert.fp8_weights import check_weight, fits, own, quantize_weight
from fp8rs.convert.select import LARGE_3D, SHARDED, ModuleFilter, large_3d, select
from fp8rs.convert.torchao import from_float8_linear_config
from fp8rs.nn.linear import Float8Linear, float8_class
from fp8rs.nn.model_state import ModelState
from fp8rs.quantize.quantizers import group_name
from fp8rs.quantize.recipes import Recipe, RecipeName, resolve_recipe
from fp8rs.tensor.quantized import QuantizedTensor

_log = logging.getLogger("fp8rs")

M = TypeVar("M", bound=nn.Module)


def convert_to_float8_training(
    module: M,
    *,
    recipe: Recipe | RecipeName | None = None,
    module_filter_fn: ModuleFilter | None = None,
    filter_fqns: Iterable[str] = (),
    enable_fsdp_float8_all_gather: bool | None = None,
    amax_reduction_group: Any = None,
    fp8_weights: bool = False,
    preserve_high_precision_init_val: bool = False,
    config: Any = None,
) -> M:
    """Convert the ``nn.Linear`` layers of ``module`` to train in FP8.

    Layers become ``fp8rs.nn.Linear`` in place: objects, hooks and names stay. Call this before
    parallelizing the model.

    A layer that has this recipe already stays as it is, so a second call changes nothing. A layer
    with another recipe is an error. A subclass of nn.Linear that inherits its forward is converted
    and stays an instance of its class.

    These layers stay in high precision: subclasses with a forward of their own, and, with a
    warning, layers whose weight is tied to another module's or computed from other parameters
    (weight_norm, spectral_norm, pruning, parametrizations). If no layer is converted, a warning
    says so.

    The logger "fp8rs" receives what was converted and why other layers were not, at level INFO. If
    the program has not configured logging, rank 0 prints one line to stderr instead. To silence it,
    call ``logging.getLogger("fp8rs").setLevel(logging.WARNING)``.

    Everything is checked before the model is changed. If memory runs out while weights become FP8,
    some of them are FP8 already.

    Args:
        module: the model, or a single nn.Linear. Parameters may be on the meta device.
        recipe: a recipe or its short name, by default "current".
        module_filter_fn: called with each layer and its fully qualified name. A layer for which it
            returns False stays in high precision.
        filter_fqns: layers whose name contains one of these strings stay in high precision.
        enable_fsdp_float8_all_gather: under FSDP2, quantize weights before the all-gather. True by
            default, unless ``config`` says otherwise. With False, weights are gathered in the
            mixed-precision policy's dtype.
        amax_reduction_group: process group over which amaxes are reduced. With delayed scaling they
            are reduced once a step, by default over the mesh that FSDP2 shards the model on; a
            model that is not sharded has no reduction. With current scaling, the amaxes of
            activations and gradients are reduced at each quantization, by default not at all.
        fp8_weights: store the weights as codes and scales, 1 byte a parameter, without
            high-precision copies. Use it for frozen models, inference, and `fp8rs.optim.AdamW`,
            which trains them with or without masters.
        preserve_high_precision_init_val: with ``fp8_weights``, keep each weight's values before
            quantization on the CPU, for an optimizer's masters.
        config: a torchao Float8LinearConfig, instead of ``recipe``.

    Returns:
        ``module``.

    Raises:
        TypeError, ValueError: an argument is wrong, ``config`` asks for something that no recipe
            supports or contradicts another argument, a layer has another recipe, or ``module`` went
            through fully_shard already.
        RuntimeError: with ``fp8_weights``, a graph or a weak reference holds a weight's tensor.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    for name, given in (
        ("enable_fsdp_float8_all_gather", enable_fsdp_float8_all_gather or False),
        ("fp8_weights", fp8_weights),
        ("preserve_high_precision_init_val", preserve_high_precision_init_val),
    ):
        if not isinstance(given, bool):
            raise TypeError(f"{name} must be True or False, not {given!r}")
    if module_filter_fn is not None and not callable(module_filter_fn):
        raise TypeError(
            "module_filter_fn must be a function of a module and its name, "
            f"not {module_filter_fn!r}"
        )
    recipe, enable_fsdp_float8_all_gather = settle(
        recipe, config, enable_fsdp_float8_all_gather, fp8_weights
    )
    group_name(amax_reduction_group)  # raises if it is not a group
    if preserve_high_precision_init_val and not fp8_weights:
        raise ValueError(
            "preserve_high_precision_init_val=True requires fp8_weights=True: other weights keep "
            "their high-precision values anyway"
        )
    selected = select(module, module_filter_fn, filter_fqns, recipe, fp8_weights)
    for name, reason in selected.left.items():
        if reason == SHARDED:
            raise ValueError(f"{name} is sharded already: convert before fully_shard")
    layers = selected.layers
    for name, layer in layers:
        if fp8_weights:
            check_weight(layer, recipe)
        elif isinstance(layer.weight, QuantizedTensor) and not fits(layer.weight, recipe):
            raise ValueError(
                f"the weight of {name or 'the root'} is FP8 already, in format "
                f"{layer.weight.format.name!r}, but weights of recipe {recipe.name!r} have another "
                "format: give fp8_weights=True to quantize it again"
            )
    for message in (*selected.unused, *selected.warnings):
        warnings.warn(message, stacklevel=2)
    if not layers:
        if not any(isinstance(m, Float8Linear) for m in module.modules()):
            warnings.warn(
                "no layer was converted: the module has no nn.Linear that could be, or "
                "module_filter_fn and filter_fqns leave out all",
                stacklevel=2,
            )
        return module
    state = ModelState(recipe, amax_reduction_group=amax_reduction_group)
    state.fp8_gather = enable_fsdp_float8_all_gather
    _convert(state, layers, fp8_weights, preserve_high_precision_init_val)
    state.attach(module)
    _log_conversion(module, recipe, selected.left)
    return module


def _convert(
    state: ModelState, layers: Sequence[tuple[str, nn.Linear]], fp8_weights: bool, keep_init: bool
) -> None:
    """Make layers, which have been checked, the layers of ``state``.

    Weights are quantized first, because that is the one part that a device can refuse.
    """
    largest = []
    if fp8_weights:
        largest = [quantize_weight(layer, state.recipe, keep_init) for _, layer in layers]
    previous = []
    for name, layer in layers:
        if isinstance(layer, Float8Linear):
            previous.append(layer._fp8_state)
        else:
            layer.__class__ = float8_class(type(layer))
        assert isinstance(layer, Float8Linear)
        layer._join(state, name)
    for joined in previous:
        joined.detach()
    if fp8_weights:
        from fp8rs.optim.warnings import watch  # imported only by models that need it

        for (_, layer), amax in zip(layers, largest, strict=True):
            own(layer, "weight").begin_history(amax)
        state.subscribe_to_steps()
        watch()


def settle(recipe: Any, config: Any, gather: bool | None, fp8_weights: bool) -> tuple[Recipe, bool]:
    """Return the recipe, and whether weights are quantized before the all-gather.

    Args:
        recipe: the caller's ``recipe``.
        config: the caller's ``config``.
        gather: the caller's ``enable_fsdp_float8_all_gather``.
        fp8_weights: the caller's ``fp8_weights``.

    Raises:
        TypeError, ValueError: an argument is wrong, or two contradict each other.
    """
    if config is not None:
        if recipe is not None:
            raise ValueError("recipe and config are both given: give one")
        recipe, said = from_float8_linear_config(config)
        if gather not in (None, said):
            raise ValueError(
                f"enable_fsdp_float8_all_gather={gather} contradicts "
                f"config.enable_fsdp_float8_all_gather={said}: give one of them"
            )
        gather = said
    else:
        recipe = resolve_recipe("current" if recipe is None else recipe)
        gather = gather is None or gather
    if fp8_weights and not gather:
        raise ValueError(
            "enable_fsdp_float8_all_gather=False does not go with fp8_weights=True: FP8 weights "
            "have no high-precision values to gather"
        )
    return recipe, gather


def _log_conversion(root: nn.Module, recipe: Recipe, left: dict[str, str]) -> None:
    """Log what a conversion did at level INFO.

    If the program has not configured logging, rank 0 prints the first line to stderr, so that a
    conversion is visible by default. A level above INFO on the logger silences it.
    """
    summary, reasons = _summary(root, recipe, left)
    if _log.hasHandlers():
        _log.info("%s", "\n".join([summary, *reasons]))
    elif _log.level <= logging.INFO and _rank() == 0:
        print(f"fp8rs: {summary}", file=sys.stderr)


def _rank() -> int:
    """Return this process's rank, also before the default process group exists."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def _summary(root: nn.Module, recipe: Recipe, left: dict[str, str]) -> tuple[str, list[str]]:
    """Return a line on the converted layers, and one for each reason to leave layers out."""
    converted = [m for m in root.modules() if isinstance(m, Float8Linear)]
    weights = sum(m.weight.numel() for m in converted)
    parameters = sum(0 if nn.parameter.is_lazy(p) else p.numel() for p in root.parameters())
    count = "1 linear layer" if len(converted) == 1 else f"{len(converted)} linear layers"
    summary = (
        f"recipe {recipe.name!r}: {count} converted, whose weights are "
        f"{weights / max(parameters, 1):.1%} of {parameters:,} parameters"
    )
    reasons: dict[str, list[str]] = {}
    for name, reason in left.items():
        reasons.setdefault(reason, []).append(name)
    experts = [name for name, _ in large_3d(root)]
    if experts:
        reasons[LARGE_3D] = experts
    if reasons:
        summary += f"; {sum(map(len, reasons.values()))} left in high precision"
    lines = []
    for reason, names in reasons.items():
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        lines.append(f"  left in high precision: {', '.join(names[:4])}{more}: {reason}")
    return summary, lines


def optimizer_stepped(module: nn.Module) -> None:
    """Notify the layers in ``module`` that their weights were updated.

    Delayed scaling then updates its amax histories. Optimizers that derive from
    ``torch.optim.Optimizer`` do this by themselves. Call it on every rank, once after each step, if
    weights are updated in another way. A model with delayed scaling that is never notified warns
    after some forwards.

    Args:
        module: a module that contains converted layers.
    """
    states = {id(s): s for m in module.modules() if (s := getattr(m, "_fp8_state", None))}
    for state in states.values():
        state.stepped()
