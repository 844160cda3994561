"""Select the linear layers to convert, and say why others stay in high precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import nn

from fp8rs._torch import own_part
from fp8rs.gemm.estimates import linear_us
from fp8rs.nn.fp8_params import Float8Params
from fp8rs.nn.linear import Float8Linear
from fp8rs.quantize.recipes import Recipe, RecipeName, resolve_recipe
from fp8rs.tensor.formats import INPUT_DTYPES
from fp8rs.tensor.quantized import QuantizedTensor

ModuleFilter = Callable[[nn.Module, str], bool]
ExpertsMode = Literal["auto", "fp8", "gather", "off"]

#: The reasons of filters, and of layers that can no longer be converted.
NAMED = "named by filter_fqns"
FILTERED = "excluded by module_filter_fn"
SHARDED = "it is sharded already"


@dataclass(frozen=True)
class Options:
    """The arguments of a conversion: see ``convert_to_float8_training``."""

    recipe: Recipe
    module_filter_fn: ModuleFilter | None
    filter_fqns: tuple[str, ...]
    fp8_gather: bool
    amax_reduction_group: Any
    fp8_weights: bool
    experts: ExpertsMode

    def names(self, fqn: str) -> bool:
        """Whether ``filter_fqns`` excludes a name."""
        return any(part in fqn for part in self.filter_fqns)


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

    Combine it with a filter of your own by ``and``::

        fast = fp8rs.min_speedup(tokens=8192)
        fp8rs.convert_to_float8_training(
            model, module_filter_fn=lambda module, fqn: "gate" not in fqn and fast(module, fqn)
        )

    Args:
        tokens: rows of the layers' inputs on each GPU: batch size times sequence length.
        speedup: the least ratio of the times in bf16 and in FP8.
        recipe: a recipe or its short name. "delayed" is estimated as "current", and is faster.

    Raises:
        TypeError, ValueError: there is no such recipe, or ``tokens`` is less than 1. The filter
            raises TypeError for a module that is not an nn.Linear.
    """
    name = resolve_recipe(recipe).name
    name = "current" if name == "delayed" else name
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, not {tokens}")

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
            "its weight is not a parameter, but computed from others (weight_norm, spectral_norm, "
            "pruning or another parametrization)",
        )
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return Reason("its weight has no size yet: run a forward first")
    if kind is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return Reason("its parent (nn.MultiheadAttention) reads its weight without calling it")
    if _is_from_torchao(layer):
        return Reason("torchao has converted it")
    if kind.forward is not nn.Linear.forward:
        return Reason(f"its class {kind.__name__} overrides forward")
    if tied:
        return Reason(
            "its weight is tied to another module's", f"its weight is tied to {', '.join(tied)}"
        )
    if weight.dtype not in INPUT_DTYPES:
        return Reason(
            f"its weight is {weight.dtype}",
            f"its weight is {weight.dtype}, not float32, bfloat16 or float16",
        )
    return None


def _is_from_torchao(layer: nn.Module) -> bool:
    return any(base.__module__.startswith("torchao.") for base in type(layer).__mro__)


