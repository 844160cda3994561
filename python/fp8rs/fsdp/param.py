"""The handle of one FP8 parameter: its shard, its scale, and the writes to it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8rs._torch import dtensor_spec, own_part, reshard
from fp8rs.model.shard_spec import ShardSpec
from fp8rs.model.state import ModelState, state_of
from fp8rs.scaling.histories import fit_history
from fp8rs.scaling.streams import StreamDependency
from fp8rs.tensor.quantized import QuantizedTensor

from .layout import AllGatherMetadata


class ParamHandle:
    """One FP8 parameter of one module.

    FSDP2 may replace the sharded tensor at any time, so state lives here rather than on the tensor.
    A converted module has its handles in ``_fp8_params``, and every `MasterWeight` of a parameter
    refers to the parameter's handle. Handles compare by identity.

    Attributes:
        name: the parameter's name in its module.
        writes: number of times that operators wrote to the shard.
        written_on: the CUDA stream of the last write, or an event on that stream after the write.
        scale: for formats with one scale per tensor, the scale () of the whole parameter, or for a
            batched parameter (E, N, K) the scales (E,) of the shard's matrices. If a batched
            parameter is on Shard(1), all its scales, in every format.
        amaxes: amaxes of the blocks that the shard touches, if other ranks need them too: shard
            boundaries split blocks, or a batch is on Shard(1).
        unrecorded: with delayed scaling, the amax of the shard in its last cast for a forward, if
            that was an evaluation.
        ready: the work that computed ``scale``, ``amaxes`` and ``unrecorded``.
        prepared: the shard's codes and their metadata, until the pre-all-gather hook returns them.
        kept: the codes and metadata of a forward with gradients, until its backward gathers them.
        fsdp_initialized: whether the sharded model has seen that FSDP2 has initialized.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self.name = name
        self.writes = 0
        self.written_on: torch.cuda.Stream | torch.cuda.Event | None = None
        self.scale: Tensor | None = None
        self.amaxes: Tensor | None = None
        self.unrecorded: Tensor | None = None
        self.ready: StreamDependency | None = None
        self.prepared: AllGatherMetadata | None = None
        self.kept: AllGatherMetadata | None = None
        self.fsdp_initialized = False
        #: The forward and the number of writes that the scale was computed for.
        self._forward_id = self._writes_seen = -1
        self._shard_spec: tuple[Any, ShardSpec] | None = None

    # --- the parameter ---------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The module that has the parameter. RuntimeError if it no longer exists."""
        module = self._module()
        if module is None:
            raise RuntimeError("the module that this weight belongs to no longer exists")
        return module

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
    def in_place(self) -> bool:
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
    def shard_spec(self) -> ShardSpec:
        """How the parameter is sharded, or was sharded before the module held it unsharded."""
        parameter, known = self.parameter, self._shard_spec
        # Reading a mesh's groups is slow. The DTensor's specification stays the same object.
        if known is None or dtensor_spec(parameter) is not known[0]:
            if local_of(parameter) is not None:
                known = dtensor_spec(parameter), ShardSpec.from_dtensor(parameter)
                self._shard_spec = known
            assert known is not None, f"{self.fqn} is not sharded"
        return known[1]

    def reshard(self) -> None:
        """Make modules hold their shards again if FSDP2 has this weight gathered."""
        part, root = self.parameter_part, self.state.root
        if isinstance(part, QuantizedTensor) and part._storage.gathered and root is not None:
            reshard(root)

    # --- scales and writes -----------------------------------------------------------------------

    def is_stale(self, forward_id: int, in_backward: bool) -> bool:
        """Whether the scale was computed for an earlier forward or before a write.

        Inside a backward, a scale that exists is not stale. Other ranks might not take part in the
        all-reduce of a new one, and the backward needs the bytes of its forward.
        """
        if in_backward and self.ready is not None:
            return False
        return self._forward_id < forward_id or self.written

    @property
    def written(self) -> bool:
        """Whether the shard was written since the scale was computed."""
        return self._writes_seen != self.writes

    def set_fresh(self, forward_id: int, ready: StreamDependency) -> None:
        """Mark the scale as computed from the current values of the shard, for a forward."""
        self._forward_id, self._writes_seen, self.ready = forward_id, self.writes, ready
        self.prepared = self.kept = self.written_on = None  # `ready` includes the wait for writes

    def invalidate_scale(self, keep_codes: bool = False) -> None:
        """Mark the scale as stale: the values may have changed without an operator."""
        self._writes_seen, self.kept = -1, self.kept if keep_codes else None

    def mark_written(self) -> None:
        """Count a write to the shard by an operator."""
        self.writes, self.kept = self.writes + 1, None
        self._note_stream()

    def _note_stream(self) -> None:
        """Note the current CUDA stream, which all-gathers wait for."""
        if torch.cuda.is_initialized():
            # FSDP2's all-gather streams wait for this stream only when the root's forward begins.
            self.written_on = torch.cuda.current_stream()

    # --- delayed scaling -------------------------------------------------------------------------

    @property
    def slots(self) -> tuple[Tensor, Tensor] | None:
        """With delayed scaling, the next scale (0 if there is none) and the recorded amax.

        A batched parameter has none: each of its matrices has a scale of its values.
        """
        state, module = self.state_if_any, cast(Any, self._module())
        if state is None or state.delayed is None:
            return None
        parameter = module._parameters.get(self.name)
        if parameter is None or own_part(parameter).dim() > 2:
            return None
        scales, amaxes = module._fp8_slots.get(module._buffers)
        return scales[0], amaxes[0]

    def fit_history(
        self, scale: Tensor, amax: Tensor, *, exact: bool = False, partial: bool = False
    ) -> None:
        """With delayed scaling, fit the history to written values (`fp8rs.scaling.histories`).

        Args:
            scale: the scale of the written values, fp32, one element.
            amax: their amax, fp32, one element.
            exact: whether the amax is that of high-precision values.
            partial: whether other ranks have elements of the parameter.
        """
        slots = self.slots
        if slots is not None:
            history = cast(Tensor, self.module._buffers["fp8_amax_history"])[:, 0]
            fit_history(slots, history, scale, amax, exact=exact, partial=partial)

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


