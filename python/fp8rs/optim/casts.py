"""Codes of FP8 weights from their fp32 masters, byte for byte those that the quantizers make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8rs.optim import weights
from fp8rs.tensor import formats
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.spec import QuantSpec

_multi_amax = torch.ops.fp8rs.multi_amax.default
_multi_quantize = torch.ops.fp8rs.multi_quantize.default
_multi_quantize_delayed = torch.ops.fp8rs.multi_quantize_delayed.default

#: Formats whose scales ``adamw_`` finds in the pass that writes the codes.
OWN_SCALES = (formats.ROW, formats.BLOCK_128X128, formats.MX_32X32)


def write(params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Write masters into their weights; all ranks write the same weights, in the same order.

    With one scale a tensor, all weights are cast in one launch, and maxima reduced in one
    collective a mesh. In other formats each weight is quantized by itself.

    Args:
        params: FP8 weights, as an optimizer has them.
        masters: of their local parts, fp32.
    """
    kinds: dict[tuple[str, torch.device], list[int]] = {}
    for i, param in enumerate(params):
        weight: Any = weights.quantized(param)
        kinds.setdefault((kind(param, weight), weight.device), []).append(i)
    for (how, _), places in kinds.items():
        of, values = [params[i] for i in places], [masters[i] for i in places]
        if how == "known":
            with_known_scales(of, values)
        elif how == "current":
            amaxes = _multi_amax(values)
            weights.reduce_amaxes_(of, amaxes)
            with_maxima(of, values, amaxes)
        else:
            weights.write_all_(of, values)


def with_maxima(
    params: Sequence[Tensor],
    masters: Sequence[Tensor],
    amaxes: Tensor,
    found_inf: Tensor | None = None,
) -> None:
    """Cast masters with the scales of their maxima.

    Args:
        params: weights with one scale of their own values each.
        masters: of their local parts, fp32.
        amaxes: fp32, one of each whole weight.
        found_inf: of a step; where it is not 0 codes and scales stay.
    """
    parts: list[Any] = [weights.quantized(param) for param in params]
    planes = [weights.plane(part) for part in parts]
    old = [plane.scale.view(()) for plane in planes]
    scales = scales_from(amaxes, [part.spec for part in parts])
    if found_inf is not None:
        scales = torch.where(found_inf.view(()) != 0, torch.stack(old), scales)
    _multi_quantize(masters, scales, [plane.data for plane in planes])
    torch._foreach_copy_(old, list(scales.unbind()))


def with_known_scales(params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Cast masters with the scales that delayed scaling knows, and note their maxima."""
    parts: list[Any] = [weights.quantized(param) for param in params]
    planes = [weights.plane(part) for part in parts]
    slots = weights.known_scales(params)
    known, seen, _ = zip(*slots, strict=True)
    amaxes = torch.stack([amax.view(()) for amax in seen])
    codes = [plane.data for plane in planes]
    used = _multi_quantize_delayed(masters, torch.stack(known), amaxes, codes)
    torch._foreach_copy_([amax.view(()) for amax in seen], list(amaxes.unbind()))
    weights.pass_on(slots)
    torch._foreach_copy_([plane.scale.view(()) for plane in planes], list(used.unbind()))


def kind(param: Tensor, weight: Tensor) -> str:
    """How a parameter is written: plain, known, current, own (scales), or by other means.

    The same on all ranks that have a part of it: they reduce together.
    """
    if not isinstance(weight, QuantizedTensor):
        return "plain"
    if not weights.is_one_plane(weight):
        return "other"
    if weight.format.per_tensor:
        return "known" if weights.known(param) else "current"
    if weight.format in OWN_SCALES and not weights.is_cut(param):
        return "own"
    return "other"


def scales_from(amaxes: Tensor, specs: Sequence[QuantSpec]) -> Tensor:
    """The scales (n,) of tensors with these maxima (n,); neighbours of one spec in one launch."""
    parts, start = [], 0
    for end in range(1, len(specs) + 1):
        if end == len(specs) or specs[end] != specs[start]:
            parts.append(specs[start].scale_from_amax(amaxes[start:end]))
            start = end
    return parts[0] if len(parts) == 1 else torch.cat(parts)
