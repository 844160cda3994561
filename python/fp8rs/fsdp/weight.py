"""One weight: a parameter of a module, whichever tensor stands for it at the moment."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from fp8rs._torch import is_distributed, own_part, spec
from fp8rs.scaling.histories import keep_local
from fp8rs.tensor.formats import FP8_MAX
from fp8rs.tensor.quantized import QuantizedTensor

from .placement import Placement, local_part, place

if TYPE_CHECKING:
    from fp8rs.nn.registry import ModelState


class Freshness:
    """Whether a shard was written since it was last quantized, and when.

    Attributes:
        written: it was, by an operator that every rank has run, those with an empty shard too.
        written_on: the CUDA stream that it was last written on, or the event on that stream before
            which it was.
    """

    __slots__ = ("written", "written_on")

    def __init__(self) -> None:
        self.written = False
        self.written_on: torch.cuda.Stream | torch.cuda.Event | None = None

    def wrote(self) -> None:
        """The shard is being written."""
        self.written = True
        if torch.cuda.is_initialized():
            # FSDP2 gathers on a stream of its own, which waits for this one only when a forward
            # of its root begins.
            self.written_on = torch.cuda.current_stream()

    def quantized(self) -> None:
        """The shard is being quantized."""
        self.written = False


class Weight:
    """A parameter's place: (module, name). All else is found through that.

    FSDP2 replaces the sharded tensors as it likes, so nothing is remembered on them; every
    `MasterWeight` of one parameter refers to one `Weight`. It compares by identity, and a copy of a
    tensor alone keeps it: as metadata of a traced tensor it is a constant.

    Attributes:
        name: of the parameter in its module.
        freshness: whether what it was last quantized to is that of what the shard has now.
        writes: how many times the shard was written.
        unagreed: of an FP8 weight: scales that shards share may differ between ranks.
        keep_init: of an FP8 weight: its first values are kept from before they are rounded.
    """

    __slots__ = (
        "__weakref__",
        "_init_value",
        "_module",
        "_placed",
        "freshness",
        "keep_init",
        "name",
        "unagreed",
        "writes",
    )

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self.name = name
        self.freshness = Freshness()
        self.unagreed = self.keep_init = False
        self.writes = 0
        self._init_value: Tensor | None = None
        self._placed: tuple[Any, Placement] | None = None

    @property
    def module(self) -> nn.Module:
        """The layer that the weight belongs to. RuntimeError if it is gone."""
        module = self._module()
        if module is None:
            raise RuntimeError("the module that this weight belongs to no longer exists")
        return module

    @property
    def state(self) -> ModelState:
        """The state of the converted model."""
        return cast("ModelState", self.module._fp8_state)

    @property
    def index(self) -> int:
        """The index of the layer among those of the converted model."""
        return cast(int, self.module._fp8_index)

    @property
    def fqn(self) -> str:
        """The fully qualified name, for messages."""
        return f"{self.state.names[self.index]}.{self.name}".lstrip(".")

    @property
    def in_place(self) -> bool:
        """Whether the layer has it as its weight.

        What has moved to another name is what a weight is computed from (pruning, weight_norm,
        parametrizations): a parameter like others, whose writes concern no layer.
        """
        module = self._module()
        return module is not None and module._parameters.get(self.name) is not None

    @property
    def placement(self) -> Placement:
        """Where this rank's shard lies. RuntimeError while the module has no shard in its place."""
        parameter: Any = self.parameter
        if local_of(parameter) is None:
            raise RuntimeError(f"{self.fqn} is gathered, but its module holds no sharded parameter")
        # Asking a mesh for its groups is slow; the specification stays the same object.
        if self._placed is None or self._placed[0] is not spec(parameter):
            self._placed = spec(parameter), place(parameter)
        return self._placed[1]

    @property
    def parameter(self) -> Tensor:
        """The module's parameter: sharded or, while FSDP2 has it gathered, not."""
        return cast(Tensor, self.module._parameters[self.name])

    def wrote(self, agreed: bool = False) -> None:
        """The shard is being written, by this rank for itself unless ``agreed``."""
        self.freshness.wrote()
        self.writes += 1
        self.unagreed = not agreed
        state = getattr(self._module(), "_fp8_state", None)
        if state is None or state.delayed is None:
            return
        if not agreed:
            part = self.parameter_part if self.in_place else None
            # A whole FP8 weight, that is: what FSDP2 has gathered of a shard has no owner.
            if isinstance(part, QuantizedTensor) and part._store.owner is self:
                self.follow(part._store.any_plane.scale)
        elif (passes := self._passes) is not None:
            passes.shared = False

    def reshard(self) -> None:
        """Have modules hold their shards again, where FSDP2 has this weight whole in its place.

        What it has gathered is from before a write that is about to come.
        """
        part: Any = self.parameter_part
        if not (isinstance(part, QuantizedTensor) and part._store.gathered):
            return
        from torch.distributed.fsdp import FSDPModule

        root = self.state.root
        for part in () if root is None else root.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

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

    @property
    def slots(self) -> tuple[Tensor, Tensor] | None:
        """Of delayed scaling: the next scale (0: none yet), and where amaxes are noted."""
        module: Any = self._module()  # None where it was removed from the model before a step
        state = getattr(module, "_fp8_state", None)
        if state is None or state.delayed is None or not self.in_place:
            return None
        keep_local(module._buffers)
        return module.fp8_scale[0, 0], module.fp8_amax[0, 0]

    @property
    def shards(self) -> Any:
        """The model's sharded weights; None where this one is whole."""
        sharded = self.in_place and local_of(self.parameter) is not None
        return self._passes if sharded else None

    @property
    def _passes(self) -> Any:
        sharding: Any = self.state.sharding
        return None if sharding is None else sharding.passes

    @property
    def number(self) -> int:
        """The number of the first element that this rank has: see `Placement.number`."""
        if self.shards is not None:
            return self.placement.number
        parameter: Any = self.parameter if self.in_place else None
        return place(parameter).number if is_distributed(parameter) else 0

    def write(self, tensor: QuantizedTensor, values: Tensor, keep: bool) -> bool:
        """Of an FP8 weight: write ``values`` with scales that all ranks agree on.

        Returns:
            False, with nothing written, where other ranks may not be writing (see
            `WeightPasses.together`), and where scales are to be kept: each rank does so by the same
            rule from the same scale, so that what they differ by are powers of two.
        """
        whole = self.has_whole(tensor)
        self._keep(values if whole else None)
        passes = self._passes if hasattr(self.module, "_fp8_state") else None
        if passes is not None and not keep and passes.write(self, tensor, values):
            return True
        if whole and self.shards is None:
            self.begin_history(values)
        return False

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
        """Values of a whole FP8 weight are quantized by their own amax.

        Of delayed scaling the next scale is that one, and the history begins with that amax, as of
        shards.
        """
        slots = self.slots
        if slots is None or values.is_meta or not values.numel():
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

    def take(self, tensor: QuantizedTensor, src: QuantizedTensor) -> bool:
        """As `write`, of codes and scales as they are."""
        self._keep(None)
        passes = self._passes if hasattr(self.module, "_fp8_state") else None
        return passes is not None and bool(passes.take(self, tensor, src))

    def loaded(self) -> None:
        """Codes and scales were read in place, on all ranks: these agree on them."""
        self._keep(None)
        self.wrote(agreed=True)

    def _keep(self, values: Tensor | None) -> None:
        """Keep values from before they are rounded, where that is asked for; None: there are none.

        Of every write until an optimizer has had them: what was kept before it is not the weight's.
        """
        if self.keep_init:
            kept = values is not None and not values.is_meta
            self.init_value = values.detach().to("cpu", copy=True) if kept else None  # type: ignore[union-attr]

    def has(self, store: Any) -> bool:
        """Whether these are the planes of the weight, and not those of a copy.

        While FSDP2 has the whole weight in the shard's place, the shard's are not known: they may
        be.
        """
        if not self.in_place:
            return False
        part: Any = self.parameter_part
        known = getattr(part, "_store", None)
        return known is None or known.owner is not self or known is store

    def has_whole(self, tensor: QuantizedTensor) -> bool:
        """Whether a tensor over the weight's planes shows all of this rank's part."""
        return tensor.shape == self.parameter_part.shape

    @property
    def parameter_part(self) -> Tensor:
        """This rank's part of the parameter."""
        parameter: Any = self.parameter
        part: Tensor = own_part(parameter)
        return part

    def __deepcopy__(self, memo: dict[int, Any]) -> Weight:
        """That of the copied module, if one is being copied; else the same."""
        copy = memo.get(id(self._module()))
        if copy is None:
            return self
        found = memo.get(id(self))
        if found is None:
            found = memo[id(self)] = Weight(copy, self.name)
            found.unagreed, found.keep_init = self.unagreed, self.keep_init
            found._init_value = self._init_value  # which nobody writes
        return cast(Weight, found)


