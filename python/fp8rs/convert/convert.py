"""Swap a model's linear layers for FP8 ones, in place."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from fp8rs.convert.torchao import from_float8_linear_config, refuse_high_precision_name
from fp8rs.convert.transformer_engine import from_te_recipe, is_te_recipe
from fp8rs.nn.linear import Float8Linear, float8_class
from fp8rs.nn.registry import ModelState
from fp8rs.quantize.recipes import Recipe, resolve_recipe
from fp8rs.tensor.formats import INPUT_DTYPES

_log = logging.getLogger("fp8rs")

#: From this many elements on a 3-D parameter is worth a word: experts of a mixture, say.
_LARGE = 1 << 20
LARGE_3D = "3-D parameters (experts?) are not converted"

ModuleFilter = Callable[[nn.Module, str], bool]


def convert_to_float8_training(
    module: nn.Module,
    *,
    recipe: Recipe | str | Any = None,
    module_filter_fn: ModuleFilter | None = None,
    filter_fqns: Iterable[str] = (),
    enable_fsdp_float8_all_gather: bool | None = None,
    amax_reduction_group: Any = None,
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
        recipe: a recipe or its short name; "current" by default. TransformerEngine's recipe objects
            are read by their fields.
        module_filter_fn: called with each layer and its fully qualified name; False leaves it out.
        filter_fqns: a layer whose name contains one of these strings is left out.
        enable_fsdp_float8_all_gather: under FSDP2, quantize weights before they are gathered: True
            unless ``config`` says otherwise. With False they are gathered in the mixed-precision
            policy's dtype. Either way the parameters stay the objects that they are.
        amax_reduction_group: process group over which amaxes are reduced. For delayed scaling once
            a step; None is the ranks of the mesh that FSDP2 shards the model over, and nobody for
            a model that is not sharded, whose other ranks may have no forward to run. For current
            scaling those of activations and gradients at each quantization; None is no group.
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
    recipe, enable_fsdp_float8_all_gather = settle(recipe, config, enable_fsdp_float8_all_gather)
    if amax_reduction_group is not None and not isinstance(amax_reduction_group, ProcessGroup):
        raise TypeError(
            "amax_reduction_group must be a torch.distributed.ProcessGroup, "
            f"not {type(amax_reduction_group).__name__}"
        )

    selected = select(module, module_filter_fn, filter_fqns, recipe)
    if selected.sharded:
        raise ValueError(f"{selected.sharded[0]} is sharded already: convert before fully_shard")
    for message in selected.warnings:
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
    state = ModelState(recipe, amax_reduction_group=amax_reduction_group)
    state.fp8_gather = enable_fsdp_float8_all_gather
    on_shard = adopt if enable_fsdp_float8_all_gather else None
    for name, layer in layers:
        if isinstance(layer, Float8Linear):
            layer._fp8_state.detach()
        else:
            layer.__class__ = float8_class(type(layer))
        assert isinstance(layer, Float8Linear)
        layer._join(state, name, on_shard)
    state.attach(module)
    _log.info("%s", _report(module, recipe, selected.left))
    return module


def settle(recipe: Any, config: Any, gather: bool | None) -> tuple[Recipe, bool]:
    """The recipe, and whether weights are quantized before they are gathered.

    Args:
        recipe, config, gather: what a caller gave as ``recipe``, ``config`` and
            ``enable_fsdp_float8_all_gather``.

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
        return recipe, said
    if is_te_recipe(recipe):
        recipe = from_te_recipe(recipe)
    refuse_high_precision_name(recipe)
    return resolve_recipe("current" if recipe is None else recipe), gather is None or gather


