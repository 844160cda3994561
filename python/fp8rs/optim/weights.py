"""What the optimizer asks of FP8 weights: how they are cut, what their scales are agreed with.

Everything that depends on sharding is here; the rest of the package sees local tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fp8rs._torch import increment_version, is_distributed, own_part
from fp8rs.tensor import stochastic
from fp8rs.tensor.formats import FP8_MAX, matrix_shape
from fp8rs.tensor.planes import Plane, as_bytes
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.spec import reduce_amax
from fp8rs.tensor.store import Delayed, Owner


class Shards(Protocol):
    """The sharded weights of a model. What reduces runs on all ranks, with the same weights."""

    def is_cut(self, weight: Any) -> bool:
        """Whether some block of the weight has elements on several ranks."""

    def reduce_(self, weights: Sequence[Any], amaxes: Tensor) -> None:
        """Make shards' maxima (n,), fp32, those of the whole weights: one all-reduce a mesh."""

    def write_all(self, weights: Sequence[Any], values: Sequence[Tensor]) -> None:
        """Quantize values into whole shards, as those of the whole weights."""

    def agree(self) -> None:
        """Have the scales of all weights agree."""


class Weight(Owner, Protocol):
    """What an optimizer asks the owner of a weight's planes beside.

    Attributes:
        writes: how many times the planes were written.
        unagreed: scales that shards share may differ between ranks.
    """

    writes: int
    unagreed: bool

    def reshard(self) -> None:
        """Have modules hold their shards, where a sharded weight is there whole."""

    @property
    def slots(self) -> Delayed | None:
        """Of delayed scaling: the next scale (0: none yet), and where amaxes are noted."""

    @property
    def number(self) -> int:
        """The number, among those of the whole weight, of this rank's first element."""

    @property
    def shards(self) -> Shards | None:
        """What knows of the other ranks' shards; None of a weight that is whole."""


def quantized(param: Tensor) -> QuantizedTensor | None:
    """This rank's part of an FP8 weight; None of any other."""
    part = own_part(param)
    return part if isinstance(part, QuantizedTensor) else None


def owner(param: Tensor) -> Weight | None:
    """Whom a weight belongs to; None of a quantized tensor that is no layer's."""
    weight = quantized(param)
    return None if weight is None else cast("Weight | None", weight._store.owner)


def shards(param: Tensor) -> Shards | None:
    """What knows of the other ranks' shards; None of a weight that is whole."""
    of = owner(param)
    return None if of is None else of.shards


def prepare(params: Sequence[Tensor]) -> None:
    """Have modules hold the shards that a step is to write, with scales that all ranks agree on."""
    unagreed: dict[int, Shards] = {}
    for param in params:
        of = owner(param) if is_distributed(param) else None
        if of is not None:
            of.reshard()
            if of.unagreed and (sharded := of.shards) is not None:
                unagreed[id(sharded)] = sharded
    for sharded in unagreed.values():
        sharded.agree()


def is_one_plane(weight: QuantizedTensor) -> bool:
    """Whether a rowwise plane is all that there is of a weight, and the weight is all of that.

    Of a view, what is written with a scale of its own would leave other elements with that scale.
    """
    whole = weight.region.is_whole or not weight.numel()  # an empty shard is a view of room
    return whole and weight._store.has == (True, False)


def plane(weight: QuantizedTensor) -> Plane:
    """The rowwise plane of a local part, which may be empty."""
    row = weight.rowwise
    if row is None or not weight.numel():
        return weight._store.any_plane.empty(*matrix_shape(weight.shape))
    return row


def stored(param: Tensor) -> list[Tensor]:
    """The memory of a weight's local part: bytes of codes, and scales."""
    weight = quantized(param)
    assert weight is not None
    planes = [plane for plane in weight.planes if plane is not None]
    return [as_bytes(t) for plane in planes for t in (plane.data, plane.scale)]


def kept_init(param: Tensor) -> Tensor | None:
    """The values that the local part was initialized with, on any device; None if not kept."""
    of = owner(param)
    return None if of is None else of.init_value


def drop_init(param: Tensor) -> None:
    """Forget them."""
    of = owner(param)
    if of is not None:
        of.forget_init()


def number(param: Tensor) -> int:
    """The number, among those of the whole weight, of the local part's first element."""
    of = owner(param) if is_distributed(param) else None
    return 0 if of is None else of.number


def is_cut(param: Tensor) -> bool:
    """Whether a block of the weight's format has elements on several ranks: on all, or on none."""
    of = shards(param)
    return of is not None and of.is_cut(owner(param))


