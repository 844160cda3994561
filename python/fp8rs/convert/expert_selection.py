"""Select the experts of a model, and choose the GEMMs of each module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from torch import Tensor, nn

from fp8rs.convert.options import Options, fqn_of, has_fp8_gemms
from fp8rs.gemm.estimates import (
    FP8,
    HIGH_PRECISION,
    GroupedChoice,
    GroupedWeight,
    choose,
    gated_mlp_is_faster,
)
from fp8rs.gemm.grouped import ALIGNMENT, MAX_GROUPS
from fp8rs.model.linear_spec import grouped_fp8_gemms
from fp8rs.model.state import ModelState, state_of
from fp8rs.nn.expert_modules import (
    ExpertsConfig,
    Float8Experts,
    GroupedExperts,
    batched_parameters,
    other_implementation,
    register_experts_forward,
    uses_registry,
)
from fp8rs.nn.fp8_params import Float8Params, add_fp8_params
from fp8rs.nn.grouped_function import Gemms
from fp8rs.nn.grouped_linear import GroupedLinear
from fp8rs.quantize.formats import INPUT_DTYPES
from fp8rs.quantize.recipes import Recipe, describe

#: The reason of ``filter_fqns``.
NAMED = "named by filter_fqns"

#: The condition of GEMMs that `GroupedGemms` replaces. For example, Llama 4 calls torch.bmm.
IF_CALLED = "if the module's forward calls torch's grouped GEMMs"

#: 3-D parameters of other modules with at least this many elements are reported.
_LARGE = 1 << 20

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
        reason: why all GEMMs run in high precision, or `IF_CALLED`, or an empty string.
        activation: the activation of experts of transformers that `gated_mlp` supports, or None.
        config: the config with which transformers calls `experts_forward`. None for experts of
            other libraries, and if another implementation of transformers stays selected.
    """

    name: str
    module: nn.Module
    parameters: tuple[str, ...]
    gemms: Gemms
    reason: str
    activation: str | None
    config: ExpertsConfig | None = None

    @property
    def mixin(self) -> type[Float8Experts]:
        """The class that the class of the converted module also inherits from."""
        if uses_registry(self.module) or isinstance(self.module, GroupedLinear):
            return Float8Experts
        return GroupedExperts

    @classmethod
    def of(cls, name: str, module: Any) -> Experts:
        """Return a converted module."""
        gemms: Any = getattr(module, "_gemms", "gather")
        reason = getattr(module, "_gemms_reason", "")
        implementation = None if gemms == "gather" else other_implementation(module)
        if implementation:
            gemms = "gather"
            reason = (
                f"the experts implementation {implementation!r} was selected after the conversion"
            )
        activation = getattr(module, "_fp8_activation", None)
        return cls(name, module, tuple(module._fp8_params), gemms, reason, activation)

    @property
    def fqns(self) -> list[str]:
        """The fully qualified names of the weights."""
        return [fqn_of(self.name, key) for key in self.parameters]

    def choices(self, rows: int, recipe: Recipe) -> dict[str, GroupedChoice]:
        """Return the GEMMs of each weight on Hopper, if FSDP2 gathers it in FP8.

        Args:
            rows: rows per expert.
            recipe: the recipe of the module.
        """
        per_row = recipe.block_format("weight").per_row
        fp8_gemms = grouped_fp8_gemms(recipe)
        weights = {}
        for name in self.parameters:
            experts, n, k = _batch(self.module._parameters[name])
            weights[name] = GroupedWeight(
                experts, n, k, row_scales=per_row, fp8_wgrad=fp8_gemms.wgrad
            )
        if self.gemms != "auto":
            return dict.fromkeys(weights, fp8_gemms if self.gemms == "fp8" else HIGH_PRECISION)
        if self.activation:
            down = weights["down_proj"]
            if gated_mlp_is_faster(rows * down.experts, down):
                return dict.fromkeys(weights, FP8)
        return {name: choose(rows * weight.experts, weight) for name, weight in weights.items()}


