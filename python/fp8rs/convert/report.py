"""What converting and sharding a model would come to, before any GPU time is spent."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fp8rs.convert.convert import settle
from fp8rs.convert.link import Gather, gather_of
from fp8rs.convert.report_table import Left, Report
from fp8rs.convert.select import LARGE_3D, ModuleFilter, large_3d, select
from fp8rs.fsdp.chosen_links import links_of
from fp8rs.fsdp.memory import STATES, Memory, States, memory_of
from fp8rs.fsdp.placement import place
from fp8rs.fsdp.sizes import Group, codecs_of, groups_of
from fp8rs.nn.linear import Float8Linear
from fp8rs.quantize.recipes import Recipe, RecipeName

__all__ = ["Gather", "Left", "Memory", "Report", "report"]

#: The ranks of a report on a model that is not sharded, in a process that is not distributed.
USUAL_RANKS = 8


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
    link_bandwidth: float | None = None,
    gpu_flops: float | None = None,
    tokens: int | None = None,
) -> Report:
    """What converting ``model`` and sharding it with FSDP2 would come to. Nothing is changed.

    Meta-device parameters are fine. A model that is converted already is reported as it is, and of
    one that is sharded the groups and ranks are FSDP2's own. What ``set_links`` chose for it is in
    the report, and bytes are counted accordingly.

    Args:
        model: the model, usually before it is converted.
        recipe: as in ``convert_to_float8_training``, and by default a converted model's own.
        module_filter_fn: as there.
        filter_fqns: as there.
        enable_fsdp_float8_all_gather: as there.
        config: as there.
        world_size: ranks that shard the model; with HSDP the shards, not the replicas. By default
            those of the process group, or 8 where there is none.
        param_dtype: of FSDP2's mixed-precision policy; None gathers what is stored.
        reduce_dtype: of that policy. Without one (None) newer torch reduces gradients in the dtype
            that parameters are stored in, torch 2.11 in that which they come in.
        reshard_after_forward: as given to ``fully_shard``. None, its default, keeps the root's own
            parameters between forward and backward.
        fsdp_unit_fn: called with each module and its name: whether ``fully_shard`` is called on
            it. By default on the classes that a transformers model names in ``_no_split_modules``,
            else on the members of each outermost nn.ModuleList; and on the root in any case.
        optimizer: torch's by "adam", "adamw", "lion", "momentum" (SGD's), "muon", "sgd";
            ``fp8rs.optim.AdamW`` by "fp8rs-adamw" (8 bytes an element of fp32 moments, and 4 of a
            master where the parameter is not plain fp32), "fp8rs-adamw-bf16" (4 of moments, and the
            master), "fp8rs-adamw-no-masters" (8), "fp8rs-adamw-bf16-no-masters" (4); or how many
            tensors of a parameter's size and dtype it keeps, such as 0.5 for two states of one byte
            each and fp32 parameters. By default "fp8rs-adamw" where FP8 weights are trained, else
            "adamw".
        fp8_weights: count converted weights as stored in FP8 alone, without master weights. Those
            of a model that has such weights already are counted so in any case.
        link_bandwidth: bytes a second that a rank takes in during an all-gather.
        gpu_flops: floating-point operations a second that a GPU reaches in this model's GEMMs.
        tokens: a rank and step, for the seconds in ``Report.gather``.

    Warns:
        UserWarning: a name in ``filter_fqns`` is in no linear layer's.

    Raises:
        TypeError, ValueError: an argument is wrong, or a layer is on another recipe.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Float8Linear)}
    if recipe is None and config is None and layers:
        recipe = next(iter(layers.values())).recipe
    recipe, fp8_gather = settle(recipe, config, enable_fsdp_float8_all_gather, fp8_weights)
    world_size = _ranks(world_size, model)
    selected = select(model, module_filter_fn, filter_fqns, recipe)
    for message in selected.unused:  # of the other warnings the table has a row each
        warnings.warn(message, stacklevel=2)
    chosen: dict[str, nn.Linear] = {
        n: m for n, m in layers.items() if (n or "the root") not in selected.left
    }
    chosen.update(selected.layers)

    codecs = codecs_of(
        recipe,
        (
            m
            for m in chosen.values()
            if (m._fp8_state.fp8_gather if isinstance(m, Float8Linear) else fp8_gather)
        ),
    )
    links, symmetric = links_of(model)
    reductions = {link.unit: link.reduction for link in links}
    fp8, plain = (
        [
            replace(group, reduction=reductions.get(group.name, "torch"))
            for group in groups_of(
                model,
                which,
                world_size=world_size,
                param_dtype=param_dtype,
                reshard_after_forward=reshard_after_forward,
                unit_fn=fsdp_unit_fn,
                fp8_weights=fp8_weights,
            )
        ]
        for which in (codecs, {})
    )
    if optimizer is None:
        ours = any(p.at_rest and p.trained for group in fp8 for p in group.parameters)
        optimizer = "fp8rs-adamw" if ours else "adamw"
    memory, memory_high_precision = (
        memory_of(of, reduce_dtype=reduce_dtype, states=_states(optimizer), symmetric=symmetric)
        for of in (fp8, plain)
    )
    return Report(
        recipe=recipe,
        world_size=world_size,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        optimizer=optimizer,
        converted=tuple(chosen),
        converted_parameters=sum(m.weight.numel() for m in chosen.values()),
        parameters=sum(p.numel() for p in model.parameters()),
        left=_left(model, selected.left, chosen),
        units=tuple(group.name for group in fp8),
        gathered=_gathered(fp8),
        gathered_high_precision=_gathered(plain),
        scattered=sum(group.scattered_bytes(reduce_dtype) for group in fp8),
        memory=memory,
        memory_high_precision=memory_high_precision,
        gather=gather_of(model, fp8, plain, reduce_dtype, link_bandwidth, gpu_flops, tokens),
        links=links,
    )


