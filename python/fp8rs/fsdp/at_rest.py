"""FP8 weights: shards whose codes and scales are what is kept.

Their bytes are gathered as they are. A scale that several shards share (one a tensor; of a block
that the sharding cuts) is the same on all ranks: writes that every rank makes together (an
initialisation, a state dict, fp8rs.optim) find the maxima of all shards first. Writes that a tensor
cannot know all ranks to make (torch's optimizers, a checkpoint that is read in place) quantize the
shard by itself, and scales are agreed on afterwards, before anybody reads the bytes: codes of
smaller scales are rounded to the largest. In-place arithmetic moves scales by powers of two
(`QuantSpec.keep_scale`), also where all ranks make it together: then that rounding is exact but for
subnormal numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8rs.tensor.planes import Plane
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.spec import Planes
from fp8rs.tensor.windows import Rectangle, Span

from .codec import Codec
from .cuts import cut_rows
from .gathered import Shard
from .maker import set_scales
from .placement import Placement

_block_amax = torch.ops.fp8rs.block_amax.default
_quantize = torch.ops.fp8rs.quantize.default

#: Reduces maxima over the ranks of each shard: `Maker.reduce`.
Reduce = Callable[[Sequence[Shard], Tensor], Tensor]


def is_at_rest(shard: Shard) -> bool:
    """Whether the shard is quantized already."""
    return isinstance(shard.data, QuantizedTensor)


# --- the bytes that are gathered -----------------------------------------------------------------


def lay_out(codec: Codec, shards: Sequence[Shard]) -> None:
    """Set the shards' tensors to gather, and the scales to read them with."""
    if codec.format.per_tensor:
        # Copies: what is gathered keeps its scale when the shard is written.
        set_scales(shards, torch.stack([scale_of(s).to(s.device) for s in shards]))
    for shard in shards:
        if not shard.offloaded:
            shard.inputs = inputs(codec, shard.data, shard.placement)


def inputs(codec: Codec, local: Any, placement: Placement) -> tuple[Tensor, ...]:
    """The tensors to gather of a shard."""
    row, col = planes_of(local)
    store = local._store
    if local.numel() and local.shape[0] < placement.padded and placement.dim == 0:
        # FSDP2 keeps short shards padded, with codes of 0: what is gathered lies there already.
        row, col = (
            Plane(whole.data, plane.scale, plane.format, plane.lead)
            if plane is not None and whole.matrix.shape[dim] == placement.padded
            else plane
            for plane, whole, dim in ((row, store.rowwise, 0), (col, store.columnwise, 1))
        )
    return codec.encode((row, col), placement)


def scale_of(shard: Shard) -> Tensor:
    """The scale of a format with one a tensor."""
    data: Any = shard.data
    scale: Tensor = data._store.any_plane.scale
    return scale


def planes_of(local: QuantizedTensor) -> Planes:
    """The planes of a shard; those of an empty one too."""
    if local.numel():
        return local.planes
    store = local._store
    cols = local.shape[1]

    def empty(plane: Plane | None, size: tuple[int, int]) -> Plane | None:
        if plane is None:
            return None
        codes = plane.data.new_empty(size)
        if plane.format.per_tensor:
            return Plane(codes, plane.scale, plane.format)
        return Plane(codes, plane.scale.new_empty(plane.format.scale_shape(*size)), plane.format)

    return empty(store.rowwise, (0, cols)), empty(store.columnwise, (cols, 0))


# --- writes --------------------------------------------------------------------------------------


def put(local: QuantizedTensor, planes: Planes) -> None:
    """Write planes of a whole shard, which may be empty."""
    store = local._store
    if local.numel():
        store.put(planes, Rectangle(Span(0, local.shape[0]), Span(0, local.shape[1])))
    elif store.any_plane.format.per_tensor:
        row, col = planes
        plane = row if row is not None else col
        assert plane is not None
        store.any_plane.scale.copy_(plane.scale)


