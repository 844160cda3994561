"""Select the layers and experts to convert, and say why others stay in high precision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from torch import nn

from fp8rs.convert.expert_selection import NAMED, Experts, is_expert, select_experts
from fp8rs.convert.options import ModuleFilter, Options, fqn_of
from fp8rs.convert.routers import routers_and_gates
from fp8rs.gemm.estimates import linear_us
from fp8rs.model.state import state_of
from fp8rs.nn.expert_modules import batched_parameters
from fp8rs.nn.linear import Float8Linear
from fp8rs.quantize.formats import INPUT_DTYPES
from fp8rs.quantize.recipes import Recipe, RecipeName, check_int, resolve_recipe

#: Why a layer stays in high precision. `NOT_SEEN`: the layer was outside the converted module, or
#: was added later.
FILTERED = "excluded by module_filter_fn"
SHARDED = "it is sharded already"
TORCHAO = "torchao has converted it"
NOT_SEEN = "not part of a conversion"
REPLACED = "it has replaced a converted layer: convert the model after such changes"


class Reason(NamedTuple):
    """Why a layer is not converted.

    Attributes:
        text: for reports and logs.
        details: for a warning. It is empty for reasons that users choose or expect.
    """

    text: str
    details: str = ""


def min_speedup(
    tokens: int, speedup: float = 1.02, *, recipe: Recipe | RecipeName = "current"
) -> ModuleFilter:
    """Return a ``module_filter_fn`` that keeps small layers in high precision.

    Small layers are slower in FP8, because quantization and its launches take longer than FP8 GEMMs
    save. The filter returns whether forward and backward of a layer are at least ``speedup`` times
    as fast as in bf16. It estimates both from measurements of compiled layers on one H100, which
    quantize their whole weight in each forward. Under FSDP2, a rank quantizes only its shard and
    gathers half of the bytes, so layers can be faster than estimated.

    It does not apply to experts. With ``experts="auto"``, each call of experts chooses the faster
    GEMMs.

    Combine it with a filter of your own by ``and``:

        fast = fp8rs.min_speedup(tokens=8192)
        fp8rs.convert_to_float8_training(
            model, module_filter_fn=lambda module, fqn: "gate" not in fqn and fast(module, fqn)
        )

    Args:
        tokens: rows of the layers' inputs on each GPU: batch size times sequence length.
        speedup: the least ratio of the times in bf16 and in FP8.
        recipe: a recipe or its short name. "delayed" is estimated as "current", and is faster. A
            GEMM in high precision is estimated as a third of a bf16 layer's time.

    Raises:
        TypeError, ValueError: ``recipe`` is unknown, or ``tokens`` is less than 1. The filter
            raises TypeError for a module that is not an nn.Linear.
    """
    recipe = resolve_recipe(recipe)
    high_precision_gemms = len(recipe.high_precision_gemms)
    check_int("tokens", tokens, 1)

    def keep(module: nn.Module, fqn: str) -> bool:
        if not isinstance(module, nn.Linear):
            raise TypeError(
                f"min_speedup estimates nn.Linear layers, not {fqn!r}, a {type(module).__name__}. "
                "GEMMs of experts are chosen by the argument experts of the conversion"
            )
        n = module.out_features
        k = module.in_features
        us = linear_us(recipe.name, tokens, n, k, high_precision_gemms)
        return linear_us("bf16", tokens, n, k) >= speedup * us

    return keep


def why_not(layer: nn.Linear, tied: Iterable[str] = ()) -> Reason | None:
    """Return the first reason not to convert a high-precision layer, or None.

    Args:
        layer: the layer.
        tied: other names of its weight.
    """
    weight = layer._parameters.get("weight")
    kind = type(layer)
    if weight is None:
        return Reason(
            "its weight is computed from other parameters",
            "the weight is not a parameter, but computed from others (weight_norm, spectral_norm, "
            "pruning or another parametrization)",
        )
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return Reason("its weight has no size yet: run a forward first")
    if kind is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return Reason("its parent (nn.MultiheadAttention) reads its weight without calling it")
    if any(base.__module__.startswith("torchao.") for base in kind.__mro__):
        return Reason(TORCHAO)
    if "forward" in layer.__dict__:  # for example by torch's or another library's hooks
        return Reason(
            "its forward is an attribute of the instance",
            "an attribute of the instance replaces the forward, for example tensor parallelism of "
            "transformers or a hook of accelerate. Convert the model before",
        )
    if kind.forward is not nn.Linear.forward:
        return Reason(f"its class {kind.__name__} overrides forward")
    if tied:
        return Reason(
            "its weight is tied to another module's", f"the weight is tied to {', '.join(tied)}"
        )
    if weight.dtype not in INPUT_DTYPES:
        return Reason(
            f"its weight is {weight.dtype}",
            f"the weight is {weight.dtype}, not float32, bfloat16 or float16",
        )
    return None


class SelectedWeight(NamedTuple):
    """A weight that a conversion converts, or has converted.

    Attributes:
        module_name: the module's fully qualified name.
        module: the module. Its class is that of the module before or after the conversion.
        name: the weight's name in the module.
    """

    module_name: str
    module: Any
    name: str

    @property
    def parameter(self) -> nn.Parameter:
        """The weight."""
        parameter: nn.Parameter = self.module._parameters[self.name]
        return parameter


@dataclass(frozen=True)
class Selection:
    """The layers and experts of a model that a conversion converts, or has converted.

    Attributes:
        layers: names and linear layers in model order.
        experts: modules with weights of experts in model order.
        unconverted: the reason for each linear layer and each weight of experts that stays in high
            precision, by name.
        unused: warnings about strings in ``filter_fqns`` that match no layer.
        warnings: other warnings.
    """

    layers: list[tuple[str, nn.Linear]] = field(default_factory=list)
    experts: list[Experts] = field(default_factory=list)
    unconverted: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def weights(self) -> list[SelectedWeight]:
        """Return the weights of the layers, then those of the experts."""
        weights = [SelectedWeight(name, layer, "weight") for name, layer in self.layers]
        for experts in self.experts:
            for name in experts.parameters:
                weights.append(SelectedWeight(experts.name, experts.module, name))
        return weights

    def __str__(self) -> str:
        text = counted(len(self.layers), "linear layer")
        expert_weights = len(self.weights()) - len(self.layers)
        if expert_weights:
            text += f" and {counted(expert_weights, 'weight')} of experts"
        return text


def counted(number: int, noun: str) -> str:
    """Return a number and a noun, which is plural for other numbers than 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def select(root: nn.Module, options: Options) -> Selection:
    """Select the layers and experts to convert, without changing the model.

    Layers and experts that are already converted are not selected.

    Args:
        root: the model.
        options: the arguments of the conversion, resolved.

    Raises:
        ValueError: a module was converted with other options, or ``experts="fp8"`` is requested for
            a weight without FP8 GEMMs.
    """
    selection = Selection()
    _warn_of_unused_filters(selection, root, options)
    sharded_prefixes = _sharded_prefixes(root)
    parameter_names = _parameter_names(root)
    next_to_experts = routers_and_gates(root)

    layers_by_details: dict[str, list[str]] = {}
    has_experts = False
    for name, module in root.named_modules():
        is_sharded = f"{name}.".startswith(sharded_prefixes)
        if not isinstance(module, nn.Linear):
            experts, reasons = select_experts(name, module, options, parameter_names)
            if experts or reasons or state_of(module) is not None:
                has_experts = True
            selection.unconverted.update(reasons)
            if experts and is_sharded:
                selection.unconverted.update(dict.fromkeys(experts.fqns, SHARDED))
            elif experts:
                selection.experts.append(experts)
            continue

        reason = _why_excluded(name, module, options)
        if isinstance(module, Float8Linear):
            if reason is None:
                options.check(name, module)
            if not module._fp8_state.standalone:
                continue
        elif reason is None and module in next_to_experts:
            reason = Reason(next_to_experts[module])
        elif reason is None and is_sharded:
            reason = Reason(SHARDED)
        elif reason is None:
            weight_names = parameter_names.get(id(module._parameters.get("weight")), [])
            weight_fqn = fqn_of(name, "weight")
            reason = why_not(module, [other for other in weight_names if other != weight_fqn])

        if reason is None:
            selection.layers.append((name, module))
            continue
        selection.unconverted[fqn_of(name)] = reason.text
        if reason.details:
            layers_by_details.setdefault(reason.details, []).append(fqn_of(name))

    if options.experts in ("gather", "fp8") and not has_experts:
        selection.unused.append(
            f"experts={options.experts!r} has no effect, because the module has no weights of "
            "experts: parameters (E, N, K) outside of linear layers"
        )
    _check_whole(selection.layers)
    for details, names in layers_by_details.items():
        verb = "is" if len(names) == 1 else "are"
        selection.warnings.append(f"{listed(names)} {verb} not converted: {details}")
    torchao_layers = [name for name, text in selection.unconverted.items() if text == TORCHAO]
    if torchao_layers:
        selection.warnings.append(
            f"{len(torchao_layers)} layers are not converted (the first is {torchao_layers[0]}): "
            "torchao has already converted them to FP8. Remove torchao's conversion. To keep its "
            "Float8LinearConfig, pass it as config"
        )
    return selection


