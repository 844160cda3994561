"""Warns when in-place arithmetic on FP8 weights is lost to rounding."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False, slots=True)
class HostCopy:
    """A copy of the result of a write to the host.

    Attributes:
        lost: whether the write was lost, a bool (). It is valid after ``event``.
        event: the event after the copy.
        name: the fully qualified name of the weight.
    """

    lost: Tensor
    event: torch.cuda.Event
    name: str


class LostWrites:
    """Warns once per model when in-place arithmetic changed no code of a weight.

    On the CPU, the result of a write is read at once. On CUDA, that would synchronize with the
    device. The result is copied to the host instead, and read at a later write or forward, when the
    copy has arrived.

    Attributes:
        in_step: an optimizer without masters is stepping, which has a warning of its own
            (`fp8rs.optim.missing_masters`).
    """

    def __init__(self) -> None:
        self.in_step = False
        self._warned = False
        self._copies: list[HostCopy] = []

    @property
    def detects(self) -> bool:
        """Whether to find out if a write is lost."""
        return not (self._warned or self.in_step)

    def add(self, lost: Tensor, name: str) -> None:
        """Add the result of a write.

        Args:
            lost: whether the write was lost, a bool () on the device.
            name: the fully qualified name of the weight.
        """
        if not lost.is_cuda:
            if bool(lost):
                self._warn(name)
            return
        if torch.cuda.is_current_stream_capturing():
            return  # the host does not see replays of a graph
        self.poll()
        on_host = lost.to("cpu", non_blocking=True)
        event = torch.cuda.current_stream(lost.device).record_event()
        self._copies.append(HostCopy(on_host, event, name))

    def poll(self) -> None:
        """Read the copies that have arrived, without waiting for others."""
        if not self._copies or torch.cuda.is_current_stream_capturing():
            return
        while self._copies and self._copies[0].event.query():
            copy = self._copies.pop(0)
            if bool(copy.lost):
                self._warn(copy.name)

    def _warn(self, name: str) -> None:
        if self._warned:
            return
        self._warned = True
        self._copies.clear()
        warnings.warn(
            f"in-place arithmetic on the FP8 weight {name} had no effect: it changed each value by "
            "less than half the distance to the next code, which is 3 to 6% of a value. Such "
            "changes are lost, however often they are repeated. With masters, in-place arithmetic "
            "changes the masters: use fp8rs.optim.AdamW or fp8rs.optim.MasterWeights, and write "
            "weights after the first step, or convert with preserve_high_precision_init_val=True. "
            "Or keep weights in high precision (fp8_weights=False)",
            stacklevel=8,
        )
