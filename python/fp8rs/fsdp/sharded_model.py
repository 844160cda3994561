"""The FSDP2 side of one converted model: which parameters are sharded, and when they are quantized.

```text
fully_shard                    setattr -> wrap: a MasterWeight over the shard
FSDP2 initializes              fsdp_looks_for_hooks: the ranks compare their conversions
root's forward begins          forward_begins: all scales become stale
FSDP2 unshards a module        pre-all-gather hook -> prepare_all_gather
                                 a stale scale: amaxes of all stale shards, one all-reduce
                                 cast of the module's shards, one launch
                               all-gather of uint8
                               post-all-gather hook: a QuantizedTensor over the gathered bytes
optimizer writes to a shard    MasterWeight.__torch_dispatch__ -> handle.mark_written()
```
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8rs._torch import (
    dtensor_like,
    fsdp_groups,
    fsdp_is_initialized,
    local_tensor,
    own_part,
    set_local_tensor,
    sharded_parameters,
)
from fp8rs.model.shard_spec import local_part
from fp8rs.model.state import ModelState, state_of
from fp8rs.nn.fp8_params import copy_attributes, mark_replaced
from fp8rs.quantize.recipes import check_module, quant_spec
from fp8rs.scaling.streams import StreamDependency
from fp8rs.tensor.quantized import QuantizedTensor

from .checks import check_settings, compare_conversions
from .float8_shard import Float8ParamHandle, Float8Shard, handle_for
from .layout import AllGatherMetadata
from .master_weight import MasterWeight
from .param import LocalShard, ParamHandle, local_of, record_write_events, wait_for_writes
from .scale_sync import sync_shards
from .shard_quantizer import shard_quantizer


class ShardedModel:
    """The sharded parameters of one converted model.

    A scale depends on values only, so it is valid until they change. A handle's scale is stale if
    it was computed for an earlier forward of the root module, or if an operator wrote to the shard
    since. An all-gather that finds a stale scale computes all stale scales of parameters that are
    sharded over the same ranks.

    An all-gather outside of a backward casts its shards with the handles' scales. If FSDP2 frees
    the weights after a forward with gradients, the codes are kept until the backward gathers them,
    1 byte per element of the shard. Only that backward uses them. Every other all-gather casts
    again, because a write that no operator makes may precede it. A new scale or a counted write
    discards the codes, and the backward casts the shard again with the scale of the forward.

    All ranks must find the same scales stale, because of the all-reduce. They run the same forwards
    and the same writes, except that one rank may write to its shard between a forward and its
    backward. Inside a backward, writes therefore do not count.

    Args:
        state: the state of the converted model.

    Attributes:
        quantizer: quantizes high-precision shards.
    """

    def __init__(self, state: ModelState) -> None:
        self._state = weakref.ref(state)
        self.quantizer = shard_quantizer(quant_spec(state.recipe, "weight"), state.delayed)
        #: Sharded parameters that are gathered in high precision: others are tied to them, or the
        #: conversion asked for it.
        self._high_precision: set[ParamHandle] = set()
        #: Modules with parameters that are not converted, by name. Listed once, because each weight
        #: is compared with all of them.
        self._unconverted: weakref.WeakKeyDictionary[nn.Module, str] | None = None
        #: The parameters that FSDP2 gathers together, and FSDP2's group, by each of them.
        self._groups: dict[ParamHandle, tuple[list[ParamHandle], Any]] | None = None
        self._compared: set[Any] = set()
        self._checked = self._synced_by_optimizer = False

    @property
    def state(self) -> ModelState:
        """The state of the converted model."""
        return cast(ModelState, self._state())

    # --- parameters ------------------------------------------------------------------------------

    def wrap(self, module: nn.Module, name: str, parameter: Any) -> None:
        """Give a parameter a local tensor with all-gather hooks when FSDP2 puts it on a module.

        The tensor shares the shard's memory, and the DTensor remains the same object. Also called
        after the module was moved or cast.

        Args:
            module: a converted module.
            name: the parameter's name.
            parameter: the DTensor.
        """
        handles: dict[str, ParamHandle] = module._fp8_params  # type: ignore[assignment]
        if name not in handles:
            return
        if module._parameters.get(name) is parameter:
            self._checked = False  # moved or cast
            handles[name].invalidate_scale()
        local, known = local_tensor(parameter), local_of(parameter)
        # With tensor parallelism, an unsharded weight is a DTensor too.
        gathered = isinstance(local, QuantizedTensor) and local._storage.gathered
        if gathered or not local.dtype.is_floating_point:
            return
        # A tied parameter has the handle of one of its modules.
        holder = None if known is None else known._handle
        if holder is not None and (holder._module() is module or holder.local is known):
            return
        state, index = self.state, handles[name].index
        state.relink(module)
        state.move_hooks_first()
        if state.delayed is not None:
            state.delayed.add_mesh(parameter.device_mesh, index)
        if handles[name] in self._high_precision:
            return
        # An optimizer from before holds the parameter that the first shard replaces.
        before = module._parameters.get(name)
        if before is not None and before is not parameter:
            mark_replaced(before, handles[name].fqn)
        if not isinstance(local, QuantizedTensor):
            if not state.fp8_gather:
                self._high_precision.add(handles[name])
                return
            if tied := self._unconverted_ties(module, name, parameter):
                self._high_precision.add(handles[name])
                warnings.warn(
                    f"the weight of {state.names[index] or 'the layer'} is gathered in high "
                    f"precision: it is tied to that of {', '.join(tied)}, which is not converted "
                    "and would read rounded values",
                    stacklevel=2,
                )
                return
        handles[name] = handle = handle_for(module, name, parameter)
        handle.invalidate_scale()
        if isinstance(handle, Float8ParamHandle):
            if (kept := handle.init_value) is not None and kept.shape != local.shape:
                handle.init_value = local_part(kept, parameter)
            shard: Any = local.view_of(local.geometry)
            shard.__class__ = Float8Shard
            set_local_tensor(parameter, shard)
        else:
            set_local_tensor(parameter, MasterWeight(local, handle))
        # The DTensor gets the attributes that users have set on the parameter before.
        if before is not None:
            copy_attributes(before.__dict__, parameter)
        if make_plain not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(make_plain)
        self._groups = None

    def _unconverted_ties(self, module: nn.Module, name: str, parameter: Any) -> list[str]:
        """Return the names of modules that have a parameter and do not gather it in FP8.

        Args:
            module: a converted module that has the parameter too.
            name: the parameter's name in that module.
            parameter: the parameter that FSDP2 puts on that module.
        """
        root = self.state.root
        if self._unconverted is None and root is not None:
            self._unconverted = weakref.WeakKeyDictionary(
                (other, path or type(other).__name__)
                for path, other in root.named_modules()
                if other._parameters and state_of(other) is None
            )
        own = {id(parameter), id(module._parameters.get(name))}  # tied modules are set one by one
        return [
            path
            for other, path in (self._unconverted or {}).items()
            if any(id(p) in own for p in other._parameters.values() if p is not None)
        ]

    def _all_handles(self) -> Iterable[ParamHandle]:
        """Yield the handles of all layers, in the order of their indices, which all ranks share."""
        for module in self.state.layers():
            if module is not None:
                yield from module._fp8_params.values()  # type: ignore[operator]

    def handles(self, of: Iterable[ParamHandle] | None = None) -> list[ParamHandle]:
        """Return the handle of every parameter whose module holds the shard now, once.

        Args:
            of: handles of modules, by default of all layers. Tied modules share a handle.
        """
        locals_ = (handle.local for handle in (self._all_handles() if of is None else of))
        return list(dict.fromkeys(local._handle for local in locals_ if local is not None))

    def _group(self, handle: ParamHandle) -> tuple[list[ParamHandle], bool]:
        """Return this parameter and those that FSDP2 gathers after it in the same all-gather.

        Also return whether FSDP2 frees them after a forward.
        """
        if self._groups is None:
            self._groups = {}
            for _, group in fsdp_groups(self.state.root):
                locals_ = (local_of(p.sharded_param) for p in group.fsdp_params)
                handles = [t._handle for t in locals_ if t is not None]
                own = [h for h in handles if h.state_if_any is self.state]
                self._groups.update(dict.fromkeys(own, (own, group)))
        own, group = self._groups.get(handle, ([handle], None))
        reshards = group is not None and group.post_forward_mesh_info is not None
        return [h for h in own[own.index(handle) :] if h is handle or h.local is not None], reshards

    # --- all-gathers -----------------------------------------------------------------------------

    def prepare_all_gather(self, handle: ParamHandle, data: Tensor) -> AllGatherMetadata:
        """Return the tensors that FSDP2 gathers for a parameter, with the metadata of the gather.

        Args:
            handle: the parameter's handle.
            data: its shard, or the copy that FSDP2 made of an offloaded one.
        """
        tracker, backward = self.state.tracker, self.state.tracker.in_backward
        if backward:
            handle.prepared, handle.kept = handle.prepared or handle.kept, None
        if handle.prepared is None or handle.is_stale(tracker.forward_id, backward):
            group, reshards = self._group(handle)
            self._refresh_scales(group)
            if handle.prepared is None:
                self._cast(group, data, keep=reshards and tracker.in_forward and tracker.grad)
        prepared = cast(AllGatherMetadata, handle.prepared)
        prepared.ready.wait()
        handle.prepared = None
        return prepared

    def _refresh_scales(self, group: Sequence[ParamHandle]) -> None:
        """If a scale of a group is stale, compute all stale scales of its process group.

        Raises:
            RuntimeError: an FP8 weight that is gathered for a backward was written.
        """
        forward_id, backward = self.state.tracker.forward_id, self.state.tracker.in_backward
        if any(h.is_stale(forward_id, backward) for h in group):
            self._compare([group[0].parameter.device_mesh])
            self._check_settings()
            groups = group[0].shard_spec.shard_groups
            stale = [h for h in self.handles() if h.is_stale(forward_id, backward)]
            same_ranks = [h for h in stale if h.shard_spec.shard_groups == groups]
            self._update_scales(same_ranks, forward_id)
        for h in group:
            if h.written and isinstance(h, Float8ParamHandle):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: the FP8 weight {h.fqn}, which is gathered for a "
                    "backward, was written since its forward. Write weights after the backward, or "
                    "keep master weights"
                )

    def _cast(self, group: Sequence[ParamHandle], data: Tensor, keep: bool) -> None:
        """Quantize the shards of a group on the current stream, for the hooks of all of them.

        Args:
            group: the parameters. FSDP2 calls the hook of the first one first.
            data: the first one's shard, or the copy that FSDP2 made of an offloaded one.
            keep: whether to keep the codes for the backward, which may gather them again.
        """
        shard = self.quantizer.local_shard(group[0], data)
        if offloaded := group[0].local.device != shard.data.device:
            group = group[:1]  # only this copy is there
        shards = [shard, *map(self.quantizer.local_shard, group[1:])]
        with torch.inference_mode(False), torch.no_grad():
            wait_for_writes(group)
            for ready in dict.fromkeys(h.ready for h in group):
                cast(StreamDependency, ready).wait()
            inputs = self.quantizer.all_gather_inputs(shards)
            scales = [h.scale for h in group if h.scale is not None]
            ready = StreamDependency(shard.device, chain(scales, *inputs))
        for s, t in zip(shards, inputs, strict=True):
            made = AllGatherMetadata(self.quantizer.layout, s.shard_spec, s.handle.scale, t, ready)
            s.handle.prepared = made
            s.handle.kept = made if keep and not (offloaded or s.is_fp8) else None

    def _update_scales(self, handles: Sequence[ParamHandle], forward_id: int) -> None:
        """Compute the scales of parameters from their shards: one amax launch, one all-reduce."""
        shards = list(map(self.quantizer.local_shard, handles))
        with torch.inference_mode(False), torch.no_grad():
            wait_for_writes(handles)
            if fp8_shards := [s for s in shards if s.is_fp8]:
                self._sync(fp8_shards)
                self.quantizer.copy_scales(fp8_shards)
            if masters := [s for s in shards if not s.is_fp8]:
                self.quantizer.update_scales(masters)
            computed = [t for h in handles for t in (h.scale, h.amaxes) if t is not None]
            ready = StreamDependency(shards[0].device, computed)
        for h in handles:
            h.set_fresh(forward_id, ready)

    def precompute(self) -> None:
        """Compute the scales of the next forward now."""
        forward_id = self.state.tracker.forward_id + 1
        if stale := [h for h in self.handles() if h.is_stale(forward_id, False)]:
            self._compare([h.parameter.device_mesh for h in stale])
            self._update_scales(stale, forward_id)

    # --- scales that FP8 shards share, on all ranks ----------------------------------------------

    def sync_scales(
        self, handles: Iterable[ParamHandle] | None = None, *, in_step: bool = False
    ) -> None:
        """Synchronize the scales of FP8 weights: one all-reduce per group.

        Args:
            handles: the handles of sharded parameters. By default, of all.
            in_step: whether an optimizer calls this within a step, which has made all other scales
                common. They are not synchronized at the end of the step.
        """
        handles = self.handles() if handles is None else handles
        fp8 = [h for h in handles if isinstance(h, Float8ParamHandle) and not h.local.is_meta]
        with torch.inference_mode(False), torch.no_grad():
            wait_for_writes(fp8)
            self._sync(map(self.quantizer.local_shard, fp8))
        self._synced_by_optimizer = in_step

    def _sync(self, shards: Iterable[LocalShard]) -> None:
        """Synchronize the scales of FP8 shards that several ranks share."""
        shared = [s for s in shards if self.quantizer.shares_scales(s.shard_spec)]
        self._compare([s.handle.parameter.device_mesh for s in shared])
        if shared:
            sync_shards(self.quantizer, shared)

    def sync_module(self, module: Any) -> None:
        """Synchronize the scales of a converted module's FP8 weights."""
        self.sync_scales(self.handles(module._fp8_params.values()))

    def write_values(self, handles: Sequence[Float8ParamHandle], values: Sequence[Tensor]) -> None:
        """Quantize values into whole FP8 shards, with common scales: one all-reduce."""
        shards = list(map(self.quantizer.local_shard, handles, values))
        with torch.inference_mode(False), torch.no_grad():
            for handle, planes in zip(handles, self.quantizer.planes(shards), strict=True):
                storage, row = handle.local._storage, planes[0]
                if handle.local.numel():
                    storage.copy_planes_((storage.rowwise, storage.columnwise), planes)
                elif row is not None and row.format.per_tensor and not row.batched:
                    storage.any_plane.scale.copy_(row.scale)  # of all ranks
                handle.mark_written()

    def reduce_amaxes_(self, handles: Sequence[Float8ParamHandle], amaxes: Tensor) -> None:
        """Reduce the amaxes (n,) of shards, fp32, over the ranks of each weight, in place."""
        shards = list(map(self.quantizer.local_shard, handles))
        # A process group may have no backend for the device of offloaded weights.
        values = self.quantizer.reduce(shards, amaxes.to(shards[0].device))
        if values is not amaxes:
            amaxes.copy_(values)

    # --- events ----------------------------------------------------------------------------------

    def fsdp_looks_for_hooks(self) -> None:
        """Notify that FSDP2 looks for all-gather hooks, maybe because it initializes.

        It initializes before its first all-gather. Then the ranks of each mesh that shards the root
        compare their conversions. The root's forward may be too late for that. If this rank
        converted no layer of the root's own unit, FSDP2's hooks on the root precede ours, and
        gather that unit first.
        """
        root = self.state.root
        if not fsdp_is_initialized(root):
            return
        for handle in self._all_handles():
            handle.fsdp_initialized = True
        self.state.move_hooks_first()
        self._compare([p.device_mesh for p in sharded_parameters(root)])

    def forward_begins(self, root: nn.Module) -> None:
        """Notify that a forward of the root module begins.

        The ranks of each mesh that shards the root compare their conversions, once.
        """
        # All-gathers of this forward wait for writes before it, not for its own computation.
        record_write_events(self._all_handles())
        if self.state.tracker.training:
            self.quantizer.record_gathered(self._all_handles())
        if not self._checked:
            self._compare([p.device_mesh for p in sharded_parameters(root)])
            self._check_settings()

    def stepped(self) -> None:
        """Notify that an optimizer with parameters of this model has stepped.

        A compiled step writes to shards without an operator that `MasterWeight` sees. Codes that
        are kept for a running backward stay valid. The scales of trainable FP8 weights are
        synchronized, unless the step itself has done it.
        """
        for handle in self._all_handles():
            if not isinstance(handle, Float8ParamHandle):
                handle.invalidate_scale(keep_codes=self.state.tracker.in_backward)
        if not self._synced_by_optimizer:
            self.sync_scales([h for h in self.handles() if h.parameter.requires_grad])
        self._synced_by_optimizer = False

    def _check_settings(self) -> None:
        """Raise if FSDP2's settings do not allow FP8 all-gathers. Runs again after a move."""
        if not self._checked:
            check_settings(self.state)
            self.state.move_hooks_first()
            for handle in self._all_handles():
                handle.fsdp_initialized = True
            self._checked = True

    def _compare(self, meshes: Iterable[Any]) -> None:
        """Raise ValueError if the conversions of a mesh's ranks differ. Runs once per mesh."""
        for mesh in dict.fromkeys(meshes):
            if mesh not in self._compared:
                compare_conversions(self.state, mesh)
                self._compared.add(mesh)


