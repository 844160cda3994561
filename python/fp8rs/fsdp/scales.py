"""Keeps the scales of FP8 weights equal on all ranks that share them.

Shards share the scale of a per-tensor format, and the scales of blocks that a shard boundary
splits. If every rank writes its whole shard (initialization, a state dict, `fp8rs.optim`), the
amaxes of all shards are reduced first. Other writes quantize the shard alone: writes through views,
which other ranks may not make, and the steps of torch's optimizers. The ranks then agree on the
scales before the bytes are read, and a rank whose scale changes rounds its codes again.

In-place arithmetic moves scales by powers of two (`QuantSpec.keep_scale`). Rounding codes again is
then exact except for subnormal numbers. If all ranks store the same scale, nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8rs.scaling.reductions import reduce_packed_
from fp8rs.tensor.planes import Plane
from fp8rs.tensor.spec import QuantSpec

from .at_rest import planes_of, put, scale_of
from .param import LocalShard, ParamHandle
from .planes_owner import PlanesOwner
from .quantize import BlockwiseShardQuantizer, ShardQuantizer

_block_amax = torch.ops.fp8rs.block_amax.default
_quantize = torch.ops.fp8rs.quantize.default


class SharedScales:
    """The scales of a model's sharded FP8 weights.

    What reduces runs on all ranks, with the same weights.

    Args:
        quantizer: quantizes what is written, and reduces maxima over the ranks.
        weights: gives the weights that are sharded at the moment, in an order of all ranks.
    """

    def __init__(
        self, quantizer: ShardQuantizer, weights: Callable[[], Sequence[ParamHandle]]
    ) -> None:
        self._quantizer, self._weights = quantizer, weights

    def stepped(self) -> None:
        """An optimizer has stepped: scales are to be those of all ranks."""
        weights = self._resting()
        self.agree(weights)
        self._compare(weights)

    def agree(self, weights: Sequence[PlanesOwner] | None = None) -> None:
        """Have scales agree, where a rank may have written some weights by itself.

        Args:
            weights: which ones; None is all.
        """
        with torch.inference_mode(False), torch.no_grad():
            weights = self._resting() if weights is None else weights
            if any(w.unagreed for w in weights):
                self.agree_on(list(map(self._quantizer.shard, weights)))

    def agree_on(self, shards: Sequence[LocalShard]) -> None:
        """The same of shards: one all-reduce where any is unagreed, and codes are rounded."""
        if not any(_owner(s).unagreed for s in shards):
            return
        if isinstance(self._quantizer, BlockwiseShardQuantizer):
            _agree_on_cut_blocks(self._quantizer, shards)
        else:
            _agree_on_tensors(self._quantizer, shards)
        for shard in shards:
            _owner(shard).unagreed = False

    def _compare(self, weights: Sequence[PlanesOwner]) -> None:
        """Have scales known beforehand be NaN on all ranks where they are so on one."""
        if not any(weight.uncompared for weight in weights):
            return
        for weight in weights:
            weight.uncompared = False
        shards = list(map(self._quantizer.shard, weights))
        scales = [scale_of(s) for s in shards]
        values = torch.stack(scales).to(shards[0].device)
        reduced = self._quantizer.reduce(shards, values)
        torch._foreach_copy_(scales, list(reduced.unbind()))

    def _resting(self) -> list[PlanesOwner]:
        """The FP8 weights among those."""
        return [weight for weight in self._weights() if isinstance(weight, PlanesOwner)]

    # --- what optimizers ask ---------------------------------------------------------------------

    def write_all(self, weights: Sequence[PlanesOwner], values: Sequence[Tensor]) -> None:
        """Quantize values into whole shards, as those of the whole weights: one all-reduce."""
        shards = list(map(self._quantizer.shard, weights, values))
        with torch.inference_mode(False), torch.no_grad():
            for weight, planes in zip(weights, self._quantizer.planes(shards), strict=True):
                put(weight.local, planes)
                weight.wrote()

    def is_cut(self, weight: PlanesOwner) -> bool:
        """Whether some block of the weight has elements on several ranks."""
        return bool(self._quantizer.split_rows(weight.spec))

    def reduce_(self, weights: Sequence[PlanesOwner], amaxes: Tensor) -> None:
        """Make shards' maxima (n,), fp32, those of the whole weights, in place."""
        placed = [weight.spec for weight in weights]
        # A group need not have a backend for where weights are offloaded to.
        values = amaxes.to(placed[0].mesh_device(amaxes.device))
        reduce_packed_(values, ((range(i, i + 1), p.groups) for i, p in enumerate(placed)))
        if values is not amaxes:
            amaxes.copy_(values)


def _owner(shard: LocalShard) -> PlanesOwner:
    assert isinstance(shard.handle, PlanesOwner)
    return shard.handle


# --- the common scale ----------------------------------------------------------------------------

_LARGEST_BITS = 0x7FFFFFFF
"""Scales are reduced with MAX, as int32 bits. This minus the bits gives the least scale."""


def _contribution(scale: Tensor, wanted: Tensor) -> Tensor:
    """Return what a rank adds to the agreement on scales, (3, ...), to be reduced with MAX.

    Args:
        scale: the scales that this rank stores, fp32.
        wanted: the scales that this rank's own values need, fp32 of the same shape. 0 where they
            are zeros.
    """
    reversed_scale = (_LARGEST_BITS - scale.view(torch.int32)).view(torch.float32)
    return torch.stack([wanted, scale, reversed_scale])


