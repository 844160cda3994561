"""High-precision shards to planes, as the bytes that a `Codec` gathers.

A maker knows, for one block format, what of the shards other ranks must hear before they can be
quantized (maxima, reduced for all weights together), and how they are quantized then. Everything
else about gathering is the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from fp8rs.scaling.reductions import reduce_packed_
from fp8rs.tensor.spec import Planes, QuantSpec

from .codec import Codec
from .cuts import cut_rows
from .gathered import Pass, Shard, on_mesh
from .param import ParamHandle
from .placement import Placement


class Maker:
    """Base of the makers. One serves all weights of a model.

    Args:
        spec: how weights are quantized.

    Attributes:
        codec: what gathers them.
    """

    def __init__(self, spec: QuantSpec) -> None:
        self.spec, self.codec = spec, Codec(spec.format, spec.fp8_dtype)

    def shard(self, weight: ParamHandle, values: Tensor | None = None) -> Shard:
        """A weight's shard as it is, or is to be. ValueError for a sharding that cannot work.

        The module's own: the tensor that FSDP2 has at hand is a copy of it where it offloads.
        """
        placement = weight.placement
        self.check(weight, placement)
        if values is None:
            values = weight.local.shard
        device = on_mesh(values.device, placement)
        return Shard(weight, values, placement, self.codec, device)

    def check(self, weight: ParamHandle, placement: Placement) -> None:
        """Raise ValueError for a sharding that cannot work, the same on all ranks."""

    def cuts(self, placement: Placement) -> tuple[int, ...]:
        """The rows of blocks that the sharding cuts."""
        p = placement
        return cut_rows(p.whole[0], p.padded, p.ranks, self.codec.height)

    def reduce(self, shards: Sequence[Shard], values: Tensor) -> Tensor:
        """Make shards' maxima those of the whole weights: one all-reduce for each group of ranks.

        Args:
            shards: of all the weights that are quantized together.
            values: a run of maxima for each shard, as many as `size` says: fp32, contiguous. They
                are reduced in place.
        """
        ends = list(accumulate(map(self.size, shards)))
        runs = map(range, [0, *ends], ends)
        return reduce_packed_(values, zip(runs, map(self.groups, shards), strict=True))

    def groups(self, shard: Shard) -> tuple[Any, ...]:
        """The process groups over which a shard's maxima are reduced."""
        return shard.placement.groups

    def size(self, shard: Shard) -> int:
        """How many maxima of a shard are reduced."""
        raise NotImplementedError

    def precompute(self, shards: Sequence[Shard]) -> Tensor | None:
        """What of `make` can be found ahead of a forward; None if nothing."""
        return None

    def make(self, shards: Sequence[Shard], precomputed: Tensor | None, record: bool) -> Pass:
        """Quantize the shards: set their ``inputs``, and what is needed to read them.

        Args:
            shards: of all the weights that are quantized together.
            precomputed: what `precompute` gave for them.
            record: whether amaxes enter the histories of delayed scaling.
        """
        raise NotImplementedError

    def make_offloaded(self, data: Tensor, shard: Shard) -> tuple[Tensor, ...]:
        """Quantize the copy on the device that FSDP2 has just made of an offloaded shard."""
        raise NotImplementedError

    def planes(self, shards: Sequence[Shard]) -> list[Planes]:
        """The planes of high-precision shards, with scales from the data at hand.

        What becomes of FP8 weights that are written whole.
        """
        raise NotImplementedError
