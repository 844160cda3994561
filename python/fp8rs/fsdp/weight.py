"""One weight: a parameter of a module, whichever tensor stands for it at the moment."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fp8rs._torch import own_part, spec
from fp8rs.scaling.histories import keep_local

from .placement import Placement, place

if TYPE_CHECKING:
    from fp8rs.nn.model_state import ModelState


class Weight:
    """A parameter's place: (module, name). All else is found through that.

    FSDP2 replaces the sharded tensors as it likes, so nothing is remembered on them; every
    `MasterWeight` of one parameter refers to one `Weight`. It compares by identity, and a copy of a
    tensor alone keeps it: as metadata of a traced tensor it is a constant.

    Attributes:
        name: of the parameter in its module.
        written: the shard was written since it was last quantized, by an operator that every rank
            has run, those with an empty shard too.
        written_on: the CUDA stream that it was last written on, or the event on that stream before
            which it was.
        writes: how many times the shard was written.
    """

    __slots__ = ("__weakref__", "_module", "_placed", "name", "writes", "written", "written_on")

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self.name = name
        self.written = False
        self.written_on: torch.cuda.Stream | torch.cuda.Event | None = None
        self.writes = 0
        self._placed: tuple[Any, Placement] | None = None

    # --- where it is -----------------------------------------------------------------------------

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
    def state_if_any(self) -> ModelState | None:
        """The same; None where the layer is not converted yet, or is gone."""
        return getattr(self._module(), "_fp8_state", None)

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
    def parameter(self) -> Tensor:
        """The module's parameter: sharded or, while FSDP2 has it gathered, not."""
        return cast(Tensor, self.module._parameters[self.name])

    @property
    def parameter_part(self) -> Tensor:
        """This rank's part of the parameter."""
        part: Tensor = own_part(self.parameter)
        return part

    @property
    def local(self) -> Any:
        """The shard that its module holds, or another weight's that it is tied to; else None."""
        return local_of(self.parameter) if self.in_place else None

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

    # --- writes ----------------------------------------------------------------------------------

    def wrote(self) -> None:
        """The shard is being written."""
        self.written = True
        self.writes += 1
        if torch.cuda.is_initialized():
            # FSDP2 gathers on a stream of its own, which waits for this one only when a forward
            # of its root begins.
            self.written_on = torch.cuda.current_stream()

    @property
    def slots(self) -> tuple[Tensor, Tensor] | None:
        """Of delayed scaling: the next scale (0: none yet), and where amaxes are noted."""
        state = self.state_if_any
        if state is None or state.delayed is None or not self.in_place:
            return None
        module: Any = self.module
        keep_local(module._buffers)
        return module.fp8_scale[0, 0], module.fp8_amax[0, 0]

    @property
    def has_scale(self) -> bool:
        """Of delayed scaling: that scale is known not to be 0, without a look at it."""
        return bool(cast(Any, self.module).fp8_ready[0])

    def __deepcopy__(self, memo: dict[int, Any]) -> Weight:
        """That of the copied module, if one is being copied; else the same."""
        copy = memo.get(id(self._module()))
        if copy is None:
            return self
        found = memo.get(id(self))
        if found is None:
            found = memo[id(self)] = self._of(copy)
        return cast(Weight, found)

    def _of(self, module: nn.Module) -> Weight:
        """The copy's, of a copy of the module."""
        return type(self)(module, self.name)


def local_of(parameter: Any) -> Any:
    """The local tensor behind a parameter that is gathered in FP8; None if it is another.

    A `MasterWeight`, or a `Sharded` one: it says by ``_weight`` whose it is, and has the plain or
    the quantized tensor as ``shard``.
    """
    local = own_part(parameter)
    return local if isinstance(getattr(local, "_weight", None), Weight) else None


def wait_for_writes(weights: Sequence[Weight]) -> None:
    """Have the current stream see what other streams have written to the weights."""
    for on in {weight.written_on for weight in weights} - {None}:
        assert on is not None
        current = torch.cuda.current_stream(on.device)
        if isinstance(on, torch.cuda.Event):
            current.wait_event(on)
        elif current != on:
            current.wait_stream(on)
    for weight in weights:
        weight.written_on = None


def mark_writes(weights: Iterable[Weight]) -> None:
    """Have streams that wait for what was written to the weights wait for nothing after now."""
    events: dict[torch.cuda.Stream, torch.cuda.Event] = {}
    for weight in weights:
        stream = weight.written_on
        if isinstance(stream, torch.cuda.Stream):
            if stream not in events:
                events[stream] = torch.cuda.Event()
                events[stream].record(stream)
            weight.written_on = events[stream]
