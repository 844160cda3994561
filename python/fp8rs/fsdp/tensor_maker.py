"""Shards to planes with one scale a tensor: from the amaxes of all shards, or from histories."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8rs.scaling.histories import Histories
from fp8rs.scaling.reductions import index_tensor
from fp8rs.tensor.planes import Plane
from fp8rs.tensor.spec import Planes, QuantSpec

from .gathered import Pass, Shard, apart, set_scales
from .maker import Maker
from .planes_owner import PlanesOwner

ALIGNMENT = 256
"""Bytes between the starts of shards in the common buffer: as an allocator would align them."""

_multi_amax = torch.ops.fp8rs.multi_amax.default
_multi_quantize = torch.ops.fp8rs.multi_quantize.default
_multi_quantize_delayed = torch.ops.fp8rs.multi_quantize_delayed.default
_quantize = torch.ops.fp8rs.quantize.default


class TensorMaker(Maker):
    """Per-tensor scales, from the amaxes of all shards or from the histories.

    All shards are measured in one launch and cast in another one.
    """

    def __init__(self, spec: QuantSpec, histories: Histories | None) -> None:
        super().__init__(spec)
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
        return all(s.weight.has_scale and not s.offloaded for s in shards)

    def planes(self, shards: Sequence[Shard]) -> list[Planes]:
        amax = self._amaxes(shards)
        scales = self.spec.scale_from_amax(amax)
        made: list[Planes] = []
        for i, (shard, scale) in enumerate(zip(shards, apart(scales), strict=True)):
            scale = scale.to(shard.data.device)
            codes = _quantize(shard.data, scale, self.spec.fp8_dtype, True, False, None)[0]
            made.append((Plane(codes, scale, self.spec.format), None))
            if self._histories is not None:
                assert isinstance(shard.weight, PlanesOwner)
                shard.weight.begin_with(scale, amax[i])
        return made

    def make_offloaded(self, data: Tensor, shard: Shard) -> tuple[Tensor, ...]:
        scale = shard.scale
        assert scale is not None
        if self._histories is not None:
            # A NaN scale says that the data were not finite; codes are cast with the one before.
            slots = shard.weight.slots
            assert slots is not None
            scale = torch.where(scale.isfinite(), scale, slots[0])
        room = self.codec.room(shard.inputs[0], data.shape)
        _multi_quantize([data], scale.view(1), [room])
        return shard.inputs


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
