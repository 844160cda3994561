"""How shards of each block format become the bytes that are gathered, and bytes a weight.

A layout answers, for one `BlockFormat`: what must be known from other ranks before a shard
can be quantized (`measure`: maxima, reduced for all weights together), how the shards are
quantized (`quantize`, into flat uint8 tensors, equally long on all ranks), and what the
gathered tensors mean (`assemble`). Everything else about gathering is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8rs.tensor.quantized import Plane

if TYPE_CHECKING:
    from fp8rs.quantize.recipes import Recipe
    from fp8rs.scaling.state import ModelState

    from .master_weight import MasterWeight
    from .placement import Placement
    from .slot import WeightSlot


@dataclass(eq=False, slots=True)
class Shard:
    """One weight's shard on this rank, and what it was quantized to.

    Attributes:
        slot: the weight.
        data: the high-precision shard; its padding is not in it.
        padded_numel: elements of the longest rank's shard.
        placement: where it lies in the whole weight.
        device: where the bytes go: the mesh's device, `data`'s own unless offloaded.
        inputs: the flat uint8 tensors to gather.
        known: what the layout needs again to assemble them.
    """

    slot: WeightSlot
    data: Tensor
    padded_numel: int
    placement: Placement
    device: torch.device
    inputs: tuple[Tensor, ...] = ()
    known: Any = None

    @property
    def offloaded(self) -> bool:
        """Whether FSDP2 keeps the shard on another device and copies it over for each gather."""
        return self.data.device.type != self.device.type


@dataclass(eq=False, slots=True)
class Measured:
    """Maxima to be reduced over ranks: for each shard a run of ``values``, of its ``size``."""

    values: Tensor
    sizes: list[int] = field(default_factory=list)


#: Reduces maxima (n,), whose runs of the given sizes belong to the shards, over their ranks.
Reduce = Callable[[Tensor], Tensor]

#: The planes of a whole weight.
Planes = tuple[Plane | None, Plane | None]


class Layout:
    """Base of the layouts. One serves all weights of a model.

    Args:
        state: the model's.
    """

    def __init__(self, state: ModelState) -> None:
        self.state = state
        self.recipe: Recipe = state.recipe
        self.fp8_dtype = self.recipe.fp8_dtype("weight")
        self.format = self.recipe.block_format("weight")

    def check(self, shard: Shard) -> None:
        """Raise ValueError for a sharding that cannot work, the same on all ranks."""

    def groups(self, shard: Shard) -> tuple[Any, ...]:
        """The process groups over which a shard's maxima are reduced."""
        return shard.placement.groups

    def measure(self, shards: Sequence[Shard]) -> Measured | None:
        """What of the shards other ranks must know; None if nothing."""
        raise NotImplementedError

    @property
    def precomputes(self) -> bool:
        """Whether anything of ``quantize`` can be found ahead of a forward."""
        return False

    def precompute(self, measured: Tensor) -> Any:
        """What can be found ahead of a forward, from reduced maxima, where ``precomputes``."""
        raise NotImplementedError

    def quantize(
        self,
        shards: Sequence[Shard],
        measured: Tensor | None,
        precomputed: Any,
        record: bool,
        reduce: Reduce,
    ) -> None:
        """Quantize the shards: set their ``inputs`` and what is ``known``.

        Args:
            shards: all weights' shards.
            measured: the values that `measure` gave, reduced.
            precomputed: what `precompute` gave, instead.
            record: whether amaxes enter the histories of delayed scaling.
            reduce: reduces a tensor (n,), one element a shard, by maximum over its ranks.
        """
        raise NotImplementedError

    def quantize_offloaded(
        self, master: MasterWeight, inputs: tuple[Tensor, ...], known: Any
    ) -> tuple[Tensor, ...]:
        """Quantize the copy on the device that FSDP2 has just made of an offloaded shard."""
        raise NotImplementedError

    def inner_tensors(self, placement: Placement, device: torch.device) -> list[Tensor]:
        """Storage beside the gathered tensors that a whole weight needs; FSDP2 frees it too."""
        return []

    def assemble(
        self,
        outputs: Sequence[Tensor],
        inner: Sequence[Tensor],
        placement: Placement,
        known: Any,
        shape: torch.Size,
    ) -> Planes:
        """The planes of the whole weight over the gathered tensors."""
        raise NotImplementedError


def layout_for(state: ModelState) -> Layout:
    """The layout of a model's weights: by whether their blocks are cut out of the tensor."""
    from .block_layout import BlockLayout
    from .tensor_layout import TensorLayout

    per_tensor = state.recipe.block_format("weight").per_tensor
    return TensorLayout(state) if per_tensor else BlockLayout(state)
