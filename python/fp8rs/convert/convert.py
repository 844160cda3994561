"""Swap a model's linear layers for FP8 ones, in place."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from fp8rs.convert.fp8_weights import check_weight, fits, high_precision_weight, quantize_weight
from fp8rs.convert.select import LARGE_3D, ModuleFilter, large_3d, select
from fp8rs.convert.torchao import from_float8_linear_config
from fp8rs.nn.linear import Float8Linear, float8_class
from fp8rs.nn.registry import ModelState
from fp8rs.nn.sharding import Sharding
from fp8rs.quantize.quantizers import group_name
from fp8rs.quantize.recipes import Recipe, RecipeName, resolve_recipe
from fp8rs.tensor.quantized import QuantizedTensor

_log = logging.getLogger("fp8rs")


def convert_to_float8_training(
    module: nn.Module,
    *,
    recipe: Recipe | RecipeName | None = None,
    module_filter_fn: ModuleFilter | None = None,
    filter_fqns: Iterable[str] = (),
    enable_fsdp_float8_all_gather: bool | None = None,
    amax_reduction_group: Any = None,
    fp8_weights: bool = False,
    preserve_high_precision_init_val: bool = False,
    config: Any = None,
) -> nn.Module:
    """Make the ``nn.Linear`` layers of ``module`` train in FP8. Before parallelising it.

    Layers become ``fp8rs.nn.Linear`` in place: the objects, their hooks and names stay.
    Afterwards every selected layer is on this recipe: one that is already is left as it is, so
    that a second call changes nothing, and one on another recipe is an error. A subclass of
    nn.Linear that inherits its forward is converted too, and stays an instance of its class; one
    with a forward of its own is left alone, since it may use its weight in its own way. So is, with
    a warning, a layer whose weight is tied to another module's, or is no parameter because it is
    computed from others (weight_norm, spectral_norm, pruning, parametrizations). Where no layer is
    left, a warning says so. What was converted and what was left out, with the reasons, is logged
    (logger "fp8rs", level INFO).

    Args:
        module: the model; an nn.Linear itself will do. Meta-device parameters are fine.
        recipe: a recipe or its short name; "current" by default.
        module_filter_fn: called with each layer and its fully qualified name; False leaves it out.
        filter_fqns: a layer whose name contains one of these strings is left out.
        enable_fsdp_float8_all_gather: under FSDP2, quantize weights before they are gathered: True
            unless ``config`` says otherwise. With False they are gathered in the mixed-precision
            policy's dtype. Either way the parameters stay the objects that they are.
        amax_reduction_group: process group over which amaxes are reduced. For delayed scaling once
            a step; None is the ranks of the mesh that FSDP2 shards the model over, and nobody for
            a model that is not sharded, whose other ranks may have no forward to run. For current
            scaling those of activations and gradients at each quantization; None is no group.
        fp8_weights: make the weights FP8 weights: codes and scales, 1 byte a parameter, without
            high-precision copies. For frozen models, inference, and `fp8rs.optim.AdamW`, which
            trains them with or without masters of its own.
        preserve_high_precision_init_val: with ``fp8_weights``, keep each weight's values from
            before the rounding, on the CPU, for an optimizer's masters.
        config: a torchao Float8LinearConfig, instead of ``recipe``.

    Returns:
        ``module``.

    Raises:
        TypeError, ValueError: an argument is wrong, ``config`` asks for what there is not or
            contradicts another argument, a layer is on another recipe, or ``module`` went through
            fully_shard already.
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
    group_name(amax_reduction_group)  # which is an error of what is no group
    if preserve_high_precision_init_val and not fp8_weights:
        raise ValueError(
            "preserve_high_precision_init_val=True is for fp8_weights=True: other weights keep "
            "their high-precision values anyway"
        )
    selected = select(module, module_filter_fn, filter_fqns, recipe, fp8_weights)
    if selected.sharded:
        raise ValueError(f"{selected.sharded[0]} is sharded already: convert before fully_shard")
    for message in (*selected.unused, *selected.warnings):
        warnings.warn(message, stacklevel=2)
    layers = selected.layers
    if not layers:
        if not any(isinstance(m, Float8Linear) for m in module.modules()):
            warnings.warn(
                "no layer was converted: the module has no nn.Linear that could be, or "
                "module_filter_fn and filter_fqns leave out all",
                stacklevel=2,
            )
        return module
    state = ModelState(recipe, amax_reduction_group=amax_reduction_group, shard_with=shard_with)
    state.fp8_gather = enable_fsdp_float8_all_gather
    for name, layer in layers:
        if fp8_weights:
            check_weight(layer, recipe)
        elif isinstance(layer.weight, QuantizedTensor) and not fits(layer.weight, recipe):
            raise ValueError(
                f"the weight of {name or 'the root'} is FP8 already, in format "
                f"{layer.weight.format.name!r}, which recipe {recipe.name!r} does not have weights "
                "in: give fp8_weights=True to quantize it anew"
            )
    left = _join_all(state, layers, fp8_weights, preserve_high_precision_init_val)
    for joined in left:
        joined.detach()
    if fp8_weights:
        from fp8rs.optim.warnings import watch  # other models do not need it

        state.watch_steps()
        watch()
    state.attach(module)
    _log.info("%s", _report(module, recipe, selected.left))
    return module