@dataclass(frozen=True)
class Selection:
    """The layers of a model to convert.

    Attributes:
        layers: names and layers in model order, without layers that are already converted.
        left: the reason for each linear layer that stays in high precision, by name.
        unused: warnings about strings in ``filter_fqns`` that match no layer.
        warnings: other warnings.
    """

    layers: list[tuple[str, nn.Linear]] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def select(root: nn.Module, options: Options) -> Selection:
    """Select the linear layers to convert, without changing the model.

    Args:
        root: the model.
        options: the arguments of the conversion.

    Raises:
        ValueError: a layer was converted with other options.
    """
    linears = {n: m for n, m in root.named_modules() if isinstance(m, nn.Linear)}
    found = Selection()
    filtered = (*linears, *(n for n, p in root.named_parameters() if _is_batch(p)))
    unused = [part for part in options.filter_fqns if not any(part in name for name in filtered)]
    if unused:
        found.unused.append(
            f"filter_fqns has {', '.join(map(repr, unused))}, but no linear layer and no parameter "
            "of experts has that in its name"
        )
    sharded, names = sharded_prefixes(root), parameter_names(root)
    keep, torchao = options.module_filter_fn, []
    for name, layer in linears.items():
        if options.names(name):
            reason: Reason | None = Reason(NAMED)
        elif keep is not None and not keep(layer, name):
            reason = Reason(FILTERED)
        elif isinstance(layer, Float8Linear):
            check_converted(name, layer, options)
            if layer._fp8_state.standalone:
                found.layers.append((name, layer))
            continue
        elif f"{name}.".startswith(sharded):
            reason = Reason(SHARDED)
        else:
            own = f"{name}.weight".lstrip(".")
            tied = [n for n in names.get(id(layer._parameters.get("weight")), ()) if n != own]
            reason = why_not(layer, tied)
            if _is_from_torchao(layer):
                torchao.append(name or "the root")
        if reason is None:
            found.layers.append((name, layer))
        elif not isinstance(layer, Float8Linear):
            found.left[name or "the root"] = reason.text
            if reason.details:
                found.warnings.append(f"{name or 'the root'} is not converted: {reason.details}")
    _check_whole(found.layers)
    if torchao:
        found.warnings.append(
            f"{len(torchao)} layers are not converted (the first is {torchao[0]}): torchao has "
            "already converted them to FP8. Remove torchao's conversion. To keep its "
            "Float8LinearConfig, pass it as config"
        )
    return found


def check_converted(name: str, module: Float8Params, options: Options) -> None:
    """Check that a module with FP8 parameters was converted or built with these options.

    Raises:
        ValueError: an option differs.
    """
    state = module._fp8_state
    given: dict[str, tuple[Any, Any]] = {"recipe": (state.recipe, options.recipe)}
    if not state.standalone:
        given |= {
            "enable_fsdp_float8_all_gather": (state.fp8_gather, options.fp8_gather),
            "amax_reduction_group": (state.group, options.amax_reduction_group),
        }
        if not isinstance(module, nn.Linear):
            given["experts"] = state.experts, options.experts
        weights = [own_part(module._parameters[key]) for key in module._fp8_params]
        if options.fp8_weights and not all(isinstance(w, QuantizedTensor) for w in weights):
            given["fp8_weights"] = False, True
    for option, (before, now) in given.items():
        if before != now:
            raise ValueError(
                f"{name or 'the root'} is already in FP8, with {option}={before!r}, not {now!r}. "
                "To change it, load the state dict into an unconverted model and convert that. To "
                "keep it, exclude it with filter_fqns"
            )


def _check_whole(layers: Iterable[tuple[str, nn.Linear]]) -> None:
    """Raise ValueError if only some layers of a module built with ``recipe=`` are selected.

    The layers of such a module share one state, and adding some to a model detaches that state.
    """
    selected = {id(layer) for _, layer in layers}
    for name, layer in layers:
        state = layer._fp8_state if isinstance(layer, Float8Linear) else None
        for other in () if state is None else state.layers():
            if getattr(other, "_fp8_state", None) is state and id(other) not in selected:
                raise ValueError(
                    f"{name or 'the root'} is in a module that was built with recipe=, and another "
                    "layer of that module is excluded. Build the module without recipe, or convert "
                    "all of its layers"
                )


def _is_batch(parameter: nn.Parameter) -> bool:
    """Whether a parameter has the shape of a batch of matrices."""
    return not nn.parameter.is_lazy(parameter) and parameter.dim() > 2


def parameter_names(root: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter by id, with one name per module that holds it."""
    names: dict[int, list[str]] = {}
    for prefix, module in root.named_modules():  # yields each module once
        for name, parameter in module._parameters.items():
            names.setdefault(id(parameter), []).append(f"{prefix}.{name}".lstrip("."))
    return names


def sharded_prefixes(root: nn.Module) -> tuple[str, ...]:
    """Return prefixes of the names of layers inside modules that ``fully_shard`` was called on."""
    return tuple(
        f"{name}." if name else ""
        for name, module in root.named_modules()
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
    )


def counted(layers: int, weights: int) -> str:
    """Return the numbers of converted linear layers and weights of experts, for messages."""
    text = f"{layers} linear layer{'s' * (layers != 1)}"
    return f"{text} and {weights} weight{'s' * (weights != 1)} of experts" if weights else text
