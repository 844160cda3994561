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
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8rs._torch import (
    is_alias,
    is_distributed,
    is_traced,
    local_tensor,
    outside_selective_checkpoints,
)
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
    shapes = {
        "fp8_scale": (3, 4),
        "fp8_amax": (4, 4),
        "fp8_amax_history": (recipe.amax_history_len, 3),
    }
    buffers = {}
    with torch.inference_mode(False):
        for name, shape in shapes.items():
            buffers[name] = torch.zeros(shape, dtype=torch.float32, device=device)
    return buffers


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
        #: The buffers that the slots are in.
        self._scale: Tensor | None = None
        self._amax: Tensor | None = None
        self._slots: Slots = (), ()

    def get(self, buffers: dict[str, Any]) -> Slots:
        """Return the slots in these buffers, which become local float32 tensors."""
        scale: Tensor = buffers["fp8_scale"]
        amax: Tensor = buffers["fp8_amax"]
        if self._scale is not scale or self._amax is not amax:
            return self._create(buffers)
        if not is_alias(self._slots[1][0], amax):  # `fully_shard` moves buffers in place
            return self._create(buffers)
        return self._slots

    # A recomputation finds the slots of its forward.
    @outside_selective_checkpoints
    def _create(self, buffers: dict[str, Any]) -> Slots:
        """Create the slots in these buffers."""
        keep_local(buffers)
        scale: Tensor = buffers["fp8_scale"]
        amax: Tensor = buffers["fp8_amax"]
        self._scale = scale
        self._amax = amax
        self._slots = slots(scale, amax)
        return self._slots

    def __reduce__(self) -> Any:
        return SlotCache, ()


def slots(scale: Tensor, amax: Tensor) -> Slots:
    """Return the slots in a layer's buffers."""
    return scale[:, 0].unbind(), amax[:, 0].unbind()


class WeightSlots(NamedTuple):
    """The slots of one weight, both () fp32.

    Attributes:
        next_scale: the scale of the next cast. 0 if there is none yet.
        recorded_amax: the maximum of the finite amaxes since the last roll.
    """

    next_scale: Tensor
    recorded_amax: Tensor


@dataclass(eq=False, slots=True)
class WeightAmaxes:
    """The recorded amaxes of some weights, for a cast that raises them in place.

    Attributes:
        values: the amaxes (n,), fp32. They are a view of the slots if the layers are consecutive.
            Otherwise `store` copies them to the slots.
    """

    values: Tensor
    _all_amaxes: Tensor  # (layers,), a view of the slots
    _index: slice | Tensor  # of `values` in `_all_amaxes`

    def store(self) -> None:
        """Store ``values`` after they were written."""
        if isinstance(self._index, Tensor):
            self._all_amaxes[self._index] = self.values

    def raise_to(self, amaxes: Tensor) -> None:
        """Raise the recorded amaxes to other ones (n,). Those that are not finite do not count."""
        raised = self.values.maximum(amaxes)
        self.values.copy_(torch.where(amaxes.isfinite(), raised, self.values))
        self.store()


@dataclass(eq=False, slots=True)
class Pack:
    """The buffers of all layers on one device, in the order of ``indices``."""

    indices: list[int]
    buffers: list[Tensor]  # of one layer after the other, in the order of `BUFFERS`
    addresses: list[int]  # of the buffers
    scale: Tensor  # (layers, 3, 4)
    amax: Tensor  # (layers, 4, 4)
    history: Tensor  # (amax_history_len, layers, 3)
    #: Where layers are in this pack. Each forward casts the weights of the same layers together.
    _positions_cache: dict[tuple[int, ...], slice | tuple[int, ...]] = field(default_factory=dict)

    def latest(self) -> Tensor:
        """Return the amaxes (3, layers) since the last roll."""
        return self.amax[:, :3, 0].t()

    def weight_scales(self, layers: Sequence[int]) -> Tensor:
        """Return a copy of the scales (n,) of the weights of some layers. 0 if there is none."""
        return self.scale[self._index_of(layers), 0, 0].clone()

    def weight_amaxes(self, layers: Sequence[int]) -> WeightAmaxes:
        """Return the recorded amaxes of the weights of some layers.

        Compiled graphs save amaxes for the backward, so writes must not change their versions.
        """
        all_amaxes = self.amax.data[:, 0, 0]
        index = self._index_of(layers)
        return WeightAmaxes(all_amaxes[index], all_amaxes, index)

    def _index_of(self, layers: Sequence[int]) -> slice | Tensor:
        """Return the index of layers in this pack: a slice if they are consecutive."""
        key = tuple(layers)
        positions = self._positions_cache.get(key)
        if positions is None:
            positions = self._positions_of(key)
            self._positions_cache[key] = positions
        if isinstance(positions, slice):
            return positions
        return index_tensor(positions, self.amax.device)

    def _positions_of(self, layers: tuple[int, ...]) -> slice | tuple[int, ...]:
        position_of_layer = {layer: position for position, layer in enumerate(self.indices)}
        positions = tuple(position_of_layer[layer] for layer in layers)
        first = positions[0]
        end = first + len(positions)
        if positions == tuple(range(first, end)):
            return slice(first, end)
        return positions

    def roll(
        self,
        latest: Tensor,
        specs: Sequence[QuantSpec],
        algo: str,
        any_recorded: Tensor | None,
    ) -> None:
        """Add amaxes to the histories, reset the slots and compute the next scales.

        Args:
            latest: the amaxes (3, layers), on any device.
            specs: how weights, inputs and gradients are quantized.
            algo: "max" or "most_recent", see the recipe.
            any_recorded: bool (), whether any amax was recorded. If not, the histories stay. None
                for True.
        """
        latest = latest.t().to(self.amax.device)
        history = torch.cat([latest.unsqueeze(0), self.history[:-1]])
        if any_recorded is not None:
            history = torch.where(any_recorded.to(history.device), history, self.history)
        self.history.copy_(history)
        self.amax.zero_()

        amaxes = self.history.amax(0) if algo == "max" else latest  # (layers, 3)
        scales_by_role = []
        for spec, role_amaxes in zip(specs, amaxes.t().contiguous(), strict=True):
            scales_by_role.append(spec.scale_from_amax(role_amaxes))
        new_scales = torch.stack(scales_by_role, 1)
        # An amax of 0 means that nothing was recorded. The scale stays.
        self.scale[:, :, 0] = torch.where(amaxes > 0, new_scales, self.scale[:, :, 0])


