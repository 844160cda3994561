"""Convert the linear layers of a model to FP8 layers, in place."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn

from fp8rs.convert.experts import (
    Experts,
    ExpertsMode,
    convert_experts,
    select_experts,
)
from fp8rs.convert.fp8_weights import check_weight, quantize_weight
from fp8rs.convert.select import LARGE_3D, SHARDED, ModuleFilter, large_3d, select
from fp8rs.convert.torchao import from_float8_linear_config
from fp8rs.nn.fp8_params import float8_class
from fp8rs.nn.linear import Float8Linear
from fp8rs.nn.model_state import ModelState
from fp8rs.quantize.quantizers import group_name
from fp8rs.quantize.recipes import Recipe, RecipeName, resolve_recipe

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
    experts: ExpertsMode = "auto",
    config: Any = None,
) -> M:
    """Convert the ``nn.Linear`` layers and the experts of ``module`` to train in FP8.

    Layers become ``fp8rs.nn.Linear`` in place: objects, hooks and names stay. Call this before
    parallelizing the model.

    A layer that already has this recipe is not changed, so a second call has no effect. A layer
    with another recipe is an error. A subclass of nn.Linear that inherits its forward is converted
    and remains an instance of its class.

    These layers stay in high precision: subclasses that override forward and, with a warning,
    layers whose weight is tied to another module's or computed from other parameters (weight_norm,
    spectral_norm, pruning, parametrizations). If no layer is converted, a warning is raised.

    Experts are modules with parameters (E, N, K), one matrix for each expert: experts of
    transformers 5 and torchtitan 0.3, ``fp8rs.nn.GroupedLinear``, and on request others. They
    become instances of a subclass of their class.

    The logger "fp8rs" logs the converted layers, and why other layers were not converted, at level
    INFO. If the program has not configured logging, rank 0 prints one line to stderr instead. To
    silence it, call ``logging.getLogger("fp8rs").setLevel(logging.WARNING)``.

    All arguments and layers are checked before the model is changed. If memory runs out while
    weights are quantized for ``fp8_weights``, the weights before that one are FP8.

    Args:
        module: the model, or a single nn.Linear. Parameters may be on the meta device.
        recipe: a recipe or its short name. The default is "current".
        module_filter_fn: called with each layer and its fully qualified name. A layer for which it
            returns False stays in high precision.
        filter_fqns: layers, and parameters of experts, whose name contains one of these strings
            stay in high precision.
        enable_fsdp_float8_all_gather: under FSDP2, quantize weights before the all-gather. The
            default is True, or the value in ``config``. With False, weights are gathered in the
            mixed-precision policy's dtype.
        amax_reduction_group: process group over which amaxes are reduced. With delayed scaling,
            they are reduced once per step, by default over the mesh that FSDP2 shards the model on,
            and not at all for an unsharded model. With current scaling, the amaxes of activations
            and gradients are reduced at each quantization, and by default not at all.
        fp8_weights: store the weights as codes and scales, 1 byte per parameter, without
            high-precision copies. Use it for frozen models, inference, and `fp8rs.optim.AdamW`,
            which trains such weights with or without fp32 masters.
        preserve_high_precision_init_val: with ``fp8_weights``, keep each weight's values before
            quantization on the CPU, from which an optimizer initializes its masters.
        experts: how experts are converted. "off": not at all. "gather": FSDP2 gathers their weights
            in FP8, and GEMMs run in high precision. "fp8": their grouped GEMMs also run on FP8
            operands, as in ``fp8rs.nn.functional.grouped_linear``. Both convert parameters of three
            or more dimensions in all modules that are not torch's own. "auto": experts of
            transformers and torchtitan, and ``GroupedLinear``. If the recipe has FP8 GEMMs,
            each call chooses the faster GEMMs for its number of rows (`fp8rs.report` names them).
        config: a torchao Float8LinearConfig, instead of ``recipe``.

    Returns:
        ``module``.

    Raises:
        TypeError, ValueError: an argument is wrong, ``config`` requires something that no recipe
            supports or contradicts another argument, a layer has another recipe, or ``fully_shard``
            was already called on ``module``.
        RuntimeError: with ``fp8_weights``, a graph or a weak reference holds a weight's tensor.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    recipe, enable_fsdp_float8_all_gather = resolve_options(
        recipe, config, enable_fsdp_float8_all_gather, fp8_weights
    )
    group_name(amax_reduction_group)  # raises if it is not a group
    if preserve_high_precision_init_val and not fp8_weights:
        raise ValueError(
            "preserve_high_precision_init_val=True requires fp8_weights=True: other weights keep "
            "their high-precision values anyway"
        )
    if not isinstance(filter_fqns, str):
        filter_fqns = tuple(filter_fqns)
    selected = select(module, module_filter_fn, filter_fqns, recipe, fp8_weights)
    for name, reason in selected.left.items():
        if reason == SHARDED:
            raise ValueError(f"{name} is sharded already: convert before fully_shard")
    selected_experts = select_experts(module, experts, filter_fqns, recipe)
    for name, layer in selected.layers:
        check_weight(layer, "weight", name or "the root", recipe, fp8_weights)
    for one in selected_experts.modules:
        for name in one.parameters:
            check_weight(one.module, name, one.name or "the root", recipe, fp8_weights)
    for message in (*selected.unused, *selected.warnings):
        warnings.warn(message, stacklevel=2)
    if not selected.layers and not selected_experts.modules:
        if not any(hasattr(m, "_fp8_params") for m in module.modules()):
            warnings.warn(
                "no layer was converted: the module has no nn.Linear that can be converted, or "
                "module_filter_fn and filter_fqns exclude all of them",
                stacklevel=2,
            )
        return module
    state = ModelState(recipe, amax_reduction_group=amax_reduction_group)
    state.fp8_gather = enable_fsdp_float8_all_gather
    keep_init = preserve_high_precision_init_val
    _convert(state, selected.layers, selected_experts.modules, fp8_weights, keep_init)
    state.attach(module)
    _log_conversion(
        module, recipe, {**selected.left, **selected_experts.left}, selected_experts.modules
    )
    return module


