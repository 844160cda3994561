"""Modules that have FP8 weights from the moment they are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fp8rs.convert.convert import convert_to_float8_training
from fp8rs.convert.fp8_weights import high_precision_weight, quantize_weight
from fp8rs.convert.select import ModuleFilter, why_not
from fp8rs.nn.linear import Float8Linear
from fp8rs.quantize.recipes import Recipe, RecipeName, resolve_recipe


@contextmanager
def quantized_init(
    recipe: Recipe | RecipeName = "current",
    preserve_high_precision_init_val: bool = False,
    *,
    module_filter_fn: ModuleFilter | None = None,
    filter_fqns: Iterable[str] = (),
    amax_reduction_group: Any = None,
) -> Iterator[None]:
    """Linear layers made inside have FP8 weights, and train in FP8.

    A layer's weight is quantized when the layer is put into another module, so that no more than a
    layer is ever there in high precision (with a filter: at the end, when names are known). At the
    end each outermost module that was made is converted as by
    ``convert_to_float8_training(..., fp8_weights=True)``. On the meta device too: give it memory by
    ``to_empty`` and values by ``reset_parameters`` or a state dict.

    Args:
        recipe: a recipe or its short name.
        preserve_high_precision_init_val: keep each weight's values from before the first rounding,
            on the CPU: the optimizers of ``fp8rs.optim`` begin their masters with them, and
            ``get_high_precision_init_val()`` of a weight gives them.
        module_filter_fn: as of ``convert_to_float8_training``.
        filter_fqns: as of ``convert_to_float8_training``.
        amax_reduction_group: as of ``convert_to_float8_training``.

    Raises:
        TypeError, ValueError: as ``convert_to_float8_training``.
    """
    recipe = resolve_recipe(recipe)
    filter_fqns = tuple(filter_fqns)
    early = module_filter_fn is None and not filter_fqns
    linears: dict[int, nn.Linear] = {}
    parents: dict[int, nn.Module] = {}
    children: set[int] = set()

    def made(module: nn.Module, name: str, parameter: Any) -> None:
        if isinstance(module, nn.Linear):
            linears[id(module)] = module

    def placed(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is None:
            return
        parents[id(parent)] = parent
        children.add(id(child))
        layer = linears.get(id(child))
        if early and layer is not None and _can_be_converted(layer):
            quantize_weight(layer, recipe, preserve_high_precision_init_val)

    hooks = (
        register_module_parameter_registration_hook(made),
        register_module_module_registration_hook(placed),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    made_inside = linears.values()
    roots = [m for m in (*parents.values(), *made_inside) if id(m) not in children]
    for root in {id(m): m for m in roots}.values():
        inside = [m for m in root.modules() if id(m) in linears]
        if not inside:
            continue
        convert_to_float8_training(
            root,
            recipe=recipe,
            module_filter_fn=_only(linears, module_filter_fn),
            filter_fqns=filter_fqns,
            amax_reduction_group=amax_reduction_group,
            fp8_weights=True,
            preserve_high_precision_init_val=preserve_high_precision_init_val,
        )
        for layer in inside:
            if isinstance(layer, nn.Linear) and not isinstance(layer, Float8Linear):
                high_precision_weight(layer)  # tied since, or changed otherwise


def _can_be_converted(layer: nn.Linear) -> bool:
    """Whether a conversion takes a layer, as far as the layer alone tells."""
    if isinstance(layer, Float8Linear):
        return layer._fp8_state.standalone
    return why_not(layer) is None


def _only(linears: dict[int, nn.Linear], keep: ModuleFilter | None) -> ModuleFilter:
    """A filter that leaves out what was not made inside."""

    def chosen(module: nn.Module, name: str) -> bool:
        return id(module) in linears and (keep is None or keep(module, name))

    return chosen
