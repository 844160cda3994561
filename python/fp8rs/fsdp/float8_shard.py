"""FP8 weights under FSDP2: the local tensor, the handle that observes its writes, padded shards.

A `Float8Shard` is gathered as it is stored. A write quantizes with the scale of this rank's values
alone and never starts a collective. It marks the `Float8ParamHandle` as unsynced.
`fp8rs.fsdp.scale_sync` synchronizes the scales that shards share.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from fp8rs._torch import is_distributed, is_traced, own_part, sharded_parameters
from fp8rs.model.handle import ParamHandle
from fp8rs.model.shard_spec import ShardSpec, local_part
from fp8rs.quantize.formats import split_batch
from fp8rs.quantize.spec import QuantSpec
from fp8rs.tensor.plane_storage import PlaneStorage, Write, WriteKind
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.rounding import rounds_to_codes

from .hooks import PreAllGather, post_all_gather
from .layout import AllGatherLayout

#: Kinds of writes whose values do not depend on the values from before.
_REPLACING_WRITES = (WriteKind.VALUES, WriteKind.COPY)


class Float8Shard(QuantizedTensor):
    """A quantized shard. Its codes and scales are the bytes that FSDP2 gathers."""

    fsdp_pre_all_gather = property(PreAllGather)
    fsdp_post_all_gather = post_all_gather

    @property
    def _handle(self) -> Float8ParamHandle:
        return cast(Float8ParamHandle, self._storage.observer)

    @property
    def _is_weight(self) -> bool:
        """Whether this object is the local tensor of the parameter, and not a view or a copy."""
        return self._handle.has_parameter and self is self._handle.parameter_part


class MasterSource(Protocol):
    """An optimizer that keeps masters of FP8 weights (`fp8rs.optim.masters`)."""

    def local_master(self, parameter: Tensor) -> Tensor | None:
        """Return the master of this rank's part of a parameter, float32, or None."""

    def is_current(self, parameter: Tensor) -> bool:
        """Return whether a parameter's master includes all writes to the parameter."""

    def mark_current(self, parameter: Tensor) -> None:
        """Record that a parameter's master includes all writes to the parameter."""


@dataclass(frozen=True)
class MasterRef:
    """Where the master of an FP8 weight is.

    Attributes:
        source: the optimizer that keeps it.
        parameter: the parameter of the optimizer. It is not a weak reference, because torch does
            not swap the tensor of a parameter that has one.
    """

    source: weakref.ref[MasterSource]
    parameter: Tensor