# --- arguments -----------------------------------------------------------------------------------


def _states(optimizer: str | float) -> States:
    if isinstance(optimizer, str):
        try:
            return STATES[optimizer]
        except KeyError:
            known = ", ".join(map(repr, STATES))
            raise ValueError(
                f"optimizer {optimizer!r} is not known; the names are {known}. Else give the "
                "number of states that it keeps for a parameter"
            ) from None
    if isinstance(optimizer, bool) or not isinstance(optimizer, (int, float)):
        raise TypeError(f"optimizer must be a name or a number, not {optimizer!r}")
    if not 0 <= optimizer < float("inf"):
        raise ValueError(f"optimizer must be finite and not negative, not {optimizer!r}")
    return States(optimizer)


def _ranks(world_size: int | None, model: nn.Module) -> int:
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            found = place(parameter).ranks
            if world_size not in (None, found):
                raise ValueError(
                    f"world_size is {world_size}, but the model is sharded over {found} ranks"
                )
            return found
    if world_size is None:
        return dist.get_world_size() if dist.is_initialized() else USUAL_RANKS
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size must be an int, not {world_size!r}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    return world_size


# --- what is found -------------------------------------------------------------------------------


def _left(
    model: nn.Module, reasons: dict[str, str], chosen: dict[str, nn.Linear]
) -> tuple[Left, ...]:
    """All parameters that are not converted weights, each once, by reason."""
    names: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    seen = {id(m.weight) for m in chosen.values()}

    def leave(reason: str, name: str, parameters: Iterable[nn.Parameter]) -> None:
        fresh = [p for p in parameters if id(p) not in seen]
        seen.update(map(id, fresh))
        names.setdefault(reason, []).append(name)
        sizes[reason] = sizes.get(reason, 0) + sum(p.numel() for p in fresh)

    modules = {name or "the root": module for name, module in model.named_modules()}
    for name, reason in reasons.items():
        leave(reason, name, modules[name].parameters())
    for name, parameter in large_3d(model):
        leave(LARGE_3D, name, [parameter])
    for name, module in chosen.items():
        if module.bias is not None and id(module.bias) not in seen:
            leave("biases of converted layers", f"{name}.bias".lstrip("."), [module.bias])
    for name, parameter in model.named_parameters():
        if id(parameter) not in seen:
            leave("in no linear layer", name, [parameter])
    return tuple(
        Left(reason, tuple(dict.fromkeys(found)), sizes[reason]) for reason, found in names.items()
    )


def _gathered(groups: list[Group]) -> int:
    return sum(group.gathers * group.gathered_bytes for group in groups)
