"""The FSDP2 side of one converted model: its local tensors, its gather units, its scales.

```text
fully_shard                    setattr -> wrap: a MasterWeight over the shard
FSDP2 initializes              fsdp_may_initialize: the ranks compare their conversions
root's forward begins          forward_begins: all scales become stale
FSDP2 unshards a module        pre-all-gather hook -> GatherUnit.all_gather_inputs
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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fp8rs._torch import (
    fsdp_groups,
    fsdp_is_initialized,
    local_tensor,
    outside_inference_mode,
    set_local_tensor,
    set_plainly,
    sharded_local_tensor,
    sharded_parameters,
    was_gathered,
)
from fp8rs.gemm.estimates import is_measured
from fp8rs.model.handle import ParamHandle, copy_attributes, local_of, mark_replaced
from fp8rs.model.shard_spec import local_part
from fp8rs.model.state import ModelState, state_of
from fp8rs.quantize.recipes import check_module, quant_spec
from fp8rs.scaling.streams import StreamDependency, note_current_stream
from fp8rs.tensor.quantized import QuantizedTensor

from .checks import check_settings, compare_conversions, most_tokens
from .float8_shard import Float8ParamHandle, Float8Shard, handle_for
from .gather_unit import GatherUnit, scale_tensors
from .local_shard import LocalShard
from .master_weight import MasterWeight
from .scale_sync import sync_shards
from .shard_quantizer import shard_quantizer
from .state_dict import make_plain


class ShardedModel:
    """The sharded parameters of one converted model.

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
        #: What FSDP2 gathers at once, in the order of the modules. None until the first all-gather
        #: after a change.
        self._gather_units: list[GatherUnit] | None = None
        #: The meshes whose ranks have compared their conversions.
        self._compared_meshes: set[DeviceMesh] = set()
        #: Whether FSDP2's settings were checked since the model was last moved or cast.
        self._checked = False
        #: Whether an optimizer has synchronized scales within the step that is running. The end of
        #: the step reads and resets it.
        self._synced_by_optimizer = False
        #: The ids of CUDA streams that wrote to shards without a unit, for example in a first
        #: forward before it gathers weights. Units that are built later wait for them.
        self._writing_streams: set[int] = set()

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
            parameter: the DTensor, which is an ``nn.Parameter`` too.
        """
        handles: dict[str, ParamHandle] = module._fp8_params  # type: ignore[assignment]
        handle = handles.get(name)
        if handle is None:
            return
        replaced = module._parameters.get(name)
        if replaced is parameter:
            self._module_moved(handle)  # which put the parameter on the module again
        if not self._is_new_shard(module, parameter):
            return
        self._join_model(module, handle, parameter)
        if handle in self._high_precision:
            return

        if replaced is not None and replaced is not parameter:
            # An optimizer from before holds the parameter that the first shard replaces.
            mark_replaced(replaced, handle.fqn)
        is_fp8_weight = isinstance(local_tensor(parameter), QuantizedTensor)
        if not is_fp8_weight and not self._can_gather_in_fp8(module, name, parameter):
            self._high_precision.add(handle)
            return

        handles[name] = self._replace_local_tensor(module, name, parameter)
        if replaced is not None:
            # Users may have set attributes on the parameter that the DTensor replaces.
            copy_attributes(replaced.__dict__, parameter)
        if make_plain not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(make_plain)
        self._forget_units()

        # Once FSDP2 has put all shards on the module, it need not call this method any more.
        others = [module._parameters.get(other) for other in handles if other != name]
        if all(local_of(other) is not None for other in others):
            set_plainly(module)

    def _module_moved(self, handle: ParamHandle) -> None:
        """Notify that the module of a handle was moved or cast."""
        self._checked = False
        handle.invalidate_scale()

    def _is_new_shard(self, module: nn.Module, parameter: Any) -> bool:
        """Return whether a parameter that is put on a module is a shard without all-gather hooks.

        It is not if FSDP2 puts the gathered weight on the module, or a shard that has hooks.
        """
        local = local_tensor(parameter)
        if not local.dtype.is_floating_point:
            return False
        # With tensor parallelism, an unsharded weight is a DTensor too.
        if isinstance(local, QuantizedTensor) and local._storage.gathered:
            return False
        local_with_hooks = local_of(parameter)
        if local_with_hooks is None:
            return True
        # A tied parameter has the handle of one of its modules. If that module holds another local
        # tensor by now, this one needs a handle of its own.
        handle: ParamHandle = local_with_hooks._handle
        return not handle.belongs_to(module) and handle.local is not local_with_hooks

    def _join_model(self, module: nn.Module, handle: ParamHandle, parameter: Any) -> None:
        """Register a module with a sharded parameter in the converted model."""
        state = self.state
        state.relink(module)
        state.move_hooks_first()
        if state.delayed is not None:
            state.delayed.add_mesh(parameter.device_mesh, handle.index)

    def _replace_local_tensor(self, module: nn.Module, name: str, parameter: Any) -> ParamHandle:
        """Give a sharded parameter a `MasterWeight` or a `Float8Shard`, and return its handle."""
        local = local_tensor(parameter)
        handle = handle_for(module, name, parameter)
        handle.invalidate_scale()
        if not isinstance(handle, Float8ParamHandle):
            set_local_tensor(parameter, MasterWeight(local, handle))
            return handle

        init_value = handle.init_value
        if init_value is not None and init_value.shape != local.shape:
            handle.init_value = local_part(init_value, parameter)
        shard: Any = local.view_of(local.geometry)
        shard.__class__ = Float8Shard
        set_local_tensor(parameter, shard)
        return handle

    def _can_gather_in_fp8(self, module: nn.Module, name: str, parameter: Any) -> bool:
        """Return whether to gather a high-precision parameter in FP8. Warn if a tie forbids it."""
        if not self.state.fp8_gather:
            return False
        tied_names = self._unconverted_ties(module, name, parameter)
        if not tied_names:
            return True
        index: Any = module._fp8_index
        warnings.warn(
            f"the weight of {self.state.names[index] or 'the layer'} is gathered in high "
            f"precision: it is tied to that of {', '.join(tied_names)}, which is not "
            "converted and would read rounded values",
            stacklevel=3,
        )
        return False

    def choose_gathers(self, tokens: int | None) -> None:
        """Gather linear layers in high precision if FP8 does not pay off for a number of tokens.

        FSDP2 gathers a parameter always as it did the first time, so this has no effect on weights
        that it has gathered before. The ranks of a mesh decide together, by the most tokens of any
        of them.

        Args:
            tokens: the tokens of this rank's forward, or None if their number is not known.
        """
        handles_by_mesh: dict[DeviceMesh, list[ParamHandle]] = {}
        for _, group in fsdp_groups(self.state.root):
            for handle, fsdp_param in self._params_of_group(group):
                is_master_weight = not isinstance(handle, Float8ParamHandle)
                is_linear = isinstance(handle.module, nn.Linear)
                if is_master_weight and is_linear and not was_gathered(fsdp_param):
                    mesh = handle.parameter.device_mesh
                    handles_by_mesh.setdefault(mesh, []).append(handle)

        for mesh, handles in handles_by_mesh.items():
            if is_measured(mesh.device_type):
                self._compare([mesh])
                if most_tokens(tokens, mesh) < self.state.min_tokens:
                    for handle in handles:
                        self._restore_local_tensor(handle)

    def _restore_local_tensor(self, handle: ParamHandle) -> None:
        """Undo `_replace_local_tensor` of a master weight, which is gathered in high precision."""
        self._high_precision.add(handle)
        set_local_tensor(handle.parameter, handle.local.high_precision)
        self._forget_units()

    def _unconverted_ties(self, module: nn.Module, name: str, parameter: Any) -> list[str]:
        """Return the names of modules that have a parameter and do not gather it in FP8.

        Args:
            module: a converted module that has the parameter too.
            name: the parameter's name in that module.
            parameter: the parameter that FSDP2 puts on that module.
        """
        root = self.state.root
        if self._unconverted is None and root is not None:
            self._unconverted = weakref.WeakKeyDictionary()
            for other_name, other in root.named_modules():
                if other._parameters and state_of(other) is None:
                    self._unconverted[other] = other_name or type(other).__name__

        # Tied modules are set one by one, so some still hold the parameter from before.
        tied_ids = {id(parameter), id(module._parameters.get(name))}
        tied_names = []
        for other, other_name in (self._unconverted or {}).items():
            ids = {id(p) for p in other._parameters.values() if p is not None}
            if ids & tied_ids:
                tied_names.append(other_name)
        return tied_names

    def _all_handles(self) -> Iterator[ParamHandle]:
        """Yield the handles of all layers, in the order of their indices, which all ranks share."""
        for module in self.state.layers():
            if module is not None:
                yield from module._fp8_params.values()  # type: ignore[operator]

    def handles(self, candidates: Iterable[ParamHandle] | None = None) -> list[ParamHandle]:
        """Return the handle of every parameter whose module holds the shard now, once.

        Args:
            candidates: handles of modules, by default of all layers.
        """
        if candidates is None:
            candidates = self._all_handles()
        handles: dict[ParamHandle, None] = {}  # an ordered set
        for candidate in candidates:
            local = candidate.local
            if local is not None:
                # A tied parameter has the handle of one of its modules.
                handles[local._handle] = None
        return list(handles)

    # --- gather units ----------------------------------------------------------------------------

    @property
    def units(self) -> list[GatherUnit]:
        """What FSDP2 gathers at once, in the order of the modules, which all ranks share."""
        if self._gather_units is None:
            self._gather_units = list(self._build_units())
        return self._gather_units

    def unit_of(self, handle: ParamHandle) -> GatherUnit:
        """Return the unit that a sharded parameter belongs to."""
        units = self.units  # which sets the units of their handles
        unit = cast("GatherUnit | None", handle.unit_if_any)
        if unit is None:
            # The handle is new, or its parameter is not in a group of FSDP2 below the root.
            unit = self._unit([handle], [], None)
            units.append(unit)
        return unit

    def note_stream(self) -> None:
        """Note that the current CUDA stream writes to shards that have no unit yet."""
        note_current_stream(self._writing_streams)

    def _forget_units(self) -> None:
        """Build the units again at the next all-gather."""
        for unit in self._gather_units or ():
            self._writing_streams |= unit.writing_streams
            for handle in unit.handles:
                handle.set_unit(None)
        self._gather_units = None

    def _build_units(self) -> Iterator[GatherUnit]:
        for _, group in fsdp_groups(self.state.root):
            handles = []
            fsdp_params = []
            for handle, fsdp_param in self._params_of_group(group):
                handles.append(handle)
                fsdp_params.append(fsdp_param)
            if handles:
                yield self._unit(handles, fsdp_params, group)

    def _params_of_group(self, fsdp_group: Any) -> Iterator[tuple[ParamHandle, Any]]:
        """Yield the parameters of FSDP2's group that this model gathers in FP8.

        Each is its handle and its ``FSDPParam``. A group may also have parameters of another
        converted model.
        """
        for fsdp_param in fsdp_group.fsdp_params:
            handle = getattr(sharded_local_tensor(fsdp_param), "_handle", None)
            if handle is not None and handle.state_if_any is self.state:
                yield handle, fsdp_param

    def _unit(
        self, handles: Sequence[ParamHandle], fsdp_params: Sequence[Any], fsdp_group: Any
    ) -> GatherUnit:
        unit = GatherUnit(
            handles,
            fsdp_params,
            self.quantizer,
            self.state.tracker,
            self._refresh_scales,
            fsdp_group,
            self._writing_streams,
        )
        for handle in handles:
            handle.set_unit(unit)
        return unit

    def _refresh_scales(self, unit: GatherUnit) -> None:
        """Compute all stale scales of parameters that are sharded over the same ranks as a unit."""
        self._compare([unit.mesh])
        self._check_settings()
        tracker = self.state.tracker
        shard_groups = unit.shard_groups
        stale_units = []
        for other in self.units:
            is_stale = other.is_stale(tracker.forward_id, tracker.in_backward)
            if is_stale and other.is_sharded and other.shard_groups == shard_groups:
                stale_units.append(other)
        self._update_scales(stale_units, tracker.forward_id)

    def _update_scales(self, units: Sequence[GatherUnit], forward_id: int) -> None:
        """Compute the stale scales of units together, for a forward.

        Scales of master weights follow from the current values, with one launch and one all-reduce
        for shards on the same ranks. Scales of FP8 weights are synchronized, and copied to the
        handles.
        """
        shards = []
        for unit in units:
            shards += unit.stale_shards(forward_id)
        fp8_shards = [shard for shard in shards if shard.is_fp8]
        masters = [shard for shard in shards if not shard.is_fp8]

        with outside_inference_mode(), torch.no_grad():
            for unit in units:
                unit.wait_for_writes()
            if fp8_shards:
                if self.state.delayed is not None:
                    # The synchronization may raise the next scales in the packs.
                    self.state.delayed.packs_on_current_stream()
                self._sync(fp8_shards)
                self.quantizer.copy_scales(fp8_shards)
            if masters:
                self.quantizer.update_scales(masters)
            computed = scale_tensors(shard.handle for shard in shards)
            ready = StreamDependency(shards[0].device, computed)
        for unit in units:
            unit.set_fresh(forward_id, ready)

    def precompute(self) -> None:
        """Compute the scales of the next forward now."""
        forward_id = self.state.tracker.forward_id + 1
        stale_units = [unit for unit in self.units if unit.is_sharded and unit.is_stale(forward_id)]
        if stale_units:
            self._compare([unit.mesh for unit in stale_units])
            self._update_scales(stale_units, forward_id)

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
        if handles is None:
            handles = self.handles()
        shards = []
        with outside_inference_mode(), torch.no_grad():
            for handle in handles:
                if isinstance(handle, Float8ParamHandle) and not handle.local.is_meta:
                    self.unit_of(handle).wait_for_writes()
                    shards.append(self.quantizer.local_shard(handle))
            self._sync(shards)
        self._synced_by_optimizer = in_step

    def _sync(self, shards: Iterable[LocalShard]) -> None:
        """Synchronize the scales of FP8 shards that several ranks share."""
        sharing_shards = []
        for shard in shards:
            if self.quantizer.shares_scales(shard.shard_spec):
                sharing_shards.append(shard)
        self._compare([shard.handle.parameter.device_mesh for shard in sharing_shards])
        if sharing_shards:
            sync_shards(self.quantizer, sharing_shards)

    def sync_module(self, module: Any) -> None:
        """Synchronize the scales of a converted module's FP8 weights."""
        self.sync_scales(self.handles(module._fp8_params.values()))

    def write_values(self, handles: Sequence[Float8ParamHandle], values: Sequence[Tensor]) -> None:
        """Quantize values into whole FP8 shards, with common scales: one all-reduce."""
        shards = []
        for handle, shard_values in zip(handles, values, strict=True):
            shards.append(self.quantizer.local_shard(handle, shard_values))
        with outside_inference_mode(), torch.no_grad():
            for handle, planes in zip(handles, self.quantizer.quantize(shards), strict=True):
                storage = handle.local._storage
                row = planes[0]
                if handle.local.numel():
                    storage.copy_planes_((storage.rowwise, storage.columnwise), planes)
                elif row is not None and row.format.per_tensor and not row.batched:
                    # An empty shard has the scale of all ranks.
                    storage.any_plane.scale.copy_(row.scale)
                handle.mark_written()

    def reduce_amaxes_(self, handles: Sequence[Float8ParamHandle], amaxes: Tensor) -> None:
        """Reduce the amaxes (n,) of shards, fp32, over the ranks of each weight, in place."""
        shards = [self.quantizer.local_shard(handle) for handle in handles]
        # A process group may have no backend for the device of offloaded weights.
        amaxes_on_mesh = amaxes.to(shards[0].device)
        self.quantizer.reduce(shards, amaxes_on_mesh)
        if amaxes_on_mesh is not amaxes:
            amaxes.copy_(amaxes_on_mesh)

    # --- events ----------------------------------------------------------------------------------

    def fsdp_may_initialize(self) -> None:
        """Notify that a hook was registered on a converted module, as FSDP2 does to initialize.

        It initializes before its first all-gather. Then the ranks of each mesh that shards the root
        compare their conversions. The root's forward may be too late for that. If this rank
        converted no layer of the root's own unit, FSDP2's hooks on the root precede ours, and
        gather that unit first.
        """
        root = self.state.root
        if not fsdp_is_initialized(root):
            return
        self.state.move_hooks_first()
        self._compare([p.device_mesh for p in sharded_parameters(root)])

    def forward_begins(self, root: nn.Module) -> None:
        """Notify that a forward of the root module begins.

        The ranks of each mesh that shards the root compare their conversions, once.
        """
        # All-gathers of this forward wait for writes before it, not for its own computation.
        events: dict[int, torch.cuda.Event] = {}
        for unit in self._gather_units or ():
            unit.record_write_events(events)
        if self.state.tracker.training:
            self.quantizer.record_gathered()
        if not self._checked:
            self._compare([p.device_mesh for p in sharded_parameters(root)])
            self._check_settings()

    def stepped(self) -> None:
        """Notify that an optimizer with parameters of this model has stepped.

        The scales of all master weights become stale. A compiled step writes to shards without an
        operator that `MasterWeight` sees, and forwards are not counted if the root is compiled or
        if another method of it is called. Codes that are kept for a running backward stay valid.

        The scales of trainable FP8 weights are synchronized, unless the step itself has done it.
        """
        keep_codes = self.state.tracker.in_backward
        fp8_handles = []
        for handle in self._all_handles():
            if isinstance(handle, Float8ParamHandle):
                fp8_handles.append(handle)
            else:
                handle.invalidate_scale(keep_codes=keep_codes)

        synced_by_optimizer = self._synced_by_optimizer
        self._synced_by_optimizer = False
        if synced_by_optimizer or not fp8_handles:
            return

        trainable_handles = []
        for handle in self.handles(fp8_handles):
            if handle.parameter.requires_grad:
                trainable_handles.append(handle)
        self.sync_scales(trainable_handles)

    def _check_settings(self) -> None:
        """Raise if FSDP2's settings do not allow FP8 all-gathers. Runs again after a move."""
        if self._checked:
            return
        check_settings(self.state)
        self.state.move_hooks_first()
        self._checked = True

    def _compare(self, meshes: Iterable[DeviceMesh]) -> None:
        """Raise ValueError if the conversions of a mesh's ranks differ. Runs once per mesh."""
        for mesh in meshes:
            if mesh not in self._compared_meshes:
                compare_conversions(self.state, mesh)
                self._compared_meshes.add(mesh)


def sharded_model(state: ModelState) -> ShardedModel:
    """Return the FSDP2 side of a converted model, created on first use."""
    if state.sharded_model is None:
        state.sharded_model = ShardedModel(state)
    return cast(ShardedModel, state.sharded_model)


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
    states = dict.fromkeys(map(state_of, module.modules()))  # of each converted model once
    for state in states:
        if state is not None and state.sharded_model is not None:
            state.sharded_model.precompute()
