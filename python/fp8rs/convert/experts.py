"""Select the experts of a model, and choose the GEMMs of each module."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, cast, get_args

from torch import nn

from fp8rs.convert.select import parameter_names, sharded_prefixes
from fp8rs.gemm.estimates import (
    FP8,
    HIGH_PRECISION,
    GroupedChoice,
    GroupedWeight,
    choose,
    prefers_gated_mlp,
)
from fp8rs.gemm.grouped import ALIGNMENT, MAX_GROUPS, reads_format
from fp8rs.nn.experts import Float8Experts, GroupedExperts, batched_parameters, experts_forward
from fp8rs.nn.fp8_params import Float8Params, add_fp8_params
from fp8rs.nn.grouped import Gemms
from fp8rs.nn.grouped_linear import GroupedLinear
from fp8rs.nn.model_state import ModelState
from fp8rs.quantize.recipes import Recipe
from fp8rs.tensor.formats import INPUT_DTYPES

ExpertsMode = Literal["auto", "fp8", "gather", "off"]

#: The name of `experts_forward` in the registry of transformers.
TRANSFORMERS_KEY = "fp8rs"

#: Activations of transformers that a kernel computes, by class.
_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}


@dataclass(frozen=True)
class Experts:
    """A module with weights of experts to convert.

    Attributes:
        name: the module's fully qualified name.
        module: the module.
        parameters: the names of its weights.
        gemms: which of its grouped GEMMs run on FP8 operands.
        activation: the activation of experts of transformers that `gated_mlp` supports, or None.
    """

    name: str
    module: nn.Module
    parameters: tuple[str, ...]
    gemms: Gemms
    activation: str | None

    def choices(self, rows: int, recipe: Recipe) -> dict[str, GroupedChoice]:
        """Return the GEMMs of each weight on Hopper, if FSDP2 gathers it in FP8.

        Args:
            rows: rows per expert.
            recipe: the recipe of the module.
        """
        per_row = recipe.block_format("weight").per_row
        weights = {
            name: GroupedWeight(*_batch(self.module._parameters[name]), row_scales=per_row)
            for name in self.parameters
        }
        if self.gemms != "auto":
            return dict.fromkeys(weights, FP8 if self.gemms == "fp8" else HIGH_PRECISION)
        if self.activation:
            down = weights["down_proj"]
            if prefers_gated_mlp(rows * down.experts, down):
                return dict.fromkeys(weights, FP8)
        return {name: choose(rows * weight.experts, weight) for name, weight in weights.items()}


@dataclass(frozen=True)
class ExpertSelection:
    """The experts of a model to convert.

    Attributes:
        modules: the modules in model order.
        left: the reason for each batched parameter that stays in high precision, by name.
    """

    modules: list[Experts] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


def select_experts(
    root: nn.Module, mode: str, filter_fqns: Iterable[str], recipe: Recipe
) -> ExpertSelection:
    """Select the experts to convert, without changing the model.

    Args:
        root: the model.
        mode: the caller's ``experts``.
        filter_fqns: the caller's ``filter_fqns``, which also match names of parameters.
        recipe: the recipe to convert to.

    Raises:
        ValueError: ``mode`` is unknown, ``"fp8"`` is requested for a recipe or a weight without FP8
            GEMMs, or experts are sharded already or have another recipe.
    """
    if mode not in get_args(ExpertsMode):
        known = ", ".join(map(repr, get_args(ExpertsMode)))
        raise ValueError(f"experts must be one of {known}, not {mode!r}")
    found = ExpertSelection()
    if mode == "off":
        return found
    if mode == "fp8" and not has_fp8_gemms(recipe):
        raise ValueError(
            f"experts='fp8' requires a recipe with grouped FP8 GEMMs: 'current', 'delayed' or "
            f"'rowwise', not {recipe.name!r}. With experts='gather', weights of experts are "
            "gathered in FP8 and their GEMMs run in high precision"
        )
    parts, sharded, names = tuple(filter_fqns), sharded_prefixes(root), parameter_names(root)
    for name, module in root.named_modules():
        if isinstance(module, Float8Params) and not isinstance(module, nn.Linear):
            _check_recipe(name, module, recipe)
            continue
        weights = batched_parameters(module)
        if not weights or not (is_known(module) if mode == "auto" else _may_be_experts(module)):
            continue
        taken = []
        for key, weight in weights.items():
            fqn = f"{name}.{key}".lstrip(".")
            tied = [other for other in names[id(weight)] if other != fqn]
            if any(part in fqn for part in parts):
                found.left[fqn] = "named by filter_fqns"
            elif weight.dtype not in INPUT_DTYPES:
                found.left[fqn] = f"its dtype is {weight.dtype}"
            elif tied:
                found.left[fqn] = f"it is tied to {', '.join(tied)}"
            else:
                taken.append(key)
        if not taken:
            continue
        if f"{name}.".startswith(sharded):
            raise ValueError(f"{name or 'the root'} is sharded already: convert before fully_shard")
        reason = _why_no_fp8_gemms(module, taken, recipe)
        whole = len(taken) == len(weights)
        if isinstance(module, GroupedLinear) and module.recipe != recipe:
            raise ValueError(
                f"{name or 'the root'} is a GroupedLinear with recipe {module.recipe}, not "
                f"{recipe}. Build it with that recipe, or exclude it by filter_fqns"
            )
        if mode == "fp8" and reason:
            raise ValueError(
                f"experts='fp8' is not possible for {name or 'the root'}: {reason}. Use "
                "experts='gather', or exclude it by filter_fqns"
            )
        gemms = cast(Gemms, "gather" if reason or not whole else mode)
        activation = None if gemms == "gather" else _activation(module, recipe)
        found.modules.append(Experts(name, module, tuple(taken), gemms, activation))
    return found


def has_fp8_gemms(recipe: Recipe) -> bool:
    """Whether grouped FP8 GEMMs read weights in a recipe's format."""
    return reads_format(recipe.block_format("weight"))