class Float8ParamHandle(ParamHandle):
    """The handle of an FP8 weight, sharded or not (`fp8rs.tensor.plane_storage.WriteObserver`).

    Attributes:
        unsynced: whether this rank wrote the shard since scales were last synchronized.
        pending: the values of the last write if it replaced the whole shard, in high precision.
            They are rounded again if the synchronization changes the scale, so that each value is
            rounded only once. None if no scale is shared or the shard was written otherwise.
        keep_init: whether to keep values from before they are rounded, for masters.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module, name)
        self.unsynced = False
        self.keep_init = False
        self.pending: Tensor | None = None
        self._init_value: Tensor | None = None
        self._master: MasterRef | None = None

    def _copy_for(self, module: nn.Module) -> Float8ParamHandle:
        new = Float8ParamHandle(module, self.name)
        new.unsynced = self.unsynced
        new.keep_init = self.keep_init
        # Nothing writes to the pending values, so the copy can share them.
        new.pending = self.pending
        if self._init_value is not None:
            new._init_value = self._init_value.clone()
        return new

    # --- the parameter ---------------------------------------------------------------------------

    @property
    def quant_spec(self) -> QuantSpec:
        """How the weight is quantized."""
        return cast(QuantSpec, self.parameter_part.spec)

    @property
    def shares_scales(self) -> bool:
        """Whether several ranks have elements of one scale of the weight."""
        if not self.is_sharded and not self.was_sharded:
            return False
        spec = self.quant_spec
        return AllGatherLayout(spec.format, spec.fp8_dtype).shares_scales(self.shard_spec)

    @property
    def element_offsets(self) -> tuple[int, ...]:
        """The indices of this rank's first elements: see `ShardSpec`."""
        if self.local is not None:
            return self.shard_spec.element_offsets
        # A layer that was made with a recipe is sharded without all-gather hooks.
        if self.has_parameter and is_distributed(self.parameter):
            return ShardSpec.from_dtensor(self.parameter).element_offsets
        return (0,)

    # --- writes ----------------------------------------------------------------------------------

    def observes(self, storage: PlaneStorage) -> bool:
        """Return whether planes belong to the weight, and not to a copy of it."""
        if not self.has_parameter:
            return False
        parameter_storage = getattr(self.parameter_part, "_storage", None)
        if parameter_storage is not None and parameter_storage.observer is self:
            return parameter_storage is storage

        # FSDP2 has the weight gathered. It may also have wrapped a module above the root.
        state = self.state_if_any
        root = None if state is None else state.root
        is_sharded = False
        for parameter in sharded_parameters(root):
            local = own_part(parameter)
            if isinstance(local, QuantizedTensor) and local._storage.observer is self:
                if local._storage is storage:
                    return True
                is_sharded = True
        return not is_sharded

    @property
    def detects_lost_writes(self) -> bool:
        """Whether to find out if arithmetic is lost to rounding, to warn of it."""
        state = self.state_if_any
        return state is not None and state.lost_writes.detects

    def observe_write(self, tensor: QuantizedTensor, write: Write) -> None:
        """Note that an operator wrote to the weight. Runs no collective."""
        self.mark_written()
        self.unsynced = True
        if tensor.is_meta:
            return

        # Keep the values from before rounding up to date.
        if write.kind is WriteKind.EXACT_ARITHMETIC:
            self._store_exact_values(tensor, cast(Tensor, write.values))
        elif self.keep_init:  # until an optimizer reads them
            self._update_init_value(tensor, write)

        # The scale that the values were rounded with may change at the synchronization. Keep the
        # values until then, to round them again.
        shares_scales = self.shares_scales
        replaces_shard = write.kind in _REPLACING_WRITES and tensor.is_whole
        if replaces_shard and shares_scales:
            self.pending = _as_planes_of(tensor, cast(Tensor, write.values)).clone()

        # With delayed scaling, the next scale must fit these values too. If the scale is shared, or
        # if only a part of the weight was written, other elements may have a larger amax. The
        # synchronization fits the history to the values of all ranks.
        if self.slots is not None and tensor.numel():
            is_partial = shares_scales or not tensor.is_whole
            self.fit_history(
                tensor._storage.any_plane.scale,
                _amax_after(tensor, write),
                exact=replaces_shard and not is_partial,
                partial=is_partial,
                changed=write.changed,
            )

        if write.lost is not None:
            self.state.lost_writes.add(write.lost, self.fqn)

    def mark_written(self) -> None:
        """Note a write that left the same scales on all ranks. Other writes set ``unsynced``."""
        super().mark_written()
        self.unsynced = False
        self.pending = None

    def mark_synced(self) -> None:
        """Note that all ranks have the same scales now, and free pending values.

        The shard may have been rounded again, to a scale of other ranks. This is not a write: the
        values are the same, so masters stay.
        """
        pending = self.pending
        if pending is not None and pending.is_cuda and not is_traced(pending):
            # An all-gather stream may read what another stream allocated.
            pending.record_stream(torch.cuda.current_stream(pending.device))
        self.unsynced = False
        self.pending = None
        self.note_stream()

    # --- values from before rounding -------------------------------------------------------------

    def exact_values(self, tensor: QuantizedTensor) -> Tensor | None:
        """Return the values that codes were rounded from: see `WriteObserver`."""
        storage = tensor._storage
        if is_traced(storage.any_plane.data) or tensor.is_meta:
            return None
        source = self._master_source()
        if self._master is None or source is None:
            exact = self.init_value
        elif source.is_current(self._master.parameter):
            exact = source.local_master(self._master.parameter)
        else:
            # Other code has written the weight, and may write its codes back.
            exact = None
        if exact is None or exact.numel() != math.prod(storage.matrix):
            return None
        return elements_of(exact, tensor).to(tensor.device, torch.float32)

    def _store_exact_values(self, tensor: QuantizedTensor, values: Tensor) -> None:
        """Write the results of exact arithmetic to where `exact_values` read its operands."""
        source = self._master_source()
        if self._master is None or source is None:
            exact = cast(Tensor, self.init_value)
            elements_of(exact, tensor).copy_(values)
        else:
            exact = cast(Tensor, source.local_master(self._master.parameter))
            elements_of(exact, tensor).copy_(values)
            source.mark_current(self._master.parameter)

    def _master_source(self) -> MasterSource | None:
        """Return the optimizer that keeps the master, or None if there is none any more."""
        return None if self._master is None else self._master.source()

    def use_master(self, optimizer: MasterSource, parameter: Tensor) -> None:
        """Take exact values from an optimizer's master, and free those from before conversion."""
        self.forget_init()
        self._master = MasterRef(weakref.ref(optimizer), parameter)

    @property
    def init_value(self) -> Tensor | None:
        """The values from before the first rounding that this rank holds, on the CPU, or None."""
        value = self._init_value
        if value is None or not self.has_parameter:
            return value
        # Tensor parallelism replaces the parameter by a DTensor without a notification.
        parameter = self.parameter
        is_sharded = parameter.shape != self.parameter_part.shape
        if is_sharded and value.shape == parameter.shape:
            self.init_value = local_part(value, parameter)
        return self._init_value

    @init_value.setter
    def init_value(self, value: Tensor | None) -> None:
        self._init_value = None if value is None else value.contiguous()

    def _update_init_value(self, tensor: QuantizedTensor, write: Write) -> None:
        """Replace the initial values of the elements that a write changed, or drop all of them.

        A copy of the weight's own rounded values, such as DDP's first broadcast, changes none.
        """
        storage = tensor._storage
        if is_traced(storage.any_plane.data):
            # Compiled code writes without a notification, so the values cannot be kept up to date.
            self.init_value = None
            return

        init_value = self.init_value
        if init_value is None:
            # The values of the whole weight are its new initial values.
            if write.values is not None and tensor.is_whole:
                self.init_value = write.values.detach().to("cpu", copy=True)
            return

        # The values are found by position, so the written elements must be consecutive. Columns of
        # a shard, which DCP may load, are not.
        if init_value.numel() != math.prod(storage.matrix) or not tensor.is_contiguous():
            self.init_value = None
            return

        old_values = elements_of(init_value, tensor)
        written_values = write.values
        if written_values is None:
            written_values = tensor.dequantize(torch.float32)
        new_values = written_values.detach().cpu()
        unchanged = _unchanged_elements(tensor, write, old_values)
        if unchanged is not None:
            new_values = torch.where(unchanged.cpu(), old_values, new_values)

        if tensor.is_whole:
            # Replace the tensor, because the written values may have another dtype.
            self.init_value = new_values.reshape(init_value.shape).clone()
        else:
            old_values.copy_(new_values)

    def forget_values(self) -> None:
        """Free the values that the codes were rounded from, because the weight moved to meta.

        After ``to_empty`` the weight is zero. A write of zeros changes nothing in it, so it would
        leave the values from before the move in their place.
        """
        self.init_value = None
        self.pending = None

    def forget_init(self) -> None:
        """Free the values from before the first rounding, and keep no others."""
        self.init_value = None
        self.keep_init = False


