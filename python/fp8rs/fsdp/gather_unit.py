"""GatherUnit: the FP8 parameters that FSDP2 all-gathers together.

```text
pre-all-gather hook of the 1st parameter   stale scales of the mesh are computed, one all-reduce
                                           all shards of the unit are cast, one launch
                                           (in a backward: the codes of the forward are reused)
pre-all-gather hooks of the others         return the codes that the first hook has cast
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8rs._torch import (
    outside_inference_mode,
    profiler_range,
    reshards_parameters,
    sharded_local_tensor,
)
from fp8rs.model.handle import LocalTensor, ParamHandle
from fp8rs.scaling.steps import StepTracker
from fp8rs.scaling.streams import StreamDependency, note_current_stream, stream_of

from .layout import AllGatherMetadata
from .local_shard import LocalShard, values_of
from .shard_quantizer import ShardQuantizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(eq=False, slots=True)
class UnitParam:
    """A parameter of a gather unit.

    Attributes:
        handle: the parameter's handle.
        fsdp_param: FSDP2's ``FSDPParam``, or None if FSDP2's group is not known.
        shard: the shard when it was last read. None if it may be in other memory now.
        codes_for_hook: the codes of a cast that the parameter's hook has not returned yet.
        codes_for_backward: the codes of a forward with gradients, until its backward gathers them.
    """

    handle: ParamHandle
    fsdp_param: Any  # torch's class is private
    shard: LocalShard | None = None
    codes_for_hook: AllGatherMetadata | None = None
    codes_for_backward: AllGatherMetadata | None = None


class GatherUnit:
    """The FP8 parameters of one converted model that FSDP2 all-gathers together.

    A scale depends on values only, so it is valid until they change. A unit's scales are stale if
    they were computed for an earlier forward of the root module, or if an operator wrote to one of
    its shards since. A hook that finds stale scales computes all stale scales of parameters that
    are sharded over the same ranks and that are not gathered now.

    An all-gather outside of a backward casts the shards with these scales. If FSDP2 frees the
    weights after a forward with gradients, the codes are kept until the backward gathers them,
    1 byte per element of the shard. Only that backward uses them. Every other all-gather casts
    again, because a write that no operator makes may precede it. A new scale or a write by an
    operator discards the codes. The backward then casts the shard again, with the handle's scale.

    All ranks must find the same scales stale, because of the all-reduce. They run the same forwards
    and the same writes, except that one rank may write to its shard between a forward and its
    backward. Inside a backward, writes therefore do not make existing scales stale.

    Args:
        handles: the parameters' handles, in the order of their hooks.
        fsdp_params: FSDP2's ``FSDPParam`` of the same parameters, or none if FSDP2's group is not
            known.
        quantizer: quantizes shards.
        tracker: counts the model's forwards.
        refresh_scales: computes the stale scales of all units that are sharded over the same ranks
            as the given one.
        fsdp_group: FSDP2's ``FSDPParamGroup`` of the parameters, or None if it is not known.
        writing_streams: the ids of CUDA streams that wrote to the shards before this unit was
            built.

    Attributes:
        handles: the parameters' handles, in the order of their hooks.
    """

    def __init__(
        self,
        handles: Sequence[ParamHandle],
        fsdp_params: Sequence[Any],
        quantizer: ShardQuantizer,
        tracker: StepTracker,
        refresh_scales: Callable[[GatherUnit], None],
        fsdp_group: Any,
        writing_streams: Iterable[int],
    ) -> None:
        self.handles = list(handles)
        self._quantizer = quantizer
        self._tracker = tracker
        self._refresh_scales = refresh_scales
        self._fsdp_group = fsdp_group
        self._params: list[UnitParam] = []
        for index, handle in enumerate(handles):
            fsdp_param = fsdp_params[index] if fsdp_params else None
            self._params.append(UnitParam(handle, fsdp_param))
        self._index = {handle: index for index, handle in enumerate(handles)}
        #: The work that computed the scales. None before the first time.
        self._scales_ready: StreamDependency | None = None
        #: The smallest `scale_forward_id` of the handles, so that a hook need not read all of them.
        self._oldest_forward_id = -1
        for handle in handles:
            # Another unit computed the scale, and this one does not know when that work is done.
            handle.scale_forward_id = -1
        #: The CUDA streams that wrote to the shards since the last forward began, and events after
        #: the writes before it.
        self._writing_streams = set(writing_streams)
        self._write_events: dict[int, torch.cuda.Event] = {}

    @property
    def shard_groups(self) -> tuple[ProcessGroup, ...]:
        """The process group of the ranks that the parameters are sharded over."""
        return self.handles[0].shard_spec.shard_groups

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh of the parameters."""
        mesh: DeviceMesh = self.handles[0].parameter.device_mesh
        return mesh

    @property
    def writing_streams(self) -> set[int]:
        """The ids of CUDA streams with writes that no all-gather has waited for."""
        return self._writing_streams | self._write_events.keys()

    @property
    def is_sharded(self) -> bool:
        """Whether the modules hold the shards now, rather than the gathered weights."""
        return any(handle.is_sharded for handle in self.handles)

    def shards(self, first: int = 0) -> list[LocalShard]:
        """Return the shards of the parameters, from the one with index ``first`` on."""
        return [self._shard(param) for param in self._params[first:]]

    def _shard(self, param: UnitParam) -> LocalShard:
        if param.fsdp_param is not None:
            local = sharded_local_tensor(param.fsdp_param)
        else:
            local = param.handle.local
        # FSDP2 may replace the local tensor at any time. Assigning to `.data` replaces its values.
        if param.shard is None or param.shard.data is not values_of(local):
            param.shard = self._quantizer.local_shard(param.handle, local)
        return param.shard

    # --- writes ----------------------------------------------------------------------------------

    def shard_written(self, handle: ParamHandle) -> None:
        """Notify that an operator wrote to the shard of a parameter."""
        self._oldest_forward_id = -1
        self._params[self._index[handle]].codes_for_backward = None
        self.note_stream()

    def scale_invalidated(self, handle: ParamHandle, *, keep_codes: bool) -> None:
        """Notify that the shard of a parameter may have changed without an operator."""
        self._oldest_forward_id = -1
        param = self._params[self._index[handle]]
        param.shard = None
        if not keep_codes:
            param.codes_for_backward = None

    def note_stream(self) -> None:
        """Note the current CUDA stream as one that writes to the shards."""
        # FSDP2's all-gather streams wait for this stream only when the root's forward begins.
        note_current_stream(self._writing_streams)

    def record_write_events(self, events: dict[int, torch.cuda.Event]) -> None:
        """Record events after the writes so far, so that later waits do not include later work.

        Args:
            events: the events that were recorded for other units, by stream.
        """
        for stream_id in self._writing_streams:
            if stream_id not in events:
                events[stream_id] = stream_of(stream_id).record_event()
            self._write_events[stream_id] = events[stream_id]
        self._writing_streams.clear()

    def wait_for_writes(self) -> None:
        """Make the current stream wait for writes that other streams made to the shards."""
        if not self._writing_streams and not self._write_events:
            return
        # Without an index, torch first determines the type of the accelerator.
        current = torch.cuda.current_stream(torch.cuda.current_device())
        for event in self._write_events.values():
            current.wait_event(event)
        for stream_id in self._writing_streams:
            if stream_id != current.cuda_stream:
                current.wait_stream(stream_of(stream_id))

    # --- scales ----------------------------------------------------------------------------------

    def is_stale(self, forward_id: int, in_backward: bool = False) -> bool:
        """Return whether a scale was computed for an earlier forward or before a write.

        Inside a backward, scales that exist are not stale. Other ranks might not take part in the
        all-reduce of new ones, and the backward needs the bytes of its forward.
        """
        if in_backward and self._scales_ready is not None:
            return False
        return self._oldest_forward_id < forward_id

    def stale_shards(self, forward_id: int) -> list[LocalShard]:
        """Return the shards whose scales are stale: all, or those that were written."""
        shards = []
        for param in self._params:
            if param.handle.is_stale(forward_id):
                shards.append(self._shard(param))
        return shards

    def set_fresh(self, forward_id: int, ready: StreamDependency) -> None:
        """Mark stale scales as computed from the current values of the shards, for a forward."""
        for param in self._params:
            handle = param.handle
            param.codes_for_hook = None
            if handle.is_stale(forward_id):
                param.codes_for_backward = None
            handle.scale_forward_id = forward_id
        self._oldest_forward_id = forward_id
        self._scales_ready = ready
        # `ready` includes the wait for these writes.
        self._writing_streams.clear()
        self._write_events.clear()

    # --- all-gathers -----------------------------------------------------------------------------

    def all_gather_inputs(self, local: LocalTensor) -> AllGatherMetadata:
        """Return the tensors that FSDP2 gathers for a parameter, with the metadata of the gather.

        Args:
            local: the parameter's local tensor, or the copy that FSDP2 made of an offloaded one.

        Raises:
            RuntimeError: an FP8 weight that is gathered for a backward was written.
        """
        in_backward = self._tracker.in_backward
        if self.is_stale(self._tracker.forward_id, in_backward):
            self._refresh_scales(self)

        index = self._index[local._handle]
        codes = self._pop_codes(self._params[index], in_backward)
        if codes is None:
            codes = self._prepare_from(index, local)
        codes.ready.wait()
        return codes

    def _pop_codes(self, param: UnitParam, in_backward: bool) -> AllGatherMetadata | None:
        """Return the codes that an earlier cast has prepared for a hook, once."""
        codes = param.codes_for_hook
        param.codes_for_hook = None
        if in_backward:
            if codes is None:
                codes = param.codes_for_backward
            param.codes_for_backward = None
        return codes

    def _prepare_from(self, index: int, local: LocalTensor) -> AllGatherMetadata:
        """Prepare codes for the hooks from ``index`` on, and return those of the first."""
        if self.is_stale(self._tracker.forward_id):
            # Only inside a backward, where scales are not computed again.
            self._check_not_written()

        # Cast all shards at once. FSDP2 copies one offloaded shard at a time.
        first_param = self._params[index]
        values = values_of(local)
        is_copy = values is not self._shard(first_param).data
        if is_copy:
            shards = [self._quantizer.local_shard(first_param.handle, values)]
        else:
            shards = self.shards(index)
        with profiler_range("fp8rs::cast", self._fsdp_group):
            codes_of_shards = self._codes_of(shards)

        # If FSDP2 frees the weights after this forward, it gathers the same codes in the backward.
        has_backward = self._tracker.in_forward and self._tracker.grad
        keeps_codes = has_backward and not is_copy and reshards_parameters(self._fsdp_group)
        params = self._params[index : index + len(shards)]
        for param, shard, codes in zip(params, shards, codes_of_shards, strict=True):
            param.codes_for_hook = codes
            param.codes_for_backward = None
            if keeps_codes and not shard.is_fp8:  # an FP8 shard is its codes
                param.codes_for_backward = codes

        # The hook that runs now returns the first ones.
        first_param.codes_for_hook = None
        return codes_of_shards[0]

    def _codes_of(self, shards: Sequence[LocalShard]) -> list[AllGatherMetadata]:
        """Cast master weights on the current stream, and pack the codes of all shards."""
        assert self._scales_ready is not None
        device = shards[0].device
        with outside_inference_mode(), torch.no_grad():
            self.wait_for_writes()
            self._scales_ready.wait()
            inputs = self._quantizer.all_gather_inputs(shards)
            tensors = list(chain.from_iterable(inputs))
            for shard in shards:
                if shard.handle.scale is not None:
                    tensors.append(shard.handle.scale)
            ready = StreamDependency(device, tensors)
        # With delayed scaling, the cast has replaced the scales. Do not keep its codes alive.
        self._scales_ready = ready.for_tensors(scale_tensors(self.handles))

        layout = self._quantizer.layout
        codes_of_shards = []
        for shard, shard_inputs in zip(shards, inputs, strict=True):
            codes = AllGatherMetadata(
                layout, shard.shard_spec, shard.handle.scale, shard_inputs, ready
            )
            codes_of_shards.append(codes)
        return codes_of_shards

    def _check_not_written(self) -> None:
        """Raise RuntimeError if an FP8 weight was written since its scale was synchronized."""
        for param in self._params:
            if param.handle.written and self._shard(param).is_fp8:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: the FP8 weight {param.handle.fqn}, which is gathered for "
                    "a backward, was written since its forward. Write weights after the backward, "
                    "or keep master weights"
                )


def scale_tensors(handles: Iterable[ParamHandle]) -> Iterator[Tensor]:
    """Yield the tensors that the casts of shards read besides the shards."""
    for handle in handles:
        for tensor in (handle.scale, handle.amaxes):
            if tensor is not None:
                yield tensor