def local_of(parameter: Any) -> Any:
    """Return the local tensor of a parameter if it has all-gather hooks, else None.

    It is a `MasterWeight` or a `Float8Shard`. Its ``_handle`` is the parameter's handle.
    """
    local = own_part(parameter)
    return local if isinstance(getattr(local, "_handle", None), ParamHandle) else None


@dataclass(eq=False, slots=True)
class LocalShard:
    """The values of one parameter's shard on this rank.

    Attributes:
        handle: the parameter's handle.
        data: the shard without padding, in high precision, or an FP8 weight's quantized shard.
        shard_spec: how the parameter is sharded.
        device: the mesh's device. An offloaded shard is on another one.
    """

    handle: Any
    data: Any
    shard_spec: ShardSpec
    device: torch.device

    @property
    def is_fp8(self) -> bool:
        """Whether the shard is stored quantized."""
        return isinstance(self.data, QuantizedTensor)

    @property
    def matrices(self) -> int:
        """The number of matrices that the shard has, or has parts of."""
        return int(self.data.shape[0]) if self.shard_spec.batched else 1


def set_scales(shards: Sequence[LocalShard], scales: Tensor) -> None:
    """Give each handle the scales of its matrices, of scales (n,)."""
    aligned = scales.new_empty(scales.shape[0], 4)  # GEMMs read scales at multiples of 16 bytes
    aligned[:, 0] = scales
    counts = [shard.matrices for shard in shards]
    parts = zip(shards, scales.split(counts), aligned[:, 0].split(counts), strict=True)
    for shard, batch, single in parts:
        shard.handle.scale = batch if shard.shard_spec.batched else single.view(())


def wait_for_writes(handles: Sequence[ParamHandle]) -> None:
    """Make the current stream wait for writes that other streams made to the shards."""
    for written_on in {h.written_on for h in handles if h.written_on is not None}:
        current = torch.cuda.current_stream(written_on.device)
        if isinstance(written_on, torch.cuda.Event):
            current.wait_event(written_on)
        elif current != written_on:
            current.wait_stream(written_on)


def record_write_events(handles: Iterable[ParamHandle]) -> None:
    """Record events after the writes made so far, so that waits do not include later work."""
    events: dict[torch.cuda.Stream, torch.cuda.Event] = {}
    for handle in handles:
        stream = handle.written_on
        if isinstance(stream, torch.cuda.Stream):
            if stream not in events:
                events[stream] = stream.record_event()
            handle.written_on = events[stream]
