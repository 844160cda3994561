"""Which linear layers of a model can be converted, and why the others cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import nn

from fp8rs.nn.linear import Float8Linear
from fp8rs.quantize.recipes import Recipe
from fp8rs.tensor.formats import INPUT_DTYPES
from fp8rs.tensor.quantized import QuantizedTensor

#: From this many elements on a 3-D parameter is worth a word: experts of a mixture, say.
_LARGE = 1 << 20
TORCHAO = "torchao has converted it"
LARGE_3D = "3-D parameters (experts?) are not converted"

ModuleFilter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class Selection:
    """Which layers of a model are to be converted.

    Attributes:
        layers: those, with their names, in the order of the model; none that is converted already.
        left: the reason for each linear layer that is left out, by its name.
        sharded: those of them for which it is too late: convert before fully_shard.
        unused: what is to be said of names in ``filter_fqns`` that leave nothing out.
        warnings: what the one who converts is to be told besides.
    """

    layers: list[tuple[str, nn.Linear]] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    sharded: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def select(
    root: nn.Module,
    keep: ModuleFilter | None,
    filter_fqns: Iterable[str],
    recipe: Recipe,
    fp8_weights: bool = False,
) -> Selection:
    """The layers to convert to ``recipe``. Nothing in the model changes.

    Args:
        root: the model.
        keep: the caller's ``module_filter_fn``.
        filter_fqns: as in ``convert_to_float8_training``.
        recipe: the one to convert to.
        fp8_weights: whether weights are to be FP8.

    Raises:
        TypeError: ``filter_fqns`` is no collection of str.
        ValueError: one of its names is empty; a layer is on another recipe, or has high-precision
            weights for good.
    """
    if isinstance(filter_fqns, str) or not isinstance(filter_fqns, Iterable):
        what = "the str " if isinstance(filter_fqns, str) else ""
        raise TypeError(f"filter_fqns must be a collection of names, not {what}{filter_fqns!r}")
    filter_fqns = tuple(filter_fqns)
    for part in filter_fqns:
        if not isinstance(part, str):
            raise TypeError(f"filter_fqns must be a collection of names, and has {part!r}")
        if not part:
            raise ValueError("filter_fqns has '', which is in every name and leaves out all layers")
    found = Selection()
    linears = [name for name, part in root.named_modules() if isinstance(part, nn.Linear)]
    unused = [part for part in filter_fqns if not any(part in name for name in linears)]
    if unused:
        found.unused.append(
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
                    f"{recipe}. To change it, load the state dict into a model that was not "
                    "converted, and convert that; to keep it, leave the layer out with filter_fqns "
                    "or module_filter_fn"
                )
            if module._fp8_state.alone:
                found.layers.append((name, module))
            elif fp8_weights and not isinstance(module._parameters["weight"], QuantizedTensor):
                raise ValueError(
                    f"{shown} is an FP8 layer already, with high-precision weights: convert it "
                    "once, with fp8_weights=True, or leave it out"
                )
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
    if torchao := [name for name, reason in found.left.items() if reason == TORCHAO]:
        found.warnings.append(
            f"{len(torchao)} layers stay as they are ({torchao[0]} first): torchao has converted "
            "them to FP8. Leave out torchao's conversion; config= takes its Float8LinearConfig"
        )
    return found


def large_3d(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of three dimensions that are worth a word: experts of a mixture, say."""
    parameters = root.named_parameters()
    sized = [(name, p) for name, p in parameters if not nn.parameter.is_lazy(p)]
    return [(name, p) for name, p in sized if p.dim() == 3 and p.numel() >= _LARGE]


def why_not(module: nn.Linear) -> str:
    """Why a layer by itself cannot be converted, or need not be; empty where it can."""
    if isinstance(module, Float8Linear):
        return "" if module._fp8_state.alone else "it is an FP8 layer already"
    if module._parameters.get("weight") is None:
        return "its weight is computed from other parameters"
    if module.weight.dtype not in INPUT_DTYPES:
        return f"its weight is {module.weight.dtype}"
    return _unlike_linear(module)


def _unlike_linear(module: nn.Linear) -> str:
    """Why a subclass of nn.Linear cannot be converted; empty where it can."""
    kind = type(module)
    if isinstance(module.weight, nn.parameter.UninitializedParameter):
        return "its weight has no size yet: run a forward first"
    if kind is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return "its parent (nn.MultiheadAttention) uses its weight without calling it"
    if any(base.__module__.startswith("torchao.") for base in kind.__mro__):
        return TORCHAO
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
