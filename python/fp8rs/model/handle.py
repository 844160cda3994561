"""The identity, the write counter and the scale of one FP8 parameter."""

from __future__ import annotations

import weakref
from typing import Any, Protocol, cast

from torch import Tensor, nn

from fp8rs._torch import dtensor_spec, gathered_parameters, own_part, reshard
from fp8rs.scaling.histories import WeightSlots, WrittenValues, fit_history
from fp8rs.tensor.quantized import OWN_ATTRIBUTES, QuantizedTensor

from .shard_spec import ShardSpec
from .state import ModelState, state_of

#: The name of a parameter that was replaced by a DTensor, as an attribute of the old parameter.
_REPLACED = "_fp8_replaced"

#: Attributes of quantized tensors, master weights and DTensors, which users have not set.
_INTERNAL_ATTRIBUTES = OWN_ATTRIBUTES | {
    "high_precision",
    "_handle",
    "_local_tensor",
    "_spec",
    _REPLACED,
}


#: All handles of live modules.
_handles: weakref.WeakSet[ParamHandle] = weakref.WeakSet()


class LocalTensor(Protocol):
    """A local tensor with all-gather hooks: a `MasterWeight` or a `Float8Shard` of `fp8rs.fsdp`."""

    @property
    def _handle(self) -> ParamHandle: ...


class AllGatherInputs(Protocol):
    """What FSDP2 gathers of one parameter: the `fp8rs.fsdp.layout.AllGatherMetadata`."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors to gather."""


class AllGatherUnit(Protocol):
    """The parameters that FSDP2 gathers together: the `fp8rs.fsdp.gather_unit.GatherUnit`.

    A handle notifies it of writes to the shard.
    """

    def all_gather_inputs(self, local: LocalTensor) -> AllGatherInputs:
        """Return the tensors that FSDP2 gathers for a local tensor."""

    def shard_written(self, handle: ParamHandle) -> None:
        """Notify that an operator wrote to the shard."""

    def scale_invalidated(self, handle: ParamHandle, *, keep_codes: bool) -> None:
        """Notify that the shard may have changed without an operator."""

    def note_stream(self) -> None:
        """Note that the current CUDA stream writes to shards, without a change of values."""


class AllGatherUnits(Protocol):
    """Builds the units of a model: the `fp8rs.fsdp.sharded_model.ShardedModel`."""

    def unit_of(self, handle: ParamHandle) -> AllGatherUnit:
        """Return the unit of a sharded parameter."""

    def note_stream(self) -> None:
        """Note that the current CUDA stream writes to shards that have no unit yet."""


