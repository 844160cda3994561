"""The handle of one FP8 weight, which observes writes to its codes and scales.

A write quantizes with the scale of this rank's values alone and never starts a collective. It marks
the handle as unsynced. `fp8rs.fsdp.scale_sync` synchronizes the scales that shards share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8rs._torch import is_distributed, is_traced
from fp8rs.tensor.formats import FP8_MAX
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.spec import QuantSpec
from fp8rs.tensor.store import Store

from . import padding
from .param import ParamHandle
from .shard_spec import local_part, shard_spec


class Float8ParamHandle(ParamHandle):
    """The handle of an FP8 weight, sharded or not (`fp8rs.tensor.store.WriteObserver`).

    Attributes:
        unsynced: whether this rank wrote the shard since scales were last synchronized.
        pending: the values of the last write if it replaced the whole shard, in high precision.
            They are rounded again if the synchronization changes the scale, so that each value is
            rounded only once. None if no scale is shared or the shard was written otherwise.
        keep_init: whether to keep values from before they are rounded, for masters.
    """

    __slots__ = ("_init_value", "_shares_scales", "keep_init", "pending", "unsynced")

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module, name)
        self.unsynced = self.keep_init = self._shares_scales = False
        self.pending: Tensor | None = None
        self._init_value: Tensor | None = None

    def _copy_for(self, module: nn.Module) -> Float8ParamHandle:
        new = Float8ParamHandle(module, self.name)
        new.unsynced, new.keep_init = self.unsynced, self.keep_init
        # Nothing writes to these tensors, so the copy can share them.
        new.pending, new._init_value = self.pending, self._init_value
        new._shares_scales = self._shares_scales
        return new

    # --- the parameter ---------------------------------------------------------------------------

    @property
    def quant_spec(self) -> QuantSpec:
        """How the weight is quantized."""
        return cast(QuantizedTensor, self.parameter_part).spec

    @property
    def scale_sync(self) -> Any:
        """The model's `fp8rs.fsdp.scale_sync.ScaleSync`. None unless the module holds a shard."""
        state = self.state_if_any
        return None if state is None or self.local is None else state.shard().scale_sync

    @property
    def shares_scales(self) -> bool:
        """Whether several ranks have elements of one scale of the weight."""
        if (sync := self.scale_sync) is not None:
            self._shares_scales = sync.shares_scales(self)
        return self._shares_scales  # while the weight is gathered, as it was before

    @property
    def element_offsets(self) -> tuple[int, ...]:
        """The indices of this rank's first elements, one per matrix: see `ShardSpec`."""
        parameter: Any = self.parameter if self.in_place else None
        if self.local is None and not is_distributed(parameter):
            return (0,)
        spec = shard_spec(parameter) if self.local is None else self.spec
        return spec.matrix_offsets or (spec.element_offset,)

    def reshard(self) -> None:
        """Make modules hold their shards again if FSDP2 has this weight gathered."""
        part = self.parameter_part
        if not (isinstance(part, QuantizedTensor) and part._store.gathered):
            return
        from torch.distributed.fsdp import FSDPModule

        root = self.state.root
        for module in () if root is None else root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # --- writes ----------------------------------------------------------------------------------

    def observes(self, store: Store) -> bool:
        """Return whether planes belong to the weight, and not to a copy of it.

        While FSDP2 has the weight gathered, the shard is not known, so this returns True.
        """
        if not self.in_place:
            return False
        known = getattr(self.parameter_part, "_store", None)
        return known is None or known.observer is not self or known is store

    def allocate(self, like: Store, shape: Iterable[int], device: Any) -> Store:
        """Allocate planes of zeros for another shard of the weight that ``like`` belongs to."""
        return padding.allocate(like, shape, device)

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
        if values is not None and tensor.is_whole:
            row = tensor._store.rowwise
            values = values.reshape(tensor._store.matrix if row is None else row.data.shape)
        else:
            values = None
        self._keep_init(values)
        if values is not None and not self.shares_scales:
            self.start_history_from(values)
        elif values is not None and exact and not values.is_meta:
            self.pending = values.clone()
        store = getattr(self.parameter_part, "_store", None)
        # A gathered weight has no observer.
        if store is not None and store.observer is self:
            self.update_history(store.any_plane.scale)

    def mark_written(self) -> None:
        """Note a write of codes with scales that all ranks have."""
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

    def mark_loaded(self) -> None:
        """Note that codes and scales were loaded in place, on all ranks.

        A rank may have loaded and quantized values in high precision instead. Scales are therefore
        synchronized. Codes with a common scale stay as they are.
        """
        self._keep_init(None)
        self.mark_written()
        self.unsynced = True

    # --- delayed scaling -------------------------------------------------------------------------

    def update_history(self, scale: Tensor) -> None:
        """With delayed scaling, make the next scale the one that values were written with.

        The next write would otherwise saturate with a scale from before these values.
        """
        if self.slots is not None and not scale.is_meta:
            update_histories([self], [scale.view(1)])

    def start_history_from(self, values: Tensor) -> None:
        """With delayed scaling, start the history of a whole weight with the amax of its values."""
        if self.slots is None or values.is_meta or not values.numel():
            return
        with torch.no_grad():
            low, high = values.detach().aminmax()
            amax = torch.maximum(-low, high).float()
            self.start_history(self.quant_spec.scale_from_amax(amax), amax)

    def start_history(self, scale: Tensor, amax: Tensor) -> None:
        """With delayed scaling, set the next scale and the recorded amax, if the amax is finite."""
        if (slots := self.slots) is None:
            return
        finite = amax.isfinite().view(())
        for slot, value in zip(slots, (scale, amax), strict=True):
            slot.copy_(torch.where(finite, value.to(slot.device).view(()), slot))

    # --- values from before the first rounding ---------------------------------------------------

    @property
    def init_value(self) -> Tensor | None:
        """The values from before the first rounding that this rank holds, on the CPU, or None."""
        value = self._init_value
        if value is not None and self.in_place:
            parameter: Any = self.parameter
            # Tensor parallelism replaces the parameter by a DTensor without a notification.
            if value.shape == parameter.shape != self.parameter_part.shape:
                self._init_value = value = local_part(value, parameter)
        return value

    @init_value.setter
    def init_value(self, value: Tensor | None) -> None:
        self._init_value = value

    def forget_init(self) -> None:
        """Free the values from before the first rounding, and keep no others."""
        self.init_value, self.keep_init = None, False

    def _keep_init(self, values: Tensor | None) -> None:
        """Replace the kept values after a write, until an optimizer reads them.

        Args:
            values: the values of the whole shard, or None if they are not known.
        """
        if self.keep_init:
            kept = values is not None and not values.is_meta
            self.init_value = values.detach().to("cpu", copy=True) if kept else None  # type: ignore[union-attr]