def select_experts(
    name: str, module: nn.Module, options: Options, names: dict[int, list[str]]
) -> tuple[Experts | None, dict[str, str]]:
    """Select the weights of experts of a module.

    Args:
        name: the module's name.
        module: the module, which is not a linear layer.
        options: the arguments of the conversion.
        names: all names of each parameter of the model, by id.

    Returns:
        The module if any of its weights is to be converted, and the reason for each of its weights
        of experts that stays in high precision.

    Raises:
        ValueError: ``experts="fp8"`` is requested for a weight without FP8 GEMMs, or the module was
            converted with other options.
    """
    converted: Any = {} if state_of(module) is None else module._fp8_params
    if not all(options.excludes(fqn_of(name, key)) for key in converted):
        options.check(name, cast(Float8Params, module))
    weights = batched_parameters(module)
    selected: list[str] = []
    reasons: dict[str, str] = {}
    for key, weight in weights.items():
        if options.experts in ("gather", "fp8"):
            is_weight_of_experts = may_have_experts(module)
        else:
            is_weight_of_experts = is_expert(module, weight)
        if key in converted or not is_weight_of_experts:
            continue
        fqn = fqn_of(name, key)
        tied = [other for other in names[id(weight)] if other != fqn]
        reason = _why_not(module, weight, fqn, tied, options)
        if reason:
            reasons[fqn] = reason
        else:
            selected.append(key)

    if not selected:
        return None, reasons
    selects_all = len(selected) == len(weights)
    return _experts(name, module, tuple(selected), selects_all, options), reasons


def _why_not(
    module: nn.Module, weight: Tensor, fqn: str, tied: Sequence[str], options: Options
) -> str:
    """Return why a weight of experts stays in high precision, or an empty string."""
    if options.excludes(fqn):
        return NAMED
    if isinstance(module, Float8Params):
        return "its module is converted already"
    if options.experts == "off":
        return "experts='off'"
    if options.experts == "auto" and not is_known(module):
        return "not known as experts, see experts='gather'"
    if "forward" in module.__dict__ and not uses_registry(module):
        return "its module's forward is an attribute of the instance"
    if weight.dtype not in INPUT_DTYPES:
        return f"its dtype is {weight.dtype}"
    return f"it is tied to {', '.join(tied)}" if tied else ""


def _experts(
    name: str, module: nn.Module, parameters: tuple[str, ...], selects_all: bool, options: Options
) -> Experts:
    """Choose the GEMMs of a module that is converted.

    Args:
        name: the module's name.
        module: the module.
        parameters: its weights that are converted.
        selects_all: whether these are all of its weights.
        options: the arguments of the conversion.
    """
    fqn = fqn_of(name)
    recipe = options.recipe
    if isinstance(module, GroupedLinear) and module.recipe != recipe:
        raise ValueError(
            f"{fqn} is a GroupedLinear with recipe {describe(module.recipe)!r}, not "
            f"{describe(recipe)!r}. Build it with that recipe, or exclude it by filter_fqns"
        )
    reason = _why_no_fp8_gemms(module, parameters, recipe)
    if options.experts == "fp8" and reason:
        raise ValueError(
            f"experts='fp8' is not possible for {fqn}: {reason}. Use experts='gather', or "
            "exclude it by filter_fqns"
        )
    if options.experts == "gather":
        reason = "experts='gather'"
    elif not selects_all:
        reason = "another weight of the module is in high precision"
    gemms = cast(Gemms, "gather" if reason else options.experts)
    if not (reason or _calls_grouped_gemms(module)):
        reason = IF_CALLED
    activation = _activation(module, recipe, gemms)
    return Experts(name, module, parameters, gemms, reason, activation, _config(module, gemms))


def is_known(module: nn.Module) -> bool:
    """Whether a module has the interface of a known client for its batched parameters.

    These are experts of transformers 5, torchtitan's GroupedExperts, and `GroupedLinear`.
    """
    weights = batched_parameters(module)
    has_up = "gate_up_proj" in weights or "up_proj" in weights
    if "down_proj" in weights and has_up:
        return True
    return _calls_grouped_gemms(module)


