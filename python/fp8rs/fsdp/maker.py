"""High-precision shards to planes, as the bytes that a `Codec` gathers.

A maker answers, for one block format: what must be known from other ranks before a shard can be
quantized (`measure`: maxima, reduced for all weights together), and how the shards are quantized
(`make`). Everything else about gathering is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8rs.scaling.delayed import Delayed
from fp8rs.scaling.histories import Histories
from fp8rs.scaling.reductions import index_tensor
from fp8rs.tensor.planes import Plane
from fp8rs.tensor.spec import Planes, QuantSpec, plane_leads

from .codec import Codec
from .cuts import cut_rows
from .placement import Placement

if TYPE_CHECKING:
    from .weight import Weight

ALIGNMENT = 256
"""Bytes between the starts of shards in the common buffer: as an allocator would align them."""

_block_amax = torch.ops.fp8rs.block_amax.default
_multi_amax = torch.ops.fp8rs.multi_amax.default
_multi_quantize = torch.ops.fp8rs.multi_quantize.default
_multi_quantize_delayed = torch.ops.fp8rs.multi_quantize_delayed.default
_quantize = torch.ops.fp8rs.quantize.default
_quantize_blocks = torch.ops.fp8rs.quantize_blocks.default


@dataclass(eq=False, slots=True)
class Shard:
    """One weight's shard on this rank, and what it was quantized to.

    Attributes:
        weight: whose shard.
        data: the high-precision shard; its padding is not in it.
        placement: where it lies in the whole weight.
        device: where the bytes go: the mesh's device, `data`'s own unless offloaded.
        inputs: the flat uint8 tensors to gather.
        scale: of formats with one scale a tensor.
        amaxes: of blocks that the sharding cuts: reduced, for all blocks that the shard touches.
    """

    weight: Weight
    data: Tensor
    placement: Placement
    device: torch.device
    inputs: tuple[Tensor, ...] = ()
    scale: Tensor | None = None
    amaxes: Tensor | None = None

    @property
    def offloaded(self) -> bool:
        """Whether FSDP2 keeps the shard on another device and copies it over for each gather."""
        return self.data.device.type != self.device.type


@dataclass(eq=False, slots=True)
class Measured:
    """Maxima to be reduced over ranks: for each shard a run of ``values``, of its ``size``."""

    values: Tensor
    sizes: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Launch:
    """What makes the bytes of shards that a maker was given; it needs no other rank.

    Attributes:
        make: makes those of the shards at these places.
        reads: what was made for it, and must be kept for the stream that it runs on.
    """

    make: Callable[[Sequence[int]], None]
    reads: Sequence[Tensor] = ()


#: Reduces maxima (n,), one a shard, over the shards' ranks.
Reduce = Callable[[Tensor], Tensor]

#: Reduces what was measured of shards over the shards' ranks.
ReduceShards = Callable[[Sequence[Shard], Measured], Tensor]


class Maker:
    """Base of the makers. One serves all weights of a model.

    Args:
        spec: how weights are quantized.
        codec: what gathers them.
    """

    def __init__(self, spec: QuantSpec, codec: Codec) -> None:
        self.spec, self.codec = spec, codec

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
        """Whether anything of ``make`` can be found ahead of a forward."""
        return False

    def precompute(self, measured: Tensor) -> Any:
        """What can be found ahead of a forward, from reduced maxima, where ``precomputes``."""
        raise NotImplementedError

    def make(
        self,
        shards: Sequence[Shard],
        measured: Tensor | None,
        precomputed: Any,
        record: bool,
        reduce: Reduce,
    ) -> Launch | None:
        """Quantize the shards: set their ``inputs``, and what is needed to read them.

        Args:
            shards: of all the weights that are quantized together.
            measured: the values that `measure` gave, reduced.
            precomputed: what `precompute` gave, instead.
            record: whether amaxes enter the histories of delayed scaling.
            reduce: reduces a tensor (n,), one element a shard, by maximum over its ranks.

        Returns:
            What is left to do, for each shard before it is gathered; None if nothing is.
        """
        raise NotImplementedError

    def make_offloaded(self, data: Tensor, shard: Shard) -> tuple[Tensor, ...]:
        """Quantize the copy on the device that FSDP2 has just made of an offloaded shard."""
        raise NotImplementedError

    def planes(self, shards: Sequence[Shard], reduce: ReduceShards) -> list[Planes]:
        """The planes of high-precision shards, with scales from the data at hand.

        What becomes of FP8 weights that are written whole.
        """
        raise NotImplementedError


# --- one scale a tensor --------------------------------------------------------------------------


class TensorMaker(Maker):
    """Per-tensor scales, from the amaxes of all shards or from the histories.

    All shards are measured in one launch and cast in another one.
    """

    def __init__(self, spec: QuantSpec, codec: Codec, histories: Histories | None) -> None:
        super().__init__(spec, codec)
        self._histories = histories

    def measure(self, shards: Sequence[Shard]) -> Measured | None:
        if self._histories is not None:
            modules: list[Any] = [s.weight.module for s in shards]
            if all(m.fp8_ready[0] for m in modules) and not any(s.offloaded for s in shards):
                return None
        return self._amaxes(shards)

    def _amaxes(self, shards: Sequence[Shard]) -> Measured:
        device = shards[0].device
        amaxes: list[Tensor] = [
            _multi_amax([s.data for s in part]).to(device) for _, part in runs(shards)
        ]
        values = amaxes[0] if len(amaxes) == 1 else torch.cat(amaxes)
        return Measured(values, [1] * len(shards))

    @property
    def precomputes(self) -> bool:
        return self._histories is None

    def precompute(self, measured: Tensor) -> Tensor:
        return self.spec.scale_from_amax(measured)

    def make(
        self,
        shards: Sequence[Shard],
        measured: Tensor | None,
        precomputed: Any,
        record: bool,
        reduce: Reduce,
    ) -> Launch | None:
        self._allocate(shards)
        scales: Any
        if self._histories is not None:
            # Other ranks must hear what a cast has seen of NaN and Inf: all casts are now.
            scales = self._make_delayed(self._histories, shards, measured, record, reduce)
        else:
            scales = precomputed if measured is None else self.precompute(measured)
        for shard, scale in zip(shards, apart(scales), strict=True):
            shard.scale = scale
        if self._histories is not None:
            return None
        return Launch(lambda places: self._cast(shards, scales, places), [scales])

    def _allocate(self, shards: Sequence[Shard]) -> None:
        """Give the shards room for their bytes, in one buffer."""
        lengths = [s.placement.padded_numel for s in shards]
        sizes = [-(-length // ALIGNMENT) * ALIGNMENT for length in lengths]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=shards[0].device)
        for shard, room, length in zip(shards, buffer.split(sizes), lengths, strict=True):
            if shard.data.numel() < length:
                # So that the padding that is gathered is the same in every run.
                room[shard.data.numel() :].zero_()
            shard.inputs = (room[:length],)

    def _codes(self, shards: Sequence[Shard]) -> list[Tensor]:
        return [self.codec.room(s.inputs[0], s.data.shape) for s in shards]

    def _cast(
        self, shards: Sequence[Shard], scales: Any, places: Sequence[int] | None = None
    ) -> None:
        for start, part in runs(shards, places):
            if not part[0].offloaded:
                values = [s.data for s in part]
                _multi_quantize(values, scales[start : start + len(part)], self._codes(part))

    def _make_delayed(
        self,
        histories: Histories,
        shards: Sequence[Shard],
        measured: Tensor | None,
        record: bool,
        reduce: Reduce,
    ) -> Tensor:
        """Quantize with the histories' scales; the scales to dequantize with."""
        pack = histories.pack(shards[0].device)
        places = {index: place for place, index in enumerate(pack.indices)}
        slots = slots_of([places[s.weight.index] for s in shards], pack.amax)
        histories.wait_for_roll()
        scales = pack.scale[slots, 0, 0]
        if measured is not None:
            scales = torch.where(scales > 0, scales, self.spec.scale_from_amax(measured))
        scales = scales.contiguous()
        seen = pack.amax[slots, 0, 0].contiguous() if record else torch.zeros_like(scales)
        if measured is not None:
            # A cast that has been measured needs no second look at its amaxes.
            finite = measured.isfinite()
            used = torch.where(finite, scales, float("nan"))
            seen = torch.where(finite, seen.maximum(measured), seen)
            self._cast(shards, scales)
        else:
            used = torch.cat(
                [
                    _multi_quantize_delayed(
                        [s.data for s in part],
                        scales[start : start + len(part)],
                        seen[start : start + len(part)],
                        self._codes(part),
                    )
                    for start, part in runs(shards)
                ]
            )
            # The rank that saw a NaN or Inf has the scale NaN now; so must the others.
            used = reduce(used)
        if record:
            pack.amax[slots, 0, 0] = seen
        return used

    def planes(self, shards: Sequence[Shard], reduce: ReduceShards) -> list[Planes]:
        amax = reduce(shards, self._amaxes(shards))
        scales = self.spec.scale_from_amax(amax)
        made: list[Planes] = []
        for i, (shard, scale) in enumerate(zip(shards, apart(scales), strict=True)):
            scale = scale.to(shard.data.device)
            codes = _quantize(shard.data, scale, self.spec.fp8_dtype, True, False, None)[0]
            made.append((Plane(codes, scale, self.spec.format), None))
            if self._histories is not None:
                shard.weight.begin_with(scale, amax[i])
        return made

    def make_offloaded(self, data: Tensor, shard: Shard) -> tuple[Tensor, ...]:
        scale = shard.scale
        assert scale is not None
        if self._histories is not None:
            # A NaN scale says that the data were not finite; codes are cast with the one before.
            slots: Any = shard.weight.module.fp8_scale
            before = slots[0, 0]
            scale = torch.where(scale.isfinite(), scale, before)
        room = self.codec.room(shard.inputs[0], data.shape)
        _multi_quantize([data], scale.view(1), [room])
        return shard.inputs


