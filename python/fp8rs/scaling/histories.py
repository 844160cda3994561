"""The buffers of delayed scaling. Those of all layers on a device are updated together.

Each layer has these buffers. Their rows or columns are weight, input and gradient, in this order:

- ``fp8_scale`` (3, 4) fp32: column 0 is the scale, or 0 if there is none yet.
- ``fp8_amax`` (4, 4) fp32: column 0 is the maximum of the finite amaxes since the last roll. The
  last row receives amaxes that are not recorded.
- ``fp8_amax_history`` (amax_history_len, 3) fp32: the maxima of earlier steps, newest first.

Scales and amaxes are 16 bytes apart, because GEMMs require aligned scales, and because compilers
copy unaligned inputs, which would lose writes. The buffers of all layers on one device have the
memory of one pack, so that one operation rolls them. A pack is rebuilt after its buffers were
moved. The buffers stay the same objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from fp8rs._torch import (
    is_alias,
    is_distributed,
    is_traced,
    local_tensor,
    outside_selective_checkpoints,
)
from fp8rs.quantize.formats import FP8_MAX
from fp8rs.quantize.recipes import DelayedScaling
from fp8rs.quantize.spec import QuantSpec
from fp8rs.scaling.reductions import index_tensor

#: The names of a layer's buffers, each with the dimension along which a `Pack` stacks layers.
BUFFERS = {"fp8_scale": 0, "fp8_amax": 0, "fp8_amax_history": 1}
NOTHING_READY = (False, False, False)

#: The slots of one layer, each fp32 of one element: the scales of weight, input and gradient (0
#: before the first one), their amaxes, and an amax that is never read.
Slots = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]

_scale_from_amax = torch.ops.fp8rs.scale_from_amax.default


def new_buffers(recipe: DelayedScaling, device: torch.device) -> dict[str, Tensor]:
    """Create the buffers of one layer, by name, without a history."""
    shapes = (3, 4), (4, 4), (recipe.amax_history_len, 3)
    with torch.inference_mode(False):
        return {
            name: torch.zeros(shape, dtype=torch.float32, device=device)
            for name, shape in zip(BUFFERS, shapes, strict=True)
        }


def keep_local(buffers: dict[str, Any]) -> None:
    """Make the buffers local float32 tensors again.

    parallelize_module turns buffers into DTensors, and FullyShardedDataParallel casts them. Both
    keep their buffers, which still share the memory.
    """
    for name in BUFFERS:
        if is_distributed(buffers[name]):
            buffers[name] = local_tensor(buffers[name])
        if buffers[name].dtype != torch.float32:
            buffers[name].data = buffers[name].float()


class SlotCache:
    """Caches a layer's slots, because creating their views takes longer than using them.

    A copy starts empty, because it has other buffers.
    """

    def __init__(self) -> None:
        self._known: tuple[Tensor, Tensor, Slots] | None = None

    def get(self, buffers: dict[str, Any]) -> Slots:
        """Return the slots in these buffers, which become local float32 tensors."""
        scale, amax = buffers["fp8_scale"], buffers["fp8_amax"]
        known = self._known
        if (
            known is None
            or known[0] is not scale
            or known[1] is not amax
            or not is_alias(known[2][1][0], amax)  # `fully_shard` moves buffers in place
        ):
            return self._create(buffers)
        return known[2]

    # A recomputation finds the slots of its forward.
    @outside_selective_checkpoints
    def _create(self, buffers: dict[str, Any]) -> Slots:
        """Create the slots in these buffers."""
        keep_local(buffers)
        scale, amax = buffers["fp8_scale"], buffers["fp8_amax"]
        new_slots = slots(scale, amax)
        self._known = scale, amax, new_slots
        return new_slots

    def __reduce__(self) -> Any:
        return SlotCache, ()


def slots(scale: Tensor, amax: Tensor) -> Slots:
    """Return the slots in a layer's buffers."""
    return scale[:, 0].unbind(), amax[:, 0].unbind()


