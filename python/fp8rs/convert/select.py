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

#: Reasons. The last one is of layers outside a converted part, or added after the conversion.
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
        recipe: a recipe or its short name. "delayed" is estimated as "current", and is faster.

    Raises:
        TypeError, ValueError: ``recipe`` is unknown, or ``tokens`` is less than 1. The filter
            raises TypeError for a module that is not an nn.Linear.
    """
    name = resolve_recipe(recipe).name
    name = "current" if name == "delayed" else name
    check_int("tokens", tokens, 1)

    def keep(module: nn.Module, fqn: str) -> bool:
        if not isinstance(module, nn.Linear):
            raise TypeError(
                f"min_speedup estimates nn.Linear layers, not {fqn!r}, a {type(module).__name__}. "
                "GEMMs of experts are chosen by the argument experts of the conversion"
            )
        sizes = tokens, module.out_features, module.in_features
        return linear_us("bf16", *sizes) >= speedup * linear_us(name, *sizes)

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


@dataclass(frozen=True)
class Selection:
    """The layers and experts of a model that a conversion converts, or has converted.

    Attributes:
        layers: names and linear layers in model order.
        experts: modules with weights of experts in model order.
        left: the reason for each linear layer and each weight of experts that stays in high
            precision, by name.
        unused: warnings about strings in ``filter_fqns`` that match no layer.
        warnings: other warnings.
    """

    layers: list[tuple[str, nn.Linear]] = field(default_factory=list)
    experts: list[Experts] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def parameters(self) -> list[tuple[str, Any, str]]:
        """Return the module's name, the module and the parameter's name of each weight."""
        weights: list[tuple[str, Any, str]] = [(name, m, "weight") for name, m in self.layers]
        return weights + [(e.name, e.module, key) for e in self.experts for key in e.parameters]

    def __str__(self) -> str:
        layers, weights = len(self.layers), len(self.parameters()) - len(self.layers)
        text = counted(layers, "linear layer")
        return f"{text} and {counted(weights, 'weight')} of experts" if weights else text


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
    found = Selection()
    filtered = {n for n, m in root.named_modules() if isinstance(m, nn.Linear)}
    filtered |= {fqn_of(n, key) for n, m in root.named_modules() for key in batched_parameters(m)}
    unused = [part for part in options.filter_fqns if not any(part in name for name in filtered)]
    if unused:
        found.unused.append(
            f"filter_fqns has {', '.join(map(repr, unused))}, but no linear layer and no parameter "
            "of experts has that in its name"
        )
    sharded, names = _sharded_prefixes(root), _parameter_names(root)
    next_to_experts = routers_and_gates(root)
    unexpected: dict[str, list[str]] = {}
    has_experts = False
    for name, module in root.named_modules():
        is_sharded = f"{name}.".startswith(sharded)
        if isinstance(module, nn.Linear):
            reason = _why_excluded(name, module, options)
            if isinstance(module, Float8Linear):
                if reason is None:
                    options.check(name, module)
                if not module._fp8_state.standalone:
                    continue
            elif reason is None and module in next_to_experts:
                reason = Reason(next_to_experts[module])
            elif reason is None:
                tied = names.get(id(module._parameters.get("weight")), ())
                tied = [other for other in tied if other != fqn_of(name, "weight")]
                reason = Reason(SHARDED) if is_sharded else why_not(module, tied)
            if reason is None:
                found.layers.append((name, module))
                continue
            found.left[fqn_of(name)] = reason.text
            if reason.details:
                unexpected.setdefault(reason.details, []).append(fqn_of(name))
        else:
            experts, left = select_experts(name, module, options, names)
            has_experts = has_experts or bool(experts or left) or state_of(module) is not None
            found.left.update(left)
            if experts and is_sharded:
                found.left.update(dict.fromkeys(experts.fqns, SHARDED))
            elif experts:
                found.experts.append(experts)
    if options.experts in ("gather", "fp8") and not has_experts:
        found.unused.append(
            f"experts={options.experts!r} has no effect, because the module has no weights of "
            "experts: parameters (E, N, K) outside of linear layers"
        )
    _check_whole(found.layers)
    for details, layers in unexpected.items():
        verb = "is" if len(layers) == 1 else "are"
        found.warnings.append(f"{listed(layers)} {verb} not converted: {details}")
    if torchao := [name for name, reason in found.left.items() if reason == TORCHAO]:
        found.warnings.append(
            f"{len(torchao)} layers are not converted (the first is {torchao[0]}): torchao has "
            "already converted them to FP8. Remove torchao's conversion. To keep its "
            "Float8LinearConfig, pass it as config"
        )
    return found


def _why_excluded(name: str, layer: nn.Linear, options: Options) -> Reason | None:
    """Return the filter that excludes a layer."""
    keep = options.module_filter_fn
    if options.names(name):
        return Reason(NAMED)
    return None if keep is None or keep(layer, name) else Reason(FILTERED)


# --- converted models ----------------------------------------------------------------------------


def record(root: nn.Module, left: dict[str, str]) -> None:
    """Record why a conversion left out layers and experts.

    The reasons are kept on the modules, because wrappers change names.
    """
    for name, module in root.named_modules():
        keys = ("",) if isinstance(module, nn.Linear) else tuple(module._parameters)
        reasons = {key: left[fqn] for key in keys if (fqn := fqn_of(name, key)) in left}
        if reasons:
            module.__dict__["_fp8_left_out"] = reasons


def converted(root: nn.Module) -> Selection:
    """Return what is converted in a model, and the recorded reasons for the rest."""
    found = Selection()
    for name, module in root.named_modules():
        fp8: Any = {} if state_of(module) is None else module._fp8_params
        if isinstance(module, Float8Linear):
            found.layers.append((name, module))
            continue
        if fp8:
            found.experts.append(Experts.of(name, module))
        reasons = module.__dict__.get("_fp8_left_out", {})
        keys = [""] if isinstance(module, nn.Linear) else batched_parameters(module)
        for key in (key for key in keys if key not in fp8):
            if not key or key in reasons or is_expert(module, module._parameters[key]):
                found.left[fqn_of(name, key)] = reasons.get(key, NOT_SEEN)
    for name in _replaced(root, found):
        found.left[name] = REPLACED
    return found


def _replaced(root: nn.Module, found: Selection) -> list[str]:
    """Return the names of plain layers in the places of layers that were converted."""
    states = {cast(Any, module)._fp8_state for _, module, _ in found.parameters()}
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
    selected = {id(layer) for _, layer in layers}
    for name, layer in layers:
        state = layer._fp8_state if isinstance(layer, Float8Linear) else None
        for other in () if state is None else state.layers():
            if state_of(other) is state and id(other) not in selected:
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
