"""FP8 weights under FSDP2: the local tensor, the handle that observes its writes, padded shards.

A `Float8Shard` is gathered as it is stored. A write quantizes with the scale of this rank's values
alone and never starts a collective. It marks the `Float8ParamHandle` as unsynced.
`fp8rs.fsdp.scale_sync` synchronizes the scales that shards share.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8rs._torch import is_distributed, is_traced, own_part, sharded_parameters
from fp8rs.scaling.histories import set_next_scales
from fp8rs.tensor.plane_storage import PlaneStorage
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.spec import QuantSpec

from .master_weight import post_all_gather, pre_all_gather
from .param import ParamHandle
from .shard_spec import ShardSpec, local_part


class Float8Shard(QuantizedTensor):
    """A quantized shard. Its codes and scales are the bytes that FSDP2 gathers."""

    fsdp_pre_all_gather = property(pre_all_gather)
    fsdp_post_all_gather = post_all_gather

    @property
    def _handle(self) -> Float8ParamHandle:
        return cast(Float8ParamHandle, self._storage.observer)

    @property
    def _is_weight(self) -> bool:
        """Whether this object is the local tensor of the parameter, and not a view or a copy."""
        return self._handle.in_place and self is self._handle.parameter_part


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
        self.unsynced = self.keep_init = False
        self.pending: Tensor | None = None
        self._init_value: Tensor | None = None

    def _copy_for(self, module: nn.Module) -> Float8ParamHandle:
        new = Float8ParamHandle(module, self.name)
        new.unsynced, new.keep_init = self.unsynced, self.keep_init
        # Nothing writes to these tensors, so the copy can share them.
        new.pending, new._init_value = self.pending, self._init_value
        return new

    # --- the parameter ---------------------------------------------------------------------------

    @property
    def quant_spec(self) -> QuantSpec:
        """How the weight is quantized."""
        return cast(QuantSpec, self.parameter_part.spec)

    @property
    def sharded_model(self) -> Any:
        """The `fp8rs.fsdp.sharded_model.ShardedModel`. None unless the module holds a shard."""
        state = self.state_if_any
        return None if state is None or self.local is None else state.ensure_sharded_model()

    @property
    def shares_scales(self) -> bool:
        """Whether several ranks have elements of one scale of the weight."""
        if self.local is None and self._shard_spec is None:
            return False
        return bool(self.state.ensure_sharded_model().quantizer.shares_scales(self.shard_spec))

    @property
    def element_offsets(self) -> tuple[int, ...]:
        """The indices of this rank's first elements: see `ShardSpec`."""
        if self.local is not None:
            return self.shard_spec.element_offsets
        # A layer that was made with a recipe is sharded without all-gather hooks.
        sharded = self.in_place and is_distributed(self.parameter)
        return ShardSpec.from_dtensor(self.parameter).element_offsets if sharded else (0,)

    # --- writes ----------------------------------------------------------------------------------

    def observes(self, storage: PlaneStorage) -> bool:
        """Return whether planes belong to the weight, and not to a copy of it."""
        if not self.in_place:
            return False
        known = getattr(self.parameter_part, "_storage", None)
        if known is not None and known.observer is self:
            return known is storage
        # FSDP2 has the weight gathered. It may also have wrapped a module above the root.
        state = self.state_if_any
        parts = map(own_part, sharded_parameters(None if state is None else state.root))
        shards = (part._storage for part in parts if isinstance(part, QuantizedTensor))
        own = [shard for shard in shards if shard.observer is self]
        return not own or storage in own

    def observe_write(self, tensor: QuantizedTensor, values: Tensor | None, exact: bool) -> None:
        """Note that an operator wrote to the weight. Runs no collective.

        Args:
            tensor: the weight, or a tensor that shares its planes.
            values: the values that it has now, in high precision and in its shape. None if codes
                and scales were copied.
            exact: whether each value was rounded by itself. In-place arithmetic instead keeps the
                codes of elements that it does not change.
        """
        self.mark_written()
        self.unsynced = True
        if values is not None and tensor.is_whole and not values.is_meta:
            row = tensor._storage.rowwise
            values = values.reshape(tensor._storage.matrix if row is None else row.data.shape)
        else:
            values = None
        if self.keep_init:  # until an optimizer reads them
            self.init_value = None if values is None else values.detach().to("cpu", copy=True)
        if values is not None and not self.shares_scales:
            self.start_history_from(values)
        elif values is not None and exact:
            self.pending = values.clone()
        storage = getattr(self.parameter_part, "_storage", None)
        # A gathered weight has no observer.
        if storage is not None and storage.observer is self and not tensor.is_meta:
            # The next write would otherwise saturate with a scale from before these values.
            set_next_scales([self.slots], [storage.any_plane.scale.view(-1)], self.quant_spec)

    def mark_written(self) -> None:
        """Note a write that left the same scales on all ranks. Other writes set ``unsynced``."""
        super().mark_written()
        self.unsynced, self.pending = False, None

    def mark_synced(self) -> None:
        """Note that all ranks have the same scales now, and free pending values.

        The shard may have been rounded again, to a scale of other ranks. This is not a write: the
        values are the same, so masters stay.
        """
        pending = self.pending
        if pending is not None and pending.is_cuda and not is_traced(pending):
            # An all-gather stream may read what another stream allocated.
            pending.record_stream(torch.cuda.current_stream(pending.device))
        self.unsynced, self.pending = False, None
        self._note_stream()

    # --- delayed scaling -------------------------------------------------------------------------

    def start_history_from(self, values: Tensor) -> None:
        """With delayed scaling, start the history of a whole weight with the amax of its values."""
        if self.slots is None or values.is_meta or not values.numel():
            return
        with torch.no_grad():
            low, high = values.detach().aminmax()
            amax = torch.maximum(-low, high).float()
            self.start_history(self.quant_spec.scale_from_amax(amax), amax)

    # --- values from before the first rounding ---------------------------------------------------

    @property
    def init_value(self) -> Tensor | None:
        """The values from before the first rounding that this rank holds, on the CPU, or None."""
        value = self._init_value
        if value is None or not self.in_place:
            return value
        # Tensor parallelism replaces the parameter by a DTensor without a notification.
        if value.shape == self.parameter.shape != self.parameter_part.shape:
            self._init_value = local_part(value, self.parameter)
        return self._init_value

    @init_value.setter
    def init_value(self, value: Tensor | None) -> None:
        self._init_value = value

    def forget_init(self) -> None:
        """Free the values from before the first rounding, and keep no others."""
        self.init_value, self.keep_init = None, False


def handle_for(module: nn.Module, name: str, parameter: Any = None) -> ParamHandle:
    """Return the handle of a module's parameter. The handle of an FP8 weight observes its writes.

    Args:
        module: the module.
        name: the name of the parameter.
        parameter: the tensor that is about to become the parameter. By default, the one that is.
    """
    local = own_part(module._parameters.get(name) if parameter is None else parameter)
    known: Any = module.__dict__.get("_fp8_params", {}).get(name)
    if not isinstance(local, QuantizedTensor):
        own = type(known) is ParamHandle and known._module() is module
        return known if own else ParamHandle(module, name)
    handle = local._storage.observer
    if not isinstance(handle, Float8ParamHandle) or handle._module() is not module:
        handle = local._storage.observer = Float8ParamHandle(module, name)
    return handle