def is_known(module: nn.Module) -> bool:
    """Whether a module has the interface of a known client for its batched parameters.

    These are experts of transformers 5, torchtitan's GroupedExperts, and `GroupedLinear`.
    """
    if isinstance(module, GroupedLinear) or callable(getattr(module, "_grouped_mm", None)):
        return True
    weights = batched_parameters(module)
    return "down_proj" in weights and ("gate_up_proj" in weights or "up_proj" in weights)


def _may_be_experts(module: nn.Module) -> bool:
    """Whether a module's batched parameters may be weights of experts.

    Convolutions and other modules of torch have parameters of three dimensions too.
    """
    return not type(module).__module__.startswith("torch.")


def uses_registry(module: nn.Module) -> bool:
    """Whether transformers dispatches a module's forward through its registry."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def _batch(weight: Any) -> tuple[int, int, int]:
    """Return the number of matrices, and their rows and columns."""
    return weight.shape[0], prod(weight.shape[1:-1]), weight.shape[-1]


def _why_no_fp8_gemms(module: nn.Module, names: Sequence[str], recipe: Recipe) -> str:
    """Return why grouped GEMMs cannot run on FP8 operands, or an empty string."""
    if not has_fp8_gemms(recipe):
        return f"recipe {recipe.name!r} has no grouped FP8 GEMMs"
    for name in names:
        weight = module._parameters[name]
        assert weight is not None
        experts, rows, cols = _batch(weight)
        if rows % ALIGNMENT or cols % ALIGNMENT:
            return f"{name} has matrices of {rows} x {cols}, not multiples of {ALIGNMENT}"
        if experts >= MAX_GROUPS:
            return f"{name} has {experts} experts, not fewer than {MAX_GROUPS}"
    return ""


def _check_recipe(name: str, module: Float8Params, recipe: Recipe) -> None:
    if module._fp8_state.recipe != recipe:
        raise ValueError(
            f"{name} is already converted, with recipe {module._fp8_state.recipe}, not {recipe}. "
            "To change it, load the state dict into an unconverted model and convert that. To keep "
            "it, convert the other modules one by one"
        )


def convert_experts(state: ModelState, modules: Iterable[Experts]) -> None:
    """Convert modules of experts, which have been checked, and add them to ``state``."""
    for experts in modules:
        module: Any = experts.module
        registered = uses_registry(module)
        own = registered or isinstance(module, GroupedLinear)
        mixin = Float8Experts if own else GroupedExperts
        add_fp8_params(module, experts.parameters, state, experts.name, mixin)
        module._gemms = experts.gemms
        if registered and (
            experts.gemms != "gather" or module.config._experts_implementation == "grouped_mm"
        ):
            module._fp8_activation = experts.activation
            _register()
            module.config._experts_implementation = TRANSFORMERS_KEY


def _activation(module: Any, recipe: Recipe) -> str | None:
    """Return the activation of transformers' experts if `gated_mlp` supports them, else None."""
    if not uses_registry(module) or not recipe.block_format("weight").per_tensor:
        return None
    plain = module.has_gate and module.is_concatenated and not module.has_bias
    if not plain or module.is_transposed or _apply_gate(module) != "_default_apply_gate":
        return None
    return _ACTIVATIONS.get(type(module.act_fn).__name__)


def _apply_gate(module: Any) -> str:
    return str(getattr(type(module)._apply_gate, "__name__", ""))


def _register() -> None:
    # A module with experts of transformers exists, so transformers is imported.
    registry: Any = sys.modules["transformers.integrations.moe"]
    registry.ALL_EXPERTS_FUNCTIONS.register(TRANSFORMERS_KEY, experts_forward)
