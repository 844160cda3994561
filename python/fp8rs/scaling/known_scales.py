"""What the host knows of delayed scaling's scales: which there are.

Nobody waits for the device: it is asked after a roll, and its answer is read at the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8rs._torch import is_traced


class KnownScales:
    """Answers of the device to which layers have scales, for their ``fp8_ready``.

    Attributes:
        rolls: those of the histories since a layer last lost its scales.
        pending: answers on their way: the layers' indices, and when they are there.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """A layer has no scales any more, whatever is known of earlier ones."""
        self.rolls = 0
        self.pending: list[tuple[list[int], Tensor, torch.cuda.Event | None]] = []

    def ask(self, scales: Sequence[tuple[list[int], Tensor]], layers: Sequence[Any]) -> None:
        """Ask after a roll. After 1, 2, 3, 6, 12 and so on: a layer may have none for good.

        Args:
            scales: of each device, the indices of its layers and their scales (layers, 3).
            layers: all, with None for one that is gone.
        """
        self.rolls += 1
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # a graph's replays are not seen by the host
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
        """Tell layers what has been answered."""
        pending, self.pending = self.pending, []
        for indices, known, event in pending:
            if event is not None:
                event.synchronize()  # a step old: nothing to wait for
            if is_traced(known):
                # Fake scales have no values. In a real run, layers that train have theirs by now.
                answers = [(True, True, True)] * len(indices)
            else:
                answers = known.tolist()
            for index, ready in zip(indices, answers, strict=True):
                if layers[index] is not None:
                    layers[index].fp8_ready = tuple(ready)
