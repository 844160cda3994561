"""Operations on lists of FP8 weights, with one collective per mesh and one launch per kind.

Casting fp32 masters gives the same bytes as the quantizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8rs._torch import increment_version
from fp8rs.optim.param import Param, UpdateKind
from fp8rs.quantize.planes import as_bytes
from fp8rs.quantize.spec import QuantSpec

_multi_amax = torch.ops.fp8rs.multi_amax.default
_multi_quantize = torch.ops.fp8rs.multi_quantize.default
_multi_quantize_delayed = torch.ops.fp8rs.multi_quantize_delayed.default

#: The scale to quantize a weight with, the tensor that records its amax, and the amax of delayed
#: scaling's state to raise to it. The last is None unless that state is on another device
#: (offloaded weights).
KnownScale = tuple[Tensor, Tensor, Tensor | None]


def prepare(params: Sequence[Param]) -> None:
    """Before a step, reshard models whose FP8 weights are still gathered."""
    for p in params:
        if p.handle is not None and p.param is not p.part:
            p.handle.reshard()


def mark_written(params: Sequence[Param]) -> None:
    """Record that a step has written these parameters without calling their operators.

    With delayed scaling, the scale is NaN only on a rank that found a non-finite value, so scales
    are synchronized. Other kinds of updates write the same scales on all ranks.
    """
    increment_version([p.param for p in params])
    for p in params:
        if p.handle is not None:
            p.handle.mark_written()
    for model, members in by_model(params):
        if model is not None:
            written = map(params.__getitem__, members)
            delayed = [p.handle for p in written if p.kind is UpdateKind.KNOWN_SCALE]
            model.sync_scales(delayed, in_step=True)


def stored(p: Param) -> list[Tensor]:
    """Return the codes and scales of a weight's local part, over the same memory."""
    planes = [plane for plane in p.codes.planes if plane is not None]
    return [as_bytes(t) for plane in planes for t in (plane.data, plane.scale)]


# --- delayed scaling ------------------------------------------------------------------------------


def known_scales(params: Sequence[Param]) -> list[KnownScale]:
    """Return the scale to quantize each weight with, and the tensor that records its amax."""
    slots = [delayed for p in params if (delayed := p.delayed) is not None]
    assert len(slots) == len(params)
    if not slots:
        return []
    here = slots[0][1].device == params[0].plane.scale.device
    if here and all(p.has_next_scale for p in params):
        return [(scale, amax, None) for scale, amax in slots]
    # A next scale of 0 means that none was computed yet. Keep the scale of the codes.
    first = torch.stack([p.plane.scale for p in params])
    scales = torch.stack([scale.view(()) for scale, _ in slots]).to(first.device)
    scales = torch.where(scales > 0, scales, first)
    each = zip(scales.unbind(), slots, strict=True)
    if here:
        return [(scale, amax, None) for scale, (_, amax) in each]
    return [(scale, torch.zeros_like(scale), amax) for scale, (_, amax) in each]


def update_remote_amaxes(known: Sequence[KnownScale]) -> None:
    """Raise the amaxes of delayed scaling's state on another device to the amaxes of a step."""
    for _, amax, to in known:
        if to is not None:
            to.copy_(to.maximum(amax.to(to.device)))


# --- scales of several ranks ----------------------------------------------------------------------


def by_model(params: Sequence[Param]) -> list[tuple[Any, list[int]]]:
    """Group the indices of parameters in their list by the sharded model that they belong to."""
    places: dict[int, tuple[Any, list[int]]] = {}
    for i, p in enumerate(params):
        model = p.sharded_model
        places.setdefault(id(model), (model, []))[1].append(i)
    return list(places.values())