class ParamHandle:
    """One FP8 parameter of one module.

    FSDP2 may replace the sharded tensor at any time, so state lives here rather than on the tensor.
    A converted module has its handles in ``_fp8_params``, and every local tensor with all-gather
    hooks refers to the handle of its parameter. Handles compare by identity.

    Attributes:
        name: the parameter's name in its module.
        writes: number of times that operators wrote to the shard.
        scale: for formats with one scale per tensor, the scale () of the whole parameter, or for a
            batched parameter (E, N, K) the scales (E,) of the shard's matrices. If a batched
            parameter is on Shard(1), all its scales, in every format.
        amaxes: amaxes of the blocks that the shard touches, if other ranks need them too: shard
            boundaries split blocks, or a batch is on Shard(1).
        scale_forward_id: the forward of the root module that ``scale`` and ``amaxes`` were computed
            for. -1 if there was none, or if the shard was or may have been written since.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self.name = name
        self._unit: weakref.ref[AllGatherUnit] | None = None
        self.writes = 0
        self.scale: Tensor | None = None
        self.amaxes: Tensor | None = None
        self.scale_forward_id = -1
        self._shard_spec: ShardSpec | None = None
        #: The specification of the DTensor that `_shard_spec` describes.
        self._dtensor_spec: object = None
        _handles.add(self)

    # --- the parameter ---------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The module that has the parameter. RuntimeError if it no longer exists."""
        module = self._module()
        if module is None:
            raise RuntimeError("the module that this weight belongs to no longer exists")
        return module

    def belongs_to(self, module: nn.Module) -> bool:
        """Return whether this is the handle of one of the module's own parameters."""
        return self._module() is module

    @property
    def state(self) -> ModelState:
        """The state of the converted model."""
        return cast(ModelState, self.module._fp8_state)

    @property
    def state_if_any(self) -> ModelState | None:
        """The state of the converted model. None before conversion or without the module."""
        return state_of(self._module())

    @property
    def index(self) -> int:
        """The module's index among the layers of the converted model."""
        return cast(int, self.module._fp8_index)

    @property
    def fqn(self) -> str:
        """The fully qualified name, for messages."""
        return f"{self.state.names[self.index]}.{self.name}".lstrip(".")

    @property
    def has_parameter(self) -> bool:
        """Whether the module has a parameter of this name.

        weight_norm, pruning and parametrizations move it to another name. It is then an ordinary
        parameter that the weight is computed from.
        """
        module = self._module()
        return module is not None and module._parameters.get(self.name) is not None

    @property
    def parameter(self) -> Any:
        """The module's parameter: sharded, or unsharded while FSDP2 has it gathered."""
        return self.module._parameters[self.name]

    @property
    def parameter_part(self) -> Any:
        """This rank's part of the parameter."""
        return own_part(self.parameter)

    @property
    def local(self) -> Any:
        """The local tensor with all-gather hooks that the module holds now, or None.

        If the parameter is tied, the handle of the local tensor may be another module's.
        """
        module = self._module()
        return None if module is None else local_of(module._parameters.get(self.name))

    @property
    def is_sharded(self) -> bool:
        """Whether the module holds a shard with all-gather hooks."""
        return self.local is not None

    @property
    def sharded_model(self) -> Any:
        """The `fp8rs.fsdp.sharded_model.ShardedModel`. None unless the module holds a shard."""
        state = self.state_if_any
        return state.sharded_model if state is not None and self.is_sharded else None

    @property
    def shard_spec(self) -> ShardSpec:
        """How the parameter is sharded, or was sharded before the module held it unsharded."""
        parameter = self.parameter
        spec = dtensor_spec(parameter)
        # Reading a mesh's groups is slow. The DTensor's specification stays the same object.
        if self._shard_spec is None or spec is not self._dtensor_spec:
            if local_of(parameter) is not None:
                self._shard_spec = ShardSpec.from_dtensor(parameter)
                self._dtensor_spec = spec
            assert self._shard_spec is not None, f"{self.fqn} is not sharded"
        return self._shard_spec

    @property
    def was_sharded(self) -> bool:
        """Whether `shard_spec` was read before, so that it is also available while gathered."""
        return self._shard_spec is not None

    @property
    def unit(self) -> AllGatherUnit:
        """The sharded parameters that FSDP2 gathers together with this one, built on first use."""
        unit = self.unit_if_any
        if unit is None:
            unit = cast(AllGatherUnits, self.state.sharded_model).unit_of(self)
        return unit

    @property
    def unit_if_any(self) -> AllGatherUnit | None:
        """The parameter's unit. None before the first all-gather, and after the model changed."""
        return None if self._unit is None else self._unit()

    def set_unit(self, unit: AllGatherUnit | None) -> None:
        """Set the parameter's unit. None to build it again at the next all-gather.

        The sharded model owns the unit. Copies of a weight refer to the handle, and must not keep
        the model alive.
        """
        self._unit = None if unit is None else weakref.ref(unit)

    def reshard(self) -> None:
        """Make modules hold their shards again if FSDP2 has this weight gathered."""
        part = self.parameter_part
        root = self.state.root
        if isinstance(part, QuantizedTensor) and part._storage.gathered and root is not None:
            reshard(root)

    # --- writes ----------------------------------------------------------------------------------

    @property
    def written(self) -> bool:
        """Whether the shard was, or may have been, written since the scale was computed."""
        return self.scale_forward_id == -1

    def is_stale(self, forward_id: int) -> bool:
        """Return whether the scale was computed before a write or for an earlier forward."""
        return self.scale_forward_id < forward_id

    def invalidate_scale(self, *, keep_codes: bool = False) -> None:
        """Mark the scale as stale: the values may have changed without an operator."""
        self.scale_forward_id = -1
        unit = self.unit_if_any
        if unit is not None:
            unit.scale_invalidated(self, keep_codes=keep_codes)

    def mark_written(self) -> None:
        """Count a write to the shard by an operator."""
        self.writes += 1
        self.scale_forward_id = -1
        unit = self.unit_if_any
        if unit is not None:
            unit.shard_written(self)
        else:
            self.note_stream()

    def note_stream(self) -> None:
        """Note that the current CUDA stream writes to the shard. All-gathers wait for it."""
        unit = self.unit_if_any
        if unit is not None:
            unit.note_stream()
            return
        # The next all-gather builds the unit, and the model tells it which streams have written.
        state = self.state_if_any
        if state is not None and state.sharded_model is not None:
            cast(AllGatherUnits, state.sharded_model).note_stream()

    # --- delayed scaling -------------------------------------------------------------------------

    @property
    def slots(self) -> WeightSlots | None:
        """With delayed scaling, the next scale and the recorded amax.

        A batched parameter has none: each of its matrices has a scale of its values.
        """
        state = self.state_if_any
        if state is None or state.delayed is None:
            return None
        module = cast(Any, self.module)
        parameter = module._parameters.get(self.name)
        if parameter is None or own_part(parameter).dim() > 2:
            return None
        scales, amaxes = module._fp8_slots.get(module._buffers)
        return WeightSlots(scales[0], amaxes[0])

    def fit_history(
        self,
        scale: Tensor,
        amax: Tensor,
        *,
        exact: bool = False,
        partial: bool = False,
        changed: Tensor | None = None,
    ) -> None:
        """With delayed scaling, fit the history to written values (`fp8rs.scaling.histories`).

        Args:
            scale: the scale of the written values, fp32, one element.
            amax: their amax, fp32, one element.
            exact: whether the amax is that of high-precision values.
            partial: whether other ranks have elements of the parameter.
            changed: whether the write changed any value, bool (). None if it was not compared.
        """
        slots = self.slots
        if slots is not None:
            history = cast(Tensor, self.module._buffers["fp8_amax_history"])[:, 0]
            values = WrittenValues(scale, amax, exact=exact, partial=partial, changed=changed)
            fit_history(slots, history, values)

    # --- copies ----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamHandle:
        """Return the copied module's handle, or this one if only a tensor is copied."""
        copy = memo.get(id(self._module()))
        return self if copy is None else self._copy_for(copy)

    def _copy_for(self, module: nn.Module) -> ParamHandle:
        """Return the handle of the same parameter in a copy of the module."""
        return type(self)(module, self.name)

    def __reduce__(self) -> Any:
        return ParamHandle, (self.module, self.name)


