"""Convert the linear layers of a model to FP8 layers, in place."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, TypeVar, cast

from torch import nn

from fp8rs.convert.expert_selection import convert_experts
from fp8rs.convert.fp8_weights import check_weight, quantize_weight
from fp8rs.convert.options import Arguments, ExpertsMode, ModuleFilter, Options, fqn_of
from fp8rs.convert.select import FILTERED, SHARDED, Selection, converted, listed, record, select
from fp8rs.model.notice import notice
from fp8rs.model.state import Gemms, ModelState, state_of
from fp8rs.nn.fp8_params import add_fp8_params, float8_class
from fp8rs.nn.linear import Float8Linear
from fp8rs.quantize.recipes import Recipe, RecipeName, check_bool, check_module

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
    gemms: Gemms = "auto",
    config: Any = None,
) -> M:
    """Convert the ``nn.Linear`` layers and the experts of ``module`` to train in FP8.

    Layers become ``fp8rs.nn.Linear`` in place: objects, hooks and names stay. Call this before
    parallelizing the model.

    A second call with the same arguments has no effect. A module that was converted with another
    recipe, another mode of ``experts`` or other arguments is an error, unless ``filter_fqns``
    excludes it. `convert_to_high_precision` undoes a conversion.

    A subclass of nn.Linear that inherits its forward is converted and remains an instance of its
    class.

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
        module_filter_fn: called with each nn.Linear and its fully qualified name. A layer for which
            it returns False stays in high precision. It is not called with experts, which are
            selected by ``experts`` and ``filter_fqns``.
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
        gemms: which GEMMs of linear layers run on FP8 operands on a GPU. "fp8": all. "auto": those
            of forwards with enough tokens for FP8 to be faster, as estimated from the sizes of the
            layers; others run in high precision. If the model's first forward is in training and
            has fewer tokens, FSDP2 also gathers the layers in high precision from then on, unless
            ``enable_fsdp_float8_all_gather`` is given. The choice is logged. Devices that are not
            GPUs always have FP8 operands.
        config: a torchao Float8LinearConfig, instead of ``recipe``.

    Returns:
        ``module``.

    Raises:
        TypeError, ValueError: an argument is wrong, ``config`` requires something that no recipe
            supports or contradicts another argument, a layer was converted with other arguments,
            ``fully_shard`` was already called on ``module``, or with ``fp8_weights``, ranks have
            parts of one matrix of a weight that is a DTensor already.
        RuntimeError: with ``fp8_weights``, a graph or a weak reference holds a weight's tensor, or
            no kernel quantizes a weight on its device or of its type.
    """
    check_module("module", module)
    arguments = Arguments(
        recipe=recipe,
        config=config,
        module_filter_fn=module_filter_fn,
        filter_fqns=filter_fqns,
        enable_fsdp_float8_all_gather=enable_fsdp_float8_all_gather,
        amax_reduction_group=amax_reduction_group,
        fp8_weights=fp8_weights,
        experts=experts,
        gemms=gemms,
    )
    options = arguments.options()
    check_bool("preserve_high_precision_init_val", preserve_high_precision_init_val)
    if preserve_high_precision_init_val and not fp8_weights:
        raise ValueError(
            "preserve_high_precision_init_val=True requires fp8_weights=True: other weights keep "
            "their high-precision values anyway"
        )
    selected = select(module, options)
    check_conversion(module, options, selected)
    convert_model(module, options, selected, preserve_high_precision_init_val)
    return module


def check_conversion(root: nn.Module, options: Options, selected: Selection) -> None:
    """Check that a model can be converted, and warn about its layers, without changing it.

    Every error of a conversion is raised here, except that memory runs out.

    Args:
        root: the model.
        options: the options of the conversion.
        selected: the layers and experts to convert.

    Raises:
        ValueError, RuntimeError, TypeError: see ``convert_to_float8_training``.
    """
    for name, reason in selected.unconverted.items():
        if reason == SHARDED:
            raise ValueError(f"{name} is sharded already: convert before fully_shard")
    weights = selected.weights()
    for weight in weights:
        check_weight(
            weight.module,
            weight.name,
            fqn_of(weight.module_name),
            options.recipe,
            options.fp8_weights,
        )
    # Deriving a class fails if the original one forbids it.
    for _, layer in selected.layers:
        if not isinstance(layer, Float8Linear):
            float8_class(Float8Linear, type(layer))
    for experts in selected.experts:
        float8_class(experts.mixin, type(experts.module))

    for message in (*selected.unused, *selected.warnings):
        warnings.warn(message, stacklevel=3)
    if not weights and not converted(root).weights():
        warnings.warn(f"no layer was converted: {_why_none(selected)}", stacklevel=3)


def _why_none(selected: Selection) -> str:
    """Return why a conversion selected no layer and no experts."""
    if not selected.unconverted:
        return "the module has no nn.Linear and no experts"
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in selected.unconverted.items():
        names_by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{listed(names)} ({reason})" for reason, names in names_by_reason.items())


def convert_model(root: nn.Module, options: Options, selected: Selection, keep_init: bool) -> None:
    """Convert a model that `check_conversion` has checked.

    Args:
        root: the model.
        options: the options of the conversion.
        selected: the layers and experts to convert.
        keep_init: whether to keep the weights' values before quantization on the CPU.
    """
    if not selected.weights():
        return
    state = ModelState(
        options.recipe,
        amax_reduction_group=options.amax_reduction_group,
        gemms=options.gemms,
    )
    state.fp8_gather = options.fp8_gather
    state.experts = options.experts
    _convert(state, selected, options.fp8_weights, keep_init)
    state.attach(root)
    state.find_min_tokens()
    record(root, selected.unconverted)
    _log_conversion(root, options.recipe)


def _convert(state: ModelState, selected: Selection, fp8_weights: bool, keep_init: bool) -> None:
    """Convert layers and experts, which have been checked, and add them to ``state``.

    Weights are quantized first, because only that can run out of memory.
    """
    amaxes = []
    if fp8_weights:
        for weight in selected.weights():
            amaxes.append(quantize_weight(weight.module, weight.name, state.recipe, keep_init))

    standalone_states = []
    for name, layer in selected.layers:
        if isinstance(layer, Float8Linear):
            standalone_states.append(layer._fp8_state)
            layer._join(state, name)
        else:
            add_fp8_params(layer, ("weight",), state, name, Float8Linear)
    for standalone in standalone_states:
        standalone.detach()
    convert_experts(state, selected.experts)

    if fp8_weights:
        # Import it only for models that need it.
        from fp8rs.optim.missing_masters import warn_without_masters

        # The amaxes of experts come last. Batched weights have no history.
        for (_, layer), amax in zip(selected.layers, amaxes, strict=False):
            if not amax.is_meta:
                handle = cast(Any, layer)._fp8_params["weight"]
                scale = handle.quant_spec.scale_from_amax(amax.float())
                handle.fit_history(scale, amax.float(), exact=True)
        warn_without_masters()


def _log_conversion(root: nn.Module, recipe: Recipe) -> None:
    """Log the converted layers, and the reasons for the others."""
    selection = converted(root)
    converted_numel = sum(weight.parameter.numel() for weight in selection.weights())
    model_numel = 0
    for parameter in root.parameters():
        if not nn.parameter.is_lazy(parameter):
            model_numel += parameter.numel()
    summary = (
        f"recipe {recipe.name!r}: {selection} converted, whose weights are "
        f"{converted_numel / max(model_numel, 1):.1%} of {model_numel:,} parameters"
    )
    if selection.unconverted:
        summary += f"; {len(selection.unconverted)} left in high precision"
    if selection.experts and FILTERED in selection.unconverted.values():
        summary += "; module_filter_fn does not select experts: experts= and filter_fqns do"
    if selection.experts and recipe.delayed:
        summary += "; experts have current scales, because their rows have no history"

    lines = []
    for text, names in _log_details(selection).items():
        lines.append(f"  {text}: {listed(names)}")
    notice(summary, lines)


def _log_details(selection: Selection) -> dict[str, list[str]]:
    """Return the names of weights of experts and of unconverted layers, by what happens to them."""
    gemms = {"auto": "FP8 where it is faster", "fp8": "FP8", "gather": "high precision"}
    names_by_text: dict[str, list[str]] = {}
    for experts in selection.experts:
        reason = f" ({experts.reason})" if experts.reason else ""
        text = f"experts with grouped GEMMs in {gemms[experts.gemms]}{reason}"
        names_by_text.setdefault(text, []).extend(experts.fqns)
    for name, reason in selection.unconverted.items():
        names_by_text.setdefault(f"left in high precision ({reason})", []).append(name)
    return names_by_text


def optimizer_stepped(module: nn.Module) -> None:
    """Notify the converted layers in ``module`` that their weights were updated.

    Delayed scaling then updates its amax histories. Optimizers that derive from
    ``torch.optim.Optimizer`` notify layers automatically. If weights are updated in another way,
    call this on every rank, once after each step. A model with delayed scaling that is never
    notified warns after some forwards.

    Args:
        module: a module that contains converted layers.
    """
    check_module("module", module)
    states = map(state_of, module.modules())
    for state in dict.fromkeys(state for state in states if state is not None):
        state.stepped()