def _calls_grouped_gemms(module: nn.Module) -> bool:
    """Whether a module is known to run its GEMMs as grouped ones, which can be FP8."""
    is_torchtitan = callable(getattr(module, "_grouped_mm", None))
    return is_torchtitan or isinstance(module, GroupedLinear) or uses_registry(module)


def is_expert(module: nn.Module, weight: Tensor) -> bool:
    """Whether a batched parameter is a weight of experts, or large enough to be one."""
    if is_known(module):
        return True
    is_large = weight.dim() == 3 and weight.numel() >= _LARGE
    return is_large and may_have_experts(module)


def may_have_experts(module: nn.Module) -> bool:
    """Whether a module's batched parameters may be weights of experts.

    Convolutions and other modules of torch have parameters of three dimensions too. FSDP2 replaces
    the class of any module by a class of torch.
    """
    bases = type(module).__mro__
    return not all(base.__module__.startswith(("torch.", "builtins")) for base in bases)


def _batch(weight: Any) -> tuple[int, int, int]:
    """Return the number of matrices, and their rows and columns."""
    return weight.shape[0], prod(weight.shape[1:-1]), weight.shape[-1]


def _why_no_fp8_gemms(module: nn.Module, names: Sequence[str], recipe: Recipe) -> str:
    """Return why grouped GEMMs cannot run on FP8 operands, or an empty string."""
    if not has_fp8_gemms(recipe):
        return f"recipe {recipe.name!r} has no grouped FP8 GEMMs"
    if recipe.input_options:
        return f"{' and '.join(recipe.input_options)} of the recipe do not apply to experts"
    if not grouped_fp8_gemms(recipe).rows:
        gemms = " and ".join(gemm for gemm in recipe.high_precision_gemms if gemm != "wgrad")
        return f"recipe {recipe.name!r} runs {gemms} in high precision"
    for name in names:
        weight = module._parameters[name]
        assert weight is not None
        experts, rows, cols = _batch(weight)
        if rows % ALIGNMENT or cols % ALIGNMENT:
            return f"{name} has matrices of {rows} x {cols}, not multiples of {ALIGNMENT}"
        if experts >= MAX_GROUPS:
            return f"{name} has {experts} experts, not fewer than {MAX_GROUPS}"
    return ""


def convert_experts(state: ModelState, modules: Iterable[Experts]) -> None:
    """Convert modules of experts, which have been checked, and add them to ``state``."""
    for experts in modules:
        module: Any = experts.module
        add_fp8_params(module, experts.parameters, state, experts.name, experts.mixin)
        module._gemms = experts.gemms
        module._gemms_reason = experts.reason
        if experts.config is not None:
            register_experts_forward()
            module.config = experts.config
            module._fp8_activation = experts.activation


def restore_experts(module: Float8Experts) -> None:
    """Undo what `convert_experts` adds to `add_fp8_params`."""
    attributes = module.__dict__
    for name in ("_gemms", "_gemms_reason", "_fp8_activation"):
        attributes.pop(name, None)
    config = attributes.get("config")
    if isinstance(config, ExpertsConfig):
        module.config = config.config


def _config(module: Any, gemms: Gemms) -> ExpertsConfig | None:
    """Return the config with which transformers calls `experts_forward`, or None."""
    if not uses_registry(module):
        return None
    selected = module.config._experts_implementation
    if gemms == "gather" and selected != "grouped_mm":
        return None
    return ExpertsConfig(module.config, selected)


def _activation(module: Any, recipe: Recipe, gemms: Gemms) -> str | None:
    """Return the activation of transformers' experts if `gated_mlp` supports them, else None."""
    per_tensor = recipe.block_format("weight").per_tensor
    if gemms == "gather" or not per_tensor or not uses_registry(module):
        return None
    if grouped_fp8_gemms(recipe) != FP8:  # `gated_mlp` has no GEMMs in high precision
        return None
    has_plain_layout = module.has_gate and module.is_concatenated and not module.has_bias
    if not has_plain_layout or module.is_transposed:
        return None
    apply_gate = getattr(type(module)._apply_gate, "__name__", "")
    if apply_gate != "_default_apply_gate":
        return None
    return _ACTIVATIONS.get(type(module.act_fn).__name__)