def _warn_of_unused_filters(selection: Selection, root: nn.Module, options: Options) -> None:
    """Add a warning if strings in ``filter_fqns`` match no layer and no weight of experts."""
    names: set[str] = set()
    for module_name, module in root.named_modules():
        if isinstance(module, nn.Linear):
            names.add(module_name)
        for parameter_name in batched_parameters(module):
            names.add(fqn_of(module_name, parameter_name))

    unused = []
    for pattern in options.filter_fqns:
        if not any(pattern in name for name in names):
            unused.append(repr(pattern))
    if unused:
        selection.unused.append(
            f"filter_fqns has {', '.join(unused)}, but no linear layer and no parameter of experts "
            "has that in its name"
        )


def _why_excluded(name: str, layer: nn.Linear, options: Options) -> Reason | None:
    """Return the filter that excludes a layer."""
    keep = options.module_filter_fn
    if options.excludes(name):
        return Reason(NAMED)
    return None if keep is None or keep(layer, name) else Reason(FILTERED)


# --- converted models ----------------------------------------------------------------------------


def record(root: nn.Module, unconverted: dict[str, str]) -> None:
    """Record why a conversion left out layers and experts.

    The reasons are kept on the modules, because wrappers change names.
    """
    for module_name, module in root.named_modules():
        names = [""] if isinstance(module, nn.Linear) else list(module._parameters)
        reasons: dict[str, str] = {}
        for name in names:
            fqn = fqn_of(module_name, name)
            if fqn in unconverted:
                reasons[name] = unconverted[fqn]
        if reasons:
            module.__dict__["_fp8_left_out"] = reasons