def reduce_amaxes_(params: Sequence[Param], amaxes: Tensor) -> None:
    """Reduce the amaxes of local parts to the amaxes of whole weights, in place.

    There is one all-reduce per mesh.

    Args:
        params: weights with one scale; the same on all ranks.
        amaxes: the amaxes of the local parts, fp32, shape (n,).
    """
    for model, members in by_model(params):
        if model is None:
            continue
        handles = [params[i].handle for i in members]
        if len(members) == len(params):
            model.reduce_amaxes_(handles, amaxes)
        else:
            part = torch.stack([amaxes[i] for i in members])
            model.reduce_amaxes_(handles, part)
            torch._foreach_copy_([amaxes[i] for i in members], list(part.unbind()))


def write_values_(params: Sequence[Param], values: Sequence[Tensor]) -> None:
    """Quantize values of the local parts (fp32) into weights of any format."""
    for model, members in by_model(params):
        if model is not None:
            model.write_values([params[i].handle for i in members], [values[i] for i in members])
            continue
        for i in members:
            weight = params[i].codes
            weight.quantize_(values[i].view(weight.shape))


# --- casts of masters -----------------------------------------------------------------------------


def write_masters(params: Sequence[Param], masters: Sequence[Tensor]) -> None:
    """Write masters into their weights. All ranks write the same weights, in the same order.

    Weights with one scale per tensor are cast in one launch, and their maxima are reduced in one
    collective per mesh. Weights of other formats are quantized one by one.

    Args:
        params: FP8 weights.
        masters: the masters of their local parts, fp32.
    """
    kinds: dict[tuple[UpdateKind, torch.device], list[int]] = {}
    for i, p in enumerate(params):
        kinds.setdefault((p.kind, p.part.device), []).append(i)
    for (kind, _), places in kinds.items():
        of, values = [params[i] for i in places], [masters[i] for i in places]
        if kind is UpdateKind.KNOWN_SCALE:
            cast_with_known_scales(of, values)
        elif kind is UpdateKind.CURRENT_SCALE:
            amaxes = _multi_amax(values)
            reduce_amaxes_(of, amaxes)
            cast_with_amaxes(of, values, amaxes)
        else:
            write_values_(of, values)


def cast_with_amaxes(
    params: Sequence[Param],
    masters: Sequence[Tensor],
    amaxes: Tensor,
    found_inf: Tensor | None = None,
) -> None:
    """Cast masters with the scales of their amaxes.

    Args:
        params: weights with one current scale.
        masters: the masters of their local parts, fp32.
        amaxes: the amaxes of the whole weights, fp32, shape (n,).
        found_inf: if it is not 0, the step was skipped, and codes and scales stay.
    """
    planes = [p.plane for p in params]
    old = [plane.scale.view(()) for plane in planes]
    scales = scales_from(amaxes, [p.codes.spec for p in params])
    if found_inf is not None:
        scales = torch.where(found_inf.view(()) != 0, torch.stack(old), scales)
    _multi_quantize(masters, scales, [plane.data for plane in planes])
    torch._foreach_copy_(old, list(scales.unbind()))


def cast_with_known_scales(params: Sequence[Param], masters: Sequence[Tensor]) -> None:
    """Cast masters with the next scales of delayed scaling, and record their amaxes."""
    planes, slots = [p.plane for p in params], known_scales(params)
    known, seen, _ = zip(*slots, strict=True)
    amaxes = torch.stack([amax.view(()) for amax in seen])
    codes = [plane.data for plane in planes]
    used = _multi_quantize_delayed(masters, torch.stack(known), amaxes, codes)
    torch._foreach_copy_([amax.view(()) for amax in seen], list(amaxes.unbind()))
    update_remote_amaxes(slots)
    torch._foreach_copy_([plane.scale.view(()) for plane in planes], list(used.unbind()))


def scales_from(amaxes: Tensor, specs: Sequence[QuantSpec]) -> Tensor:
    """Return the scales (n,) of amaxes (n,). Consecutive weights with one spec share a launch."""
    parts, start = [], 0
    for end in range(1, len(specs) + 1):
        if end == len(specs) or specs[end] != specs[start]:
            parts.append(specs[start].scale_from_amax(amaxes[start:end]))
            start = end
    return parts[0] if len(parts) == 1 else torch.cat(parts)