@dataclass(eq=False, slots=True)
class Pack:
    """The buffers of all layers on one device, in the order of ``indices``."""

    indices: list[int]
    buffers: list[Tensor]  # of one layer after the other, in the order of `BUFFERS`
    addresses: list[int]  # of the buffers
    scale: Tensor  # (layers, 3, 4)
    amax: Tensor  # (layers, 4, 4)
    history: Tensor  # (amax_history_len, layers, 3)

    def latest(self) -> Tensor:
        """Return the amaxes (3, layers) since the last roll."""
        return self.amax[:, :3, 0].t()

    def weight_amaxes(self, layers: Sequence[int]) -> tuple[Tensor, Any]:
        """Return the recorded amaxes of all weights, and an index of the weights of some layers.

        The index is a slice if the layers are consecutive, else a tensor. Compiled graphs save
        amaxes for the backward, so writes must not change their versions.
        """
        place_of = {index: place for place, index in enumerate(self.indices)}
        amaxes, places = self.amax.data[:, 0, 0], [place_of[index] for index in layers]
        first, end = places[0], places[0] + len(places)
        if places == list(range(first, end)):
            return amaxes, slice(first, end)
        return amaxes, index_tensor(tuple(places), amaxes.device)

    def roll(
        self, latest: Tensor, specs: Sequence[QuantSpec], algo: str, seen: Tensor | None
    ) -> None:
        """Add amaxes to the histories, reset the slots and compute the next scales.

        Args:
            latest: the amaxes (3, layers), on any device.
            specs: how weights, inputs and gradients are quantized.
            algo: "max" or "most_recent", see the recipe.
            seen: bool (), whether any amax was recorded. If not, the histories stay. None for True.
        """
        latest = latest.t().to(self.amax.device)
        history = torch.cat([latest.unsqueeze(0), self.history[:-1]])
        if seen is not None:
            history = torch.where(seen.to(history.device), history, self.history)
        self.history.copy_(history)
        self.amax.zero_()
        if algo == "max":
            latest = self.history.amax(0)
        by_role = zip(specs, latest.t().contiguous(), strict=True)
        fresh = torch.stack([spec.scale_from_amax(part) for spec, part in by_role], 1)
        # An amax of 0 means that nothing was recorded. The scale stays.
        self.scale[:, :, 0] = torch.where(latest > 0, fresh, self.scale[:, :, 0])


def are_intact(packs: Sequence[Pack], layers: Sequence[nn.Module | None]) -> bool:
    """Return whether the layers have the buffers of these packs, with the memory of the packs.

    Comparing the objects does not suffice. ``fully_shard`` moves a buffer to another device by
    assigning to its ``data``.
    """
    seen = 0
    for pack in packs:
        here = [layers[index] for index in pack.indices]
        if None in here:
            return False
        buffers = _buffers_of(here)
        if not all(map(is_, buffers, pack.buffers)) or _addresses(buffers) != pack.addresses:
            return False
        seen += len(here)
    return seen == sum(layer is not None for layer in layers)


def _buffers_of(layers: Sequence[Any]) -> list[Tensor]:
    """Return the buffers of layers, of one layer after the other."""
    return [layer._buffers[name] for layer in layers for name in BUFFERS]


def _addresses(buffers: Sequence[Tensor]) -> list[int]:
    """Return the addresses of buffers. Fake tensors have none."""
    return [] if is_traced(buffers[0]) else list(map(Tensor.data_ptr, buffers))


