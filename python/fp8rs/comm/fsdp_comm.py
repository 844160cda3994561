"""Set the reduce-scatters of a model that FSDP2 shards."""

from __future__ import annotations

import socket
import warnings
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fp8rs._torch import computed_in, fsdp_param_groups, shard_group
from fp8rs.quantize.recipes import check_module

from .reduce_scatter import FSDPComm, SummedReduceScatter

#: The modules whose reduce-scatters have been set.
_SET: WeakSet[nn.Module] = WeakSet()


def set_fsdp_comm(model: nn.Module) -> FSDPComm:
    """Send bfloat16 gradients as they are, and sum them in float32.

    FSDP2 converts gradients to the policy's ``reduce_dtype`` before it sends them. Here, bfloat16
    gradients are sent with one ``all_to_all_single`` and summed in float32, in the order of ranks:
    half the bytes of a float32 reduction, and the same sum. The sum is divided as FSDP2 requests.
    Its bytes are the same on CPU and CUDA and in every run. Gradients in float32 are reduced by
    torch, in ``reduce_dtype``.

    Call it once for a model, after ``fully_shard`` and before the first forward, on all ranks. The
    model may have FP8 layers or not. It calls ``set_custom_reduce_scatter`` of the modules that
    ``fully_shard`` was called on. A module keeps FSDP2's reduce-scatter if

    - none of its parameters is trained, or its gradients are computed in float32;
    - one rank holds all of it, or its parameters are on several meshes, for which FSDP2 supports
      only its own collectives;
    - it is sharded over several hosts with several ranks each. A ring reduces within each host
      first, so it sends less over the network than an all-to-all.

    Args:
        model: the sharded model.

    Returns:
        The modules that keep FSDP2's reduce-scatter, and counts of what was sent.

    Raises:
        ValueError: no module of ``model`` is sharded, or its reduce-scatters have been set before.
    """
    check_module("model", model)
    units: dict[str, Any] = {}  # the modules that fully_shard was called on, by name
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and fsdp_param_groups(module):
            units[name] = module
    if not units:
        raise ValueError("no module of model is sharded: call fully_shard before set_fsdp_comm")
    for name, module in units.items():
        if module in _SET:
            raise ValueError(
                f"the reduce-scatter of {name or 'the root'} has been set: call set_fsdp_comm once "
                "for a model"
            )

    comm = FSDPComm()
    ring_reasons: dict[dist.ProcessGroup, str] = {}
    for name, module in units.items():
        _SET.add(module)
        groups = fsdp_param_groups(module)
        ranks = shard_group(groups[0])
        reason = _unsupported(groups, ranks)
        # Every rank has the same reason, so all ranks of the group compare their hosts, or none.
        if not reason and ranks not in ring_reasons:
            ring_reasons[ranks] = _prefers_ring(ranks)
        if not reason:
            reason = ring_reasons[ranks]
        if reason:
            comm.unchanged[name] = reason
        else:
            module.set_custom_reduce_scatter(SummedReduceScatter(ranks, groups[0], comm))

    for reason in filter(None, ring_reasons.values()):
        warnings.warn(f"set_fsdp_comm keeps FSDP2's reduce-scatter: {reason}", stacklevel=2)
    if len(comm.unchanged) < len(units):
        model.register_forward_pre_hook(comm._begin_forward)
    return comm


def _unsupported(groups: list[Any], ranks: dist.ProcessGroup | None) -> str:
    """Return why gradients of a module cannot be sent in bfloat16, or "".

    Args:
        groups: FSDP2's parameter groups of the module, one for each mesh.
        ranks: the ranks that shard the first of them, or None for one rank.
    """
    if ranks is None:
        return "one rank holds all of it"
    if len(groups) > 1:
        return "FSDP2 supports only its own collectives for parameters on several meshes"
    dtypes = computed_in(groups[0])
    if not dtypes:
        return "none of its parameters is trained"
    if torch.bfloat16 not in dtypes:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"gradients are computed in {names}"
    return ""


def _prefers_ring(ranks: dist.ProcessGroup) -> str:
    """Return why a ring sends less over the network than an all-to-all, or "".

    All ranks of the group call this, and get the same result.
    """
    hosts: list[str] = [""] * ranks.size()
    dist.all_gather_object(hosts, _host(), group=ranks)
    count = len(set(hosts))
    if count == 1 or count == len(hosts):
        return ""
    return (
        f"its {len(hosts)} ranks are on {count} hosts, between which a ring sends less than an "
        "all-to-all. To send bfloat16 gradients, shard within a host (HSDP)"
    )


def _host() -> str:
    """Return a name that two hosts do not share, even if they have the same host name."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot_id.read_text().strip() if boot_id.exists() else ''}"
