"""Which linear layers of a model can be converted, and why the others cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from fp8rs.nn.linear import Float8Linear
from fp8rs.quantize.recipes import Recipe
from fp8rs.tensor.formats import INPUT_DTYPES
from fp8rs.tensor.quantized import QuantizedTensor

#: A 3-D parameter with at least this many elements is reported: experts of a mixture, perhaps.
_LARGE = 1 << 20
LARGE_3D = "3-D parameters (experts?) are not converted"

ModuleFilter = Callable[[nn.Module, str], bool]


# --- the reasons ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A linear layer, and what the reasons ask about the model that it is in.

    Attributes:
        module: the layer.
        name: its fully qualified name.
        keep: the caller's ``module_filter_fn``.
        filter_fqns: the caller's.
        sharded: prefixes of the names of what ``fully_shard`` was called on.
        owners: the names of each parameter of the model, by identity.
    """

    module: nn.Linear
    name: str = ""
    keep: ModuleFilter | None = None
    filter_fqns: tuple[str, ...] = ()
    sharded: tuple[str, ...] = ()
    owners: Mapping[int, list[str]] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The name in messages."""
        return self.name or "the root"

    @property
    def tied(self) -> str:
        """The other names of the layer's weight."""
        name = f"{self.name}.weight".lstrip(".")
        return ", ".join(n for n in self.owners.get(id(self.module.weight), ()) if n != name)


@dataclass(frozen=True)
class Reason:
    """Why a layer is not converted.

    Attributes:
        name: what the code calls it.
        holds: whether it is so of a candidate. The reasons before it are not.
        sentence: what reports and logs say.
        warning: what the one who converts is told besides; empty for nothing. Both are formatted
            with the candidate as ``layer``.
    """

    name: str
    holds: Callable[[Candidate], bool]
    sentence: str
    warning: str = ""


#: What the caller wants to leave out.
CHOSEN = (
    Reason(
        "filter_fqns",
        lambda layer: any(part in layer.name for part in layer.filter_fqns),
        "named by filter_fqns",
    ),
    Reason(
        "module_filter_fn",
        lambda layer: layer.keep is not None and not layer.keep(layer.module, layer.name),
        "left out by module_filter_fn",
    ),
)

#: What cannot be converted. The first that holds is the one that is given.
REASONS = (
    Reason(
        "sharded",
        lambda layer: f"{layer.name}.".startswith(layer.sharded),
        "it is sharded already",
    ),
    Reason(
        "computed",
        lambda layer: layer.module._parameters.get("weight") is None,
        "its weight is computed from other parameters",
        "{layer.shown} stays in high precision: its weight is no parameter, but computed from "
        "others (weight_norm, spectral_norm, pruning or another parametrization)",
    ),
    Reason(
        "lazy",
        lambda layer: isinstance(layer.module.weight, nn.parameter.UninitializedParameter),
        "its weight has no size yet: run a forward first",
    ),
    Reason(
        "attention",
        lambda layer: type(layer.module) is nn.modules.linear.NonDynamicallyQuantizableLinear,
        "its parent (nn.MultiheadAttention) uses its weight without calling it",
    ),
    Reason(
        "torchao",
        lambda layer: any(c.__module__.startswith("torchao.") for c in type(layer.module).__mro__),
        "torchao has converted it",
    ),
    Reason(
        "forward",
        lambda layer: type(layer.module).forward is not nn.Linear.forward,
        "its class {layer.module.__class__.__name__} has a forward of its own",
    ),
    Reason(
        "tied",
        lambda layer: bool(layer.tied),
        "its weight is tied to another module's",
        "{layer.shown} stays in high precision: its weight is tied to {layer.tied}",
    ),
    Reason(
        "dtype",
        lambda layer: layer.module.weight.dtype not in INPUT_DTYPES,
        "its weight is {layer.module.weight.dtype}",
        "{layer.shown} stays as it is: its weight is {layer.module.weight.dtype}, "
        "not float32, bfloat16 or float16",
    ),
)