def are_intact(packs: Sequence[Pack], layers: Sequence[nn.Module | None]) -> bool:
    """Return whether the layers have the buffers of these packs, with the memory of the packs.

    Comparing the objects does not suffice. ``fully_shard`` moves a buffer to another device by
    assigning to its ``data``.
    """
    packed_layers = 0
    for pack in packs:
        layers_of_pack = [layers[index] for index in pack.indices]
        if None in layers_of_pack:
            return False
        buffers = _buffers_of(layers_of_pack)
        if not all(map(is_, buffers, pack.buffers)):
            return False
        if _addresses(buffers) != pack.addresses:
            return False
        packed_layers += len(layers_of_pack)
    return packed_layers == sum(layer is not None for layer in layers)


def _buffers_of(layers: Sequence[Any]) -> list[Tensor]:
    """Return the buffers of layers, of one layer after the other."""
    return [layer._buffers[name] for layer in layers for name in BUFFERS]


def _addresses(buffers: Sequence[Tensor]) -> list[int]:
    """Return the addresses of buffers. Fake tensors have none."""
    return [] if is_traced(buffers[0]) else list(map(Tensor.data_ptr, buffers))


# Packs are built in the forward of a layer if no forward of the model has begun.
@outside_selective_checkpoints
@torch.no_grad()
def pack_buffers(layers: Sequence[nn.Module | None]) -> list[Pack]:
    """Pack the layers' buffers, one pack per device. The buffers get the memory of the packs.

    The buffers stay the same objects. Other code may hold them, to restore their values after a
    warm-up or a trial run.
    """
    indices_by_device: dict[torch.device, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer is not None:
            device = layer._buffers["fp8_amax"].device  # type: ignore[union-attr]
            indices_by_device.setdefault(device, []).append(index)

    packs = []
    with torch.inference_mode(False):
        for indices in indices_by_device.values():
            packs.append(_pack_layers(indices, [layers[index] for index in indices]))
    return packs


def _pack_layers(indices: list[int], layers: Sequence[Any]) -> Pack:
    """Pack the buffers of layers that are on one device."""
    for layer in layers:
        keep_local(layer._buffers)
    first_buffer = layers[0]._buffers["fp8_scale"]
    stream = None
    if first_buffer.is_cuda and not is_traced(first_buffer):
        stream = torch.cuda.current_stream(first_buffer.device)

    stacked = {}
    for name, dim in BUFFERS.items():
        stack = torch.stack([layer._buffers[name] for layer in layers], dim)
        for position, layer in enumerate(layers):
            buffer = layer._buffers[name]
            if stream is not None:
                # The memory of the buffer is freed below, and another stream may have allocated it.
                buffer.record_stream(stream)
            if buffer.is_inference():
                # Such a buffer could be written in inference mode only.
                layer._buffers[name] = buffer.clone()
            layer._buffers[name].data = stack.select(dim, position)
        stacked[name] = stack

    buffers = _buffers_of(layers)
    return Pack(
        indices=indices,
        buffers=buffers,
        addresses=_addresses(buffers),
        scale=stacked["fp8_scale"],
        amax=stacked["fp8_amax"],
        history=stacked["fp8_amax_history"],
    )


# --- values that are written with scales of their own ---------------------------------------------


def differs(a: Tensor, b: Tensor) -> Tensor:
    """Compare fp32 scales bit for bit, since NaN does not equal itself."""
    return a.view(torch.int32) != b.view(torch.int32)


#: How many times larger than its codes show a weight may be, because codes saturate.
HEADROOM = 16.0


@dataclass(eq=False, slots=True)
class WrittenValues:
    """What the history of a weight depends on when values were written to the weight.

    Attributes:
        scale: the scale of the written values, fp32, one element.
        amax: their amax, fp32, one element.
        exact: whether the amax is that of high-precision values. They replace the state of a weight
            without a history, which was not trained.
        partial: whether other ranks have elements of the weight. Nothing is limited then.
        changed: whether the write changed any value, bool (). None if it was not compared. If it
            changed none, a weight with a scale keeps its state: torch creates the state of a fresh
            optimizer by a step of length 0.
    """

    scale: Tensor
    amax: Tensor
    exact: bool = False
    partial: bool = False
    changed: Tensor | None = None


@torch.no_grad()
def fit_history(slots: WeightSlots, history: Tensor, values: WrittenValues) -> None:
    """Fit the history of a weight to values that were written to it.

    A history holds amaxes from before values were rounded. An amax that is read from codes is too
    small if they saturate, so a write does not lower the next scale and the recorded amax. It only
    limits the history to `HEADROOM` times the written values: larger values were replaced, for
    example by a checkpoint from before a run diverged. Zeros need no scale and have no effect.

    Args:
        slots: the slots of the weight.
        history: the amaxes of earlier steps (amax_history_len,).
        values: the written values.
    """
    next_scale, recorded_amax = slots
    scale = values.scale.to(next_scale.device).view(())
    amax = values.amax.to(next_scale.device).view(())

    # Zeros and values that are not finite have no effect, and neither has a write that changed
    # nothing, unless the weight still needs its first scale.
    has_effect = scale.isfinite() & amax.isfinite() & (amax > 0)
    if values.changed is not None:
        has_no_scale = next_scale == 0
        has_effect = has_effect & (values.changed.to(next_scale.device) | has_no_scale)

    # The written values must fit into the next scale.
    fitted_scale = next_scale.maximum(scale)
    fitted_amax = recorded_amax.maximum(amax)

    # Limit what remains of earlier values. Other ranks may have larger values of a partial weight.
    if not values.partial:
        limit: float | Tensor = HEADROOM
        if values.exact:
            # The state of a weight that was not trained is that of the written values alone.
            is_trained = history.amax() > 0
            limit = torch.where(is_trained, HEADROOM, 1.0)
        fitted_scale = fitted_scale.minimum(limit * scale)
        fitted_amax = fitted_amax.minimum(limit * amax)
        fitted_history = history.minimum(HEADROOM * amax)
        history.copy_(torch.where(has_effect, fitted_history, history))

    next_scale.copy_(torch.where(has_effect, fitted_scale, next_scale))
    recorded_amax.copy_(torch.where(has_effect, fitted_amax, recorded_amax))


@dataclass(eq=False, slots=True)
class ScaleChange:
    """A scale of a weight before and after ranks made it common, and the amax of the weight.

    Attributes:
        slots: the slots of the weight.
        before: the scale (1,) before, fp32. If the new one has the same bits, it has no effect.
        after: the new scale (1,), fp32. It has no effect if it is not finite.
        amax: the amax (1,) of the weight, fp32. A weight of zeros has no effect.
    """

    slots: WeightSlots
    before: Tensor
    after: Tensor
    amax: Tensor


@torch.no_grad()
def raise_next_scales(changes: Sequence[ScaleChange]) -> None:
    """Raise the next scales and the recorded amaxes of weights whose scales have changed."""
    if not changes:
        return
    next_scales = [change.slots.next_scale for change in changes]
    recorded_amaxes = [change.slots.recorded_amax for change in changes]
    next_scale = torch.stack(next_scales)
    recorded_amax = torch.stack(recorded_amaxes)
    device = next_scale.device
    before = torch.cat([change.before for change in changes]).to(device)
    after = torch.cat([change.after for change in changes]).to(device)
    amax = torch.cat([change.amax for change in changes]).to(device)

    counts = after.isfinite() & (amax > 0) & differs(after, before)
    raised_scale = torch.where(counts, next_scale.maximum(after), next_scale)
    raised_amax = torch.where(counts, recorded_amax.maximum(amax), recorded_amax)
    torch._foreach_copy_(
        [*next_scales, *recorded_amaxes],
        [*raised_scale.unbind(), *raised_amax.unbind()],
    )