def _as_planes_of(tensor: QuantizedTensor, values: Tensor) -> Tensor:
    """View the values of a whole weight in the shape in which its planes store them."""
    storage = tensor._storage
    if storage.rowwise is None:
        return values.reshape(storage.matrix)
    return values.reshape(storage.rowwise.data.shape)


def _amax_after(tensor: QuantizedTensor, write: Write) -> Tensor:
    """Return the amax () of written values, or of the codes if a write has no values. fp32."""
    if write.values is None:
        return codes_amax(tensor._storage)
    return values_amax(write.values)


def _unchanged_elements(tensor: QuantizedTensor, write: Write, old_values: Tensor) -> Tensor | None:
    """Return where a write left the elements of a tensor as they were. None if it replaced all.

    Args:
        tensor: the tensor, after the write.
        write: the write.
        old_values: the values from before rounding that the tensor had before the write.
    """
    if write.kind in (WriteKind.CODES, WriteKind.ARITHMETIC):
        # The write came from rounded values. A value that rounds to the new code has not changed.
        return rounds_to(old_values.to(tensor.device, torch.float32), tensor)
    return write.unchanged


def values_amax(values: Tensor) -> Tensor:
    """Return the amax () of values, fp32."""
    low, high = values.detach().aminmax()
    return torch.maximum(-low, high).float()


def codes_amax(storage: PlaneStorage) -> Tensor:
    """Return the amax () of codes with one scale, fp32."""
    plane = storage.any_plane
    magnitudes = plane.data.view(torch.uint8) & 0x7F
    largest = magnitudes.amax().view(plane.data.dtype)
    return largest.float() * plane.scale.view(())


def elements_of(values: Tensor, tensor: QuantizedTensor) -> Tensor:
    """Return the elements of a weight's values that a view of the weight has, as a view.

    Args:
        values: values in high precision, in the order of the weight's elements.
        tensor: a view of consecutive elements, or the weight itself.
    """
    flat = values.view(-1)
    return flat.narrow(0, int(tensor.storage_offset()), tensor.numel()).view(tensor.shape)


def rounds_to(values: Tensor, tensor: QuantizedTensor) -> Tensor:
    """Return where values round to the codes of a tensor. Nowhere if it has parts of blocks."""
    planes = tensor.planes
    if planes == (None, None):
        return torch.zeros_like(values, dtype=torch.bool)
    batch, matrix = split_batch(tensor.shape, tensor._storage.batched)
    return rounds_to_codes(planes, values.view(*batch, *matrix)).view(values.shape)


def handle_for(module: nn.Module, name: str, parameter: Tensor | None = None) -> ParamHandle:
    """Return the handle of a module's parameter, which is created if there is none.

    Args:
        module: the module.
        name: the name of the parameter.
        parameter: the tensor that is about to become the parameter. By default, the one that is.
    """
    if parameter is None:
        parameter = module._parameters.get(name)
    local = own_part(parameter)

    # The planes of an FP8 weight refer to the handle, which observes writes to them. If the module
    # or the weight was copied, they may refer to the handle of another module.
    if isinstance(local, QuantizedTensor):
        observer = local._storage.observer
        if isinstance(observer, Float8ParamHandle) and observer.belongs_to(module):
            return observer
        float8_handle = Float8ParamHandle(module, name)
        local._storage.observer = float8_handle
        return float8_handle

    # The module refers to the handle of any other weight. A weight that was FP8 before has a
    # `Float8ParamHandle`, and a copied module has the handles of the original.
    handles: dict[str, ParamHandle] = module.__dict__.get("_fp8_params", {})
    handle = handles.get(name)
    if type(handle) is ParamHandle and handle.belongs_to(module):
        return handle
    return ParamHandle(module, name)
