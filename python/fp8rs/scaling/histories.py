"""The amax histories of delayed scaling: buffers of the layers, updated together at each step.

Each layer has three fp32 buffers with a row or column for its weight, its input and its gradient:

- ``fp8_scale`` (3, 4): the scale is in column 0. It is 0 if there is none yet.
- ``fp8_amax`` (4, 4): column 0 has the maximum of the finite amaxes since the last roll. The last
  row is a dummy for calls that record nothing.
- ``fp8_amax_history`` (amax_history_len, 3): the maxima of earlier steps, newest first.

Scales and amaxes are aligned to 16 bytes. GEMMs require it for scales. Compilers copy unaligned
inputs and would lose writes to them.

The buffers of all layers on a device are views of one `Pack`, so that they roll in a few launches.
If a buffer was moved, the packs are created again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8rs._torch import is_distributed, local_tensor
from fp8rs.quantize.recipes import DelayedScaling
from fp8rs.scaling.known_scales import KnownScales
from fp8rs.tensor.spec import QuantSpec

BUFFERS = ("fp8_scale", "fp8_amax", "fp8_amax_history")
NOTHING_READY = (False, False, False)

_scale_from_amax = torch.ops.fp8rs.scale_from_amax.default


def new_buffers(recipe: DelayedScaling, device: torch.device) -> dict[str, Tensor]:
    """Return the buffers of one layer by name, without a history."""
    shapes = {"fp8_scale": (3, 4), "fp8_amax": (4, 4)}
    shapes["fp8_amax_history"] = (recipe.amax_history_len, 3)
    with torch.inference_mode(False):
        return {
            name: torch.zeros(shape, dtype=torch.float32, device=device)
            for name, shape in shapes.items()
        }


def keep_local(buffers: dict[str, Any]) -> None:
    """Make the buffers local fp32 tensors again.

    parallelize_module replaces all buffers of a model by DTensors. FullyShardedDataParallel casts
    them.
    """
    for name in BUFFERS:
        if is_distributed(buffers[name]):
            buffers[name] = local_tensor(buffers[name])
        if buffers[name].dtype != torch.float32:
            buffers[name] = buffers[name].float()


@dataclass(eq=False, slots=True)
class Pack:
    """The buffers of all layers on one device, in the order of ``indices``."""

    indices: list[int]
    scale: Tensor  # (layers, 3, 4)
    amax: Tensor  # (layers, 4, 4)
    history: Tensor  # (amax_history_len, layers, 3)


def are_intact(packs: Sequence[Pack], layers: Sequence[nn.Module | None]) -> bool:
    """Return whether the layers' buffers are still views of these packs."""
    seen = 0
    for pack in packs:
        bases = {id(pack.scale), id(pack.amax), id(pack.history)}
        for index in pack.indices:
            layer = layers[index]
            if layer is None:
                return False
            seen += 1
            buffers = layer._buffers
            for name in BUFFERS:
                buffer: Any = buffers[name]
                if id(buffer._base) not in bases:
                    return False
    return seen == sum(layer is not None for layer in layers)


