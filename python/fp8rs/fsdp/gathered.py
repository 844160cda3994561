"""What a gather hands over: bytes, what to make of them, and when they are there.

FSDP2 gathers on streams of its own. What was made on another stream is waited for, and is kept in
memory for those that read it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .maker import Launch, Shard
from .placement import Placement

if TYPE_CHECKING:
    from .codec import Codec
    from .weight import Weight


#: Elements of a rank's shards from which on what a gather has no need of is left to other gathers:
#: fewer are cast in less time than another launch takes.
LARGE = 1 << 26


class MadeOn:
    """When and on which stream tensors were made, for streams that are about to read them."""

    def __init__(self, device: torch.device, made: Sequence[Tensor]) -> None:
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.current_stream(device)
            self.event = torch.cuda.Event()
            self.event.record(self.stream)
            # Most are views of one buffer, which is kept as a whole.
            self.made = list({t.untyped_storage().data_ptr(): t for t in made}.values())
            self.users = {self.stream.cuda_stream}

    def used_here(self) -> None:
        """The current stream is about to read them: wait, and keep their memory for it."""
        if self.stream is None:
            return
        current = torch.cuda.current_stream(self.stream.device)
        if current.cuda_stream in self.users:
            return
        self.users.add(current.cuda_stream)
        current.wait_event(self.event)
        for tensor in self.made:
            tensor.record_stream(current)


@dataclass(eq=False, slots=True)
class Gathered:
    """What a weight was last quantized to: the metadata of its gathers.

    Attributes:
        codec: reads the gathered tensors.
        shard: with the tensors to gather, and what is needed to read them.
        made_on: when they are there.
        number: of the pass that made it.
        taken: a gather outside a backward has had it.
        differentiable: a backward may come that gathers the weight again, for this forward.
        offloaded: the bytes are still to be made, of the copy that FSDP2 makes of the shard.
        unmade: where the bytes are still to be made, of the shard.
    """

    codec: Codec
    shard: Shard
    made_on: MadeOn
    number: int
    taken: bool
    differentiable: bool
    offloaded: bool
    unmade: Unmade | None = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors to gather."""
        return self.shard.inputs

    @property
    def placement(self) -> Placement:
        """Where the shard lies."""
        return self.shard.placement

    @property
    def scale(self) -> Tensor | None:
        """The scale, of formats with one a tensor."""
        return self.shard.scale


class Unmade:
    """Weights of a pass whose bytes are made when they are gathered, each gather's at once.

    Were all made first, the first layers would wait for all. What is left besides, if it is small,
    is made with what is gathered, to save launches.

    Args:
        launch: makes bytes.
        gathered: of the shards that it makes, in their order.
        begun: when and where all that it reads was made.
    """

    def __init__(self, launch: Launch, gathered: Sequence[Gathered], begun: MadeOn) -> None:
        self._launch, self._begun = launch, begun
        self._left = dict(enumerate(gathered))
        for found in gathered:
            found.unmade = self

    def make(self, weights: Collection[Weight] | None = None) -> None:
        """Make the bytes of these weights, or of all, on the current stream."""
        # Without those that have been quantized anew since.
        left = {i: found for i, found in self._left.items() if found.unmade is self}
        chosen = left
        if weights is not None:
            chosen = {i: found for i, found in left.items() if found.shard.weight in weights}
            others = (found.shard.data.numel() for i, found in left.items() if i not in chosen)
            if sum(others) < LARGE:
                chosen = left
        self._begun.used_here()
        with torch.inference_mode(False), torch.no_grad():
            self._launch.make(list(chosen))
        shards = [found.shard for found in chosen.values()]
        made_on = MadeOn(shards[0].device, [t for shard in shards for t in made_of(shard)])
        for found in chosen.values():
            found.made_on, found.unmade = made_on, None
        self._left = {i: found for i, found in left.items() if i not in chosen}


def made_of(shard: Shard) -> list[Tensor]:
    """The tensors that a gather reads."""
    return [*shard.inputs, *(t for t in (shard.scale, shard.amaxes) if t is not None)]
