"""Build modules whose weights are FP8 from the start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fp8rs.convert.convert import check_conversion, convert_model
from fp8rs.convert.fp8_weights import dequantize_weight, quantize_weight
from fp8rs.convert.options import Arguments, ExpertsMode, ModuleFilter, Options
from fp8rs.convert.select import Selection, select, why_not
from fp8rs.nn.linear import Float8Linear
from fp8rs.quantize.recipes import Recipe, RecipeName


@contextmanager
def quantized_init(
    recipe: Recipe | RecipeName = "current",
    preserve_high_precision_init_val: bool = False,
    *,
    module_filter_fn: ModuleFilter | None = None,
    filter_fqns: Iterable[str] = (),
    amax_reduction_group: Any = None,
    experts: ExpertsMode = "auto",
) -> Iterator[None]:
    """Context manager in which layers and experts are built with FP8 weights and train in FP8.

    A layer's weight is quantized when the layer is registered on another module, so that at most
    one layer is in high precision at a time. Experts are quantized at exit, and so are all weights
    if there is a filter, because names are known then. At exit, each outermost module that was
    built is converted by ``convert_to_float8_training(..., fp8_weights=True)``. Modules may be
    built on the meta device. Materialize them with ``to_empty``, then call ``reset_parameters`` or
    load a state dict.

    Args:
        recipe: a recipe or its short name.
        preserve_high_precision_init_val: keep each weight's values before the first rounding on the
            CPU. The optimizers of ``fp8rs.optim`` initialize masters from them, and a weight's
            ``get_high_precision_init_val()`` returns them.
        module_filter_fn: as in ``convert_to_float8_training``.
        filter_fqns: as in ``convert_to_float8_training``.
        amax_reduction_group: as in ``convert_to_float8_training``.
        experts: as in ``convert_to_float8_training``.

    Raises:
        TypeError, ValueError, RuntimeError: as in ``convert_to_float8_training``. If this happens
            at exit, no module is converted, and weights that were quantized early are dequantized.
    """
    arguments = Arguments(
        recipe,
        module_filter_fn=module_filter_fn,
        filter_fqns=filter_fqns,
        amax_reduction_group=amax_reduction_group,
        fp8_weights=True,
        experts=experts,
    )
    options = arguments.options()
    quantizes_early = module_filter_fn is None and not options.filter_fqns
    # Modules that registered a parameter, which only modules that are built here do, modules that
    # registered a child, and the children, by id. The references keep ids unique.
    built: dict[int, nn.Module] = {}
    parents: dict[int, nn.Module] = {}
    children: dict[int, nn.Module] = {}

    def on_parameter(module: nn.Module, name: str, parameter: Any) -> None:
        built[id(module)] = module

    def on_child(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is None:
            return
        parents[id(parent)] = parent
        children[id(child)] = child
        if quantizes_early and id(child) in built and _can_be_converted(child):
            quantize_weight(child, "weight", options.recipe, preserve_high_precision_init_val)

    def is_selected(module: nn.Module, name: str) -> bool:
        return id(module) in built and (module_filter_fn is None or module_filter_fn(module, name))

    parameter_hook = register_module_parameter_registration_hook(on_parameter)
    child_hook = register_module_module_registration_hook(on_child)
    try:
        yield
    finally:
        parameter_hook.remove()
        child_hook.remove()

    roots = [module for key, module in {**built, **parents}.items() if key not in children]
    layers = [module for module in built.values() if isinstance(module, nn.Linear)]
    exit_options = replace(options, module_filter_fn=is_selected)
    try:
        selections = _select_all(roots, exit_options, built)
    except BaseException:
        _dequantize_unconverted(layers)
        raise
    for root, selected in selections:
        convert_model(root, exit_options, selected, preserve_high_precision_init_val)
    _dequantize_unconverted(layers)  # layers that were tied or changed after they were registered


def _select_all(
    roots: Iterable[nn.Module], options: Options, built: Mapping[int, nn.Module]
) -> list[tuple[nn.Module, Selection]]:
    """Select and check what to convert below each root, before any of them is converted.

    Args:
        roots: the outermost modules.
        options: the options of the conversions.
        built: the modules that were built in the context, by id.

    Raises:
        ValueError, RuntimeError, TypeError: a root cannot be converted.
    """
    selections = []
    selected_ids: set[int] = set()
    for root in roots:
        selected = select(root, options)
        # Roots may share modules. The first one converts them.
        selected.layers[:] = [
            (name, layer) for name, layer in selected.layers if id(layer) not in selected_ids
        ]
        selected.experts[:] = [
            experts
            for experts in selected.experts
            if id(experts.module) in built and id(experts.module) not in selected_ids
        ]
        selected_ids.update(id(weight.module) for weight in selected.weights())

        has_layers = any(
            isinstance(module, nn.Linear) and id(module) in built for module in root.modules()
        )
        if has_layers or selected.experts:
            check_conversion(root, options, selected)
            selections.append((root, selected))
    return selections


def _dequantize_unconverted(layers: Iterable[nn.Linear]) -> None:
    """Give layers that were not converted high-precision weights again."""
    for layer in layers:
        if not isinstance(layer, Float8Linear):
            dequantize_weight(layer.weight)


def _can_be_converted(module: nn.Module) -> bool:
    """Return whether a module is a layer that can be converted, whatever the rest of the model."""
    if isinstance(module, Float8Linear):
        return module._fp8_state.standalone
    return isinstance(module, nn.Linear) and why_not(module) is None
