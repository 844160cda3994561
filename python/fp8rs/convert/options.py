"""The arguments of a conversion: as a user passes them, and as they are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import nn

from fp8rs._torch import own_part
from fp8rs.convert.torchao import from_float8_linear_config
from fp8rs.gemm.grouped import reads_format
from fp8rs.model.linear_spec import grouped_fp8_gemms
from fp8rs.model.state import Gemms
from fp8rs.nn.fp8_params import Float8Params
from fp8rs.quantize.recipes import Recipe, check_bool, describe, resolve_recipe
from fp8rs.tensor.quantized import QuantizedTensor

ModuleFilter = Callable[[nn.Module, str], bool]
ExpertsMode = Literal["auto", "fp8", "gather", "off"]


@dataclass(frozen=True)
class Arguments:
    """The arguments of a conversion that a user has passed: see ``convert_to_float8_training``."""

    recipe: Any = None
    config: Any = None
    module_filter_fn: ModuleFilter | None = None
    filter_fqns: Iterable[str] = ()
    enable_fsdp_float8_all_gather: bool | None = None
    amax_reduction_group: Any = None
    fp8_weights: bool = False
    experts: ExpertsMode = "auto"
    gemms: Gemms = "auto"

    def options(self) -> Options:
        """Check the arguments, and return the options of the conversion.

        Raises:
            TypeError, ValueError: an argument is wrong, or two arguments contradict each other.
        """
        if isinstance(self.filter_fqns, str):  # which is an iterable of letters
            raise TypeError(
                f"filter_fqns must be a collection of names, not the str {self.filter_fqns!r}"
            )
        check_bool("fp8_weights", self.fp8_weights)
        if self.enable_fsdp_float8_all_gather is not None:
            check_bool("enable_fsdp_float8_all_gather", self.enable_fsdp_float8_all_gather)
        filters = tuple(self.filter_fqns)
        for pattern in filters:
            if not isinstance(pattern, str):
                raise TypeError(f"filter_fqns must have names, not {pattern!r}")
        if not (self.module_filter_fn is None or callable(self.module_filter_fn)):
            raise TypeError(f"module_filter_fn must be callable, not {self.module_filter_fn!r}")
        group = self.amax_reduction_group
        if not (group is None or isinstance(group, dist.ProcessGroup)):
            raise TypeError(
                "amax_reduction_group must be a torch.distributed.ProcessGroup, "
                f"not {type(group).__name__}"
            )

        gather = self.enable_fsdp_float8_all_gather
        fp8_gather: bool | Literal["auto"]
        if self.config is None:
            recipe = resolve_recipe("current" if self.recipe is None else self.recipe)
            fp8_gather = "auto" if gather is None else gather
        else:
            if self.recipe is not None:
                raise ValueError("recipe and config are both given: give one")
            recipe, fp8_gather = from_float8_linear_config(self.config)
            if gather not in (None, fp8_gather):
                raise ValueError(
                    f"enable_fsdp_float8_all_gather={gather} contradicts "
                    f"config.enable_fsdp_float8_all_gather={fp8_gather}: give one of them"
                )
        if self.fp8_weights and not fp8_gather:
            raise ValueError(
                "enable_fsdp_float8_all_gather=False cannot be combined with fp8_weights=True: FP8 "
                "weights have no high-precision values to gather"
            )

        if self.gemms not in get_args(Gemms):
            raise ValueError(f"gemms must be 'auto' or 'fp8', not {self.gemms!r}")
        if self.experts not in get_args(ExpertsMode):
            modes = ", ".join(map(repr, get_args(ExpertsMode)))
            raise ValueError(f"experts must be one of {modes}, not {self.experts!r}")
        if self.experts == "fp8":
            _check_fp8_experts(recipe)
        return Options(
            recipe=recipe,
            module_filter_fn=self.module_filter_fn,
            filter_fqns=filters,
            fp8_gather=fp8_gather,
            amax_reduction_group=group,
            fp8_weights=self.fp8_weights,
            experts=self.experts,
            gemms=self.gemms,
        )


@dataclass(frozen=True)
class Options:
    """The options of a conversion, which were checked: see ``convert_to_float8_training``.

    Attributes:
        fp8_gather: ``enable_fsdp_float8_all_gather``, or "auto" if it was not given.
    """

    recipe: Recipe
    module_filter_fn: ModuleFilter | None = None
    filter_fqns: tuple[str, ...] = ()
    fp8_gather: bool | Literal["auto"] = "auto"
    amax_reduction_group: Any = None  # torch's ProcessGroup
    fp8_weights: bool = False
    experts: ExpertsMode = "auto"
    gemms: Gemms = "auto"

    def excludes(self, fqn: str) -> bool:
        """Return whether ``filter_fqns`` excludes a layer or parameter of this name."""
        return any(pattern in fqn for pattern in self.filter_fqns)

    def check(self, name: str, module: Float8Params) -> None:
        """Check that a module with FP8 parameters was converted or built with these options.

        Raises:
            ValueError: an option differs.
        """
        state = module._fp8_state
        # The value of each option in the earlier conversion and in this one.
        values: dict[str, tuple[Any, Any]] = {}
        values["recipe"] = (describe(state.recipe), describe(self.recipe))
        if not state.standalone:
            values["enable_fsdp_float8_all_gather"] = (
                _argument_of(state.fp8_gather),
                _argument_of(self.fp8_gather),
            )
            values["amax_reduction_group"] = (state.group, self.amax_reduction_group)
            values["gemms"] = (state.gemms, self.gemms)
            if not isinstance(module, nn.Linear):
                values["experts"] = (state.experts, self.experts)
            weights = [own_part(module._parameters[key]) for key in module._fp8_params]
            are_fp8 = all(isinstance(weight, QuantizedTensor) for weight in weights)
            if self.fp8_weights and not are_fp8:
                values["fp8_weights"] = (False, True)

        for option, (earlier, requested) in values.items():
            if earlier != requested:
                raise ValueError(
                    f"{name or 'the root'} is already in FP8, with {option}={earlier!r}, not "
                    f"{requested!r}. To change it, call fp8rs.convert_to_high_precision before. If "
                    "the model is sharded, load the state dict into an unconverted model and "
                    "convert that. To keep it, exclude it with filter_fqns"
                )


def _argument_of(gather: bool | Literal["auto"]) -> bool | None:
    """Return the argument of a conversion that a choice of gathers results from."""
    return None if gather == "auto" else gather


def _check_fp8_experts(recipe: Recipe) -> None:
    """Raise ValueError if a recipe does not allow ``experts="fp8"``."""
    if recipe.input_options:
        raise ValueError(
            f"experts='fp8' contradicts {' and '.join(recipe.input_options)} of the recipe: "
            "grouped FP8 GEMMs quantize inputs and gradients with the same options. Use "
            "experts='gather'"
        )
    if not grouped_fp8_gemms(recipe).rows:
        raise ValueError(
            f"experts='fp8' contradicts high_precision_gemms={recipe.high_precision_gemms} of "
            "the recipe: forward and dgrad of experts have the same precision. Use "
            "experts='gather'"
        )
    if not has_fp8_gemms(recipe):
        raise ValueError(
            f"experts='fp8' requires a recipe with grouped FP8 GEMMs: 'current', 'delayed' or "
            f"'rowwise', not {recipe.name!r}. With experts='gather', weights of experts are "
            "gathered in FP8 and their GEMMs run in high precision"
        )


def has_fp8_gemms(recipe: Recipe) -> bool:
    """Return whether grouped FP8 GEMMs read weights in a recipe's format."""
    return reads_format(recipe.block_format("weight"))


def fqn_of(module: str, parameter: str = "") -> str:
    """Return the name of a module or of its parameter, for messages."""
    return f"{module}.{parameter}".strip(".") or "the root"