# Packs are built in the forward of a layer if no forward of the model has begun.
@outside_selective_checkpoints
@torch.no_grad()
def packed(layers: Sequence[nn.Module | None]) -> list[Pack]:
    """Pack the layers' buffers, one pack per device. The buffers get the memory of the packs.

    The buffers stay the same objects. Other code may hold them, to restore their values after a
    warm-up or a trial run.
    """
    by_device: dict[torch.device, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer is not None:
            device = layer._buffers["fp8_amax"].device  # type: ignore[union-attr]
            by_device.setdefault(device, []).append(index)
    packs = []
    with torch.inference_mode(False):
        for indices in by_device.values():
            here: Any = [layers[i]._buffers for i in indices]  # type: ignore[union-attr]
            for own in here:
                keep_local(own)
            wholes = []
            for name, dim in BUFFERS.items():
                whole = torch.stack([own[name] for own in here], dim)
                for place, own in enumerate(here):
                    if own[name].is_inference():
                        # Such a buffer could be written in inference mode only.
                        own[name] = own[name].clone()
                    own[name].data = whole.select(dim, place)
                wholes.append(whole)
            buffers = _buffers_of([layers[i] for i in indices])
            packs.append(Pack(indices, buffers, _addresses(buffers), *wholes))
    return packs


# --- values that are written with scales of their own ---------------------------------------------


def largest_code(spec: QuantSpec) -> float:
    """Return the amax whose per-tensor scale is 1."""
    return float(FP8_MAX[spec.fp8_dtype] / 2**spec.margin)


def differs(a: Tensor, b: Tensor) -> Tensor:
    """Compare fp32 scales bit for bit, since NaN does not equal itself."""
    return a.view(torch.int32) != b.view(torch.int32)


#: How many times larger than its codes show a weight may be, because codes saturate.
HEADROOM = 16.0


@torch.no_grad()
def fit_history(
    slots: tuple[Tensor, Tensor],
    history: Tensor,
    scale: Tensor,
    amax: Tensor,
    *,
    exact: bool = False,
    partial: bool = False,
    changed: Tensor | None = None,
) -> None:
    """Fit the history of a weight to values that were written to it.

    A history holds amaxes from before values were rounded. An amax that is read from codes is too
    small if they saturate, so a write does not lower the next scale and the recorded amax. It only
    limits the history to `HEADROOM` times the written values: larger values were replaced, for
    example by a checkpoint from before a run diverged. Zeros need no scale and have no effect.

    Args:
        slots: the next scale () and the recorded amax () of the weight.
        history: the amaxes of earlier steps (amax_history_len,).
        scale: the scale of the written values, fp32, one element.
        amax: their amax, fp32, one element.
        exact: whether the amax is that of high-precision values. They replace the state of a weight
            without a history, which was not trained.
        partial: whether other ranks have elements of the weight. Nothing is limited then.
        changed: whether the write changed any value, bool (). None if it was not compared. If it
            changed none, a weight with a scale keeps its state: torch creates the state of a fresh
            optimizer by a step of length 0.
    """
    next_scale, recorded = slots
    scale = scale.to(next_scale.device).view(())
    amax = amax.to(next_scale.device).view(())
    counts = scale.isfinite() & amax.isfinite() & (amax > 0)
    if changed is not None:
        has_no_scale = next_scale == 0
        counts = counts & (changed.to(next_scale.device) | has_no_scale)
    fitted_scale = next_scale.maximum(scale)
    fitted_amax = recorded.maximum(amax)
    if not partial:
        limit: float | Tensor = HEADROOM
        if exact:
            trained = history.amax() > 0
            limit = torch.where(trained, HEADROOM, 1.0)
        fitted_scale = fitted_scale.minimum(limit * scale)
        fitted_amax = fitted_amax.minimum(limit * amax)
        history.copy_(torch.where(counts, history.minimum(HEADROOM * amax), history))
    next_scale.copy_(torch.where(counts, fitted_scale, next_scale))
    recorded.copy_(torch.where(counts, fitted_amax, recorded))


@torch.no_grad()
def raise_next_scales(
    slots: Sequence[tuple[Tensor, Tensor] | None],
    scales: Sequence[Tensor],
    amaxes: Sequence[Tensor],
    before: Sequence[Tensor],
) -> None:
    """Raise the next scales and the recorded amaxes of weights whose scales have changed.

    Args:
        slots: the next scale () and the recorded amax () of each weight. None for a weight without
            a history, whose scale has no effect.
        scales: the scale (1,) of each weight, fp32. A scale that is not finite has no effect.
        amaxes: the amax (1,) of each weight, fp32. A weight of zeros has no effect.
        before: the scales before the change. A scale that still has the same bits has no effect.
    """
    places = [i for i, pair in enumerate(slots) if pair is not None]
    if not places:
        return
    found: Any = [slots[i] for i in places]
    known, recorded = (torch.stack(part) for part in zip(*found, strict=True))
    new_scales = torch.cat([scales[i] for i in places]).to(known.device)
    new_amaxes = torch.cat([amaxes[i] for i in places]).to(known.device)
    counts = new_scales.isfinite() & (new_amaxes > 0)
    counts &= differs(new_scales, torch.cat([before[i] for i in places]).to(known.device))
    raised_scales = torch.where(counts, known.maximum(new_scales), known)
    raised_amaxes = torch.where(counts, recorded.maximum(new_amaxes), recorded)
    torch._foreach_copy_(
        [slot for part in zip(*found, strict=True) for slot in part],
        [*raised_scales.unbind(), *raised_amaxes.unbind()],
    )
