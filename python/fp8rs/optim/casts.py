"""Casts of fp32 masters to the codes of their FP8 weights, with the bytes of the quantizers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8rs.optim import weights
from fp8rs.optim.param import Param, UpdateKind
from fp8rs.tensor.spec import QuantSpec

_multi_amax = torch.ops.fp8rs.multi_amax.default
_multi_quantize = torch.ops.fp8rs.multi_quantize.default
_multi_quantize_delayed = torch.ops.fp8rs.multi_quantize_delayed.default


def write(params: Sequence[Param], masters: Sequence[Tensor]) -> None:
    """Write masters into their weights. All ranks write the same weights, in the same order.

    Weights with one scale per tensor are cast in one launch, and their maxima are reduced in one
    collective per mesh. Weights of other formats are quantized one by one.

    Args:
        params: FP8 weights.
        masters: fp32, of their local parts.
    """
    kinds: dict[tuple[UpdateKind, torch.device], list[int]] = {}
    for i, p in enumerate(params):
        kinds.setdefault((p.kind, p.part.device), []).append(i)
    for (kind, _), places in kinds.items():
        of, values = [params[i] for i in places], [masters[i] for i in places]
        if kind is UpdateKind.KNOWN_SCALE:
            with_known_scales(of, values)
        elif kind is UpdateKind.CURRENT_SCALE:
            amaxes = _multi_amax(values)
            weights.reduce_amaxes_(of, amaxes)
            with_maxima(of, values, amaxes)
        else:
            weights.write_values_(of, values)


def with_maxima(
    params: Sequence[Param],
    masters: Sequence[Tensor],
    amaxes: Tensor,
    found_inf: Tensor | None = None,
) -> None:
    """Cast masters with the scales of their maxima.

    Args:
        params: weights with one scale of their current values.
        masters: fp32, of their local parts.
        amaxes: fp32, shape (n,), of the whole weights.
        found_inf: of a step. If it is not 0, codes and scales stay.
    """
    planes = [p.plane for p in params]
    old = [plane.scale.view(()) for plane in planes]
    scales = scales_from(amaxes, [p.codes.spec for p in params])
    if found_inf is not None:
        scales = torch.where(found_inf.view(()) != 0, torch.stack(old), scales)
    _multi_quantize(masters, scales, [plane.data for plane in planes])
    torch._foreach_copy_(old, list(scales.unbind()))


def with_known_scales(params: Sequence[Param], masters: Sequence[Tensor]) -> None:
    """Cast masters with the next scales of delayed scaling, and record their maxima."""
    planes, slots = [p.plane for p in params], weights.known_scales(params)
    known, seen, _ = zip(*slots, strict=True)
    amaxes = torch.stack([amax.view(()) for amax in seen])
    codes = [plane.data for plane in planes]
    used = _multi_quantize_delayed(masters, torch.stack(known), amaxes, codes)
    torch._foreach_copy_([amax.view(()) for amax in seen], list(amaxes.unbind()))
    weights.pass_on(slots)
    torch._foreach_copy_([plane.scale.view(()) for plane in planes], list(used.unbind()))


def scales_from(amaxes: Tensor, specs: Sequence[QuantSpec]) -> Tensor:
    """Return the scales (n,) of these maxima (n,). Neighbors with one spec share a launch."""
    parts, start = [], 0
    for end in range(1, len(specs) + 1):
        if end == len(specs) or specs[end] != specs[start]:
            parts.append(specs[start].scale_from_amax(amaxes[start:end]))
            start = end
    return parts[0] if len(parts) == 1 else torch.cat(parts)
