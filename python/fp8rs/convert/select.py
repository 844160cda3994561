"""Select the linear layers to convert, and say why others stay in high precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from fp8rs.gemm.estimates import linear_us
from fp8rs.nn.linear import Float8Linear
from fp8rs.quantize.recipes import Recipe, RecipeName, resolve_recipe
from fp8rs.tensor.formats import INPUT_DTYPES
from fp8rs.tensor.quantized import QuantizedTensor

ModuleFilter = Callable[[nn.Module, str], bool]

#: 3-D parameters with at least this many elements are reported.
_LARGE = 1 << 20
#: The reason for parameters of `large_3d`.
LARGE_3D = "3-D parameters (experts?) are not converted"
#: The reason for layers that can no longer be converted.
SHARDED = "it is sharded already"


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
        TypeError, ValueError: there is no such recipe, or ``tokens`` is less than 1.
    """
    name = resolve_recipe(recipe).name
    name = "current" if name == "delayed" else name
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, not {tokens}")

    def keep(module: nn.Module, fqn: str) -> bool:
        assert isinstance(module, nn.Linear)
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


def select(
    root: nn.Module,
    keep: ModuleFilter | None,
    filter_fqns: Iterable[str],
    recipe: Recipe,
    fp8_weights: bool = False,
) -> Selection:
    """Select the layers to convert to ``recipe``, without changing the model.

    Args:
        root: the model.
        keep: the caller's ``module_filter_fn``.
        filter_fqns: the caller's ``filter_fqns``.
        recipe: the recipe to convert to.
        fp8_weights: whether weights become FP8.

    Raises:
        TypeError: ``filter_fqns`` is a str.
        ValueError: a layer has another recipe, or a layer was converted with high-precision
            weights and ``fp8_weights`` is set.
    """
    if isinstance(filter_fqns, str):  # which is an iterable of letters
        raise TypeError(f"filter_fqns must be a collection of names, not the str {filter_fqns!r}")
    filter_fqns = tuple(filter_fqns)
    linears = {n: m for n, m in root.named_modules() if isinstance(m, nn.Linear)}
    found = Selection()
    filtered = (*linears, *(n for n, p in root.named_parameters() if is_batch(p)))
    unused = [part for part in filter_fqns if not any(part in name for name in filtered)]
    if unused:
        found.unused.append(
            f"filter_fqns has {', '.join(map(repr, unused))}, but no linear layer and no parameter "
            "of experts has that in its name"
        )
    sharded, names = sharded_prefixes(root), parameter_names(root)
    torchao = []
    for name, layer in linears.items():
        if any(part in name for part in filter_fqns):
            reason: Reason | None = Reason("named by filter_fqns")
        elif keep is not None and not keep(layer, name):
            reason = Reason("excluded by module_filter_fn")
        elif isinstance(layer, Float8Linear):
            reason = None
        elif f"{name}.".startswith(sharded):
            reason = Reason(SHARDED)
        else:
            own = f"{name}.weight".lstrip(".")
            tied = [n for n in names.get(id(layer._parameters.get("weight")), ()) if n != own]
            reason = why_not(layer, tied)
            if _is_from_torchao(layer):
                torchao.append(name or "the root")
        if reason is not None:
            found.left[name or "the root"] = reason.text
            if reason.details:
                found.warnings.append(f"{name or 'the root'} is not converted: {reason.details}")
        elif not isinstance(layer, Float8Linear) or _is_standalone(
            layer, name, recipe, fp8_weights
        ):
            found.layers.append((name, layer))
    _check_whole(found.layers)
    if torchao:
        found.warnings.append(
            f"{len(torchao)} layers are not converted (the first is {torchao[0]}): torchao has "
            "already converted them to FP8. Remove torchao's conversion. To keep its "
            "Float8LinearConfig, pass it as config"
        )
    return found


def _is_standalone(layer: Float8Linear, name: str, recipe: Recipe, fp8_weights: bool) -> bool:
    """Return whether an FP8 layer was built directly and has not been added to a converted model.

    Raises:
        ValueError: the layer has another recipe, or a high-precision weight that should be FP8.
    """
    name = name or "the root"
    if layer.recipe != recipe:
        raise ValueError(
            f"{name} is already an FP8 layer, with recipe {layer.recipe}, not {recipe}. To change "
            "it, load the state dict into an unconverted model and convert that. To keep it, "
            "exclude the layer with filter_fqns or module_filter_fn"
        )
    if layer._fp8_state.standalone:
        return True
    if fp8_weights and not isinstance(layer._parameters["weight"], QuantizedTensor):
        raise ValueError(
            f"{name} is already an FP8 layer, with high-precision weights. Convert it once, with "
            "fp8_weights=True, or exclude it"
        )
    return False


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


def is_batch(parameter: nn.Parameter) -> bool:
    """Whether a parameter has the shape of a batch of matrices."""
    return not nn.parameter.is_lazy(parameter) and parameter.dim() > 2


def large_3d(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return names and values of large 3-D parameters in high precision, maybe of experts."""
    return [
        (f"{prefix}.{name}".lstrip("."), p)
        for prefix, module in root.named_modules()
        for name, p in module.named_parameters(recurse=False)
        if is_batch(p)
        and p.dim() == 3
        and p.numel() >= _LARGE
        and name not in getattr(module, "_fp8_params", ())
    ]


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
