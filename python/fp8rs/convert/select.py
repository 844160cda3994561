"""Select the linear layers to convert, and say why the others stay in high precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from fp8rs.nn.linear import Float8Linear
from fp8rs.quantize.recipes import Recipe
from fp8rs.tensor.formats import INPUT_DTYPES
from fp8rs.tensor.quantized import QuantizedTensor

#: 3-D parameters with at least this many elements are reported.
_LARGE = 1 << 20
LARGE_3D = "3-D parameters (experts?) are not converted"

ModuleFilter = Callable[[nn.Module, str], bool]


#: The reason of layers that can no longer be converted.
SHARDED = "it is sharded already"


class Reason(NamedTuple):
    """Why a layer stays in high precision.

    Attributes:
        text: for reports and logs.
        warning: what the conversion warns about; empty for reasons that users choose or expect.
    """

    text: str
    warning: str = ""


def why_not(layer: nn.Linear, name: str = "", tied: Sequence[str] = ()) -> Reason | None:
    """Return the first reason not to convert a high-precision layer, or None.

    Args:
        layer: the layer.
        name: its fully qualified name, for warnings.
        tied: other names of its weight.
    """
    name = name or "the root"
    weight = layer._parameters.get("weight")
    kind = type(layer)
    if weight is None:
        return Reason(
            "its weight is computed from other parameters",
            f"{name} stays in high precision: its weight is not a parameter, but computed from "
            "others (weight_norm, spectral_norm, pruning or another parametrization)",
        )
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return Reason("its weight has no size yet: run a forward first")
    if kind is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return Reason("its parent (nn.MultiheadAttention) uses its weight without calling it")
    if _is_torchaos(layer):
        return Reason("torchao has converted it")
    if kind.forward is not nn.Linear.forward:
        return Reason(f"its class {kind.__name__} has a forward of its own")
    if tied:
        return Reason(
            "its weight is tied to another module's",
            f"{name} stays in high precision: its weight is tied to {', '.join(tied)}",
        )
    if weight.dtype not in INPUT_DTYPES:
        return Reason(
            f"its weight is {weight.dtype}",
            f"{name} stays as it is: its weight is {weight.dtype}, "
            "not float32, bfloat16 or float16",
        )
    return None


def _is_torchaos(layer: nn.Module) -> bool:
    return any(base.__module__.startswith("torchao.") for base in type(layer).__mro__)


@dataclass(frozen=True)
class Selection:
    """The layers of a model to convert.

    Attributes:
        layers: names and layers, in the order of the model, without those that are converted.
        left: the reason for each linear layer that stays in high precision, by its name.
        unused: warnings about names in ``filter_fqns`` that match no layer.
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
        TypeError: ``filter_fqns`` is not a collection of str.
        ValueError: one of its names is empty, a layer has another recipe, or a layer was converted
            with high-precision weights and ``fp8_weights`` is set.
    """
    filter_fqns = _names(filter_fqns)
    linears = {n: m for n, m in root.named_modules() if isinstance(m, nn.Linear)}
    found = Selection()
    unused = [part for part in filter_fqns if not any(part in name for name in linears)]
    if unused:
        found.unused.append(
            f"filter_fqns leaves nothing out for {', '.join(map(repr, unused))}: "
            "no linear layer has that in its name"
        )
    sharded, names = _sharded_prefixes(root), _parameter_names(root)
    torchao = []
    for name, layer in linears.items():
        if any(part in name for part in filter_fqns):
            reason: Reason | None = Reason("named by filter_fqns")
        elif keep is not None and not keep(layer, name):
            reason = Reason("left out by module_filter_fn")
        elif isinstance(layer, Float8Linear):
            reason = None
        elif f"{name}.".startswith(sharded):
            reason = Reason(SHARDED)
        else:
            own = f"{name}.weight".lstrip(".")
            tied = [n for n in names.get(id(layer._parameters.get("weight")), ()) if n != own]
            reason = why_not(layer, name, tied)
            if _is_torchaos(layer):
                torchao.append(name or "the root")
        if reason is not None:
            found.left[name or "the root"] = reason.text
            if reason.warning:
                found.warnings.append(reason.warning)
        elif not isinstance(layer, Float8Linear) or _joins(layer, name, recipe, fp8_weights):
            found.layers.append((name, layer))
    _check_whole(found.layers)
    if torchao:
        found.warnings.append(
            f"{len(torchao)} layers stay as they are ({torchao[0]} first): torchao has converted "
            "them to FP8. Leave out torchao's conversion; config= takes its Float8LinearConfig"
        )
    return found


def _names(filter_fqns: Iterable[str]) -> tuple[str, ...]:
    """Return ``filter_fqns`` as a tuple, after checking that it holds names."""
    if isinstance(filter_fqns, str) or not isinstance(filter_fqns, Iterable):
        what = "the str " if isinstance(filter_fqns, str) else ""
        raise TypeError(f"filter_fqns must be a collection of names, not {what}{filter_fqns!r}")
    filter_fqns = tuple(filter_fqns)
    for part in filter_fqns:
        if not isinstance(part, str):
            raise TypeError(f"filter_fqns must be a collection of names, and has {part!r}")
        if not part:
            raise ValueError("filter_fqns has '', which is in every name and leaves out all layers")
    return filter_fqns


def _joins(layer: Float8Linear, name: str, recipe: Recipe, fp8_weights: bool) -> bool:
    """Return whether an FP8 layer was built directly and so still has to join a converted model.

    Raises:
        ValueError: it has another recipe, or a high-precision weight that would have to become FP8.
    """
    name = name or "the root"
    if layer.recipe != recipe:
        raise ValueError(
            f"{name} is an FP8 layer already, with recipe {layer.recipe}, which is not {recipe}. "
            "To change it, load the state dict into a model that was not converted, and convert "
            "that; to keep it, leave the layer out with filter_fqns or module_filter_fn"
        )
    if layer._fp8_state.standalone:
        return True
    if fp8_weights and not isinstance(layer._parameters["weight"], QuantizedTensor):
        raise ValueError(
            f"{name} is an FP8 layer already, with high-precision weights: convert it once, with "
            "fp8_weights=True, or leave it out"
        )
    return False


def _check_whole(layers: Iterable[tuple[str, nn.Linear]]) -> None:
    """Raise ValueError if a module built with ``recipe=`` is selected only in part.

    The layers of such a module share one state, and the selected ones take it with them.
    """
    taken = {id(layer) for _, layer in layers}
    for name, layer in layers:
        state = layer._fp8_state if isinstance(layer, Float8Linear) else None
        for other in () if state is None else state.layers():
            if getattr(other, "_fp8_state", None) is state and id(other) not in taken:
                raise ValueError(
                    f"{name or 'the root'} is in a module that was made with recipe=, of which "
                    "another layer is left out: make the module without recipe, or convert all "
                    "of its layers"
                )


def large_3d(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the large 3-D parameters, which are probably experts of a mixture, with names."""
    return [
        (name, p)
        for name, p in root.named_parameters()
        if not nn.parameter.is_lazy(p) and p.dim() == 3 and p.numel() >= _LARGE
    ]


def _parameter_names(root: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter, one for each module that has it, keyed by its id."""
    names: dict[int, list[str]] = {}
    for prefix, module in root.named_modules():  # each module once, also under several names
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