def known(param: Tensor) -> bool:
    """Whether a weight is written with a scale that is known beforehand."""
    weight = quantized(param)
    if weight is None or not weight.format.per_tensor:
        return False
    of = owner(param)
    return weight._store.delayed is not None or (of is not None and of.slots is not None)


def known_scales(params: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """For each such weight the scale to write with, where its amax goes, and on from there.

    The last is None but for weights on another device than what delayed scaling keeps (offloaded
    ones): :func:`pass_on` takes the amax there.
    """
    pairs: list[Any] = []
    codes = []
    for param in params:
        weight = quantized(param)
        assert weight is not None
        of = owner(param)
        slots = None if of is None else of.slots
        pairs.append(weight._store.delayed or slots)
        codes.append(plane(weight).scale.view(()))
    if not pairs:
        return []
    first = torch.stack(codes)  # where no step has passed yet: the scale that the codes have
    scales = torch.stack([scale.view(()) for scale, _ in pairs]).to(first.device)
    scales = torch.where(scales > 0, scales, first)
    if pairs[0][1].device == first.device:
        return [
            (scale, slot, None) for scale, (_, slot) in zip(scales.unbind(), pairs, strict=True)
        ]
    here = torch.zeros_like(scales).unbind()
    return [
        (scale, amax, slot)
        for scale, amax, (_, slot) in zip(scales.unbind(), here, pairs, strict=True)
    ]


def pass_on(slots: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> None:
    """Raise what delayed scaling keeps elsewhere to the amaxes that a step has found."""
    for _, amax, slot in slots:
        if slot is not None:
            slot.copy_(slot.maximum(amax.to(slot.device)))


def by_shards(params: Sequence[Tensor]) -> list[tuple[Shards | None, list[int]]]:
    """The places of parameters in their list, by what knows of their shards."""
    places: dict[int, tuple[Shards | None, list[int]]] = {}
    for i, param in enumerate(params):
        of = shards(param)
        places.setdefault(id(of), (of, []))[1].append(i)
    return list(places.values())


def reduce_amaxes_(params: Sequence[Tensor], amaxes: Tensor) -> None:
    """Make the amax of each local part that of the whole weight, in place: one all-reduce a mesh.

    Args:
        params: weights with one scale; the same on all ranks.
        amaxes: fp32, one element for each.
    """
    for of, members in by_shards(params):
        if of is None:
            reduce_over_groups_([params[i] for i in members], amaxes, members)
            continue
        owners = [owner(params[i]) for i in members]
        if len(members) == len(params):
            of.reduce_(owners, amaxes)
        else:
            part = torch.stack([amaxes[i] for i in members])
            of.reduce_(owners, part)
            torch._foreach_copy_([amaxes[i] for i in members], list(part.unbind()))


def reduce_over_groups_(params: Sequence[Tensor], amaxes: Tensor, places: Sequence[int]) -> None:
    """The same for whole tensors, whose specification may name a group."""
    groups: dict[str, list[int]] = {}
    for param, place in zip(params, places, strict=True):
        weight = quantized(param)
        if weight is not None and weight.spec.group is not None:
            groups.setdefault(weight.spec.group, []).append(place)
    for name, members in groups.items():
        part = reduce_amax(torch.stack([amaxes[i] for i in members]), name)
        torch._foreach_copy_([amaxes[i] for i in members], list(part.unbind()))


def write_all_(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Quantize ``values`` (of the local parts, fp32) into weights of any format."""
    for of, members in by_shards(params):
        if of is not None:
            of.write_all([owner(params[i]) for i in members], [values[i] for i in members])
            continue
        for i in members:
            weight = quantized(params[i])
            assert weight is not None
            weight.quantize_(values[i].view(weight.shape))


def round_(param: Tensor, values: Tensor, seed: int, stream: int, step: Tensor) -> None:
    """Write a weight's codes anew, rounded stochastically to the scales that it has.

    Args:
        param: a weight that has just been written.
        values: of the local part, fp32: what was written.
        seed, stream, step: which random numbers; they go by the place in the whole weight.
    """
    weight = quantized(param)
    assert weight is not None
    if not weight.numel():
        return
    values = values.view(matrix_shape(weight.shape))
    numbers = stochastic.units(values, seed, stream, step, number(param))
    row, col = weight.planes
    if row is not None:
        row.matrix.copy_(stochastic.encode(row, values, numbers))
    if col is not None:
        col.matrix.copy_(stochastic.encode(col, values.t(), numbers.t()))


def write_count(param: Tensor) -> tuple[int, ...]:
    """Return numbers of which each write to an FP8 weight changes one, no matter which code writes.

    A sharded weight has a handle that counts. FSDP2 may replace its tensors, so their versions do
    not count. The handle of a whole weight does not see writes to its planes. Their version counter
    does.
    """
    weight, of = quantized(param), owner(param)
    assert weight is not None
    count = 0 if of is None else of.writes
    if is_distributed(param):
        return (count,)
    return count, param._version, weight._store.any_plane.data._version


class Content:
    """What a plain parameter contains at present.

    Args:
        param: the parameter.
    """

    def __init__(self, param: Tensor) -> None:
        self._version, self._bits = param._version, bits_of(plain_part(param)).clone()

    def is_in(self, param: Tensor) -> Tensor:
        """Return whether the parameter was not written since, as a bool on its device.

        The version counter misses some writes. The bits miss writes of equal values.
        """
        same = (bits_of(plain_part(param)) == self._bits).all()
        return same & (param._version == self._version)


def is_rounded(param: Tensor, master: Tensor) -> bool:
    """Return whether a plain parameter is its rounded master; True for FP8 weights.

    This reads a value from the device.
    """
    if quantized(param) is not None:
        return True
    part = plain_part(param)
    return torch.equal(master.to(part.dtype), part)


def plain_part(param: Tensor) -> Tensor:
    """Return the local part of a parameter that is not an FP8 weight, as a plain tensor."""
    part: Any = own_part(param)
    plain: Tensor = getattr(part, "high_precision", part)  # that of a `MasterWeight`
    return plain


def bits_of(x: Tensor) -> Tensor:
    """Return a floating-point tensor as integers, in which equal NaNs are equal."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def read_plain(param: Tensor, master: Tensor, outdated: Content | None) -> None:
    """Read what other code has written to a plain parameter into its master.

    An element that equals its rounded master was not written: it keeps its master.

    Args:
        param: the parameter.
        master: of the local part.
        outdated: the content of the parameter when the master was loaded, if it differed. If the
            parameter was not written since, it does not change the master.
    """
    part = plain_part(param)
    kept = master.to(part.dtype) == part
    if outdated is not None:
        kept |= outdated.is_in(param)
    values = part.float() if part.dtype == torch.float64 else part  # others are promoted
    torch.where(kept, master, values, out=master)


def follow(
    param: Tensor, master: Tensor, stochastically: bool, written: Tensor | None = None
) -> None:
    """Have a master follow a parameter that was written by others than its optimizer.

    What is no longer the rounded master is what was written, and the master becomes it; the rest
    of the master is kept, with all that it is more exact.

    Args:
        param: what was written.
        master: of the local part, fp32.
        stochastically: how the optimizer rounds.
        written: the scale that the optimizer has last written codes with, where it did not find it
            in the values. As long as the weight has it, its largest code is that of all larger
            values too; of another's write it is that of what rounds to it alone.
    """
    weight = quantized(param)
    assert weight is not None
    if not weight.numel():
        return
    row, col = weight.planes
    values = master.view(matrix_shape(weight.shape))
    if written is not None and known(param):
        now = plane(weight).scale
        # Or nearly so: a full state dict has rounded the values to the model's dtype.
        its_own = torch.isclose(now, written, rtol=2.0**-8, atol=0.0)
        most = now * (1.01 * FP8_MAX[weight.fp8_dtype])  # which rounds to the largest code
        values = torch.where(its_own, values.clamp(-most, most), values)
    saturates = weight.format.microscaled
    if row is not None:
        same = stochastic.is_of(row, values, stochastically, saturates)
    else:
        assert col is not None
        same = stochastic.is_of(col, values.t(), stochastically, saturates).t()
    master.copy_(torch.where(same.view(master.shape), master, weight.dequantize(torch.float32)))


def keep_scales(kept: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the scale that each weight (which has one) has now, (weight, to)."""
    if kept:
        now = [
            plane(weight).scale.view(()) for p, _ in kept if (weight := quantized(p)) is not None
        ]
        torch._foreach_copy_([to for _, to in kept], now)


def wrote(params: Sequence[Tensor]) -> None:
    """Codes and scales of these weights were written past their operators."""
    increment_version(params)
    for param in params:
        of = owner(param)
        if of is not None:
            of.wrote()
