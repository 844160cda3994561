"""Estimate the communication volume and memory of a model before it is converted and sharded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fp8rs.convert.convert import resolve_options
from fp8rs.convert.experts import Experts, ExpertsMode, select_experts
from fp8rs.convert.memory import STATES, Memory, States, memory_of
from fp8rs.convert.report_table import Left, Report
from fp8rs.convert.select import LARGE_3D, ModuleFilter, large_3d, select
from fp8rs.convert.sizes import groups_of, layouts_of
from fp8rs.fsdp.shard_spec import ShardSpec
from fp8rs.nn.experts import Float8Experts
from fp8rs.quantize.recipes import Recipe, RecipeName

__all__ = ["Left", "Memory", "Report", "report"]

#: A module, and the names of its parameters that are converted.
_Fp8Params = tuple[nn.Module, tuple[str, ...]]

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
) -> Report:
    """Estimate communication volume and memory of ``model`` under FSDP2, without changing it.

    Parameters may be on the meta device. A model that is already converted is reported as it is.
    For a sharded model, groups and ranks come from FSDP2. Sizes are of FSDP2's own collectives.

    Args:
        model: the model, usually before its conversion.
        recipe: as in ``convert_to_float8_training``. The default is a converted model's recipe.
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
            stay unsharded between forward and backward.
        fsdp_unit_fn: called with each module and its name, returns whether ``fully_shard`` is
            called on it. The default is modules of the classes in a transformers model's
            ``_no_split_modules``, or else the members of each outermost nn.ModuleList. The root is
            always sharded.
        optimizer: "adam", "adamw", "lion", "momentum" (SGD with momentum), "muon" or "sgd" for
            torch's optimizers. For ``fp8rs.optim.AdamW``, "fp8rs-adamw" (8 bytes of fp32 moments
            per element, and 4 for a master unless the parameter is plain fp32), "fp8rs-adamw-bf16"
            (4 and the master), "fp8rs-adamw-no-masters" (8) or "fp8rs-adamw-bf16-no-masters" (4).
            A number counts tensors of the parameter's size and dtype: for fp32 parameters, 0.5
            means two states of one byte. The default is "fp8rs-adamw" if FP8 weights are trained,
            else "adamw".
        fp8_weights: count converted weights as FP8 weights, without masters. FP8 weights of a
            converted model are always counted as such.
        experts: as in ``convert_to_float8_training``.

    Warns:
        UserWarning: a string in ``filter_fqns`` matches no linear layer.

    Raises:
        TypeError, ValueError: an argument is wrong, or a layer has another recipe.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    converted: dict[str, Any] = {
        n: m for n, m in model.named_modules() if hasattr(m, "_fp8_params")
    }
    if recipe is None and config is None and converted:
        recipe = next(iter(converted.values()))._fp8_state.recipe
    recipe, fp8_gather = resolve_options(recipe, config, enable_fsdp_float8_all_gather, fp8_weights)
    world_size = _ranks(world_size, model)
    selected = select(model, module_filter_fn, filter_fqns, recipe)
    for message in selected.unused:  # the table shows the other reasons
        warnings.warn(message, stacklevel=2)
    selected_experts = select_experts(model, experts, filter_fqns, recipe)
    chosen: dict[str, _Fp8Params] = {
        n: (m, tuple(m._fp8_params))
        for n, m in converted.items()
        if (n or "the root") not in selected.left
    }
    chosen.update({n: (m, ("weight",)) for n, m in selected.layers})
    chosen.update({one.name: (one.module, one.parameters) for one in selected_experts.modules})
    experts_modules = [
        Experts(n, m, tuple(m._fp8_params), m._gemms, m._fp8_activation)
        for n, m in converted.items()
        if n in chosen and isinstance(m, Float8Experts)
    ]
    experts_modules += selected_experts.modules
    in_fp8 = {
        n: converted[n]._fp8_state.fp8_gather if n in converted else fp8_gather for n in chosen
    }
    layouts = layouts_of(
        recipe, ((m, name) for n, (m, names) in chosen.items() if in_fp8[n] for name in names)
    )
    fp8_parameters = [getattr(m, name) for m, names in chosen.values() for name in names]
    fp8, plain = (
        groups_of(
            model,
            which,
            world_size=world_size,
            param_dtype=param_dtype,
            reshard_after_forward=reshard_after_forward,
            unit_fn=fsdp_unit_fn,
            fp8_weights=fp8_weights,
        )
        for which in (layouts, {})
    )
    if optimizer is None:
        trained = (p for group in fp8 for p in group.parameters if p.trained)
        optimizer = "fp8rs-adamw" if any(p.is_fp8_weight for p in trained) else "adamw"
    memory, memory_high_precision = (
        memory_of(of, reduce_dtype=reduce_dtype, states=_states(optimizer)) for of in (fp8, plain)
    )
    return Report(
        recipe=recipe,
        world_size=world_size,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        optimizer=optimizer,
        converted=tuple(chosen),
        converted_parameters=sum(p.numel() for p in fp8_parameters),
        parameters=sum(p.numel() for p in model.parameters()),
        gemms=_gemms(experts_modules, recipe),
        left=_left(model, selected.left, selected_experts.left, chosen, fp8_parameters),
        units=tuple(group.name for group in fp8),
        gathered=sum(group.gathers * group.gathered_bytes for group in fp8),
        gathered_high_precision=sum(group.gathers * group.gathered_bytes for group in plain),
        scattered=sum(group.scattered_bytes(reduce_dtype) for group in fp8),
        memory=memory,
        memory_high_precision=memory_high_precision,
    )


