"""Set the all-gathers and reduce-scatters of a model that FSDP2 shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fp8rs._core import UnsupportedError
from fp8rs._torch import computed_in, fsdp_param_groups, shard_group
from fp8rs.quantize.recipes import check_choice, check_module

from . import symmetric
from .choice import CommChoice, FSDPComm
from .reduce_scatter import SummedReduceScatter, Transport

ALL_GATHERS = ("auto", "symmetric", "torch")
REDUCE_SCATTERS = ("auto", "symmetric", "bf16", "torch")

#: The modules whose collectives have been set.
_SET: WeakSet[nn.Module] = WeakSet()


def set_fsdp_comm(
    model: nn.Module,
    *,
    all_gather: str = "auto",
    reduce_scatter: str = "auto",
    timeout: timedelta = timedelta(minutes=10),
) -> FSDPComm:
    """Set the all-gathers and reduce-scatters of a model that FSDP2 shards.

    Call it once for a model, after ``fully_shard`` and before the first forward, on all ranks. The
    model may have FP8 layers or not. It calls ``set_custom_all_gather`` and
    ``set_custom_reduce_scatter`` of every module that ``fully_shard`` was called on.

    With "symmetric" and "bf16", gradients in bfloat16 are sent as they are and summed in float32,
    in the order of ranks. The sum is divided as FSDP2 requests. The bytes are the same on CPU and
    CUDA and in every run. Gradients in float32 are reduced by torch, in the policy's
    ``reduce_dtype``.

    Args:
        model: the sharded model.
        all_gather: "symmetric" reads shards from symmetric memory with the copy engines. It needs
            CUDA and ranks of one host that can read each other's memory. "torch" keeps FSDP2's
            all-gather. "auto" is "symmetric" where that is possible, else "torch".
        reduce_scatter: "symmetric" reads gradients from symmetric memory and sums them with one
            kernel. "bf16" sends them with ``all_to_all_single``, over NCCL or gloo. "torch" keeps
            FSDP2's reduce-scatter. "auto" is the first of these that is possible. It does not
            choose "bf16" for ranks of several hosts with several ranks each, because that sends
            more bytes over the network than torch's ring.
        timeout: how long a rank waits for another rank in symmetric memory.

    Returns:
        The choice for each module, why it is not a better one, and counts of what was sent.

    Raises:
        ValueError: no module of ``model`` is sharded, a name is not known, or the collectives of
            the model have been set before.
        UnsupportedError: "symmetric" was given and is not possible.
    """
    check_module("model", model)
    check_choice("all_gather", all_gather, ALL_GATHERS)
    check_choice("reduce_scatter", reduce_scatter, REDUCE_SCATTERS)
    units = list(_units(model))
    if not units:
        raise ValueError("no module of model is sharded: call fully_shard before set_fsdp_comm")
    wanted = not {all_gather, reduce_scatter}.isdisjoint({"auto", "symmetric"})
    unavailable: dict[Any, tuple[str, str]] = {}
    for unit in units:
        if unit.module in _SET:
            raise ValueError(
                f"the collectives of {unit.name or 'the root'} have been set: call set_fsdp_comm "
                "once for a model"
            )
        if unit.group is not None and unit.group not in unavailable and wanted:
            unavailable[unit.group] = symmetric.unavailable(unit.group, unit.device)
    comm = FSDPComm(tuple(_choose(u, all_gather, reduce_scatter, unavailable) for u in units))
    for channel, (unit, choice) in enumerate(zip(units, comm.choices, strict=True)):
        _SET.add(unit.module)
        _set(unit, choice, comm, channel, timeout)
    if any(choice.reduce_scatter != "torch" for choice in comm.choices):
        model.register_forward_pre_hook(comm._begin_forward)
    return comm


@dataclass(frozen=True)
class _Unit:
    """A module that ``fully_shard`` was called on.

    Attributes:
        name: name of the module.
        module: the module.
        parameters: FSDP2's parameter groups of the module, one for each mesh.
        group: process group of the ranks that shard the first of them, or None for one rank.
        device: device of the unsharded parameters.
    """

    name: str
    module: Any
    parameters: list[Any]
    group: Any
    device: torch.device


def _units(model: nn.Module) -> Iterator[_Unit]:
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and (groups := fsdp_param_groups(module)):
            yield _Unit(name, module, groups, shard_group(groups[0]), groups[0].device)


def _choose(
    unit: _Unit, all_gather: str, reduce_scatter: str, unavailable: dict[Any, tuple[str, str]]
) -> CommChoice:
    neither = ""
    if unit.group is None:
        neither = "one rank holds all of it"
    elif len(unit.parameters) > 1:
        neither = "FSDP2 supports only its own collectives for parameters on several meshes"
    no_symmetric, no_all_to_all = unavailable.get(unit.group, ("", ""))
    ranks = 1 if unit.group is None else unit.group.size()
    if not neither and no_symmetric and "symmetric" in (all_gather, reduce_scatter):
        argument = "all_gather" if all_gather == "symmetric" else "reduce_scatter"
        raise UnsupportedError(
            f'{argument}="symmetric" is not possible for {unit.name or "the root"}: {no_symmetric}'
        )
    no_bf16 = neither or _no_bf16(computed_in(unit.parameters[0]))
    gathers = {"symmetric": neither or no_symmetric}
    reductions = {
        "symmetric": no_bf16 or no_symmetric,
        "bf16": no_bf16 or (no_all_to_all if reduce_scatter == "auto" else ""),
    }
    best = *_best(all_gather, gathers), *_best(reduce_scatter, reductions)
    return CommChoice(unit.name, ranks, *best)


def _best(given: str, obstacles: dict[str, str]) -> tuple[str, str]:
    """Return the first possible choice, and why the first of those considered is not possible."""
    if given == "torch":
        return "torch", ""
    considered = list(obstacles) if given == "auto" else [given]
    chosen = next((choice for choice in considered if not obstacles[choice]), "torch")
    return chosen, obstacles[considered[0]]


def _no_bf16(dtypes: set[torch.dtype]) -> str:
    """Return why no gradient is in bfloat16, or "".

    Args:
        dtypes: the dtypes that trained parameters are gathered in.
    """
    if torch.bfloat16 in dtypes:
        return ""
    if not dtypes:
        return "none of its parameters is trained"
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    return f"gradients are computed in {names}"


def _set(unit: _Unit, choice: CommChoice, comm: FSDPComm, channel: int, timeout: timedelta) -> None:
    def buffer(collective: str) -> symmetric.DoubleBuffer:
        new = symmetric.DoubleBuffer(unit.group, unit.device, timeout)
        known: symmetric.DoubleBuffer = comm._buffers.setdefault((unit.group, collective), new)
        return known

    if choice.all_gather == "symmetric":
        gather = symmetric.CopyEngineAllGather(buffer("all-gather"), channel)
        unit.module.set_custom_all_gather(gather)
    if choice.reduce_scatter != "torch":
        transport = Transport()
        if choice.reduce_scatter == "symmetric":
            transport = symmetric.CopyEngineTransport(buffer("reduce-scatter"), channel)
        reduction = SummedReduceScatter(transport, unit.group, unit.parameters[0], comm)
        unit.module.set_custom_reduce_scatter(reduction)