def fp8_parameter_ids() -> set[int]:
    """Return the ids of the parameters that FP8 layers of this process or optimizers hold.

    While FSDP2 has a parameter gathered, its module holds the gathered one and an optimizer the
    shard. The ids of both are returned.
    """
    ids: set[int] = set()
    sharded_roots: set[nn.Module | None] = set()
    for handle in list(_handles):
        if handle.has_parameter:
            ids.add(id(handle.parameter))
            state = handle.state_if_any
            if state is not None and state.sharded_model is not None:
                sharded_roots.add(state.root)

    for root in sharded_roots:
        for gathered, shard in gathered_parameters(root):
            if id(gathered) in ids:
                ids.add(id(shard))
    return ids


def local_of(parameter: Any) -> Any:
    """Return the local tensor of a parameter if it has all-gather hooks, else None.

    It is a `MasterWeight` or a `Float8Shard`. Its ``_handle`` is the parameter's handle.
    """
    local = own_part(parameter)
    return local if isinstance(getattr(local, "_handle", None), ParamHandle) else None


def copy_attributes(attributes: dict[str, Any], parameter: Any) -> None:
    """Copy attributes that users have set on a parameter to the one that replaces it."""
    for name, value in attributes.items():
        if name not in _INTERNAL_ATTRIBUTES and name not in parameter.__dict__:
            setattr(parameter, name, value)


def mark_replaced(parameter: nn.Parameter, fqn: str) -> None:
    """Mark a parameter that FSDP2 or tensor parallelism replaces by a DTensor.

    The mark lets an optimizer that still holds the parameter report it.

    Args:
        parameter: the parameter that the module holds until now.
        fqn: its fully qualified name.
    """
    parameter.__dict__[_REPLACED] = fqn


def replaced_name(parameter: Tensor) -> str | None:
    """Return the name of a parameter that was replaced by a DTensor. None for other parameters."""
    return getattr(parameter, _REPLACED, None)
