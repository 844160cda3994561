"""Operations on lists of FP8 weights: one collective per mesh, one launch per kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8rs._torch import increment_version
from fp8rs.optim.param import Param, ScaleSync, UpdateKind
from fp8rs.tensor.planes import as_bytes
from fp8rs.tensor.spec import reduce_amax

#: The scale to write a weight with, where to record its amax, and where to pass that on to. The
#: last is None unless delayed scaling keeps its state on another device (offloaded weights).
KnownScale = tuple[Tensor, Tensor, Tensor | None]


def prepare(params: Sequence[Param]) -> None:
    """Before a step, make modules hold their shards."""
    for p in params:
        if p.handle is not None and p.param is not p.part:
            p.handle.reshard()


def mark_written(params: Sequence[Param]) -> None:
    """Record that a step has written these parameters without calling their operators.

    With delayed scaling, synchronize the scales: they are NaN only on a rank that found a
    non-finite value. Steps of other kinds have written scales that all ranks have.
    """
    increment_version([p.param for p in params])
    for p in params:
        if p.handle is not None:
            p.handle.mark_written()
    for sync, members in by_model(params):
        if sync is not None:
            kinds = [(p.handle, p.kind) for p in map(params.__getitem__, members)]
            sync.end_step([handle for handle, kind in kinds if kind is UpdateKind.KNOWN_SCALE])


def stored(p: Param) -> list[Tensor]:
    """Return the memory of a weight's local part: codes and scales, as bytes."""
    planes = [plane for plane in p.codes.planes if plane is not None]
    return [as_bytes(t) for plane in planes for t in (plane.data, plane.scale)]


# --- delayed scaling -----------------------------------------------------------------------------


def known_scales(params: Sequence[Param]) -> list[KnownScale]:
    """Return the scale to write each weight with, and where to record its amax."""
    slots = [delayed for p in params if (delayed := p.delayed) is not None]
    assert len(slots) == len(params)
    if not slots:
        return []
    # Before the first step, the codes have the next scale.
    first = torch.stack([p.plane.scale.view(()) for p in params])
    scales = torch.stack([scale.view(()) for scale, _ in slots]).to(first.device)
    scales = torch.where(scales > 0, scales, first)
    each = zip(scales.unbind(), slots, strict=True)
    if slots[0][1].device == first.device:
        return [(scale, amax, None) for scale, (_, amax) in each]
    return [(scale, torch.zeros_like(scale), amax) for scale, (_, amax) in each]


def pass_on(known: Sequence[KnownScale]) -> None:
    """Pass the amaxes of a step on to delayed scaling's state on another device."""
    for _, amax, to in known:
        if to is not None:
            to.copy_(to.maximum(amax.to(to.device)))


# --- scales of several ranks ---------------------------------------------------------------------


def by_model(params: Sequence[Param]) -> list[tuple[ScaleSync | None, list[int]]]:
    """Group the positions of parameters in their list by the sharded model they belong to."""
    places: dict[int, tuple[ScaleSync | None, list[int]]] = {}
    for i, p in enumerate(params):
        sync = p.scale_sync
        places.setdefault(id(sync), (sync, []))[1].append(i)
    return list(places.values())


def reduce_amaxes_(params: Sequence[Param], amaxes: Tensor) -> None:
    """Reduce the amax of each local part to the whole weight's, in place: one all-reduce per mesh.

    Args:
        params: weights with one scale; the same on all ranks.
        amaxes: fp32, shape (n,).
    """
    for sync, members in by_model(params):
        if sync is None:
            _reduce_over_groups_(params, amaxes, members)
            continue
        handles = [params[i].handle for i in members]
        if len(members) == len(params):
            sync.reduce_amaxes_(handles, amaxes)
        else:
            part = torch.stack([amaxes[i] for i in members])
            sync.reduce_amaxes_(handles, part)
            torch._foreach_copy_([amaxes[i] for i in members], list(part.unbind()))


def _reduce_over_groups_(params: Sequence[Param], amaxes: Tensor, places: Sequence[int]) -> None:
    """Reduce the amaxes of whole weights whose specification names a process group."""
    groups: dict[str, list[int]] = {}
    for i in places:
        group = params[i].codes.spec.group
        if group is not None:
            groups.setdefault(group, []).append(i)
    for name, members in groups.items():
        part = reduce_amax(torch.stack([amaxes[i] for i in members]), name)
        torch._foreach_copy_([amaxes[i] for i in members], list(part.unbind()))


def write_values_(params: Sequence[Param], values: Sequence[Tensor]) -> None:
    """Quantize ``values`` (fp32, of the local parts) into weights of any format."""
    for sync, members in by_model(params):
        if sync is not None:
            sync.write_values([params[i].handle for i in members], [values[i] for i in members])
            continue
        for i in members:
            weight = params[i].codes
            weight.quantize_(values[i].view(weight.shape))