class Local(Protocol):
    """A sharded parameter's local tensor: a `MasterWeight`, or an FP8 weight's shard."""

    @property
    def _weight(self) -> Weight:
        """Whose shard this is."""

    @property
    def shard(self) -> Tensor:
        """The plain shard, or the quantized one."""


def local_of(parameter: Any) -> Any:
    """The local tensor behind a parameter that is gathered in FP8; None if it is another."""
    local = own_part(parameter)
    return local if isinstance(getattr(local, "_weight", None), Weight) else None


def wait_for_writes(weights: Sequence[Weight]) -> None:
    """Have the current stream see what other streams have written to the weights."""
    for on in {weight.freshness.written_on for weight in weights} - {None}:
        assert on is not None
        current = torch.cuda.current_stream(on.device)
        if isinstance(on, torch.cuda.Event):
            current.wait_event(on)
        elif current != on:
            current.wait_stream(on)
    for weight in weights:
        weight.freshness.written_on = None


def mark_writes(weights: Iterable[Weight]) -> None:
    """Have streams that wait for what was written to the weights wait for nothing after now."""
    events: dict[torch.cuda.Stream, torch.cuda.Event] = {}
    for weight in weights:
        stream = weight.freshness.written_on
        if isinstance(stream, torch.cuda.Stream):
            if stream not in events:
                events[stream] = torch.cuda.Event()
                events[stream].record(stream)
            weight.freshness.written_on = events[stream]