def _join_all(
    state: ModelState,
    layers: Sequence[tuple[str, nn.Linear]],
    fp8_weights: bool,
    keep_init: bool,
) -> list[ModelState]:
    """Make layers those of ``state``: all of them, or none where one raises.

    Returns:
        The states that they were of before.
    """
    before = [(layer, type(layer), _contents(layer)) for _, layer in layers]
    high_precision = [layer for _, layer in layers if not isinstance(layer.weight, QuantizedTensor)]
    left = []
    try:
        for name, layer in layers:
            if isinstance(layer, Float8Linear):
                left.append(layer._fp8_state)
            else:
                layer.__class__ = float8_class(type(layer))
            assert isinstance(layer, Float8Linear)
            layer._join(state, name)
        if fp8_weights:
            for _, layer in layers:
                quantize_weight(layer, state.recipe, keep_init)
    except BaseException:
        for layer in high_precision:
            high_precision_weight(layer)
        for layer, kind, contents in before:
            layer.__class__ = kind
            for known, was in contents:
                known.clear()
                known.update(was)
        raise
    return left


def _contents(layer: nn.Module) -> list[tuple[Any, Any]]:
    """What a module keeps its attributes and buffers in, each with a copy of what is in it."""
    kept: tuple[Any, ...] = (
        layer.__dict__,
        layer._buffers,
        layer._non_persistent_buffers_set,
        layer._load_state_dict_pre_hooks,
        layer._load_state_dict_post_hooks,
    )
    return [(known, known.copy()) for known in kept]


def settle(recipe: Any, config: Any, gather: bool | None, fp8_weights: bool) -> tuple[Recipe, bool]:
    """The recipe, and whether weights are quantized before they are gathered.

    Args:
        recipe, config, gather, fp8_weights: what a caller gave as ``recipe``, ``config``,
            ``enable_fsdp_float8_all_gather`` and ``fp8_weights``.

    Raises:
        TypeError, ValueError: they are wrong or contradict each other.
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
            "enable_fsdp_float8_all_gather=False does not go with fp8_weights=True: there is no "
            "high-precision weight to gather"
        )
    return recipe, gather


def _report(root: nn.Module, recipe: Recipe, left: dict[str, str]) -> str:
    """What a conversion did, in a few lines."""
    converted = [m for m in root.modules() if isinstance(m, Float8Linear)]
    weights = sum(m.weight.numel() for m in converted)
    parameters = sum(0 if nn.parameter.is_lazy(p) else p.numel() for p in root.parameters())
    lines = [
        f"recipe {recipe.name!r}: {len(converted)} linear "
        f"{'layer' if len(converted) == 1 else 'layers'} converted, whose weights are "
        f"{weights / max(parameters, 1):.1%} of {parameters:,} parameters"
    ]
    reasons: dict[str, list[str]] = {}
    for name, reason in left.items():
        reasons.setdefault(reason, []).append(name)
    experts = [name for name, _ in large_3d(root)]
    if experts:
        reasons[LARGE_3D] = experts
    for reason, names in reasons.items():
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        lines.append(f"  left in high precision: {', '.join(names[:4])}{more}: {reason}")
    return "\n".join(lines)


def optimizer_stepped(module: nn.Module) -> None:
    """Say that the weights in ``module`` have been updated: delayed scaling's histories roll.

    For optimizers that are no ``torch.optim.Optimizer``, and updates by hand. Every rank must say
    so, once a step, after it. Of steps of torch.optim's optimizers and their subclasses torch
    tells. A model with delayed scaling that is told of none warns after some forwards.

    Args:
        module: a module that contains converted layers.
    """
    states = {id(s): s for m in module.modules() if (s := getattr(m, "_fp8_state", None))}
    for state in states.values():
        state.stepped()


def shard_with(state: ModelState) -> Sharding:
    """What keeps a model's sharded weights: `fp8rs.fsdp`, which those import who shard."""
    from fp8rs.fsdp import sharding_of

    return sharding_of(state)