@torch.no_grad()
def make_plain(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """State-dict hook: replace the entries of master weights by DTensors of plain tensors.

    Checkpoints then load into the unconverted model, without this library. The tensors share the
    weights' memory, so `torch.distributed.checkpoint.load` into the state dict loads the weights.
    With ``keep_vars=True`` an entry remains the parameter itself. The entry of an FP8 weight is the
    quantized shard, whose scales are synchronized first.
    """
    state: Any = module._fp8_state
    params: Any = module._fp8_params
    values = {name: state_dict.get(prefix + name) for name in params}
    if any(isinstance(own_part(value), Float8Shard) for value in values.values()):
        state.ensure_sharded_model().sync_module(module)
    for name, value in values.items():
        local, kept = own_part(value), isinstance(value, (MasterWeight, nn.Parameter))
        if isinstance(local, MasterWeight) and not kept:
            state_dict[prefix + name] = dtensor_like(value, local.high_precision)


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Compute the scales of all sharded FP8 weights for the next forward.

    Call it on all ranks after the optimizer's step. It moves amaxes and their all-reduce out of the
    forward: of per-tensor scales, and of blocks that shard boundaries split. For FP8 weights, it
    synchronizes the scales that shards share (`fp8rs.fsdp.scale_sync`). The scales hold for one
    forward of each converted model in ``module``, or until an operator writes to the weights. Other
    writes, such as ``dcp.load`` into a state dict, are not noticed before that forward.

    Args:
        module: a module that contains converted layers, usually FSDP2's root.
    """
    check_module("module", module)
    for state in dict.fromkeys(map(state_of, module.modules())):
        if state is not None and state.sharded_model is not None:
            state.sharded_model.precompute()