def converted(root: nn.Module) -> Selection:
    """Return what is converted in a model, and the recorded reasons for the rest."""
    selection = Selection()
    for module_name, module in root.named_modules():
        if isinstance(module, Float8Linear):
            selection.layers.append((module_name, module))
            continue
        fp8_params: Any = {} if state_of(module) is None else module._fp8_params
        if fp8_params:
            selection.experts.append(Experts.of(module_name, module))

        reasons = module.__dict__.get("_fp8_left_out", {})
        if isinstance(module, nn.Linear):
            selection.unconverted[fqn_of(module_name)] = reasons.get("", NOT_SEEN)
            continue
        for name, parameter in batched_parameters(module).items():
            if name in fp8_params:
                continue
            if name in reasons or is_expert(module, parameter):
                selection.unconverted[fqn_of(module_name, name)] = reasons.get(name, NOT_SEEN)

    for name in _replaced(root, selection):
        selection.unconverted[name] = REPLACED
    return selection


def _replaced(root: nn.Module, selection: Selection) -> list[str]:
    """Return the names of plain layers in the places of layers that were converted."""
    states = {cast(Any, weight.module)._fp8_state for weight in selection.weights()}
    names = []
    for state in states:
        if state.root is root:
            names += state.replaced_layers()
    return names


# --- helpers -------------------------------------------------------------------------------------


def _check_whole(layers: Iterable[tuple[str, nn.Linear]]) -> None:
    """Raise ValueError if only some layers of a module built with ``recipe=`` are selected.

    The layers of such a module share one state, and adding some to a model detaches that state.
    """
    selected_ids = {id(layer) for _, layer in layers}
    for name, layer in layers:
        if not isinstance(layer, Float8Linear):
            continue
        state = layer._fp8_state
        for other in state.layers():
            if state_of(other) is state and id(other) not in selected_ids:
                raise ValueError(
                    f"{name or 'the root'} is in a module that was built with recipe=, and another "
                    "layer of that module is excluded. Build the module without recipe, or convert "
                    "all of its layers"
                )


def _parameter_names(root: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter by id, with one name per module that holds it."""
    names: dict[int, list[str]] = {}
    for prefix, module in root.named_modules():  # yields each module once
        for name, parameter in module._parameters.items():
            names.setdefault(id(parameter), []).append(f"{prefix}.{name}".lstrip("."))
    return names


def _sharded_prefixes(root: nn.Module) -> tuple[str, ...]:
    """Return prefixes of the names of layers inside modules that ``fully_shard`` was called on."""
    return tuple(
        f"{name}." if name else ""
        for name, module in root.named_modules()
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
    )
