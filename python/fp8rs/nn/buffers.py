"""Keeps delayed scaling's buffers of a layer valid through torch's operations on modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8rs.scaling.histories import BUFFERS, NOTHING_READY, new_buffers

from .function import Slots

if TYPE_CHECKING:
    from fp8rs.scaling.delayed import DelayedScalingState


def slots(scale: Tensor, amax: Tensor) -> Slots:
    """Return the slots in a layer's buffers."""
    return scale[:, 0].unbind(), amax[:, 0].unbind()


class SlotCache:
    """Caches a layer's slots, because creating their views takes longer than using them.

    A copy starts empty, because it has other buffers.
    """

    def __init__(self) -> None:
        self._known: tuple[Tensor, Tensor, Slots] | None = None

    def get(self, buffers: dict[str, Any]) -> Slots:
        """Return the slots in these buffers."""
        scale, amax = buffers["fp8_scale"], buffers["fp8_amax"]
        known = self._known
        if known is None or known[0] is not scale or known[1] is not amax:
            known = self._known = scale, amax, slots(scale, amax)
        return known[2]

    def __reduce__(self) -> Any:
        return SlotCache, ()


def register(layer: nn.Module, delayed: DelayedScalingState | None, device: torch.device) -> None:
    """Register buffers without a history on a layer, with delayed scaling."""
    if delayed is not None:
        for name, value in new_buffers(delayed.recipe, device).items():
            # Not persistent, so that state dicts load into the unconverted model.
            layer.register_buffer(name, value, persistent=False)


@torch.no_grad()
def reset(layer: Any, delayed: DelayedScalingState | None) -> None:
    """Reset scales and histories, because the weight is about to be replaced.

    With the old scales, the new values and the outputs could saturate. In an evaluation, nothing
    would update the scales.
    """
    if delayed is not None:
        for name in BUFFERS:
            layer._buffers[name].zero_()
        layer.fp8_ready = NOTHING_READY
        delayed.scales_lost()


def materialize(
    layer: nn.Module, delayed: DelayedScalingState | None, device: torch.device
) -> None:
    """Allocate buffers that are on the meta device. State dicts do not contain them."""
    for name in BUFFERS if delayed is not None else ():
        buffer = layer._buffers[name]
        assert buffer is not None and delayed is not None
        if buffer.is_meta:
            layer._buffers[name] = torch.zeros_like(buffer, device=device)
            delayed.moved()


@contextmanager
def preserve(layer: nn.Module, delayed: DelayedScalingState | None) -> Iterator[None]:
    """Keep the values and the dtype of buffers while a function is applied to all tensors."""
    before = {name: layer._buffers[name] for name in BUFFERS} if delayed is not None else {}
    yield
    if delayed is not None:
        delayed.moved()
    with torch.no_grad():
        for name, was in before.items():
            new = layer._buffers[name]
            assert was is not None and new is not None
            if was.is_meta and not new.is_meta:
                new.zero_()  # to_empty does not initialize memory
            if new.dtype != torch.float32:  # a cast applies only to parameters
                layer._buffers[name] = was.to(new.device)
