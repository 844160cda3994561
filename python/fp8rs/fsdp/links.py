"""Which way FSDP2's gathers and reductions go: `set_links`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fp8rs._core import UnsupportedError
from fp8rs._torch import computed_in, fsdp_param_groups, shard_group
from fp8rs.nn.linear import Float8Linear

from . import symmetric
from .chosen_links import LINKS, Link, Links, named
from .layout import AllGatherLayout
from .reduction import AllToAll, SummedReduction, Wire
from .sizes import groups_of, layouts_of

GATHERS = ("auto", "symmetric", "torch")
REDUCTIONS = ("auto", "symmetric", "bf16", "torch")


def set_links(
    model: nn.Module,
    *,
    gather: str = "auto",
    reduction: str = "auto",
    timeout: timedelta = timedelta(minutes=10),
) -> Links:
    """Have a sharded model gather without SMs, and reduce in float32 at bfloat16's price.

    To be called after ``fully_shard``, on all ranks, for models with FP8 layers or none. It sets
    FSDP2's ``set_custom_all_gather`` and ``set_custom_reduce_scatter`` on all modules of ``model``
    that ``fully_shard`` was called on.

    The reduced gradient is the float32 sum of what each rank computed, in the order of ranks,
    divided as FSDP2 asks: the same bytes on CPU and CUDA and in each run. Gradients that are not
    bfloat16 when they are reduced go over the wire as torch has them do.

    Args:
        model: the sharded model.
        gather: "symmetric" (copy engines, out of memory that the ranks of a host share), "torch"
            (as it is), or "auto": the first where it can be.
        reduction: "symmetric" (the same, and a sum by one kernel), "bf16" (an ``all_to_all_single``
            and that sum; NCCL or gloo), "torch" (as it is), or "auto": the first of these that can
            be. ("bf16" between hosts that have several of the ranks each is for who asks for it:
            more bytes cross the network than in torch's ring.)
        timeout: how long a rank waits for another in symmetric memory.

    Returns:
        What was chosen for each module, and why nothing better was.

    Raises:
        ValueError: nothing of ``model`` is sharded, a name is not known, or links were set before.
        UnsupportedError: what was asked for by name cannot be.
    """
    for name, value, known in (("gather", gather, GATHERS), ("reduction", reduction, REDUCTIONS)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    units = list(_units(model))
    if not units:
        raise ValueError("nothing of model is sharded: call fully_shard before set_links")
    for unit in units:
        if unit.module in LINKS and not LINKS[unit.module][0].is_torchs:
            raise ValueError(
                f"{named(unit.name)} has links already: call set_links once for a model"
            )
    links = Links()
    wanted = {gather, reduction} & {"auto", "symmetric"}
    missing = _missing(units) if wanted else {}
    links.units = tuple(_choose(unit, gather, reduction, missing) for unit in units)
    plan = _plan(model, units)
    for channel, chosen in enumerate(zip(units, links.units, plan, strict=True)):
        unit, link, nbytes = chosen
        LINKS[unit.module] = link, links
        _set(unit, link, links, channel, nbytes, timeout)
    if any(link.reduction != "torch" for link in links.units):
        model.register_forward_pre_hook(links._begin_forward)
    return links


@dataclass(frozen=True)
class _Unit:
    """A module that FSDP2 communicates for."""

    name: str
    module: Any
    groups: list[Any]

    @property
    def parameters(self) -> Any:
        """Its group of parameters."""
        return self.groups[0]

    @property
    def ranks(self) -> int:
        """How many shard it."""
        return self.process_group.size() if self.process_group is not None else 1

    @property
    def process_group(self) -> Any:
        """The ranks that shard it, without their replicas; None where none do."""
        return shard_group(self.parameters)


def _units(model: nn.Module) -> Iterator[_Unit]:
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and (groups := fsdp_param_groups(module)):
            yield _Unit(name, module, groups)


def _missing(units: list[_Unit]) -> dict[Any, tuple[str, str]]:
    """What `symmetric.lacks` says of each of the process groups: a call of all ranks."""
    found: dict[Any, tuple[str, str]] = {}
    for unit in units:
        group = unit.process_group
        if unit.ranks > 1 and group not in found:
            found[group] = symmetric.lacks(group, unit.parameters.device)
    return found


def _choose(unit: _Unit, gather: str, reduction: str, missing: dict[Any, tuple[str, str]]) -> Link:
    why = ""
    if unit.ranks == 1:
        why = "one rank has all of it"
    elif len(unit.groups) > 1:
        why = "FSDP2 takes no others' where a module's parameters are on several meshes"
    lacking, crossing = missing.get(unit.process_group, ("", ""))
    lacking = why or lacking
    no_bf16 = why or _no_bf16(computed_in(unit.parameters))
    gathers = {"symmetric": lacking}
    sums = {
        "symmetric": no_bf16 or lacking,
        "bf16": no_bf16 or (crossing if reduction == "auto" else ""),
    }
    if not why and lacking and "symmetric" in (gather, reduction):
        what = "gather" if gather == "symmetric" else "reduction"
        raise UnsupportedError(f'{what}="symmetric" cannot be for {named(unit.name)}: {lacking}')
    return Link(unit.name, unit.ranks, *_best(gather, gathers), *_best(reduction, sums))


def _best(asked: str, against: dict[str, str]) -> tuple[str, str]:
    """The first way that nothing is against, of those asked for, and what is against the first."""
    if asked == "torch":
        return "torch", ""
    ways = list(against) if asked == "auto" else [asked]
    way = next((way for way in ways if not against[way]), "torch")
    return way, against[ways[0]]


def _no_bf16(computed: set[torch.dtype]) -> str:
    """Why no gradient of parameters that are gathered in these dtypes is bfloat16, or ""."""
    if torch.bfloat16 in computed:
        return ""
    if not computed:
        return "nothing of it is trained"
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in computed))
    return f"gradients are computed in {names}"


def _plan(model: nn.Module, units: list[_Unit]) -> list[tuple[int, int]]:
    """Of each unit the bytes that a gather sends, and those of its gradients in bfloat16."""
    layouts: dict[int, AllGatherLayout] = {}
    for layer in model.modules():
        if isinstance(layer, Float8Linear) and layer._fp8_state.fp8_gather:
            layouts.update(layouts_of(layer.recipe, [layer]))
    plan = []
    for unit in units:
        dtype = next(p.mp_policy.param_dtype for p in unit.parameters.fsdp_params)
        group, *_ = groups_of(unit.module, layouts, world_size=unit.ranks, param_dtype=dtype)
        sums = group.scattered_bytes(torch.bfloat16) + 16 * unit.ranks
        plan.append((group.gathered_bytes // unit.ranks, sums))
    return plan


def _set(
    unit: _Unit, link: Link, links: Links, channel: int, nbytes: tuple[int, int], timeout: timedelta
) -> None:
    """Have FSDP2 call what was chosen."""
    group, device = unit.process_group, unit.parameters.device

    def halves(of: dict[Any, symmetric.Halves], nbytes: int) -> symmetric.Halves:
        if group not in of:
            of[group] = symmetric.Halves(group, device, timeout)
        of[group].plan(nbytes)
        return of[group]

    if link.gather == "symmetric":
        gathers = halves(links._gathers, nbytes[0])
        unit.module.set_custom_all_gather(symmetric.CopyEngineGather(gathers, channel))
    if link.reduction != "torch":
        wire: Wire = AllToAll()
        if link.reduction == "symmetric":
            wire = symmetric.CopyEngineWire(halves(links._sums, nbytes[1]), channel)
        reduction = SummedReduction(
            wire, group, unit.parameters, lambda: links._forwards, links._reduces
        )
        unit.module.set_custom_reduce_scatter(reduction)
