"""The histories of delayed scaling: buffers of the layers, which roll together.

Each layer has these buffers. Their rows or columns are weight, input and gradient, in this order:

- ``fp8_scale`` (3, 4) fp32: column 0 is the scale, or 0 if there is none yet.
- ``fp8_amax`` (4, 4) fp32: column 0 is the maximum of the finite amaxes since the last roll. The
  last row receives amaxes that are not recorded.
- ``fp8_amax_history`` (amax_history_len, 3) fp32: the maxima of earlier steps, newest first.

Scales and amaxes are 16 bytes apart, because GEMMs require aligned scales, and because compilers
copy unaligned inputs, which would lose writes. The buffers of all layers on one device are views of
one pack, so that one operation rolls them. A pack is rebuilt after its buffers were moved.
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
    """Create the buffers of one layer, by name, without a history."""
    shapes = {"fp8_scale": (3, 4), "fp8_amax": (4, 4)}
    shapes["fp8_amax_history"] = (recipe.amax_history_len, 3)
    with torch.inference_mode(False):
        return {
            name: torch.zeros(shape, dtype=torch.float32, device=device)
            for name, shape in shapes.items()
        }


def keep_local(buffers: dict[str, Any]) -> None:
    """Make the buffers local float32 tensors again.

    parallelize_module turns buffers into DTensors, and FullyShardedDataParallel casts them.
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
    """Whether the layers' buffers are still views of these packs."""
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
    """Pack the layers' buffers, one pack per device. The buffers become views of the packs."""
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
        layers: returns the layers by index, with None for a layer that no longer exists.
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
        """Return the packs of the buffers, one per device."""
        layers = self._layers()
        if not are_intact(self._packs, layers):
            self._packs = packed(layers)
        return self._packs

    def ensure_packed(self) -> None:
        """Pack the buffers if they are not packed."""
        if not self._packs:
            self.packs()

    def moved(self) -> None:
        """Notify that a layer's buffers were replaced."""
        self._packs = []

    def pack(self, device: torch.device) -> Pack:
        """Return the pack of a device. RuntimeError if there is none."""
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
        """End a step: reduce the amaxes, add them to the histories, compute the next scales.

        Args:
            reduce: called once with the amaxes of all layers, fp32 and contiguous, to reduce them
                over ranks in place. Weights come first, then inputs, then gradients, each in the
                order of the layers.
            unsure: whether possibly no forward has run. If nothing was recorded, nothing changes.
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
            # An amax of 0 means that nothing was recorded. The scale stays.
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
        """Make the current stream wait for the last roll. FSDP2 gathers on its own streams."""
        for event in self._rolled:
            torch.cuda.current_stream().wait_event(event)
