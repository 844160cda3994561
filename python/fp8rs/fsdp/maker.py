"""High-precision shards to planes, as the bytes that a `Codec` gathers.

A maker knows, for one block format, what of the shards other ranks must hear before they can be
quantized (maxima, reduced for all weights together), and how they are quantized then. Everything
else about gathering is the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fp8rs.scaling.delayed import Delayed
from fp8rs.scaling.histories import Histories
from fp8rs.scaling.reductions import index_tensor, reduce_packed_
from fp8rs.tensor.planes import Plane
from fp8rs.tensor.spec import Planes, QuantSpec, plane_leads

from .codec import Codec
from .cuts import cut_rows
from .gathered import Pass, Shard
from .placement import Placement

ALIGNMENT = 256
"""Bytes between the starts of shards in the common buffer: as an allocator would align them."""

_block_amax = torch.ops.fp8rs.block_amax.default
_multi_amax = torch.ops.fp8rs.multi_amax.default
_multi_quantize = torch.ops.fp8rs.multi_quantize.default
_multi_quantize_delayed = torch.ops.fp8rs.multi_quantize_delayed.default
_quantize = torch.ops.fp8rs.quantize.default
_quantize_blocks = torch.ops.fp8rs.quantize_blocks.default


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


# --- one scale a tensor --------------------------------------------------------------------------


class TensorMaker(Maker):
    """Per-tensor scales, from the amaxes of all shards or from the histories.

    All shards are measured in one launch and cast in another one.
    """

    def __init__(self, spec: QuantSpec, codec: Codec, histories: Histories | None) -> None:
        super().__init__(spec, codec)
        self._histories = histories

    def size(self, shard: Shard) -> int:
        return 1

    def _amaxes(self, shards: Sequence[Shard]) -> Tensor:
        """The largest values of the whole weights."""
        device = shards[0].device
        amaxes: list[Tensor] = [
            _multi_amax([s.data for s in part]).to(device) for _, part in runs(shards)
        ]
        return self.reduce(shards, amaxes[0] if len(amaxes) == 1 else torch.cat(amaxes))

    def precompute(self, shards: Sequence[Shard]) -> Tensor | None:
        if self._histories is not None:
            return None
        return self.spec.scale_from_amax(self._amaxes(shards))

    def make(self, shards: Sequence[Shard], precomputed: Tensor | None, record: bool) -> Pass:
        if self._histories is not None:
            # Other ranks must hear what a cast has seen of NaN and Inf: all casts are now.
            set_scales(shards, self._make_delayed(self._histories, shards, record))
            return Pass(shards)
        scales = precomputed if precomputed is not None else self.precompute(shards)
        assert scales is not None
        self._allocate(shards)
        set_scales(shards, scales)
        return Pass(shards, partial(self._cast, shards, scales), [scales])

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

    def _make_delayed(self, histories: Histories, shards: Sequence[Shard], record: bool) -> Tensor:
        """Quantize with the histories' scales; the scales to dequantize with."""
        measured = None if self._are_known(shards) else self._amaxes(shards)
        self._allocate(shards)
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
            used = self.reduce(shards, used)
        if record:
            pack.amax[slots, 0, 0] = seen
        return used

    def _are_known(self, shards: Sequence[Shard]) -> bool:
        """Whether the histories have scales of all shards, and all can be cast now."""
        modules: list[Any] = [s.weight.module for s in shards]
        return all(m.fp8_ready[0] for m in modules) and not any(s.offloaded for s in shards)

    def planes(self, shards: Sequence[Shard]) -> list[Planes]:
        amax = self._amaxes(shards)
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


def set_scales(shards: Sequence[Shard], scales: Tensor) -> None:
    """Give shards a scale each, of scales (n,)."""
    for shard, scale in zip(shards, apart(scales), strict=True):
        shard.scale = scale


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

    def size(self, shard: Shard) -> int:
        width = self.cut_block[1]
        return len(self._cuts(shard)) * -(-shard.placement.whole[1] // width)

    def _measure(self, shards: Sequence[Shard]) -> None:
        """Find the amaxes of shards whose blocks are cut, reduced as far as they are."""
        cut = [shard for shard in shards if self._cuts(shard)]
        parts: list[Tensor] = []
        for shard in cut:
            first, grid = self._amaxes(shard)
            cuts = self._cuts(shard)
            out = grid.new_zeros((len(cuts), grid.shape[1]))
            for i, row in enumerate(cuts):
                if first <= row < first + grid.shape[0]:
                    out[i] = grid[row - first]
            parts.append(out.view(-1).to(shard.device))
            shard.amaxes = grid.to(shard.device)
        if parts:
            self._complete(cut, self.reduce(cut, torch.cat(parts)))

    def _cuts(self, shard: Shard) -> tuple[int, ...]:
        p = shard.placement
        return cut_rows(p.whole[0], p.padded, p.ranks, self.height)

    def _amaxes(self, shard: Shard) -> tuple[int, Tensor]:
        """The amaxes of the blocks that the shard touches, and the first one's row."""
        offset = shard.placement.offset
        grid: Tensor = _block_amax(shard.data, self.cut_block, offset % self.height)
        return offset // self.height, grid

    def make(self, shards: Sequence[Shard], precomputed: Tensor | None, record: bool) -> Pass:
        self._measure(shards)

        def cast(places: Sequence[int]) -> None:
            for shard in (shards[place] for place in places):
                if not shard.offloaded:
                    shard.inputs = self._bytes(shard.data, shard.placement, shard.amaxes)

        return Pass(shards, cast)

    def _complete(self, cut: Sequence[Shard], reduced: Tensor) -> None:
        """Put the reduced amaxes of cut blocks among those of the shards."""
        for shard, values in zip(cut, reduced.split(list(map(self.size, cut))), strict=True):
            cuts, amax = self._cuts(shard), shard.amaxes
            assert amax is not None
            first = shard.placement.offset // self.height
            for row, common in zip(cuts, values.view(len(cuts), -1), strict=True):
                if first <= row < first + amax.shape[0]:
                    amax[row - first] = common

    def planes(self, shards: Sequence[Shard]) -> list[Planes]:
        self._measure(shards)
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
