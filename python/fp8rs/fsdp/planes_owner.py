"""An FP8 weight: whom the planes of a layer's parameter belong to, sharded or whole."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from fp8rs._torch import is_distributed
from fp8rs.tensor.formats import FP8_MAX
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.store import Store

from . import at_rest, padding
from .param import ParamHandle
from .shard_spec import local_part, shard_spec


class Shards(Protocol):
    """What an FP8 weight asks of other ranks' shards: `fp8rs.fsdp.scales` has the one there is."""

    def agree(self, weights: Sequence[PlanesOwner] | None = None) -> None:
        """Have the scales of these weights agree; None: of all."""

    def write_all(self, weights: Sequence[PlanesOwner], values: Sequence[Tensor]) -> None:
        """Quantize values into whole shards, as those of the whole weights."""


class PlanesOwner(ParamHandle):
    """An FP8 weight: what its quantized tensors tell of writes (`fp8rs.tensor.store.Owner`).

    Args:
        module: the layer.
        name: of the parameter in it.
        scales: knows of the other ranks' shards; None of a weight that is whole.

    Attributes:
        unagreed: scales that shards share may differ between ranks.
        uncompared: it was written with a scale known beforehand, which only some ranks may have
            found to be NaN.
        keep_init: its first values are kept from before they are rounded.
    """

    __slots__ = ("_init_value", "_scales", "keep_init", "unagreed", "uncompared")

    def __init__(self, module: nn.Module, name: str, scales: Shards | None = None) -> None:
        super().__init__(module, name)
        # Not held: tensors hold their owners, and the garbage collector sees no cycle through what
        # torch holds of tensors.
        self._scales = None if scales is None else weakref.ref(scales)
        self.unagreed = self.uncompared = self.keep_init = False
        self._init_value: Tensor | None = None

    def _of(self, module: nn.Module) -> PlanesOwner:
        new = PlanesOwner(module, self.name)
        new.unagreed, new.keep_init = self.unagreed, self.keep_init
        new._init_value = self._init_value  # which nobody writes
        return new

    room = staticmethod(padding.room)

    # --- which planes ----------------------------------------------------------------------------

    def has(self, store: Store) -> bool:
        """Whether these are the planes of the weight, and not those of a copy.

        While FSDP2 has the whole weight in the shard's place, the shard's are not known: they may
        be.
        """
        if not self.in_place:
            return False
        known = getattr(self.parameter_part, "_store", None)
        return known is None or known.owner is not self or known is store

    def reshard(self) -> None:
        """Have modules hold their shards again, where FSDP2 has this weight whole in its place.

        What it has gathered is from before a write that is about to come.
        """
        part = self.parameter_part
        if not (isinstance(part, QuantizedTensor) and part._store.gathered):
            return
        from torch.distributed.fsdp import FSDPModule

        root = self.state.root
        for module in () if root is None else root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # --- other ranks -----------------------------------------------------------------------------

    @property
    def shards(self) -> Shards | None:
        """What knows of the other ranks' shards; None where this is no shard, or not at the moment.

        Optimizers ask it too.
        """
        return None if self._scales is None or self.local is None else self._scales()

    @property
    def number(self) -> int:
        """The number of the first element that this rank has: see `ShardSpec.number`."""
        if self.local is not None:
            return self.spec.number
        parameter: Any = self.parameter if self.in_place else None
        return shard_spec(parameter).number if is_distributed(parameter) else 0

    def _agrees_on(self, tensor: QuantizedTensor) -> Shards | None:
        """What agrees on scales where all ranks write their whole shards; None where they may not.

        An operator on a DTensor, which all ranks run, writes the very object that this has as its
        local tensor. Who writes on some ranks, or in an order of its own (a checkpoint that is read
        in place, an assignment to a row of the local tensor), does so through a view. So nothing is
        to be noted where such operators begin, and no class is needed that sees them.
        """
        return self.shards if tensor is self.local else None

    # --- writes ----------------------------------------------------------------------------------

    def write(self, tensor: QuantizedTensor, values: Tensor, keep: bool) -> bool:
        """Write ``values`` with scales that all ranks agree on.

        Returns:
            False, with nothing written, where other ranks may not be writing, and where scales are
            to be kept: each rank does so by the same rule from the same scale, so that what they
            differ by are powers of two.
        """
        whole = tensor.shape == self.parameter_part.shape
        self._keep(values if whole else None)
        if not keep and (scales := self._agrees_on(tensor)) is not None:
            scales.write_all([self], [values])
            return True
        if whole and self.shards is None:
            self.begin_history(values)
        return False

    def take(self, tensor: QuantizedTensor, src: QuantizedTensor) -> bool:
        """Take over another shard's codes and scales; False if all ranks may not be doing so.

        Whether they can be taken over is decided by what is equal on all ranks, and not by how
        much of this rank's shard is padding.
        """
        self._keep(None)
        if src._store.has != tensor._store.has or self._agrees_on(tensor) is None:
            return False
        with torch.inference_mode(False), torch.no_grad():
            at_rest.put(tensor, at_rest.planes_of(src))
            self.wrote(tensor)
        return True

    def begin_empty_load(self) -> list[Any]:
        """Other ranks begin to load their shards; this rank's is empty. Returns no chunks."""
        self.unagreed = True
        return []

    def loaded(self) -> None:
        """Codes and scales were loaded in place, on all ranks.

        Each rank may have loaded and quantized values in high precision instead, so the scales are
        synchronized before they are next read. Codes with a common scale stay as they are.
        """
        self._keep(None)
        self.wrote()
        self.unagreed = True

    def wrote(self, tensor: QuantizedTensor | None = None) -> None:
        """The shard is being written, with the scales of all ranks.

        Args:
            tensor: what was written, by this rank for itself; if all ranks have, they agree now.
        """
        super().wrote()
        if tensor is None:
            state = self.state_if_any
            self.unagreed, self.uncompared = False, state is not None and state.delayed is not None
            return
        self.unagreed = True
        part = self.parameter_part if self.in_place else None
        # What FSDP2 has gathered of a shard has no owner.
        if isinstance(part, QuantizedTensor) and part._store.owner is self:
            self.follow(part._store.any_plane.scale)
        if (scales := self._agrees_on(tensor)) is not None:
            scales.agree([self])

    # --- delayed scaling -------------------------------------------------------------------------

    def follow(self, scale: Tensor) -> None:
        """Of delayed scaling: values were written with this scale, past the history.

        What is written next must not saturate for the sake of the values before.
        """
        slots = self.slots
        if slots is None or scale.is_meta:
            return
        spec = cast(QuantizedTensor, self.parameter_part).spec
        with torch.no_grad():
            known, amax = slots
            scale = scale.to(known.device).view(())
            finite = scale.isfinite()
            known.copy_(torch.where(finite, scale, known))
            largest = scale * (FP8_MAX[spec.fp8_dtype] / 2**spec.margin)
            amax.copy_(torch.where(finite, amax.maximum(largest), amax))

    def begin_history(self, values: Tensor) -> None:
        """Values of a whole weight are quantized by their own amax.

        Of delayed scaling the next scale is that one, and the history begins with that amax, as of
        shards.
        """
        if self.slots is None or values.is_meta or not values.numel():
            return
        with torch.no_grad():
            low, high = values.detach().aminmax()
            amax = torch.maximum(-low, high).float()
            scale = cast(QuantizedTensor, self.parameter_part).spec.scale_from_amax(amax)
            self.begin_with(scale, amax)

    def begin_with(self, scale: Tensor, amax: Tensor) -> None:
        """The same, of a scale and an amax that are known; where that is finite."""
        finite = amax.isfinite()
        for slot, value in zip(self.slots or (), (scale, amax), strict=False):
            slot.copy_(torch.where(finite, value.to(slot.device).view(()), slot))

    # --- the first values ------------------------------------------------------------------------

    @property
    def init_value(self) -> Tensor | None:
        """Its first values, as many of them as this rank has, on the CPU; None if not kept."""
        value = self._init_value
        if value is not None and self.in_place:
            parameter: Any = self.parameter
            # Nobody tells of tensor parallelism, which cuts a parameter into DTensors.
            if value.shape == parameter.shape != self.parameter_part.shape:
                self._init_value = value = local_part(value, parameter)
        return value

    @init_value.setter
    def init_value(self, value: Tensor | None) -> None:
        self._init_value = value

    def forget_init(self) -> None:
        """Free the values from before the first rounding, and keep no others."""
        self.init_value, self.keep_init = None, False

    def _keep(self, values: Tensor | None) -> None:
        """Keep values from before they are rounded, where that is asked for; None: there are none.

        Of every write until an optimizer has had them: what was kept before it is not the weight's.
        """
        if self.keep_init:
            kept = values is not None and not values.is_meta
            self.init_value = values.detach().to("cpu", copy=True) if kept else None  # type: ignore[union-attr]


def own(module: nn.Module, name: str) -> PlanesOwner:
    """Have a layer's quantized parameter own its planes: tensors made from it know of it."""
    parameter: Any = module._parameters[name]
    assert isinstance(parameter, QuantizedTensor)
    owner = parameter._store.owner
    if not isinstance(owner, PlanesOwner) or owner._module() is not module:
        owner = parameter._store.owner = PlanesOwner(module, name)
    module.__dict__.setdefault("_fp8_params", {})[name] = owner
    return owner
