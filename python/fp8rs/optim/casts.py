"""Codes of FP8 weights from their fp32 masters, byte for byte those that the quantizers make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8rs.optim import weights
from fp8rs.optim.lists import codes, kind, scale, scales_from

_multi_amax = torch.ops.fp8rs.multi_amax.default
_multi_quantize = torch.ops.fp8rs.multi_quantize.default
_multi_quantize_delayed = torch.ops.fp8rs.multi_quantize_delayed.default


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
        cast = {"known": _with_known_scales, "current": _with_own_maxima}.get(
            how, weights.write_all_
        )
        cast([params[i] for i in places], [masters[i] for i in places])


def _with_own_maxima(params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    parts: list[Any] = [weights.quantized(param) for param in params]
    amaxes = _multi_amax(masters)
    weights.reduce_amaxes_(params, amaxes)
    scales = scales_from(amaxes, [part.spec for part in parts])
    _multi_quantize(masters, scales, [codes(part) for part in parts])
    _put_scales(parts, scales)


def _with_known_scales(params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    parts: list[Any] = [weights.quantized(param) for param in params]
    slots = weights.known_scales(params)
    known, seen, _ = zip(*slots, strict=True)
    amaxes = torch.stack([amax.view(()) for amax in seen])
    used = _multi_quantize_delayed(
        masters, torch.stack(known), amaxes, [codes(part) for part in parts]
    )
    torch._foreach_copy_([amax.view(()) for amax in seen], list(amaxes.unbind()))
    weights.pass_on(slots)
    _put_scales(parts, used)


def _put_scales(parts: Sequence[Any], scales: Tensor) -> None:
    torch._foreach_copy_([scale(part).view(()) for part in parts], list(scales.unbind()))