def _convert(
    state: ModelState,
    layers: Sequence[tuple[str, nn.Linear]],
    experts: Sequence[Experts],
    fp8_weights: bool,
    keep_init: bool,
) -> None:
    """Convert layers and experts, which have been checked, and add them to ``state``.

    Weights are quantized first, because only that can run out of memory or lack a kernel.
    """
    amaxes = []
    if fp8_weights:
        amaxes = [quantize_weight(layer, "weight", state.recipe, keep_init) for _, layer in layers]
        for one in experts:
            for name in one.parameters:
                quantize_weight(one.module, name, state.recipe, keep_init)
    standalone = []
    for name, layer in layers:
        if isinstance(layer, Float8Linear):
            standalone.append(layer._fp8_state)
        else:
            layer.__class__ = float8_class(Float8Linear, type(layer))
        assert isinstance(layer, Float8Linear)
        layer._join(state, name)
    for left in standalone:
        left.detach()
    convert_experts(state, experts)
    if fp8_weights:
        from fp8rs.optim.warnings import watch  # imported only by models that need it

        for (_, layer), amax in zip(layers, amaxes, strict=True):
            cast(Any, layer)._fp8_params["weight"].start_history_from(amax)
        state.subscribe_to_steps()
        watch()


def resolve_options(
    recipe: Any, config: Any, gather: bool | None, fp8_weights: bool
) -> tuple[Recipe, bool]:
    """Return the recipe, and whether weights are quantized before the all-gather.

    Args:
        recipe: the caller's ``recipe``.
        config: the caller's ``config``.
        gather: the caller's ``enable_fsdp_float8_all_gather``.
        fp8_weights: the caller's ``fp8_weights``.

    Raises:
        TypeError, ValueError: an argument is wrong, or two arguments contradict each other.
    """
    if config is None:
        recipe = resolve_recipe("current" if recipe is None else recipe)
        gather = gather is None or gather
    else:
        if recipe is not None:
            raise ValueError("recipe and config are both given: give one")
        recipe, config_gather = from_float8_linear_config(config)
        if gather not in (None, config_gather):
            raise ValueError(
                f"enable_fsdp_float8_all_gather={gather} contradicts "
                f"config.enable_fsdp_float8_all_gather={config_gather}: give one of them"
            )
        gather = config_gather
    if fp8_weights and not gather:
        raise ValueError(
            "enable_fsdp_float8_all_gather=False cannot be combined with fp8_weights=True: FP8 "
            "weights have no high-precision values to gather"
        )
    return recipe, gather


def _log_conversion(
    root: nn.Module, recipe: Recipe, left: dict[str, str], experts: Sequence[Experts]
) -> None:
    """Log the converted layers, and the reasons for the others, at level INFO.

    If the program has not configured logging, rank 0 prints the first line to stderr, so that a
    conversion is visible by default. A level above INFO on the logger silences it.
    """
    converted = [m for m in root.modules() if isinstance(m, Float8Linear)]
    batches = [m.module._parameters[name] for m in experts for name in m.parameters]
    weights = sum(p.numel() for p in (*(m.weight for m in converted), *batches) if p is not None)
    parameters = sum(0 if nn.parameter.is_lazy(p) else p.numel() for p in root.parameters())
    count = len(converted)
    summary = (
        f"recipe {recipe.name!r}: {count} linear layer{'s' * (count != 1)} "
        f"{f'and {len(batches)} weights of experts ' if batches else ''}converted, whose weights "
        f"are {weights / max(parameters, 1):.1%} of {parameters:,} parameters"
    )
    by_text: dict[str, list[str]] = {}
    for one in experts:
        gemms = {"auto": "FP8 where it is faster", "fp8": "FP8", "gather": "high precision"}
        text = f"experts gathered in FP8, with GEMMs in {gemms[one.gemms]}"
        names = (f"{one.name}.{name}".lstrip(".") for name in one.parameters)
        by_text.setdefault(text, []).extend(names)
    large = ((name, LARGE_3D) for name, _ in large_3d(root) if name not in left)
    reasons = (*left.items(), *large)
    if reasons:
        summary += f"; {len(reasons)} left in high precision"
    if _log.hasHandlers():
        lines = [summary, *(f"  {text}: {_names(names)}" for text, names in by_text.items())]
        by_reason: dict[str, list[str]] = {}
        for name, reason in reasons:
            by_reason.setdefault(reason, []).append(name)
        for reason, names_left in by_reason.items():
            lines.append(f"  left in high precision: {_names(names_left)}: {reason}")
        _log.info("%s", "\n".join(lines))
    elif _log.level <= logging.INFO and _rank() == 0:
        print(f"fp8rs: {summary}", file=sys.stderr)


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _rank() -> int:
    """Return this process's rank, even before the default process group exists."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def optimizer_stepped(module: nn.Module) -> None:
    """Notify the converted layers in ``module`` that their weights were updated.

    Delayed scaling then updates its amax histories. Optimizers that derive from
    ``torch.optim.Optimizer`` notify layers automatically. If weights are updated in another way,
    call this on every rank, once after each step. A model with delayed scaling that is never
    notified warns after some forwards.

    Args:
        module: a module that contains converted layers.
    """
    states = (getattr(m, "_fp8_state", None) for m in module.modules())
    for state in dict.fromkeys(state for state in states if state is not None):
        state.stepped()
