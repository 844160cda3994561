"""Modules with FP8 parameters: converted linear layers, and batched weights of experts.

`Float8Params` is the mixin of all of them. It notifies the sharded model of shards that FSDP2 puts
on the module, and keeps FP8 weights and the buffers of delayed scaling valid through torch's
operations on modules. `add_fp8_params` adds it to a module. The forward of a module that is not a
linear layer does not change, and must accept the gathered `fp8rs.tensor.quantized.QuantizedTensor`.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fp8rs._torch import (
    become,
    can_share_data,
    is_alias,
    is_distributed,
    own_part,
    set_local_tensor,
)
from fp8rs.model.handle import ParamHandle, local_of
from fp8rs.model.state import ModelState, refuse_codes, remove_hook
from fp8rs.quantize.cast import quantize_planes
from fp8rs.scaling.histories import (
    BUFFERS,
    NOTHING_READY,
    SlotCache,
    keep_local,
    new_buffers,
)
from fp8rs.tensor.quantized import QuantizedTensor, is_fp8

from .function import prepare_compilers

if TYPE_CHECKING:  # fsdp imports torch.distributed.tensor, which takes seconds
    from fp8rs.fsdp.float8_shard import Float8ParamHandle


class Float8Params(nn.Module):
    """Mixin of modules with FP8 parameters.

    Attributes:
        _fp8_state: the state of the converted model.
        _fp8_index: the module's index among the converted modules.
        _fp8_params: the handle of each FP8 parameter, by the parameter's name.
        _fp8_slots: with delayed scaling, views of single elements of the buffers.
        fp8_ready: with delayed scaling, whether weight, input and gradient had scales one roll
            before the last. The buffers themselves are not read.
    """

    #: The mixin and the class before the conversion, of classes that `float8_class` returns.
    _fp8_bases: ClassVar[tuple[type, type]]
    _fp8_state: ModelState
    _fp8_index: int
    _fp8_params: dict[str, ParamHandle]
    _fp8_slots: SlotCache
    fp8_ready: tuple[bool, bool, bool] = NOTHING_READY
    #: The histories of a state dict that is being loaded.
    _fp8_loaded_histories: dict[str, Tensor] | None = None

    def _join(self, state: ModelState, fqn: str, names: Sequence[str]) -> None:
        """Make parameters of this module FP8 parameters of the model with ``state``."""
        # torch.distributed.tensor takes seconds to import, and fsdp imports it.
        from fp8rs.fsdp.float8_shard import handle_for

        prepare_compilers()
        self._fp8_state = state
        self._fp8_index = state.add_layer(self, fqn)
        self._fp8_params = {name: handle_for(self, name) for name in names}
        self._fp8_slots = SlotCache()
        self.fp8_ready = NOTHING_READY
        if state.delayed is not None:
            weight = getattr(self, names[0])
            for name, value in new_buffers(state.delayed.recipe, weight.device).items():
                # State dicts of master weights load into the unconverted model. The scale of an FP8
                # weight comes from its history, so a resumed training needs both.
                self.register_buffer(name, value, persistent=is_fp8(weight))
        hooks: Any = self._load_state_dict_pre_hooks.values()
        if _before_load not in [registered.hook for registered in hooks]:
            self.register_load_state_dict_pre_hook(_before_load)
            self.register_load_state_dict_post_hook(_after_load)
            self.register_state_dict_post_hook(_copy_histories)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter) and name in self._parameters:
            # FSDP2 sets each shard and each gathered weight.
            sharded = is_distributed(value)
            if sharded:
                self._wrap_shard(name, value)
            if sharded or isinstance(value, QuantizedTensor):
                self._parameters[name] = value
                return
        super().__setattr__(name, value)

    def register_state_dict_pre_hook(self, hook: Any) -> Any:
        """Register a hook as `nn.Module` does, and notify the model that FSDP2 may initialize.

        FSDP2 registers a hook on each module with sharded parameters when it initializes, before
        the first all-gather of any of its units. All ranks that shard a converted layer reach this
        point, whichever layers they converted, and also if they gather them in high precision.
        """
        handle = super().register_state_dict_pre_hook(hook)
        if self._fp8_state.sharded_model is not None:
            self._fp8_state.sharded_model.fsdp_may_initialize()
        return handle

    def _wrap_shard(self, name: str, parameter: Any) -> None:
        if not self._fp8_state.standalone:
            from fp8rs.fsdp.sharded_model import sharded_model

            sharded_model(self._fp8_state).wrap(self, name, parameter)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        delayed = self._fp8_state.delayed
        buffers_before: dict[str, Any] = {}
        if delayed is not None:
            for name in BUFFERS:
                buffers_before[name] = self._buffers[name]

        fp8_weights: dict[str, Any] = {}
        for name in self._fp8_params:
            weight = self._parameters.get(name)
            if is_fp8(weight):
                fp8_weights[name] = weight

        # Torch swaps the tensors of subclasses, which loses hooks and other state of autograd. It
        # skips parameters that are None.
        self._parameters.update(dict.fromkeys(fp8_weights))
        try:
            out = super()._apply(fn, recurse)
        finally:
            self._parameters.update(fp8_weights)
        for name, weight in fp8_weights.items():
            apply_to_fp8_weight(weight, fn)
            if weight.is_meta:
                handle = cast("Float8ParamHandle", self._fp8_params[name])
                handle.forget_values()

        if delayed is not None:
            delayed.moved()
            self._restore_values(buffers_before)

        for name in self._fp8_params:
            weight = self._parameters.get(name)
            # Without a sharded model, it is tensor parallelism that has divided the weight.
            if is_distributed(weight) and self._fp8_state.sharded_model is not None:
                self._wrap_shard(name, weight)  # it may have another local tensor
        return out

    def _restore_values(self, buffers_before: dict[str, Any]) -> None:
        """Give the buffers of delayed scaling the values and the dtype from before `_apply`."""
        for name, before in buffers_before.items():
            new = self._buffers[name]
            assert new is not None
            if new is not before and new.is_meta >= before.is_meta:
                # A cast applies only to parameters, and to_empty does not initialize memory.
                self._buffers[name] = before.to(new.device)
            if before.is_meta and not new.is_meta:
                reset_scales(self, keep_fp8_weight=False)  # the meta device has no values

    def __setstate__(self, state: dict[str, Any]) -> None:
        from fp8rs.fsdp.float8_shard import handle_for
        from fp8rs.fsdp.sharded_model import sharded_model

        prepare_compilers()
        super().__setstate__(state)
        for name in self._fp8_params:
            weight: Any = self._parameters.get(name)
            if isinstance(weight, QuantizedTensor) and weight._storage.observer is None:
                self._fp8_params[name] = handle_for(self, name)
            if local_of(weight) is not None:
                sharded_model(self._fp8_state)


# --- classes --------------------------------------------------------------------------------------


#: The classes of converted modules, by a mixin and the class before conversion.
CLASSES: dict[tuple[type, type], type[Any]] = {}


def float8_class(mixin: type[Any], kind: type[Any]) -> type[Any]:
    """Return the class that inherits from a mixin and from a class of modules.

    FSDP2 creates classes in the same way.
    """
    bases = (mixin, kind)
    if bases not in CLASSES:
        namespace = {"__module__": kind.__module__, "_fp8_bases": bases}
        cls = type(f"Float8{kind.__name__}", bases, namespace)
        copyreg.pickle(cls, _reduce)
        CLASSES[bases] = cls
    return CLASSES[bases]


def class_before_conversion(kind: type[Any]) -> type[Any] | None:
    """Return the class that `float8_class` derived a class from. None for any other class.

    A class that another library has derived from the class of a converted module is another class.
    """
    bases: tuple[type, type] | None = kind.__dict__.get("_fp8_bases")
    return None if bases is None else bases[1]


def _reduce(module: Any) -> Any:
    """Pickle a module whose class was created at run time."""
    return _blank, type(module).__dict__["_fp8_bases"], module.__dict__


def _blank(mixin: Any, kind: Any) -> nn.Module:
    """Create a module without state, for pickle and copy."""
    module: nn.Module = object.__new__(float8_class(mixin, kind))
    return module


def add_fp8_params(
    module: nn.Module,
    names: Sequence[str],
    state: ModelState,
    fqn: str,
    mixin: type[Float8Params] = Float8Params,
) -> None:
    r"""Make FSDP2 gather parameters of a module in FP8.

    Call it before ``fully_shard``. A parameter in high precision is quantized for each all-gather.
    An FP8 weight is gathered as it is stored. A parameter of three or more dimensions is a batch of
    matrices, each of which is quantized by itself.

    Args:
        module: a module that is not converted. Its class is changed to a subclass.
        names: names of its parameters (N, K), (E, N, K) or (E, \*, N, K).
        state: the state of the converted model, whose root contains the module.
        fqn: the module's fully qualified name, for messages.
        mixin: the class that the subclass also inherits from.
    """
    module.__class__ = float8_class(mixin, type(module))
    converted: Any = module
    converted._join(state, fqn, names)


def remove_fp8_params(module: Float8Params) -> None:
    """Undo `add_fp8_params`. Parameters stay as they are.

    Args:
        module: a converted module whose class a conversion has made (`class_before_conversion`).
    """
    original = class_before_conversion(type(module))
    assert original is not None, f"{type(module).__name__} was not made by a conversion"
    state = module._fp8_state
    state.remove_layer(module)

    if state.delayed is not None:
        state.delayed.moved()
        for name in BUFFERS:
            delattr(module, name)
    remove_hook(module._load_state_dict_pre_hooks, _before_load)
    remove_hook(module._load_state_dict_post_hooks, _after_load)
    remove_hook(module._state_dict_hooks, _copy_histories)

    module.__class__ = original
    for name in [name for name in module.__dict__ if name.startswith("_fp8_")]:
        del module.__dict__[name]
    del module.__dict__["fp8_ready"]
    module.__dict__.pop("__setattr__", None)  # see `fp8rs._torch.set_plainly`


# --- FP8 weights ----------------------------------------------------------------------------------


def apply_to_fp8_weight(weight: Any, fn: Callable[[Tensor], Tensor]) -> None:
    """Apply a function of ``nn.Module._apply`` to an FP8 weight and to its gradient.

    Like a plain parameter, the weight keeps its object and its state of autograd. A weight that
    moves from or to the meta device keeps them too, which a plain parameter does not.

    Args:
        weight: the parameter, maybe a DTensor.
        fn: returns a tensor on another device, in another dtype, or in other memory.
    """
    with torch.no_grad():
        new = fn(weight)
    grad = weight.grad
    if isinstance(weight, QuantizedTensor) and can_share_data(weight, new):
        weight.data = new
    else:
        weight.grad = None
        become(weight, new)

    if grad is None:
        return
    with torch.no_grad():
        new_grad = fn(grad)
    if weight.grad is grad and can_share_data(grad, new_grad):
        grad.data = new_grad
    else:
        weight.grad = new_grad


def quantize_like(replaced: Any, parameter: Any) -> None:
    """Quantize the slice that a parallel style takes from an FP8 weight, if it is not quantized.

    A slice that starts inside a block arrives as values, because its own blocks start at its edge.

    Args:
        replaced: the parameter that is replaced.
        parameter: the new parameter, maybe a DTensor. It becomes FP8 if ``replaced`` is.
    """
    weight = own_part(replaced)
    local = own_part(parameter)
    if not isinstance(weight, QuantizedTensor):
        return
    if local is parameter or isinstance(local, QuantizedTensor):
        return
    rowwise, columnwise = weight._storage.has_planes
    with torch.no_grad():
        row, col = quantize_planes(weight.spec, local.contiguous(), rowwise, columnwise)
    storage = weight._storage.over(row, col)
    set_local_tensor(parameter, weight.over(storage, local.shape, weight.dtype))


# --- scales of delayed scaling --------------------------------------------------------------------


@torch.no_grad()
def reset_scales(module: Any, *, keep_fp8_weight: bool = True) -> None:
    """With delayed scaling, reset scales and histories, because a weight is about to be replaced.

    With the old scales, the new values and the outputs could saturate. In an evaluation, nothing
    would update the scales.

    Args:
        module: a converted module.
        keep_fp8_weight: whether to keep the history of an FP8 weight that was trained. The write
            then fits it to the new values, which may be the weight's own codes. A history of exact
            values is not lost to them.
    """
    delayed = module._fp8_state.delayed
    if delayed is None:
        return
    scale, amax, history = (module._buffers[name] for name in BUFFERS)
    weight_views = [scale[0], amax[0], history[:, 0]]
    values_before = [view.clone() for view in weight_views]
    was_trained = history[:, 0].amax() > 0

    for buffer in (scale, amax, history):
        buffer.zero_()
    weight_name = next(iter(module._fp8_params), None)
    if keep_fp8_weight and is_fp8(module._parameters.get(weight_name)):
        for view, value in zip(weight_views, values_before, strict=True):
            view.copy_(torch.where(was_trained, value, view))

    module.fp8_ready = NOTHING_READY
    delayed.scales_lost()


def _materialize(module: Any, device: torch.device) -> None:
    """Allocate buffers that are on the meta device. State dicts do not contain them."""
    delayed = module._fp8_state.delayed
    if delayed is None:
        return
    for name in BUFFERS:
        buffer = module._buffers[name]
        if buffer.is_meta:
            module._buffers[name] = torch.zeros_like(buffer, device=device)
            delayed.moved()


# --- state dicts ----------------------------------------------------------------------------------


def _copy_histories(
    module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """State-dict hook: replace the buffers of delayed scaling by copies.

    `torch.distributed.checkpoint.load` writes to a state dict in place, and its writes to the
    weights would change histories that it has loaded. On the meta device there are no histories.
    Then the state dict of a sharded model consists of DTensors, which accelerate requires to load
    from rank 0.
    """
    if module._fp8_state.delayed is None:
        return
    keep_local(module._buffers)
    for name in BUFFERS:
        buffer = state_dict.pop(prefix + name, None)
        if buffer is not None and not buffer.is_meta:
            state_dict[prefix + name] = module._buffers[name].detach().clone()


def _take_histories(
    module: Any, state_dict: dict[str, Any], prefix: str, error_msgs: list[str]
) -> dict[str, Tensor] | None:
    """Return copies of the buffers of delayed scaling in a state dict, by name.

    The module's own buffers replace them in the state dict, or nothing if they are not persistent.

    Returns:
        None if the state dict does not have all buffers.
    """
    if module._fp8_state.delayed is None:
        return None
    keep_local(module._buffers)
    histories: dict[str, Tensor] = {}
    for name in BUFFERS:
        key = prefix + name
        value = state_dict.pop(key, None)
        buffer = module._buffers[name]
        if name not in module._non_persistent_buffers_set:
            state_dict[key] = buffer
        # Torch's load of a full state dict passes the buffer itself for a missing entry.
        if value is None or is_alias(value, buffer):
            continue

        if value.shape == buffer.shape:
            histories[name] = value.detach().clone()
        else:
            error_msgs.append(
                f"size mismatch for {key}: copying a buffer of delayed scaling with shape "
                f"{tuple(value.shape)} from the state dict, the shape in the current model is "
                f"{tuple(buffer.shape)}. Convert with the amax_history_len of the saved model"
            )
    return histories if len(histories) == len(BUFFERS) else None


def _before_load(
    module: Any,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    names = [name for name in module._fp8_params if prefix + name in state_dict]
    if not names:
        return
    refuse_codes(module, state_dict, prefix)
    module._fp8_loaded_histories = _take_histories(module, state_dict, prefix, error_msgs)
    reset_scales(module)
    if not local_metadata.get("assign_to_params_buffers", False):
        return
    for name in names:
        value = state_dict[prefix + name]
        module._fp8_params[name].reshard()  # FSDP2's own hook runs later
        if not value.is_meta:
            _materialize(module, value.device)
        state_dict[prefix + name] = _copy_into_fp8_weight(module, name, value)


def _after_load(module: Any, incompatible: Any) -> None:
    for name in module._fp8_params:
        weight = module._parameters.get(name)
        if weight is not None and not weight.is_meta:
            _materialize(module, weight.device)
    sharded_model = module._fp8_state.sharded_model
    if sharded_model is not None:
        sharded_model.sync_module(module)

    # Writes and the synchronization fit the history of the weight to its rounded values. The saved
    # history comes from exact values.
    histories = module._fp8_loaded_histories
    module._fp8_loaded_histories = None
    if histories is not None:
        load_histories(module, histories)


@torch.no_grad()
def load_histories(module: Any, histories: dict[str, Tensor]) -> None:
    """Write saved buffers of delayed scaling to a layer.

    Args:
        module: a layer of a model with delayed scaling.
        histories: the buffers, by name.
    """
    for name, value in histories.items():
        module._buffers[name].copy_(value)
    if not module.fp8_scale.is_meta:
        module.fp8_ready = tuple((module.fp8_scale[:, 0] > 0).tolist())


def _copy_into_fp8_weight(module: nn.Module, name: str, value: Any) -> Any:
    """Write to an FP8 weight what ``load_state_dict(assign=True)`` would assign to it.

    Assigning would replace it by a plain weight.

    Returns:
        The value to assign: the FP8 parameter itself, or ``value`` for other parameters.
    """
    weight: Any = module._parameters[name]
    if not is_fp8(weight) or value.shape != weight.shape:
        return value  # torch reports a wrong shape
    if weight.is_meta and not value.is_meta:
        empty = torch.empty_like(weight.detach(), device=value.device)
        setattr(module, name, nn.Parameter(empty, weight.requires_grad))
        weight = module._parameters[name]
    with torch.no_grad():
        weight.copy_(value)
    return weight