def why_not(layer: Candidate) -> Reason | None:
    """The first reason not to convert a layer; None where there is none.

    A layer that is FP8 already has no reason but the caller's.
    """
    converted = isinstance(layer.module, Float8Linear)
    reasons = CHOSEN if converted else (*CHOSEN, *REASONS)
    return next((reason for reason in reasons if reason.holds(layer)), None)


# --- the selection -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """Which layers of a model are to be converted.

    Attributes:
        layers: those, with their names, in the order of the model; none that is converted already.
        left: the sentence for each linear layer that is left out, by its name.
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
    filter_fqns = _names(filter_fqns)
    linears = {n: m for n, m in root.named_modules() if isinstance(m, nn.Linear)}
    found = Selection()
    unused = [part for part in filter_fqns if not any(part in name for name in linears)]
    if unused:
        found.unused.append(
            f"filter_fqns leaves nothing out for {', '.join(map(repr, unused))}: "
            "no linear layer has that in its name"
        )
    sharded, owners = _sharded_parts(root), _weight_owners(root)
    torchao = []
    for name, module in linears.items():
        layer = Candidate(module, name, keep, filter_fqns, sharded, owners)
        reason = why_not(layer)
        if reason is None:
            if not isinstance(module, Float8Linear) or _joins(layer, recipe, fp8_weights):
                found.layers.append((name, module))
            continue
        found.left[layer.shown] = reason.sentence.format(layer=layer)
        if reason.warning:
            found.warnings.append(reason.warning.format(layer=layer))
        if reason.name == "sharded":
            found.sharded.append(layer.shown)
        if reason.name == "torchao":
            torchao.append(layer.shown)
    _check_whole(found.layers)
    if torchao:
        found.warnings.append(
            f"{len(torchao)} layers stay as they are ({torchao[0]} first): torchao has converted "
            "them to FP8. Leave out torchao's conversion; config= takes its Float8LinearConfig"
        )
    return found


def _names(filter_fqns: Iterable[str]) -> tuple[str, ...]:
    """``filter_fqns`` as a tuple; TypeError or ValueError where it is not names of layers."""
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


def _joins(layer: Candidate, recipe: Recipe, fp8_weights: bool) -> bool:
    """Whether an FP8 layer was made by hand, so that the conversion takes it in.

    Raises:
        ValueError: it is on another recipe, or its weight would have to become FP8.
    """
    module = layer.module
    assert isinstance(module, Float8Linear)
    if module.recipe != recipe:
        raise ValueError(
            f"{layer.shown} is an FP8 layer already, with recipe {module.recipe}, which is not "
            f"{recipe}. To change it, load the state dict into a model that was not "
            "converted, and convert that; to keep it, leave the layer out with filter_fqns "
            "or module_filter_fn"
        )
    if module._fp8_state.by_hand:
        return True
    if fp8_weights and not isinstance(module._parameters["weight"], QuantizedTensor):
        raise ValueError(
            f"{layer.shown} is an FP8 layer already, with high-precision weights: convert it "
            "once, with fp8_weights=True, or leave it out"
        )
    return False


def _check_whole(layers: Iterable[tuple[str, nn.Linear]]) -> None:
    """Raise ValueError where some layers of a module that was made by hand are left out.

    Its state goes with the layers that are taken: the others would be without one.
    """
    taken = {id(layer) for _, layer in layers}
    for name, layer in layers:
        state = layer._fp8_state if isinstance(layer, Float8Linear) else None
        for other in () if state is None else state.layers():
            if getattr(other, "_fp8_state", None) is state and id(other) not in taken:
                raise ValueError(
                    f"{name or 'the root'} is in a module that was made with recipe=, of which "
                    "another layer is not to be converted: make it without recipe, or convert "
                    "all of it"
                )


def large_3d(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of three dimensions that are worth a word: experts of a mixture, say."""
    parameters = root.named_parameters()
    sized = [(name, p) for name, p in parameters if not nn.parameter.is_lazy(p)]
    return [(name, p) for name, p in sized if p.dim() == 3 and p.numel() >= _LARGE]


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