def agree(codec: Codec, shards: Sequence[Shard], reduce: Reduce) -> None:
    """Make shared scales equal on all ranks, by one all-reduce, and round codes to them."""
    if codec.format.per_tensor:
        _agree_on_tensors(shards, reduce)
    else:
        _agree_on_cut_blocks(codec, shards, reduce)
    for shard in shards:
        shard.weight.unagreed = False


def _agree_on_tensors(shards: Sequence[Shard], reduce: Reduce) -> None:
    own = []
    for shard in shards:
        scale, data = scale_of(shard), shard.data
        if not data.numel():
            scale = torch.zeros_like(scale)
        elif shard.weight.unagreed:
            # Of zeros the scale is 1, which says nothing of theirs.
            codes = planes_of(data)[0].data.view(torch.uint8)  # type: ignore[arg-type,union-attr]
            scale = torch.where(((codes & 0x7F) != 0).any(), scale, 0.0)
        own.append(scale.to(shard.device))
    common = reduce(shards, torch.stack(own))
    common = torch.where(common == 0, 1.0, common)
    for shard, scale in zip(shards, common.unbind(), strict=True):
        if shard.weight.unagreed:
            local: Any = shard.data
            scale = scale.to(local.device)
            row = planes_of(local)[0]
            assert row is not None
            values = local.dequantize(torch.float32)
            codes = _quantize(values, scale, row.data.dtype, True, False, None)[0]
            put(local, (Plane(codes, scale, row.format), None))
            shard.weight.follow(scale)


def _agree_on_cut_blocks(codec: Codec, shards: Sequence[Shard], reduce: Reduce) -> None:
    height, both = codec.height, codec.both
    found: list[tuple[Shard, tuple[int, ...], Tensor, Tensor]] = []
    parts: list[Tensor] = []
    for shard in shards:
        p = shard.placement
        cuts = cut_rows(p.whole[0], p.padded, p.ranks, height)
        if not cuts:
            continue
        local: Any = shard.data
        scales, values = _block_rows(codec, local)
        block = [height, 1] if both else list(codec.format.block)
        amax = _block_amax(values, block, p.offset % height)
        known = torch.where(amax == 0, 0.0, scales)
        out = known.new_zeros((len(cuts), known.shape[1]))
        first = p.offset // height
        for i, row in enumerate(cuts):
            if first <= row < first + known.shape[0]:
                out[i] = known[row - first]
        parts.append(out.view(-1).to(shard.device))
        found.append((shard, cuts, scales, values))
    if not parts:
        return
    reduced = reduce(shards, torch.cat(parts))
    start = 0
    for shard, cuts, scales, values in found:
        count = len(cuts) * scales.shape[1]
        common = reduced[start : start + count].view(len(cuts), -1).to(scales.device)
        start += count
        if shard.weight.unagreed and values.shape[0]:
            for row, scale in zip(cuts, common, strict=True):
                _recode(codec, shard, row, scale, values)


def _block_rows(codec: Codec, local: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """The scales of the rows of blocks that a shard touches, fp32, and its values."""
    row, col = planes_of(local)
    plane = col if codec.both else row
    assert plane is not None
    scales, values = plane.scale.to(torch.float32), plane.dequantize(torch.float32)
    return (scales.t(), values.t()) if codec.both else (scales, values)


def _recode(codec: Codec, shard: Shard, row: int, scale: Tensor, values: Tensor) -> None:
    """Round what a shard has of a row of blocks to common scales, fp32 (blocks,); 0: none."""
    offset, height = shard.placement.offset, codec.height
    start, end = max(row * height - offset, 0), min((row + 1) * height - offset, values.shape[0])
    if start >= end:
        return
    least = 2.0**-127 if codec.format.microscaled else 1.0
    scale = torch.where(scale == 0, least, scale)
    width = 1 if codec.both else codec.format.block[1]
    wide = scale.repeat_interleave(width)[: values.shape[1]]
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