def largest_code(spec: QuantSpec) -> float:
    """Return the largest value that a per-tensor scale of 1 is computed for."""
    return float(FP8_MAX[spec.fp8_dtype] / 2**spec.margin)


def differs(a: Tensor, b: Tensor) -> Tensor:
    """Compare fp32 scales bit for bit, since NaN does not equal itself."""
    return a.view(torch.int32) != b.view(torch.int32)


def update_histories(
    handles: Sequence[Float8ParamHandle],
    scales: Sequence[Tensor],
    before: Sequence[Tensor] | None = None,
) -> None:
    """With delayed scaling, make the next scales those that values were written with.

    Args:
        handles: handles of one model.
        scales: the scale of each handle (1,), fp32. A scale that is not finite has no effect, nor
            have the scales (E,) of a batch, which has no history.
        before: scales with the same bits in both have no effect. None if all have.
    """
    found = [(pair, i) for i, handle in enumerate(handles) if (pair := handle.slots) is not None]
    if not found:
        return
    with torch.no_grad():
        slots = [pair for pair, _ in found]
        known, amaxes = (torch.stack(part) for part in zip(*slots, strict=True))
        new_scales = torch.cat([scales[i] for _, i in found]).to(known.device)
        counts = new_scales.isfinite()
        if before is not None:
            old = torch.cat([before[i] for _, i in found]).to(known.device)
            counts &= differs(new_scales, old)
        largest = amaxes.maximum(new_scales * largest_code(handles[0].quant_spec))
        new = (*torch.where(counts, new_scales, known), *torch.where(counts, largest, amaxes))
        torch._foreach_copy_([slot for part in zip(*slots, strict=True) for slot in part], new)


def register_handle(module: nn.Module, name: str) -> Float8ParamHandle:
    """Return the handle of a module's quantized parameter, which observes its writes from now on.

    Args:
        module: a converted module.
        name: the name of a parameter that is not sharded.
    """
    parameter: Any = module._parameters[name]
    assert isinstance(parameter, QuantizedTensor)
    handle = parameter._store.observer
    if not isinstance(handle, Float8ParamHandle) or handle._module() is not module:
        handle = parameter._store.observer = Float8ParamHandle(module, name)
    module.__dict__.setdefault("_fp8_params", {})[name] = handle
    return handle
