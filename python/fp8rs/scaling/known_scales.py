"""Tracks on the host which scales of delayed scaling are nonzero.

A copy to the host starts after a roll and is read at the next roll, so the host does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8rs._torch import is_traced


class KnownScales:
    """Updates ``fp8_ready`` of layers: which of their scales are known to be nonzero.

    Attributes:
        rolls: the number of rolls since a layer last lost its scales.
        pending: copies in flight: the layers' indices, the copy, and the event of its completion.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard copies in flight, because a layer has lost its scales."""
        self.rolls = 0
        self.pending: list[tuple[list[int], Tensor, torch.cuda.Event | None]] = []

    def poll(self, scales: Sequence[tuple[list[int], Tensor]], layers: Sequence[Any]) -> None:
        """Start copies after a roll, if layers exist that are not known to have all scales.

        Some layers never get a scale. Therefore copies start only after rolls 1, 2, 3, 6, 12, 24
        and so on.

        Args:
            scales: for each device, the indices of its layers and their scales (layers, 3).
            layers: the layers by index, with None for a layer that was freed.
        """
        self.rolls += 1
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # replays of a CUDA graph do not run host code
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
        """Set ``fp8_ready`` of layers from the copies in flight."""
        pending, self.pending = self.pending, []
        for indices, known, event in pending:
            if event is not None:
                event.synchronize()  # recorded a step ago, so this does not block
            if is_traced(known):
                # Fake scales have no values. In a real run, layers that train have theirs by now.
                answers = [(True, True, True)] * len(indices)
            else:
                answers = known.tolist()
            for index, ready in zip(indices, answers, strict=True):
                if layers[index] is not None:
                    layers[index].fp8_ready = tuple(ready)
