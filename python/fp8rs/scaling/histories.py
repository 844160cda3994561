"""The histories of delayed scaling: named buffers of the layers, rolled all at once.

Each layer has, for its weight, its input and its gradient, in this order:

- ``fp8_scale`` (3, 4) fp32: the scale in column 0 of each row; 0 while there is none;
- ``fp8_amax`` (4, 4) fp32: the maximum of the finite amaxes since the last roll, likewise; the last
  row is written by calls that record nothing;
- ``fp8_amax_history`` (amax_history_len, 3) fp32: earlier steps' maxima, the newest first.

Scales and amaxes are 16 bytes apart: GEMMs want scales there, and compilers copy what is not
aligned, which would lose what is written to it. All else derives from these buffers. For those of
one device to be rolled at once they are views of one pack, which is made again where they have been
moved.
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
    """The buffers of one layer, by name: no history yet."""
    shapes = {"fp8_scale": (3, 4), "fp8_amax": (4, 4)}
    shapes["fp8_amax_history"] = (recipe.amax_history_len, 3)
    with torch.inference_mode(False):
        return {
            name: torch.zeros(shape, dtype=torch.float32, device=device)
            for name, shape in shapes.items()
        }


def keep_local(buffers: dict[str, Any]) -> None:
    """Undo what others do to all buffers of a model.

    parallelize_module makes DTensors of them, and FullyShardedDataParallel casts them.
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
    """Whether the layers' buffers are views of these packs still."""
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
    """New packs of the layers' buffers, one a device; the buffers become views of them."""
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
    """The histories of one model's layers.

    Args:
        recipe: margin, history length and algorithm.
        specs: how weights, inputs and gradients are quantized.
        layers: gives the layers, with None for one that is gone; the places are the indices.
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
        """The buffers as packs, one a device."""
        layers = self._layers()
        if not are_intact(self._packs, layers):
            self._packs = packed(layers)
        return self._packs

    def keep_packed(self) -> None:
        """Make packs where there are none, or buffers have been moved out of them."""
        if not self._packs:
            self.packs()

    def moved(self) -> None:
        """A layer's buffers are others now."""
        self._packs = []

    def pack(self, device: torch.device) -> Pack:
        """The pack of a device."""
        for pack in self.packs():
            if pack.scale.device == device:
                return pack
        raise RuntimeError(
            f"delayed scaling's buffers are on {[str(p.scale.device) for p in self._packs]}, but "
            f"weights are quantized on {device}: move the model (`model.to({str(device)!r})`)"
        )

    # --- the roll --------------------------------------------------------------------------------

    @torch.no_grad()
    def roll(self, reduce: Callable[[Tensor], None], unsure: bool = False) -> None:
        """End a step: reduce, push into the histories, compute the next scales.

        Args:
            reduce: called once with the amaxes of all layers, fp32, contiguous: weights, then
                inputs, then gradients, each in the order of the layers. It reduces them over ranks
                in place.
            unsure: maybe no forward has run. If so nothing was recorded, and nothing changes.
        """
        with torch.inference_mode(False):
            self._roll(reduce, unsure)

    def _roll(self, reduce: Callable[[Tensor], None], unsure: bool) -> None:
        self.known.read(self._layers())
        packs = [pack for pack in self.packs() if not pack.scale.is_meta]  # which hold nothing
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
        seen = values.any() if unsure else None  # the device's answer, for which nobody waits
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
            # A slot that saw nothing keeps its scale: 0 says that there is no information.
            pack.scale[:, :, 0] = torch.where(latest > 0, fresh, pack.scale[:, :, 0])
        self.known.ask([(pack.indices, pack.scale[:, :, 0]) for pack in packs], self._layers())
        self._rolled = []
        for pack in packs:
            if pack.scale.is_cuda:
                with torch.cuda.device(pack.scale.device):
                    event = torch.cuda.Event()
                    event.record()
                self._rolled.append(event)

    def wait_for_roll(self) -> None:
        """Have the current stream see the last roll: FSDP gathers on streams of its own."""
        for event in self._rolled:
            torch.cuda.current_stream().wait_event(event)
