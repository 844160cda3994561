"""Scales that the shards of FP8 weights have in common: one a tensor, those of blocks that are cut.

They are the same on all ranks. Writes that every rank makes together (an initialisation, a state
dict, fp8rs.optim) find the maxima of all shards first. Writes through views, which a tensor cannot
know all ranks to make (a checkpoint that is read in place), and those of torch's optimizers
quantize the shard by itself, and scales are agreed on afterwards, before anybody reads the bytes:
codes of smaller scales are rounded to the largest. In-place arithmetic moves scales by powers of
two (`QuantSpec.keep_scale`), also where all ranks make it together: then that rounding is exact but
for subnormal numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8rs.scaling.reductions import reduce_packed_
from fp8rs.tensor.planes import Plane

from .at_rest import planes_of, put, scale_of
from .block_maker import BlockMaker
from .gathered import Shard, on_mesh
from .maker import Maker
from .planes_owner import PlanesOwner
from .weight import Weight

_block_amax = torch.ops.fp8rs.block_amax.default
_quantize = torch.ops.fp8rs.quantize.default


class SharedScales:
    """The scales of a model's sharded FP8 weights.

    What reduces runs on all ranks, with the same weights.

    Args:
        maker: quantizes what is written, and reduces maxima over the ranks.
        weights: gives the weights that are sharded at the moment, in an order of all ranks.
    """

    def __init__(self, maker: Maker, weights: Callable[[], Sequence[Weight]]) -> None:
        self._maker, self._weights = maker, weights

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
                self.agree_on(list(map(self._maker.shard, weights)))

    def agree_on(self, shards: Sequence[Shard]) -> None:
        """The same of shards: one all-reduce where any is unagreed, and codes are rounded."""
        if not any(_owner(s).unagreed for s in shards):
            return
        if isinstance(self._maker, BlockMaker):
            _agree_on_cut_blocks(self._maker, shards)
        else:
            _agree_on_tensors(self._maker, shards)
        for shard in shards:
            _owner(shard).unagreed = False

    def _compare(self, weights: Sequence[PlanesOwner]) -> None:
        """Have scales known beforehand be NaN on all ranks where they are so on one."""
        if not any(weight.uncompared for weight in weights):
            return
        for weight in weights:
            weight.uncompared = False
        shards = list(map(self._maker.shard, weights))
        scales = [scale_of(s) for s in shards]
        values = torch.stack(scales).to(shards[0].device)
        reduced = self._maker.reduce(shards, values)
        torch._foreach_copy_(scales, list(reduced.unbind()))

    def _resting(self) -> list[PlanesOwner]:
        """The FP8 weights among those."""
        return [weight for weight in self._weights() if isinstance(weight, PlanesOwner)]

    # --- what optimizers ask ---------------------------------------------------------------------

    def write_all(self, weights: Sequence[PlanesOwner], values: Sequence[Tensor]) -> None:
        """Quantize values into whole shards, as those of the whole weights: one all-reduce."""
        shards = list(map(self._maker.shard, weights, values))
        with torch.inference_mode(False), torch.no_grad():
            for weight, planes in zip(weights, self._maker.planes(shards), strict=True):
                put(weight.local, planes)
                weight.wrote()

    def is_cut(self, weight: PlanesOwner) -> bool:
        """Whether some block of the weight has elements on several ranks."""
        return bool(self._maker.cuts(weight.placement))

    def reduce_(self, weights: Sequence[PlanesOwner], amaxes: Tensor) -> None:
        """Make shards' maxima (n,), fp32, those of the whole weights, in place."""
        placed = [weight.placement for weight in weights]
        # A group need not have a backend for where weights are offloaded to.
        values = amaxes.to(on_mesh(amaxes.device, placed[0]))
        reduce_packed_(values, ((range(i, i + 1), p.groups) for i, p in enumerate(placed)))
        if values is not amaxes:
            amaxes.copy_(values)


def _owner(shard: Shard) -> PlanesOwner:
    assert isinstance(shard.weight, PlanesOwner)
    return shard.weight


# --- one scale a tensor --------------------------------------------------------------------------


def _agree_on_tensors(maker: Maker, shards: Sequence[Shard]) -> None:
    own = []
    for shard in shards:
        scale, data = scale_of(shard), shard.data
        if not data.numel():
            scale = torch.zeros_like(scale)
        elif _owner(shard).unagreed:
            # Of zeros the scale is 1, which says nothing of theirs.
            codes = planes_of(data)[0].data.view(torch.uint8)  # type: ignore[arg-type,union-attr]
            scale = torch.where(((codes & 0x7F) != 0).any(), scale, 0.0)
        own.append(scale.to(shard.device))
    common = maker.reduce(shards, torch.stack(own))
    common = torch.where(common == 0, 1.0, common)
    for shard, scale in zip(shards, common.unbind(), strict=True):
        if _owner(shard).unagreed:
            local: Any = shard.data
            scale = scale.to(local.device)
            row = planes_of(local)[0]
            assert row is not None
            values = local.dequantize(torch.float32)
            codes = _quantize(values, scale, row.data.dtype, True, False, None)[0]
            put(local, (Plane(codes, scale, row.format), None))
            _owner(shard).follow(scale)


# --- blocks that are cut -------------------------------------------------------------------------


def _agree_on_cut_blocks(maker: BlockMaker, shards: Sequence[Shard]) -> None:
    cut = [shard for shard in shards if maker.cuts(shard.placement)]
    if not cut:
        return
    own = [_block_rows(maker, shard) for shard in cut]
    common = maker.reduce_cut(cut, [known for known, _ in own])
    for shard, (_, values), scales in zip(cut, own, common, strict=True):
        if _owner(shard).unagreed and values.shape[0]:
            for row, scale in zip(maker.cuts(shard.placement), scales, strict=True):
                _recode(maker, shard, row, scale.to(values.device), values)


def _block_rows(maker: BlockMaker, shard: Shard) -> tuple[Tensor, Tensor]:
    """The scales of the rows of blocks that a shard touches, fp32 (0 of zeros), and its values."""
    row, col = planes_of(shard.data)  # type: ignore[arg-type]
    plane = col if maker.codec.both else row
    assert plane is not None
    scales, values = plane.scale.to(torch.float32), plane.dequantize(torch.float32)
    if maker.codec.both:
        scales, values = scales.t(), values.t()
    amax = _block_amax(values, maker.cut_block, shard.placement.offset % maker.height)
    return torch.where(amax == 0, 0.0, scales), values


def _recode(maker: BlockMaker, shard: Shard, row: int, scale: Tensor, values: Tensor) -> None:
    """Round what a shard has of a row of blocks to common scales, fp32 (blocks,); 0: none."""
    codec, offset, height = maker.codec, shard.placement.offset, maker.height
    start, end = max(row * height - offset, 0), min((row + 1) * height - offset, values.shape[0])
    if start >= end:
        return
    least = 2.0**-127 if codec.format.microscaled else 1.0
    scale = torch.where(scale == 0, least, scale)
    wide = scale.repeat_interleave(maker.cut_block[1])[: values.shape[1]]
    codes = (values[start:end] * (1.0 / wide)).to(codec.fp8_dtype).view(torch.uint8)
    place = row - offset // height
    own, other = planes_of(shard.data)  # type: ignore[arg-type]
    plane = other if codec.both else own
    assert plane is not None
    data = plane.data.view(torch.uint8)
    as_stored = scale.to(plane.scale.dtype)
    if codec.both:
        data[:, start:end] = codes.t()
        plane.scale[:, place] = as_stored
    else:
        data[start:end] = codes
        plane.scale[place] = as_stored
