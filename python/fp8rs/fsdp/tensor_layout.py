"""One scale a weight: the bytes are codes alone, and every rank knows the scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fp8rs.scaling.reductions import index_tensor
from fp8rs.tensor.quantized import Plane

from .layouts import Layout, Measured, Planes, Reduce, Shard

if TYPE_CHECKING:
    from fp8rs.scaling.state import ModelState

    from .master_weight import MasterWeight
    from .placement import Placement

ALIGNMENT = 256
"""Bytes between the starts of shards in the common buffer: as an allocator would align them."""

_multi_amax = torch.ops.fp8rs.multi_amax.default
_multi_quantize = torch.ops.fp8rs.multi_quantize.default
_multi_quantize_delayed = torch.ops.fp8rs.multi_quantize_delayed.default
_scale_from_amax = torch.ops.fp8rs.scale_from_amax.default


class TensorLayout(Layout):
    """Per-tensor scales, from the amaxes of all shards or from the histories.

    All shards are measured in one launch and cast in another one, into memory that is kept from
    forward to forward. What is ``known`` of a shard is the weight's scale.
    """

    def __init__(self, state: ModelState) -> None:
        super().__init__(state)
        #: Index -> where the weight's bytes go, a part of the buffer made for its first pass.
        self._places: dict[int, Tensor] = {}

    def measure(self, shards: Sequence[Shard]) -> Measured | None:
        if self.recipe.delayed and self._have_scales(shards):
            return None
        device = shards[0].device
        amaxes: list[Tensor] = [
            _multi_amax([s.data for s in part]).to(device) for _, part in runs(shards)
        ]
        values = amaxes[0] if len(amaxes) == 1 else torch.cat(amaxes)
        return Measured(values, [1] * len(shards))

    def _have_scales(self, shards: Sequence[Shard]) -> bool:
        history = self.state.histories(shards[0].device)
        return all(history.ready[s.slot.index] and not s.offloaded for s in shards)

    @property
    def precomputes(self) -> bool:
        return not self.recipe.delayed

    def precompute(self, measured: Tensor) -> Tensor:
        recipe = self.recipe
        return cast(
            Tensor,
            _scale_from_amax(measured, self.fp8_dtype, recipe.power_2_scale, recipe.amax_epsilon),
        )

    def quantize(
        self,
        shards: Sequence[Shard],
        measured: Tensor | None,
        precomputed: Any,
        record: bool,
        reduce: Reduce,
    ) -> None:
        self._allocate(shards)
        scales: Any
        if self.recipe.delayed:
            scales = self._quantize_delayed(shards, measured, record, reduce)
        else:
            scales = precomputed if measured is None else self.precompute(measured)
            self._cast(shards, scales)
        # cuBLAS takes a scale at an address that is a multiple of 16 bytes.
        apart = scales.new_empty(len(shards), 4)
        apart[:, 0] = scales
        for shard, scale in zip(shards, apart[:, 0].unbind(), strict=True):
            shard.known = scale

    def _allocate(self, shards: Sequence[Shard]) -> None:
        """Give the shards room for their bytes: each weight has one place, in whatever pass.

        The places of all that come without one are allocated together.
        """
        missing = []
        for shard in shards:
            place = self._places.get(shard.slot.index)
            if place is None or (place.device, len(place)) != (shard.device, shard.padded_numel):
                missing.append(shard)
        sizes = [-(-s.padded_numel // ALIGNMENT) * ALIGNMENT for s in missing]
        if missing:
            # Zeros, so that the padding that is gathered is the same in every run.
            buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device=missing[0].device)
            for shard, room in zip(missing, buffer.split(sizes), strict=True):
                self._places[shard.slot.index] = room[: shard.padded_numel]
        for shard in shards:
            shard.inputs = (self._places[shard.slot.index],)

    def _codes(self, shards: Sequence[Shard]) -> list[Tensor]:
        return [self._room(s.inputs, s.data) for s in shards]

    def _room(self, inputs: tuple[Tensor, ...], data: Tensor) -> Tensor:
        """Where the codes of ``data`` go, in its shape."""
        return inputs[0][: data.numel()].view(self.fp8_dtype).view(data.shape)

    def _cast(self, shards: Sequence[Shard], scales: Any) -> None:
        for start, part in runs(shards):
            if not part[0].offloaded:
                values = [s.data for s in part]
                _multi_quantize(values, scales[start : start + len(part)], self._codes(part))

    def _quantize_delayed(
        self, shards: Sequence[Shard], measured: Tensor | None, record: bool, reduce: Reduce
    ) -> Tensor:
        """Quantize with the histories' scales; the scales to dequantize with."""
        history = self.state.histories(shards[0].device)
        indices = [s.slot.index for s in shards]
        slots = slots_of(indices, history.amax)
        history.wait_for_roll()
        scales = history.scale[slots]
        if measured is not None:
            scales = history.first_scales(indices, slots, measured, self.fp8_dtype)
        seen = history.amax[slots] if record else torch.zeros_like(scales)
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
            history.amax[slots] = seen
            history.dirty = True
        return used

    def quantize_offloaded(
        self, master: MasterWeight, inputs: tuple[Tensor, ...], known: Any
    ) -> tuple[Tensor, ...]:
        data, scale = master.high_precision, known
        if self.recipe.delayed:
            # A NaN scale says that the data were not finite; codes are cast with the one before.
            history = self.state.histories(data.device)
            scale = torch.where(scale.isfinite(), scale, history.scale[master._slot.index])
        _multi_quantize([data], scale.view(1), [self._room(inputs, data)])
        return inputs

    def assemble(
        self,
        outputs: Sequence[Tensor],
        inner: Sequence[Tensor],
        placement: Placement,
        known: Any,
        shape: torch.Size,
    ) -> Planes:
        codes = outputs[0].view(self.fp8_dtype)[: shape.numel()].view(shape)
        return Plane(codes, known, self.format), None


def runs(shards: Sequence[Shard]) -> list[tuple[int, Sequence[Shard]]]:
    """The shards in runs that one launch can take, those on one device, with their starts."""
    found = []
    start = 0
    for i in range(1, len(shards) + 1):
        if i == len(shards) or shards[i].data.device != shards[start].data.device:
            found.append((start, shards[start:i]))
            start = i
    return found


def slots_of(indices: list[int], like: Tensor) -> Any:
    """What picks slots on the device: a slice if they are consecutive, else an index tensor."""
    if indices == list(range(indices[0], indices[0] + len(indices))):
        return slice(indices[0], indices[0] + len(indices))
    return index_tensor(tuple(indices), like.device)
