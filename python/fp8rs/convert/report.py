"""Estimate the communication volume and memory of a model before it is converted and sharded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fp8rs.convert.memory import STATES, States, memory_of
from fp8rs.convert.options import ExpertsMode, ModuleFilter, Options, fqn_of
from fp8rs.convert.report_table import Left, Report
from fp8rs.convert.select import Selection, converted, select
from fp8rs.convert.sizes import Layouts, groups_of, is_sharded_by_fsdp, layouts_of
from fp8rs.model.shard_spec import ShardSpec
from fp8rs.quantize.recipes import Recipe, RecipeName, check_module, describe

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
            (4 and the master), "fp8rs-adamw-no-masters" (8) or "fp8rs-adamw-bf16-no-masters" (4).
            A number counts tensors of the parameter's size and dtype: for fp32 parameters, 0.5
            means two states of one byte. The default is "fp8rs-adamw" if FP8 weights are trained,
            else "adamw".
        fp8_weights: as in ``convert_to_float8_training``.
        experts: as in ``convert_to_float8_training``.

    Warns:
        UserWarning: a string in ``filter_fqns`` matches no linear layer and no experts.

    Raises:
        TypeError, ValueError: an argument is wrong, the model is converted and an argument of the
            conversion is given, or its modules have different recipes.
    """
    check_module("model", model)
    options = Options(
        recipe=recipe,
        config=config,
        module_filter_fn=module_filter_fn,
        filter_fqns=filter_fqns,
        enable_fsdp_float8_all_gather=enable_fsdp_float8_all_gather,
        fp8_weights=fp8_weights,
        experts=experts,
    )
    found, options, layouts = _modules(model, options)
    world_size = _ranks(world_size, model)
    groups = partial(
        groups_of,
        model,
        world_size=world_size,
        param_dtype=param_dtype,
        reshard_after_forward=reshard_after_forward,
        unit_fn=fsdp_unit_fn,
        fp8_weights=fp8_weights,
    )
    fp8, plain = groups(layouts), groups({})
    if optimizer is None:
        trained = (p for group in fp8 for p in group.parameters if p.trained)
        optimizer = "fp8rs-adamw" if any(p.is_fp8_weight for p in trained) else "adamw"
    states = _states(optimizer)
    return Report(
        recipe=options.recipe,
        world_size=world_size,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        optimizer=optimizer,
        experts=options.experts,
        summary=str(found),
        converted=tuple(dict.fromkeys(name for name, _, _ in found.parameters())),
        converted_parameters=sum(getattr(m, key).numel() for _, m, key in found.parameters()),
        parameters=sum(p.numel() for p in model.parameters()),
        gemms={
            fqn: {rows: str(one.choices(rows, options.recipe)[key]) for rows in ROWS_PER_EXPERT}
            for one in found.experts
            for fqn, key in zip(one.fqns, one.parameters, strict=True)
        },
        gemm_reasons={fqn: one.reason for one in found.experts for fqn in one.fqns if one.reason},
        left=_left(model, found),
        units=tuple(group.name for group in fp8),
        gathered=sum(g.gathers * g.gathered_bytes for g in fp8 if g.is_sharded),
        gathered_high_precision=sum(g.gathers * g.gathered_bytes for g in plain if g.is_sharded),
        scattered=sum(group.reduced_bytes(reduce_dtype) for group in fp8 if group.is_sharded),
        memory=memory_of(fp8, reduce_dtype, states),
        memory_high_precision=memory_of(plain, reduce_dtype, states),
    )


def _modules(model: nn.Module, options: Options) -> tuple[Selection, Options, Layouts]:
    """Return what is converted or will be, with which options, and the layouts of FP8 gathers."""
    found = converted(model)
    states = [m._fp8_state for _, m, _ in reversed(found.parameters())]
    states = [state for state in states if not state.standalone]
    if states:
        names = [f.name for f in fields(Options) if getattr(options, f.name) not in (f.default, [])]
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
        options = Options(states[0].recipe, experts=states[0].experts)  # of experts, if any
    else:
        options = options.resolved()
        found = select(model, options)
        for message in found.unused:  # the table shows the other reasons
            warnings.warn(message, stacklevel=3)
    gathered = (
        (m, key)
        for _, m, key in found.parameters()
        if (m._fp8_state.fp8_gather if states else options.enable_fsdp_float8_all_gather)
    )
    return found, options, layouts_of(options.recipe, gathered)


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
    for parameter in model.parameters() if is_sharded_by_fsdp(model) else ():
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


def _left(model: nn.Module, found: Selection) -> tuple[Left, ...]:
    """Return the parameters that are not converted, each once, grouped by reason."""
    owned = {n or "the root": list(m.parameters(False)) for n, m in model.named_modules()}
    owned.update({n: [p] for n, p in model.named_parameters(remove_duplicate=False)})
    biases = (
        (fqn_of(name, key), "biases of converted layers")
        for name, module, _ in found.parameters()
        for key, parameter in module._parameters.items()
        if key.endswith("bias") and parameter is not None
    )
    others = ((name, "not in a linear layer") for name, _ in model.named_parameters())
    names: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    seen = {id(getattr(m, key)) for _, m, key in found.parameters()}
    for name, reason in chain(found.left.items(), biases, others):
        fresh = [p for p in owned[name] if id(p) not in seen]
        seen.update(map(id, fresh))
        if fresh or found.left.get(name) == reason:
            names.setdefault(reason, []).append(name)
            sizes[reason] = sizes.get(reason, 0) + sum(p.numel() for p in fresh)
    return tuple(Left(reason, tuple(n), sizes[reason]) for reason, n in names.items())
