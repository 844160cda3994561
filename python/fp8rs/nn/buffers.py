"""Delayed scaling's buffers in a layer, through what torch does to buffers of any module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8rs.scaling.histories import BUFFERS, NOTHING_READY, new_buffers

from .function import Slots

if TYPE_CHECKING:
    from fp8rs.scaling.delayed import Delayed


def slots(scale: Tensor, amax: Tensor) -> Slots:
    """The slots in a layer's buffers."""
    return scale[:, 0].unbind(), amax[:, 0].unbind()


class KnownSlots:
    """A layer's slots, made once: each is a view that takes longer than its use.

    A copy starts without: its buffers are others.
    """

    def __init__(self) -> None:
        self._known: tuple[Tensor, Tensor, Slots] | None = None

    def of(self, buffers: dict[str, Any]) -> Slots:
        """The slots in these buffers."""
        scale, amax = buffers["fp8_scale"], buffers["fp8_amax"]
        known = self._known
        if known is None or known[0] is not scale or known[1] is not amax:
            known = self._known = scale, amax, slots(scale, amax)
        return known[2]

    def __reduce__(self) -> Any:
        return KnownSlots, ()


def register(layer: nn.Module, delayed: Delayed | None, device: torch.device) -> None:
    """Give a layer its buffers, with no history yet; none without delayed scaling."""
    if delayed is not None:
        for name, value in new_buffers(delayed.histories.recipe, device).items():
            # Not in state dicts, which load into the unconverted model.
            layer.register_buffer(name, value, persistent=False)


@torch.no_grad()
def begin_anew(layer: Any, delayed: Delayed | None) -> None:
    """Have first scales come from data again: the weight is to be another.

    With scales of the one before its values would saturate, and its outputs at the next layer, in
    an evaluation for good.
    """
    if delayed is not None:
        for name in BUFFERS:
            layer._buffers[name].zero_()
        layer.fp8_ready = NOTHING_READY
        delayed.histories.known.forget()


def give_memory(layer: nn.Module, delayed: Delayed | None, device: torch.device) -> None:
    """Give buffers on the meta device memory, which no state dict has for them."""
    for name in BUFFERS if delayed is not None else ():
        buffer = layer._buffers[name]
        assert buffer is not None and delayed is not None
        if buffer.is_meta:
            layer._buffers[name] = torch.zeros_like(buffer, device=device)
            delayed.histories.moved()


@contextmanager
def kept(layer: nn.Module, delayed: Delayed | None) -> Iterator[None]:
    """What is done to all of a layer's tensors in here moves its buffers, and changes nothing."""
    before = {name: layer._buffers[name] for name in BUFFERS} if delayed is not None else {}
    yield
    if delayed is not None:
        delayed.histories.moved()
    with torch.no_grad():
        for name, was in before.items():
            new = layer._buffers[name]
            assert was is not None and new is not None
            if was.is_meta and not new.is_meta:
                new.zero_()  # to_empty gives memory as it is
            if new.dtype != torch.float32:  # a cast of the model is one of its parameters
                layer._buffers[name] = was.to(new.device)
