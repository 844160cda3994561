"""A shard and what it was quantized to: bytes, when they are there, and who makes them.

FSDP2 gathers on streams of its own. What was made on another stream is waited for, and is kept in
memory for those that read it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8rs._torch import is_traced

from .codec import Codec
from .placement import Placement

if TYPE_CHECKING:
    from .param import ParamHandle


#: With fewer elements than this left in a rank's other shards, a gather casts those too: that takes
#: less time than one more launch.
LARGE = 1 << 26


class Ready:
    """When and on which stream tensors were made, for streams that are about to read them."""

    def __init__(self, device: torch.device, made: Sequence[Tensor]) -> None:
        self.stream: torch.cuda.Stream | None = None
        # Fake tensors have no memory, and nothing runs on a stream.
        if device.type == "cuda" and not any(map(is_traced, made)):
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
class Shard:
    """One weight's shard on this rank, and what it was quantized to: the metadata of its gathers.

    Attributes:
        weight: whose shard.
        data: the high-precision shard, or the FP8 weight's; its padding is not in it.
        placement: where it lies in the whole weight.
        codec: reads what is gathered.
        device: where the bytes go: the mesh's device, `data`'s own unless offloaded.
        inputs: the flat uint8 tensors to gather.
        scale: of formats with one scale a tensor.
        amaxes: of blocks that the sharding cuts: reduced, for all blocks that the shard touches.
        ready: when ``inputs`` are there, or what is needed to make them.
        left_to: the pass that has still to make ``inputs``.
        offloaded: they are still to be made, of the copy that FSDP2 makes of the shard.
        forward: the number of the announced forward that they are of; None if of another.
        differentiable: a backward may come that gathers the weight again, for this forward.
        taken: a gather outside a backward has had them.
    """

    weight: ParamHandle
    data: Tensor
    placement: Placement
    codec: Codec
    device: torch.device
    inputs: tuple[Tensor, ...] = ()
    scale: Tensor | None = None
    amaxes: Tensor | None = None
    ready: Ready | None = None
    left_to: Pass | None = None
    offloaded: bool = field(init=False)
    forward: int | None = None
    differentiable: bool = False
    taken: bool = False

    def __post_init__(self) -> None:
        self.offloaded = is_offloaded(self.data, self.device)

    @property
    def made(self) -> list[Tensor]:
        """The tensors that a gather reads."""
        return [*self.inputs, *(t for t in (self.scale, self.amaxes) if t is not None)]


def set_scales(shards: Sequence[Shard], scales: Tensor) -> None:
    """Give shards a scale each, of scales (n,)."""
    for shard, scale in zip(shards, apart(scales), strict=True):
        shard.scale = scale


def apart(scales: Tensor) -> tuple[Tensor, ...]:
    """Copies of scales (n,), at addresses that are multiples of 16 bytes: cuBLAS wants that."""
    room = scales.new_empty(scales.shape[0], 4)
    room[:, 0] = scales
    return room[:, 0].unbind()


def on_mesh(device: torch.device, placement: Placement) -> torch.device:
    """The device of a shard's mesh: the shard's own, unless that is offloaded."""
    if device.type == placement.device_type:
        return device
    accelerator = torch.get_device_module(placement.device_type)
    return torch.device(placement.device_type, accelerator.current_device())


def is_offloaded(data: Tensor, device: torch.device) -> bool:
    """Whether FSDP2 keeps a shard on another device and copies it over for each gather."""
    return data.device.type != device.type


class Pass:
    """Shards that are quantized together, each before it is gathered.

    Were the bytes of all made first, the first layers would wait for all. So each gather makes
    those of what it gathers, at once; and, if it is little, what is left besides, to save launches.

    Args:
        shards: the shards, with all that needs other ranks done.
        cast: makes the bytes of the shards at these places, in ascending order; None: they are
            made.
        reads: what ``cast`` reads besides the shards' own.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        cast: Callable[[Sequence[int]], None] | None = None,
        reads: Sequence[Tensor] = (),
    ) -> None:
        self._cast = cast
        self._left = dict(enumerate(shards)) if cast is not None else {}
        made = [t for shard in shards for t in shard.made]
        self._begun = Ready(shards[0].device, [*made, *reads])
        for shard in shards:
            shard.ready = self._begun
            shard.left_to = None if cast is None else self

    def make(self, weights: Collection[ParamHandle] | None = None) -> None:
        """Make the bytes of these weights, or of all, on the current stream."""
        # Without those that have been quantized anew since.
        left = {i: shard for i, shard in self._left.items() if shard.left_to is self}
        chosen = left
        if weights is not None:
            chosen = {i: shard for i, shard in left.items() if shard.weight in weights}
            others = (shard.data.numel() for i, shard in left.items() if i not in chosen)
            if sum(others) < LARGE:
                chosen = left
        if self._cast is None or not chosen:
            return
        self._begun.used_here()
        with torch.inference_mode(False), torch.no_grad():
            self._cast(list(chosen))
        shards = list(chosen.values())
        ready = Ready(shards[0].device, [t for shard in shards for t in shard.made])
        for shard in shards:
            shard.ready, shard.left_to = ready, None
        self._left = {i: shard for i, shard in left.items() if i not in chosen}
