"""Estimate the communication volume and memory of a model before it is converted and sharded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fp8rs._torch import own_part
from fp8rs.convert.expert_selection import Experts
from fp8rs.convert.memory import STATES, States, memory_of
from fp8rs.convert.options import Arguments, ExpertsMode, ModuleFilter, Options, fqn_of
from fp8rs.convert.report_table import Left, Report
from fp8rs.convert.select import Selection, converted, select
from fp8rs.convert.sizes import Group, Layouts, groups_of, is_sharded_by_fsdp, layouts_of
from fp8rs.convert.speed import linear_speed
from fp8rs.model.shard_spec import ShardSpec
from fp8rs.model.state import Gemms, ModelState
from fp8rs.quantize.recipes import Recipe, RecipeName, check_int, check_module, describe
from fp8rs.tensor.quantized import QuantizedTensor

#: Rows per expert for which a report names GEMMs.
ROWS_PER_EXPERT = (128, 1024, 8192)

#: Default number of ranks without a process group.
DEFAULT_RANKS = 8


def report(
    model: nn.Module,
    *,
    recipe: Recipe | RecipeName | None = None,
    module_filter_fn: ModuleFilter | None = None,
    filter_fqns: Iterable[str] = (),
    enable_fsdp_float8_all_gather: bool | None = None,
    config: Any = None,
    world_size: int | None = None,
    param_dtype: torch.dtype | None = torch.bfloat16,
    reduce_dtype: torch.dtype | None = torch.float32,
    reshard_after_forward: bool | None = None,
    fsdp_unit_fn: Callable[[nn.Module, str], bool] | None = None,
    optimizer: str | float | None = None,
    fp8_weights: bool = False,
    experts: ExpertsMode = "auto",
    gemms: Gemms = "auto",
    tokens: int | None = None,
) -> Report:
    """Estimate speed, communication volume and memory of ``model`` under FSDP2.

    The model does not change.

    Parameters may be on the meta device. A converted model is reported as it is, with the reasons
    that its conversion had. For a sharded model, groups, ranks and resharding come from FSDP2.
    Sizes are of FSDP2's own collectives.

    Args:
        model: the model, converted or not. For a converted model, omit the arguments of
            ``convert_to_float8_training``.
        recipe: as in ``convert_to_float8_training``.
        module_filter_fn: as in ``convert_to_float8_training``.
        filter_fqns: as in ``convert_to_float8_training``.
        enable_fsdp_float8_all_gather: as in ``convert_to_float8_training``.
        config: as in ``convert_to_float8_training``.
        world_size: number of shards. With HSDP, this is without replicas. The default is the size
            of the process group, or 8 without one.
        param_dtype: ``param_dtype`` of FSDP2's mixed-precision policy. With None, parameters are
            gathered in their stored dtype.
        reduce_dtype: ``reduce_dtype`` of the policy. With None, torch 2.11 reduces gradients in
            their own dtype, and newer releases in the dtype of the stored parameter.
        reshard_after_forward: as in ``fully_shard``. With None, only the root's own parameters
            stay unsharded between forward and backward, or what FSDP2 does with a sharded model.
        fsdp_unit_fn: called with each module and its name, returns whether ``fully_shard`` is
            called on it. The default is modules of the classes in a transformers model's
            ``_no_split_modules``, or else the members of each outermost nn.ModuleList. The root is
            always sharded.
        optimizer: "adam", "adamw", "lion", "momentum" (SGD with momentum), "muon" or "sgd" for
            torch's optimizers. For ``fp8rs.optim.AdamW``, "fp8rs-adamw" (8 bytes of fp32 moments
            per element, and 4 for a master unless the parameter is plain fp32), "fp8rs-adamw-bf16"
            (4 and the master), "fp8rs-adamw-fp8" (2.125 and the master for weights of FP8 layers),
            or any of these with "-no-masters" appended (8, 4 or 2.125).
            A number counts tensors of the parameter's size and dtype: for fp32 parameters, 0.5
            means two states of one byte. The default is "fp8rs-adamw" if FP8 weights are trained,
            else "adamw".
        fp8_weights: as in ``convert_to_float8_training``.
        experts: as in ``convert_to_float8_training``.
        gemms: as in ``convert_to_float8_training``.
        tokens: batch size times sequence length on each GPU, for which the report estimates the
            speed of each linear layer, and how the weights of a model that is not sharded are
            gathered. Without it, they are gathered in FP8, unless an option says otherwise.

    Warns:
        UserWarning: a string in ``filter_fqns`` matches no linear layer and no experts.

    Raises:
        TypeError, ValueError: an argument is wrong, the model is converted and an argument of the
            conversion is given, or its modules have different recipes.
    """
    check_module("model", model)
    arguments = Arguments(
        recipe=recipe,
        config=config,
        module_filter_fn=module_filter_fn,
        filter_fqns=filter_fqns,
        enable_fsdp_float8_all_gather=enable_fsdp_float8_all_gather,
        fp8_weights=fp8_weights,
        experts=experts,
        gemms=gemms,
    )
    if tokens is not None:
        check_int("tokens", tokens, 1)
    conversion = _conversion(model, arguments)
    selection = conversion.selection
    options = conversion.options
    speed = linear_speed(options.recipe, dict(selection.layers), options.gemms, tokens)
    few_tokens = not speed.run_in_fp8 and not is_sharded_by_fsdp(model)
    layouts = _layouts(selection, options, conversion.is_done, few_tokens)
    world_size = _ranks(world_size, model)
    groups_with_layouts = partial(
        groups_of,
        model,
        world_size=world_size,
        param_dtype=param_dtype,
        reshard_after_forward=reshard_after_forward,
        unit_fn=fsdp_unit_fn,
        fp8_weights=fp8_weights,
    )
    groups = groups_with_layouts(layouts)
    plain_groups = groups_with_layouts({})
    if optimizer is None:
        optimizer = "fp8rs-adamw" if _trains_fp8_weights(groups) else "adamw"
    states = _states(optimizer)

    weights = selection.weights()
    expert_gemms: dict[str, dict[int, str]] = {}
    gemm_reasons: dict[str, str] = {}
    for experts_module in selection.experts:
        expert_gemms.update(_gemms(experts_module, options.recipe))
        if experts_module.reason:
            gemm_reasons.update(dict.fromkeys(experts_module.fqns, experts_module.reason))

    return Report(
        recipe=options.recipe,
        world_size=world_size,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        optimizer=optimizer,
        experts=options.experts,
        summary=str(selection),
        converted=tuple(dict.fromkeys(weight.module_name for weight in weights)),
        # A parametrized weight is an attribute.
        converted_parameters=sum(getattr(w.module, w.name).numel() for w in weights),
        parameters=sum(p.numel() for p in model.parameters()),
        speed=speed,
        gemms=expert_gemms,
        gemm_reasons=gemm_reasons,
        left=_unconverted(model, selection),
        units=tuple(group.name for group in groups),
        gathered=_gathered_bytes(groups),
        gathered_high_precision=_gathered_bytes(plain_groups),
        scattered=sum(group.reduced_bytes(reduce_dtype) for group in groups if group.is_sharded),
        memory=memory_of(groups, reduce_dtype, states),
        memory_high_precision=memory_of(plain_groups, reduce_dtype, states),
    )


def _trains_fp8_weights(groups: Iterable[Group]) -> bool:
    """Return whether a trained parameter is an FP8 weight."""
    for group in groups:
        for parameter in group.parameters:
            if parameter.trained and parameter.is_fp8_weight:
                return True
    return False


def _gathered_bytes(groups: Iterable[Group]) -> int:
    """Return the bytes that the all-gathers of one step return."""
    return sum(group.gathers * group.gathered_bytes for group in groups if group.is_sharded)


def _gemms(experts: Experts, recipe: Recipe) -> dict[str, dict[int, str]]:
    """Return the GEMMs of each weight of experts, by rows per expert."""
    gemms: dict[str, dict[int, str]] = {fqn: {} for fqn in experts.fqns}
    for rows in ROWS_PER_EXPERT:
        choices = experts.choices(rows, recipe)
        for fqn, name in zip(experts.fqns, experts.parameters, strict=True):
            gemms[fqn][rows] = str(choices[name])
    return gemms


class _Conversion(NamedTuple):
    """A conversion to report on.

    Attributes:
        selection: what is converted, or will be.
        options: its options.
        is_done: whether the model is converted.
    """

    selection: Selection
    options: Options
    is_done: bool


def _conversion(model: nn.Module, arguments: Arguments) -> _Conversion:
    """Return the conversion of a model, or the one that the arguments describe."""
    selection = converted(model)
    states: list[ModelState] = []
    for weight in reversed(selection.weights()):
        state = weight.module._fp8_state
        if not state.standalone:
            states.append(state)

    is_done = bool(states)
    if is_done:
        names = []
        for argument in fields(Arguments):
            if getattr(arguments, argument.name) not in (argument.default, []):
                names.append(argument.name)
        if names:
            raise ValueError(
                f"the model is converted and is reported as it is: omit {', '.join(names)}"
            )
        recipes = {describe(state.recipe) for state in states}
        if len(recipes) > 1:
            raise ValueError(
                f"the model has modules with different recipes ({', '.join(sorted(recipes))}): "
                "report on them one by one"
            )
        state = states[0]  # of experts, if any
        experts = cast(ExpertsMode, state.experts)
        options = Options(state.recipe, experts=experts, gemms=state.gemms)
    else:
        options = arguments.options()
        selection = select(model, options)
        for message in selection.unused:  # the table shows the other reasons
            warnings.warn(message, stacklevel=3)
    return _Conversion(selection, options, is_done)


def _layouts(
    selection: Selection, options: Options, is_converted: bool, few_tokens: bool
) -> Layouts:
    """Return the layouts of the weights of FP8 layers.

    Args:
        selection: the layers and experts that are converted or will be.
        options: the options of their conversion.
        is_converted: whether they are converted. Each one then has its own choice of gathers.
        few_tokens: whether FSDP2 gathers linear layers in high precision by default.
    """
    layouts: Layouts = {}
    gathered_in_fp8 = []
    for weight in selection.weights():
        layouts[id(weight.module), weight.name] = None
        fp8_gather = options.fp8_gather
        if is_converted:
            fp8_gather = weight.module._fp8_state.fp8_gather
        parameter = getattr(weight.module, weight.name)
        is_fp8_weight = options.fp8_weights or isinstance(own_part(parameter), QuantizedTensor)
        if fp8_gather == "auto" and few_tokens and not is_fp8_weight:
            fp8_gather = not isinstance(weight.module, nn.Linear)
        if fp8_gather:
            gathered_in_fp8.append((weight.module, weight.name))
    layouts.update(layouts_of(options.recipe, gathered_in_fp8))
    return layouts


def _states(optimizer: str | float) -> States:
    """Return the states of an optimizer, from the argument of `report`."""
    if isinstance(optimizer, str):
        if optimizer not in STATES:
            names = ", ".join(map(repr, STATES))
            raise ValueError(
                f"optimizer {optimizer!r} is not known; the names are {names}. For another "
                "optimizer, pass the number of states that it keeps for a parameter"
            )
        return STATES[optimizer]
    if not 0 <= optimizer < float("inf"):
        raise ValueError(f"optimizer must be finite and not negative, not {optimizer!r}")
    return States(optimizer)


def _ranks(world_size: int | None, model: nn.Module) -> int:
    """Return the number of shards: of a sharded model, or as requested, or the default."""
    if is_sharded_by_fsdp(model):
        for parameter in model.parameters():
            if isinstance(parameter, DTensor):
                num_shards = ShardSpec.from_dtensor(parameter).num_shards
                if world_size not in (None, num_shards):
                    raise ValueError(
                        f"world_size is {world_size}, but the model is sharded over {num_shards} "
                        "ranks"
                    )
                return num_shards
    if world_size is None:
        return dist.get_world_size() if dist.is_initialized() else DEFAULT_RANKS
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    return world_size


def _unconverted(model: nn.Module, selection: Selection) -> tuple[Left, ...]:
    """Return the parameters that are not converted, each once, grouped by reason."""
    # A name is that of a module or of a parameter.
    parameters_of: dict[str, list[nn.Parameter]] = {}
    for name, module in model.named_modules():
        parameters_of[name or "the root"] = list(module.parameters(recurse=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameters_of[name] = [parameter]

    # Names with their reasons. Earlier reasons win.
    reasons = list(selection.unconverted.items())
    for weight in selection.weights():
        for key, parameter in weight.module._parameters.items():
            if key.endswith("bias") and parameter is not None:
                fqn = fqn_of(weight.module_name, key)
                reasons.append((fqn, "biases of converted layers"))
    for name, _ in model.named_parameters():
        reasons.append((name, "not in a linear layer"))

    names_by_reason: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    counted_ids = {id(getattr(weight.module, weight.name)) for weight in selection.weights()}
    for name, reason in reasons:
        uncounted = [p for p in parameters_of[name] if id(p) not in counted_ids]
        counted_ids.update(id(p) for p in uncounted)
        if uncounted or selection.unconverted.get(name) == reason:
            names_by_reason.setdefault(reason, []).append(name)
            sizes[reason] = sizes.get(reason, 0) + sum(p.numel() for p in uncounted)
    return tuple(
        Left(reason, tuple(names), sizes[reason]) for reason, names in names_by_reason.items()
    )
