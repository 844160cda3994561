"""What a converted model tells of sharding, and to whom: all that this package knows of it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn


class Sharding(Protocol):
    """Keeps the sharded weights of one model. `fp8rs.fsdp` has the one there is."""

    def sharded(self, layer: nn.Module, name: str, parameter: Any) -> None:
        """A parameter of a layer is sharded: FSDP2 is putting the DTensor in its place.

        Told too when the model was moved or cast, of the parameter that is in its place then; and
        of an FP8 weight, sharded or not, that has come out of a pickle.
        """

    def forward_begins(self, root: nn.Module) -> None:
        """A forward of the model begins, which is no recomputation."""

    def stepped(self) -> None:
        """An optimizer that has one of the model's parameters has stepped."""