@torch.no_grad()
def packed(layers: Sequence[nn.Module | None]) -> list[Pack]:
    """Copy the layers' buffers into new packs, one per device, and replace them by views."""
    by_device: dict[torch.device, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer is not None:
            device = layer._buffers["fp8_amax"].device  # type: ignore[union-attr]
            by_device.setdefault(device, []).append(index)
    packs = []
    with torch.inference_mode(False):
        for indices in by_device.values():
            here: Any = [layers[i]._buffers for i in indices]  # type: ignore[union-attr]
            for buffers in here:
                keep_local(buffers)
            scale, amax = (torch.stack([buffers[name] for buffers in here]) for name in BUFFERS[:2])
            history = torch.stack([buffers["fp8_amax_history"] for buffers in here], 1)
            for place, buffers in enumerate(here):
                buffers["fp8_scale"] = scale[place]
                buffers["fp8_amax"] = amax[place]
                buffers["fp8_amax_history"] = history[:, place]
            packs.append(Pack(indices, scale, amax, history))
    return packs


class Histories:
    """The amax histories of one model's layers.

    Args:
        recipe: the model's recipe.
        specs: how weights, inputs and gradients are quantized.
        layers: returns the layers by index, with None for a layer that was freed.
    """

    def __init__(
        self,
        recipe: DelayedScaling,
        specs: Sequence[QuantSpec],
        layers: Callable[[], Sequence[nn.Module | None]],
    ) -> None:
        self.recipe = recipe
        self._specs = list(specs)
        self._layers = layers
        self._packs: list[Pack] = []
        self.known = KnownScales()
        self._rolled: list[torch.cuda.Event] = []

    # --- packs -----------------------------------------------------------------------------------

    def packs(self) -> list[Pack]:
        """Return the buffers of all layers as packs, one per device."""
        layers = self._layers()
        if not are_intact(self._packs, layers):
            self._packs = packed(layers)
        return self._packs

    def ensure_packed(self) -> None:
        """Create the packs if there are none, or if a buffer was moved."""
        if not self._packs:
            self.packs()

    def moved(self) -> None:
        """Note that a layer's buffers were replaced."""
        self._packs = []

    def pack(self, device: torch.device) -> Pack:
        """Return the pack of a device."""
        for pack in self.packs():
            if pack.scale.device == device:
                return pack
        raise RuntimeError(
            f"the buffers of delayed scaling are on {[str(p.scale.device) for p in self._packs]}, "
            f"but weights are quantized on {device}: call `model.to({str(device)!r})`"
        )

    # --- the roll --------------------------------------------------------------------------------

    @torch.no_grad()
    def roll(self, reduce: Callable[[Tensor], None], unsure: bool = False) -> None:
        """End a step: reduce the amaxes, append them to the histories, compute the next scales.

        Args:
            reduce: reduces amaxes (3 * layers,), fp32, over ranks in place. The weights of all
                layers come first, then the inputs, then the gradients.
            unsure: possibly no forward has run. If nothing was recorded, nothing changes.
        """
        with torch.inference_mode(False):
            self._roll(reduce, unsure)

    def _roll(self, reduce: Callable[[Tensor], None], unsure: bool) -> None:
        self.known.read(self._layers())
        packs = [pack for pack in self.packs() if not pack.scale.is_meta]
        if not packs:
            return
        home = packs[0].amax.device
        count = len(self._layers())
        if len(packs) == 1 and len(packs[0].indices) == count:
            values = packs[0].amax[:, :3, 0].t().contiguous()
        else:
            values = torch.zeros(3, count, dtype=torch.float32, device=home)
            for pack in packs:
                values[:, pack.indices] = pack.amax[:, :3, 0].t().to(home)
        reduce(values.view(-1))
        seen = values.any() if unsure else None  # stays on the device
        for pack in packs:
            mine = values if len(pack.indices) == count else values[:, pack.indices]
            latest = mine.t().to(pack.amax.device)
            history = torch.cat([latest.unsqueeze(0), pack.history[:-1]])
            if seen is not None:
                history = torch.where(seen.to(history.device), history, pack.history)
            pack.history.copy_(history)
            pack.amax.zero_()
            if self.recipe.amax_compute_algo == "max":
                latest = pack.history.amax(0)
            by_role = zip(self._specs, latest.t().contiguous(), strict=True)
            fresh = torch.stack([spec.scale_from_amax(part) for spec, part in by_role], 1)
            # An amax of 0 means that nothing was recorded: keep the scale.
            pack.scale[:, :, 0] = torch.where(latest > 0, fresh, pack.scale[:, :, 0])
        self.known.poll([(pack.indices, pack.scale[:, :, 0]) for pack in packs], self._layers())
        self._rolled = []
        for pack in packs:
            if pack.scale.is_cuda:
                with torch.cuda.device(pack.scale.device):
                    event = torch.cuda.Event()
                    event.record()
                self._rolled.append(event)

    def wait_for_roll(self) -> None:
        """Make the current stream, such as one of FSDP's, wait for the last roll."""
        for event in self._rolled:
            torch.cuda.current_stream().wait_event(event)
