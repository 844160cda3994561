"""Tracks on the host which layers have scales from delayed scaling.

The host never waits for the device. A copy to the host starts after a roll, and is read at the next
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8rs._torch import is_traced


class KnownScales:
    """Copies from the device of which layers have scales, for their ``fp8_ready``.

    Attributes:
        rolls: number of rolls since a layer last lost its scales.
        pending: copies in flight: the layers' indices, the flags, and the event after the copy.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Notify that a layer lost its scales. Copies in flight no longer count."""
        self.rolls = 0
        self.pending: list[tuple[list[int], Tensor, torch.cuda.Event | None]] = []

    def poll(self, scales: Sequence[tuple[list[int], Tensor]], layers: Sequence[Any]) -> None:
        """Start copies after a roll, if some layers on a device have no known scale.

        Copies start after roll 1, 2, 3, 6, 12 and so on, because some layers may never get a scale.

        Args:
            scales: for each device, the indices of its layers and their scales (layers, 3).
            layers: all layers, with None for a layer that no longer exists.
        """
        self.rolls += 1
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # the host does not see replays of a graph
        rounds, rest = divmod(self.rolls, 3)
        if self.rolls > 3 and (rest or rounds.bit_count() != 1):
            return
        for indices, scale in scales:
            if scale.is_meta or all(all(getattr(layers[i], "fp8_ready", ())) for i in indices):
                continue
            known, event = scale > 0, None
            if known.is_cuda:
                event, stream = torch.cuda.Event(), torch.cuda.current_stream(known.device)
                known = known.to("cpu", non_blocking=True)
                event.record(stream)
            self.pending.append((indices, known, event))

    def read(self, layers: Sequence[Any]) -> None:
        """Set ``fp8_ready`` of layers from the copies that were started at the last roll."""
        pending, self.pending = self.pending, []
        for indices, known, event in pending:
            if event is not None:
                event.synchronize()  # the copy started a step ago
            if is_traced(known):
                # Fake scales have no values. In a real run, trained layers have scales by now.
                answers = [(True, True, True)] * len(indices)
            else:
                answers = known.tolist()
            for index, ready in zip(indices, answers, strict=True):
                if layers[index] is not None:
                    layers[index].fp8_ready = tuple(ready)