def _gemms(modules: Iterable[Experts], recipe: Recipe) -> dict[str, dict[int, str]]:
    """Return the GEMMs of each weight of experts, by rows per expert."""
    gemms: dict[str, dict[int, str]] = {}
    for module in modules:
        for rows in ROWS_PER_EXPERT:
            for name, choice in module.choices(rows, recipe).items():
                gemms.setdefault(f"{module.name}.{name}".lstrip("."), {})[rows] = str(choice)
    return gemms


def _states(optimizer: str | float) -> States:
    if isinstance(optimizer, str):
        try:
            return STATES[optimizer]
        except KeyError:
            known = ", ".join(map(repr, STATES))
            raise ValueError(
                f"optimizer {optimizer!r} is not known; the names are {known}. For another "
                "optimizer, pass the number of states that it keeps for a parameter"
            ) from None
    if not 0 <= optimizer < float("inf"):
        raise ValueError(f"optimizer must be finite and not negative, not {optimizer!r}")
    return States(optimizer)


def _ranks(world_size: int | None, model: nn.Module) -> int:
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            found = ShardSpec.from_dtensor(parameter).num_shards
            if world_size not in (None, found):
                raise ValueError(
                    f"world_size is {world_size}, but the model is sharded over {found} ranks"
                )
            return found
    if world_size is None:
        return dist.get_world_size() if dist.is_initialized() else DEFAULT_RANKS
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    return world_size


def _left(
    model: nn.Module,
    layers: dict[str, str],
    parameters: dict[str, str],
    chosen: dict[str, _Fp8Params],
    fp8_parameters: list[nn.Parameter],
) -> tuple[Left, ...]:
    """Return the parameters that are not converted, each once, grouped by reason.

    Args:
        model: the model.
        layers: the reason for each linear layer that is not converted.
        parameters: the reason for each batched parameter that is not converted.
        chosen: the modules that are converted.
        fp8_parameters: their FP8 parameters.
    """
    names: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    seen = set(map(id, fp8_parameters))

    def leave(reason: str, name: str, parameters: Iterable[nn.Parameter]) -> None:
        fresh = [p for p in parameters if id(p) not in seen]
        seen.update(map(id, fresh))
        names.setdefault(reason, []).append(name)
        sizes[reason] = sizes.get(reason, 0) + sum(p.numel() for p in fresh)

    modules = {name or "the root": module for name, module in model.named_modules()}
    for name, reason in layers.items():
        leave(reason, name, modules[name].parameters())
    for name, reason in parameters.items():
        leave(reason, name, [model.get_parameter(name)])
    for name, parameter in large_3d(model):
        if id(parameter) not in seen:
            leave(LARGE_3D, name, [parameter])
    for name, (module, _) in chosen.items():
        bias = module._parameters.get("bias")
        if bias is not None and id(bias) not in seen:
            leave("biases of converted layers", f"{name}.bias".lstrip("."), [bias])
    for name, parameter in model.named_parameters():
        if id(parameter) not in seen:
            leave("not in a linear layer", name, [parameter])
    return tuple(
        Left(reason, tuple(dict.fromkeys(found)), sizes[reason]) for reason, found in names.items()
    )