def apart(scales: Tensor) -> tuple[Tensor, ...]:
    """Copies of scales (n,), at addresses that are multiples of 16 bytes: cuBLAS wants that."""
    room = scales.new_empty(scales.shape[0], 4)
    room[:, 0] = scales
    return room[:, 0].unbind()


def runs(
    shards: Sequence[Shard], places: Sequence[int] | None = None
) -> list[tuple[int, list[Shard]]]:
    """The shards, or those at ascending ``places``, in runs that one launch can take.

    These are neighbours on one device; each run comes with the place of its first shard.
    """
    found: list[tuple[int, list[Shard]]] = []
    for i in range(len(shards)) if places is None else places:
        if found:
            start, run = found[-1]
            if i == start + len(run) and shards[i].data.device == run[0].data.device:
                run.append(shards[i])
                continue
        found.append((i, [shards[i]]))
    return found


def slots_of(indices: list[int], like: Tensor) -> Any:
    """What picks slots on the device: a slice if they are consecutive, else an index tensor."""
    if indices == list(range(indices[0], indices[0] + len(indices))):
        return slice(indices[0], indices[0] + len(indices))
    return index_tensor(tuple(indices), like.device)


# --- a scale a block -----------------------------------------------------------------------------


class BlockMaker(Maker):
    """A scale a block: blocks are those of the whole weight.

    A shard is quantized by itself where its rows align with the blocks. Where FSDP2's cut goes
    through a block, the amaxes of the blocks so cut are reduced over the shards first, which
    gives the bytes that the unsharded weight has; it costs a second read of the shard and a
    part in the forward's one all-reduce.
    """

    def __init__(self, spec: QuantSpec, codec: Codec) -> None:
        super().__init__(spec, codec)
        self.height = codec.height
        self.cut_block = [self.height, 1] if codec.both else list(spec.format.block)
        #: How scales come from amaxes, as where a weight is quantized whole.
        self.options: dict[str, Any] = {"rounding": spec.scale_rounding}
        if not spec.format.microscaled:
            self.options = {
                "power_2_scale": spec.power_2_scale,
                "amax_epsilon": spec.amax_epsilon,
            }

    def check(self, shard: Shard) -> None:
        if shard.placement.dim != 0:
            raise ValueError(
                f"shard_placement_fn puts {shard.weight.fqn} on Shard({shard.placement.dim}), but "
                f"weights in format {self.spec.format.name!r} are gathered by rows: use Shard(0)"
            )

    def groups(self, shard: Shard) -> tuple[Any, ...]:
        return shard.placement.shard_groups

    def measure(self, shards: Sequence[Shard]) -> Measured | None:
        parts: list[Tensor] = []
        sizes: list[int] = []
        for shard in shards:
            cuts = self._cuts(shard)
            sizes.append(0)
            if cuts:
                first, grid = self._amaxes(shard)
                out = grid.new_zeros((len(cuts), grid.shape[1]))
                for i, row in enumerate(cuts):
                    if first <= row < first + grid.shape[0]:
                        out[i] = grid[row - first]
                parts.append(out.view(-1).to(shard.device))
                sizes[-1] = out.numel()
                shard.amaxes = grid.to(shard.device)
        return Measured(torch.cat(parts), sizes) if parts else None

    def _cuts(self, shard: Shard) -> tuple[int, ...]:
        p = shard.placement
        return cut_rows(p.whole[0], p.padded, p.ranks, self.height)

    def _amaxes(self, shard: Shard) -> tuple[int, Tensor]:
        """The amaxes of the blocks that the shard touches, and the first one's row."""
        offset = shard.placement.offset
        grid: Tensor = _block_amax(shard.data, self.cut_block, offset % self.height)
        return offset // self.height, grid

    def make(
        self,
        shards: Sequence[Shard],
        measured: Tensor | None,
        precomputed: Any,
        record: bool,
        reduce: Reduce,
    ) -> Launch | None:
        self._complete(shards, measured)

        def make(places: Sequence[int]) -> None:
            for shard in (shards[place] for place in places):
                if not shard.offloaded:
                    shard.inputs = self._bytes(shard.data, shard.placement, shard.amaxes)

        return Launch(make)

    def _complete(self, shards: Sequence[Shard], measured: Tensor | None) -> None:
        """Put the reduced amaxes of cut blocks among those of the shards."""
        start = 0
        for shard in shards:
            amax = shard.amaxes
            if amax is not None:
                assert measured is not None
                cuts = self._cuts(shard)
                reduced = measured[start : start + len(cuts) * amax.shape[1]]
                start += reduced.numel()
                first = shard.placement.offset // self.height
                for row, values in zip(cuts, reduced.view(len(cuts), -1), strict=True):
                    if first <= row < first + amax.shape[0]:
                        amax[row - first] = values

    def planes(self, shards: Sequence[Shard], reduce: ReduceShards) -> list[Planes]:
        measured = self.measure(shards)
        self._complete(shards, None if measured is None else reduce(shards, measured))
        made = []
        for shard in shards:
            amax = None if shard.amaxes is None else shard.amaxes.to(shard.data.device)
            made.append(self._planes(shard.data, shard.placement, amax))
        return made

    def make_offloaded(self, data: Tensor, shard: Shard) -> tuple[Tensor, ...]:
        return self._bytes(data, shard.placement, shard.amaxes)

    def _bytes(self, data: Tensor, placement: Placement, amax: Tensor | None) -> tuple[Tensor, ...]:
        return self.codec.encode(self._planes(data, placement, amax), placement)

    def _planes(self, data: Tensor, placement: Placement, amax: Tensor | None) -> Planes:
        options = {**self.options, "row_offset": placement.offset % self.height}
        if amax is not None and self.codec.both:
            options["amax_columnwise"] = amax.t().contiguous()
        elif amax is not None:
            options["amax"] = amax
        spec = self.spec
        row, row_scale, col, col_scale = _quantize_blocks(
            data,
            spec.fp8_dtype,
            list(spec.format.block),
            spec.format.scale_dtype,
            True,
            self.codec.both,
            **options,
        )
        down, along = plane_leads(spec.format, placement.offset)
        return (
            Plane(row, row_scale, spec.format, down),
            Plane(col, col_scale, spec.format, along) if self.codec.both else None,
        )


def maker_for(spec: QuantSpec, delayed: Delayed | None) -> Maker:
    """The maker of a model's weights: by whether their blocks are cut out of the tensor."""
    codec = Codec(spec.format, spec.fp8_dtype)
    if spec.format.per_tensor:
        return TensorMaker(spec, codec, None if delayed is None else delayed.histories)
    return BlockMaker(spec, codec)
