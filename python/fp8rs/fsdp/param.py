"""The handle of one FP8 parameter, and the order of its writes on CUDA streams."""

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


class ParamHandle:
    """One FP8 parameter of one module.

    FSDP2 may replace the sharded tensor at any time, so state lives here rather than on the tensor.
    A converted module has its handles in ``_fp8_params``, and every `MasterWeight` of a parameter
    refers to the parameter's handle. Handles compare by identity.

    Attributes:
        name: the parameter's name in its module.
        written: an operator wrote to the shard since it was last quantized.
        written_on: the CUDA stream of the last write, or an event on that stream after the write.
        writes: number of writes to the shard.
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

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamHandle:
        """Return the copied module's handle, or this one if only a tensor is copied."""
        copy = memo.get(id(self._module()))
        if copy is None:
            return self
        found = memo.get(id(self))
        if found is None:
            found = memo[id(self)] = self._of(copy)
        return cast(ParamHandle, found)

    def _of(self, module: nn.Module) -> ParamHandle:
        """Return the handle of the same parameter in a copy of the module."""
        return type(self)(module, self.name)

    def __reduce__(self) -> Any:
        return ParamHandle, (self.module, self.name)


def handles_of(module: nn.Module, names: Iterable[str]) -> dict[str, ParamHandle]:
    """Return the handles of a module's FP8 parameters by name.

    The owner of a quantized parameter's planes is its handle already.
    """
    handles: dict[str, ParamHandle] = {}
    for name in names:
        store = getattr(own_part(module._parameters.get(name)), "_store", None)
        owner = getattr(store, "owner", None)
        if not isinstance(owner, ParamHandle) or owner._module() is not module:
            owner = ParamHandle(module, name)
        handles[name] = owner
    return handles


def local_of(parameter: Any) -> Any:
    """The local tensor behind a parameter that is gathered in FP8; None if it is another.

    A `MasterWeight`, or a `Sharded` one: it says by ``_weight`` whose it is, and has the plain or
    the quantized tensor as ``shard``.
    """
    local = own_part(parameter)
    return local if isinstance(getattr(local, "_weight", None), ParamHandle) else None


def wait_for_writes(weights: Sequence[ParamHandle]) -> None:
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


def mark_writes(weights: Iterable[ParamHandle]) -> None:
    """Have streams that wait for what was written to the weights wait for nothing after now."""
    events: dict[torch.cuda.Stream, torch.cuda.Event] = {}
    for weight in weights:
        stream = weight.written_on
        if isinstance(stream, torch.cuda.Stream):
            if stream not in events:
                events[stream] = torch.cuda.Event()
                events[stream].record(stream)
            weight.written_on = events[stream]