def _wanted(spec: QuantSpec, scale: Tensor, amax: Tensor) -> Tensor:
    """Return the scales that a rank's largest values need, starting from the stored ones."""
    return torch.where(amax == 0, 0.0, spec.keep_scale(scale, amax))


def _common(wanted: Tensor, most: Tensor, reversed_least: Tensor) -> Tensor:
    """Return the common scales, from reduced contributions.

    If all ranks store the same scale, it stays. A rank that changed nothing therefore keeps its
    bytes, however small its own values are. Otherwise the common scale is the one that the largest
    value of all ranks needs.
    """
    agreed = most.view(torch.int32) == _LARGEST_BITS - reversed_least.view(torch.int32)
    return torch.where(agreed | (wanted == 0), most, wanted)


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Compare fp32 scales bit for bit, since NaN does not equal itself."""
    return a.view(torch.int32) != b.view(torch.int32)


# --- one scale a tensor --------------------------------------------------------------------------


def _agree_on_tensors(quantizer: ShardQuantizer, shards: Sequence[LocalShard]) -> None:
    own = []
    for shard in shards:
        scale, data = scale_of(shard).view(()), shard.data
        if not data.numel():
            # An empty shard stores a scale, which must not decide.
            lanes = scale.new_zeros(3)
        elif _owner(shard).unagreed:
            row = planes_of(data)[0]  # type: ignore[arg-type]
            assert row is not None
            largest = (row.data.view(torch.uint8) & 0x7F).amax().view(row.data.dtype)
            amax = largest.to(torch.float32) * scale
            lanes = _contribution(scale, _wanted(quantizer.spec, scale, amax))
        else:
            lanes = _contribution(scale, scale)
        own.append(lanes.to(shard.device))
    # (shards, 3) as three runs of one value a shard.
    reduced = quantizer.reduce([*shards] * 3, torch.stack(own, 1).view(-1))
    common = _common(*reduced.view(3, -1).unbind())
    for shard, scale in zip(shards, common.unbind(), strict=True):
        if _owner(shard).unagreed:
            local: Any = shard.data
            scale = scale.to(local.device)
            row = planes_of(local)[0]
            assert row is not None
            values = local.dequantize(torch.float32)
            codes = _quantize(values, scale, row.data.dtype, True, False, None)[0]
            moved = _differs(scale, row.scale.view(()))
            kept = torch.where(moved, codes.view(torch.uint8), row.data.view(torch.uint8))
            put(local, (Plane(kept.view(row.data.dtype), scale, row.format), None))
            # The history follows a scale that stays, or was loaded with it.
            _owner(shard).follow(torch.where(moved, scale, torch.nan))


# --- blocks that are cut -------------------------------------------------------------------------


def _agree_on_cut_blocks(quantizer: BlockwiseShardQuantizer, shards: Sequence[LocalShard]) -> None:
    cut = [shard for shard in shards if quantizer.split_rows(shard.spec)]
    if not cut:
        return
    own = [_block_rows(quantizer, shard) for shard in cut]
    lanes = [lanes[i] for i in range(3) for lanes, _ in own]
    reduced = quantizer.reduce_split(cut * 3, lanes)
    count = len(cut)
    for i, (shard, (_, values)) in enumerate(zip(cut, own, strict=True)):
        if _owner(shard).unagreed and values.shape[0]:
            common = _common(*reduced[i::count])
            for row, scale in zip(quantizer.split_rows(shard.spec), common, strict=True):
                _recode(quantizer, shard, row, scale.to(values.device), values)


def _block_rows(quantizer: BlockwiseShardQuantizer, shard: LocalShard) -> tuple[Tensor, Tensor]:
    """Return a shard's contributions for each block that it touches, and its values.

    Both are in the orientation of the weight: contributions (3, rows of blocks, columns of
    blocks), values (rows, columns).
    """
    row, col = planes_of(shard.data)  # type: ignore[arg-type]
    plane = col if quantizer.layout.both else row
    assert plane is not None
    scales, values = plane.scale.to(torch.float32), plane.dequantize(torch.float32)
    if quantizer.layout.both:
        scales, values = scales.t().contiguous(), values.t()
    amax = _block_amax(values, quantizer.split_block, shard.spec.offset % quantizer.height)
    return _contribution(scales, _wanted(quantizer.spec, scales, amax)), values


def _recode(
    quantizer: BlockwiseShardQuantizer, shard: LocalShard, row: int, scale: Tensor, values: Tensor
) -> None:
    """Give a shard's part of a row of blocks the common scales, fp32 (columns of blocks,).

    Blocks that have their common scale already keep their bytes.
    """
    layout, offset, height = quantizer.layout, shard.spec.offset, quantizer.height
    start, end = max(row * height - offset, 0), min((row + 1) * height - offset, values.shape[0])
    if start >= end:
        return
    place = row - offset // height
    own, other = planes_of(shard.data)  # type: ignore[arg-type]
    plane = other if layout.both else own
    assert plane is not None
    data, scales = plane.data.view(torch.uint8), plane.scale
    if layout.both:
        data, scales = data.t(), scales.t()
    moved = _differs(scale, scales[place].to(torch.float32))

    def wide(x: Tensor) -> Tensor:
        return x.repeat_interleave(quantizer.split_block[1])[: values.shape[1]]

    codes = (values[start:end] * (1.0 / wide(scale))).to(layout.fp8_dtype).view(torch.uint8)
    data[start:end] = torch.where(wide(moved), codes, data[start:end])
    scales[place] = scale.to(scales.dtype)