def _report(root: nn.Module, recipe: Recipe, left: dict[str, str]) -> str:
    """What a conversion did, in a few lines."""
    converted = [m for m in root.modules() if isinstance(m, Float8Linear)]
    weights = sum(m.weight.numel() for m in converted)
    parameters = sum(p.numel() for p in root.parameters())
    lines = [
        f"recipe {recipe.name!r}: {len(converted)} linear layers converted, whose weights are "
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

    For updates that nobody sees: by an optimizer that is not of torch's kind, or by hand through
    ``.data``, of a model that is not sharded. Every rank must say so. Steps of torch.optim's
    optimizers, and writes that move tensors' versions, are seen anyway.

    Args:
        module: a module that contains converted layers.
    """
    states = {id(s): s for m in module.modules() if (s := getattr(m, "_fp8_state", None))}
    for state in states.values():
        state.stepped()


def adopt(layer: Float8Linear, name: str, parameter: Any) -> None:
    """A layer is being sharded: see `fp8rs.fsdp.adopt`, which those import who shard."""
    from fp8rs.fsdp import adopt

    adopt(layer, name, parameter)


@dataclass(frozen=True)
class Selection:
    """Which layers of a model are to be converted.

    Attributes:
        layers: those, with their names, in the order of the model; none that is converted already.
        left: the reason for each linear layer that is left out, by its name.
        sharded: those of them for which it is too late: convert before fully_shard.
        warnings: what the one who converts is to be told.
    """

    layers: list[tuple[str, nn.Linear]] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    sharded: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def select(
    root: nn.Module, keep: ModuleFilter | None, filter_fqns: Iterable[str], recipe: Recipe
) -> Selection:
    """The layers to convert to ``recipe``. Nothing in the model changes.

    Args:
        root: the model.
        keep: the caller's ``module_filter_fn``.
        filter_fqns: as in ``convert_to_float8_training``.
        recipe: the one to convert to.

    Raises:
        TypeError: ``filter_fqns`` is a str.
        ValueError: a layer is on another recipe.
    """
    if isinstance(filter_fqns, str):
        raise TypeError(f"filter_fqns must be a collection of names, not the str {filter_fqns!r}")
    filter_fqns = tuple(filter_fqns)
    found = Selection()
    linears = [name for name, part in root.named_modules() if isinstance(part, nn.Linear)]
    unused = [part for part in filter_fqns if not any(part in name for name in linears)]
    if unused:
        found.warnings.append(
            f"filter_fqns leaves nothing out for {', '.join(map(repr, unused))}: "
            "no linear layer has that in its name"
        )
    owners = _weight_owners(root)
    sharded = _sharded_parts(root)
    for name, module in root.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        shown = name or "the root"
        if any(part in name for part in filter_fqns):
            found.left[shown] = "named by filter_fqns"
            continue
        if keep is not None and not keep(module, name):
            found.left[shown] = "left out by module_filter_fn"
            continue
        if isinstance(module, Float8Linear):
            if module.recipe != recipe:
                raise ValueError(
                    f"{shown} is an FP8 layer already, with recipe {module.recipe}, which is not "
                    f"{recipe}: leave it out with filter_fqns or module_filter_fn"
                )
            if module._fp8_state.alone:
                found.layers.append((name, module))
            continue
        if f"{name}.".startswith(sharded):
            found.left[shown] = "it is sharded already"
            found.sharded.append(shown)
            continue
        if module._parameters.get("weight") is None:
            found.left[shown] = "its weight is computed from other parameters"
            found.warnings.append(
                f"{shown} stays in high precision: its weight is no parameter, but computed from "
                "others (weight_norm, spectral_norm, pruning or another parametrization)"
            )
            continue
        reason = _unlike_linear(module)
        if reason:
            found.left[shown] = reason
            continue
        tied = [
            other for other in owners[id(module.weight)] if other != f"{name}.weight".lstrip(".")
        ]
        if tied:
            found.left[shown] = "its weight is tied to another module's"
            found.warnings.append(
                f"{shown} stays in high precision: its weight is tied to {', '.join(tied)}"
            )
            continue
        if module.weight.dtype not in INPUT_DTYPES:
            found.left[shown] = f"its weight is {module.weight.dtype}"
            found.warnings.append(
                f"{shown} stays as it is: its weight is {module.weight.dtype}, "
                "not float32, bfloat16 or float16"
            )
            continue
        found.layers.append((name, module))
    return found


def large_3d(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of three dimensions that are worth a word: experts of a mixture, say."""
    parameters = root.named_parameters()
    return [(name, p) for name, p in parameters if p.dim() == 3 and p.numel() >= _LARGE]


def _unlike_linear(module: nn.Linear) -> str:
    """Why a subclass of nn.Linear cannot be converted; empty where it can."""
    kind = type(module)
    if isinstance(module.weight, nn.parameter.UninitializedParameter):
        return "its weight has no size yet: run a forward first"
    if kind is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return "its parent (nn.MultiheadAttention) uses its weight without calling it"
    if kind.forward is not nn.Linear.forward:
        return f"its class {kind.__name__} has a forward of its own"
    return ""


def _weight_owners(root: nn.Module) -> dict[int, list[str]]:
    """The names of each parameter, by identity, one a module that has it."""
    owners: dict[int, list[str]] = {}
    for name, module in root.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(f"{name}.{key}".lstrip("."))
    return owners


def _sharded_parts(root: nn.Module) -> tuple[str, ...]:
    """The names of what fully_shard was called on, as prefixes of their layers' names."""
    return tuple(
        f"{name}." if name else ""
        for name, module in root.named_modules()
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
    )
