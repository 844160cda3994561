"""Private names of torch, in one place. A new torch release can break only this module.

Each entry says why public API does not suffice.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

#: A context for writes that autograd must not count. FSDP2 refills gathered tensors that a graph
#: has saved.
preserve_version_counter = _unsafe_preserve_version_counter

#: ``__torch_function__`` of subclasses that only implement ``__torch_dispatch__``.
disabled_torch_function = torch._C._disabled_torch_function_impl

#: A context in which no ``__torch_dispatch__`` runs, not even in modes, so nothing is traced.
no_torch_dispatch = torch._C._DisableTorchDispatch

#: Returns whether two tensors share a storage.
is_alias: Callable[[Tensor, Tensor], bool] = cast(Any, torch._C)._is_alias_of

#: Increments the version counter of tensors, for writes below autograd.
increment_version = torch._C._increment_version


def note_write(x: Tensor) -> None:
    """Increment a tensor's version counter after a write below autograd, except while tracing."""
    if not torch.compiler.is_compiling() and not x.is_inference():
        increment_version([x])


def in_backward() -> bool:
    """Return whether this thread is in a backward pass, which includes recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


#: Calls a function at the end of the running backward, as FSDP2 does.
after_backward: Callable[[Callable[[], object]], None] = cast(
    Any, torch.autograd.Variable
)._execution_engine.queue_callback


_will_engine_execute_node: Callable[[Any], bool] = torch._C._will_engine_execute_node


def gradients_needed(ctx: Any) -> tuple[bool, ...]:
    """Return, for each input of an autograd Function, whether this backward needs its gradient.

    ``ctx.needs_input_grad`` is set in the forward. `torch.autograd.grad` and
    ``backward(inputs=...)`` may need fewer gradients, and zero-bubble pipeline schedules compute
    gradients of inputs and of weights in two backwards. Torch's operators query the engine.

    Dynamo cannot trace the private call, so compiled code uses ``ctx.needs_input_grad``.
    """
    needs: tuple[bool, ...] = ctx.needs_input_grad
    if torch.compiler.is_compiling() or sum(needs) < 2:
        return needs
    # Inputs that are not tensors have no edge, and inputs without a gradient have no node.
    runs = [_will_run(node) for node, _ in ctx.next_functions if node is not None]
    if all(runs):
        return needs
    next_runs = iter(runs)
    return tuple(need and next(next_runs) for need in needs)


def _will_run(node: Any) -> bool:
    """Return whether the running backward executes a node or returns its gradient."""
    try:
        return _will_engine_execute_node(node)
    except RuntimeError:
        # Torch raises this for a leaf whose gradient `torch.autograd.grad` returns.
        return True


def current_stream_id(index: int) -> int:
    """Return the current stream of a CUDA device as an int.

    ``torch.cuda.current_stream`` creates an object, which takes ten times as long.
    """
    return int(torch._C._cuda_getCurrentRawStream(index))


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return autocast's dtype for a device type, or None without autocast.

    The public functions raise an error for the meta device.
    """
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def outside_inference_mode() -> contextlib.AbstractContextManager[object]:
    """Return a context without inference mode, for tensors that a later training step may write.

    Use it with ``torch.no_grad``: leaving inference mode enables gradients. Without an inference
    mode to leave, ``torch.inference_mode(False)`` would take the host 20 us.
    """
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return contextlib.nullcontext()


def in_fake_mode() -> bool:
    """Return whether a FakeTensorMode is active, alone or below other dispatch modes."""
    fake = torch._C._TorchDispatchModeKey.FAKE
    return torch._C._get_dispatch_mode(fake) is not None


def dispatch_mode() -> object:
    """Return the innermost active ``TorchDispatchMode``, or None.

    The public function adds an import and several frames.
    """
    depth = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(depth - 1) if depth else None


#: The modes of selective checkpointing, in the forward and in the recomputation.
_SELECTIVE_CHECKPOINT_MODES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


def outside_selective_checkpoints(
    function: Callable[_Arguments, _Result],
) -> Callable[_Arguments, _Result]:
    """Hide the operators of a function from selective checkpointing, and from no other mode.

    Selective checkpointing numbers the operators of a forward, and replays saved outputs by these
    numbers. A function that runs in the forward and not in the recomputation, such as a hook that
    FSDP2 calls in an all-gather, would therefore shift the numbers of all later operators.

    Without dispatch modes, this costs one check of the depth of their stack. Torch has no public
    way to leave a mode that the caller has entered. Compilers cannot trace the stack, so they trace
    the function as it is.
    """

    @functools.wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
            return function(*args, **kwargs)
        with _without_selective_checkpoint_modes():
            return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def _without_selective_checkpoint_modes() -> Iterator[None]:
    """Take the modes of selective checkpointing off the stack of dispatch modes."""
    # Only the last mode can be taken off the stack. Modes that were entered after a hidden one are
    # therefore taken off too, and put back. FakeTensorMode and modes of compilers are always below.
    entered: list[object] = []
    visible: list[object] = []
    for index in range(torch._C._len_torch_dispatch_stack()):
        mode = torch._C._get_dispatch_stack_at(index)
        hidden = isinstance(mode, _SELECTIVE_CHECKPOINT_MODES)
        if hidden or entered:
            entered.append(mode)
            if not hidden:
                visible.append(mode)

    _replace_last_modes(entered, visible)
    try:
        yield
    finally:
        _replace_last_modes(visible, entered)


def _replace_last_modes(old: list[object], new: list[object]) -> None:
    """Replace the last modes on the stack of dispatch modes."""
    for _ in old:
        torch._C._pop_torch_dispatch_stack(None)
    for mode in new:
        torch._C._push_on_torch_dispatch_stack(cast(Any, mode))


class Itself:
    """Wraps a value to compare it by identity."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def memory_of(x: Tensor) -> object:
    """Return an identifier of a tensor's memory, to detect writes without a version bump.

    For a real tensor it is the address, which ``x.data = y`` changes. While tracing, it is the
    current functional value, which every write changes.
    """
    if isinstance(x, FunctionalTensor):
        return Itself(x.from_functional())
    if type(x) is FakeTensor:
        return None
    try:
        return x.data_ptr()
    except RuntimeError:
        if torch._C._functorch.is_batchedtensor(x):
            raise RuntimeError(
                "FP8 layers do not support torch.func.vmap: apply it before the conversion"
            ) from None
        return None


def has_tangent(*tensors: Tensor | None) -> bool:
    """Return whether forward-mode differentiation is running with a tangent of one of these."""
    if forward_ad._current_level < 0:
        return False
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            return True
    return False


#: Like ``torch.compiler.disable``, but imports Dynamo only at the first call. Used by torch.optim.
not_traced: Callable[..., Any] = torch._compile._disable_dynamo


#: ``torch.compiler.allow_in_graph``, which registers a finalizer in each call. It imports Dynamo.
allow_in_graph: Callable[[Callable[..., Any]], object] = functools.cache(
    torch.compiler.allow_in_graph
)


def constant_when_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like ``torch.compiler.assume_constant_result``, which imports Dynamo (one second)."""
    cast(Any, function)._dynamo_marked_constant = True
    return function


def dispatch_when_traced(function: Callable[..., Any]) -> None:
    """Make compilers call ``__torch_function__`` for a function whose name begins with "_".

    In eager mode, torch calls it for all functions. Do not call this at import time, because it
    imports Dynamo.
    """
    from torch._dynamo.variables import torch as dynamo

    cast(Any, dynamo).get_overridable_functions().add(function)


def keep_from_ddp(module: Any, names: list[str]) -> None:
    """Make DistributedDataParallel ignore parameters and buffers of a module.

    DDP has no argument for this, and would broadcast the first rank's buffers.
    """
    ignored = list(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for name in names:
        if name not in ignored:
            ignored.append(name)
    module._ddp_params_and_buffers_to_ignore = ignored


def give_to_ddp(module: Any, names: list[str]) -> None:
    """Undo `keep_from_ddp`."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", None)
    if ignored is None:
        return  # the module has no buffers of this state any more
    still_ignored = [name for name in ignored if name not in names]
    if still_ignored:
        module._ddp_params_and_buffers_to_ignore = still_ignored
    else:
        del module._ddp_params_and_buffers_to_ignore


def keep_address(x: Tensor) -> Tensor:
    """Mark a tensor as a static input for compilers, and return it.

    CUDA graphs copy other inputs, so that writes would go to the copy.
    """
    cast(Any, x)._dynamo_static_input_type = "unguarded"
    return x


def inductor_decomposition(operator: Any, function: Callable[..., Any]) -> None:
    """Make Inductor trace ``function`` instead of each call of ``operator``.

    Torch has no public API for this. If a torch release lacks the table, Inductor calls the
    operator. Do not call this at import time, because it imports Inductor and Dynamo.
    """
    from torch._inductor import decomposition

    table = getattr(decomposition, "fast_random_decomps", None)
    if table is not None:
        table()[operator] = function


def inductor_reads_memory(operator: Any) -> None:
    """Make Inductor materialize the inputs of ``operator`` before other code reads them.

    Otherwise Inductor materializes an input when it lowers the operator, and code that it lowered
    before recomputes the input, possibly with other bits. Call this while compiling, because it
    imports Inductor.
    """
    from torch._inductor import lowering

    operators = getattr(lowering, "needs_realized_inputs", None)
    if operators is not None:
        operators.add(operator)


def may_be_empty(x: Tensor) -> bool:
    """Return whether a tensor has no elements, or may have none while tracing."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return bool(guard_or_true(x.numel() == 0))


def depends_on_data(*sizes: int) -> bool:
    """Return whether traced sizes depend on data, as in ``x[mask]``.

    A branch on such a size ends the trace with an error.
    """
    traced_sizes = [size for size in sizes if type(size) is not int]
    if not traced_sizes:
        return False
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

    return any(map(has_free_unbacked_symbols, traced_sizes))


def real_subclass(cls: type[Tensor], data: Tensor, requires_grad: bool) -> Any:
    """Return an instance of ``cls`` that has the storage of ``data``, and a real pointer.

    The documented ``_make_wrapper_subclass`` returns tensors without a storage.
    """
    return torch.Tensor._make_subclass(cls, data, requires_grad)


def make_wrapper_subclass(cls: type[Tensor], size: Any, **kwargs: Any) -> Any:
    """Return a tensor of a subclass, without a storage.

    Code that reads its memory outside the dispatcher gets a RuntimeError instead of a null pointer.
    """
    wrapper = torch.Tensor._make_wrapper_subclass(cls, size, **kwargs)
    torch._C._set_throw_on_mutable_data_ptr(wrapper)
    return wrapper


def forget_fake(parameter: Tensor) -> None:
    """Drop the weak reference by which a ``FakeTensorMode`` remembers a parameter.

    The mode maps each tensor that it has converted to its fake. ``torch.utils.swap_tensors``
    refuses tensors that have a weak reference.
    """
    if isinstance(parameter, FakeTensor):
        memo = parameter.fake_mode.fake_tensor_converter.meta_converter.tensor_memo
        for key in [key for key, fake in memo.items() if fake is parameter]:
            del memo[key]


def become(parameter: Tensor, new: Tensor) -> None:
    """Replace a parameter's tensor by ``new``. The parameter stays the same Python object.

    The parameter keeps its gradient, ``requires_grad``, ``grad_dtype``, and the hooks and
    attributes that users have set.

    Raises:
        RuntimeError: torch cannot swap the tensors, because a graph or a weak reference holds one.
    """
    forget_fake(parameter)
    # Users' handles remove hooks from these dictionaries, so they must stay the same objects.
    backward_hooks = parameter._backward_hooks
    accumulate_hooks = cast(Any, parameter)._post_accumulate_grad_hooks

    other: Any = torch.nn.Parameter(new, requires_grad=parameter.requires_grad)
    for mark, value in parameter.__dict__.items():
        if not hasattr(other, mark):
            other.__dict__[mark] = value
    # By default, `grad_dtype` follows the dtype. Torch does not say whether it was set.
    grad_dtype = cast(Any, parameter).grad_dtype
    if grad_dtype != parameter.dtype:
        other.grad_dtype = grad_dtype
    other.grad = parameter.grad

    torch.utils.swap_tensors(parameter, other)
    parameter._backward_hooks = backward_hooks
    cast(Any, parameter)._post_accumulate_grad_hooks = accumulate_hooks


def can_share_data(tensor: Tensor, new: Tensor) -> bool:
    """Return whether torch can assign ``new`` to the ``data`` of a tensor.

    ``nn.Module.to`` queries this too.
    """
    compatible: bool = cast(Any, torch)._has_compatible_shallow_copy_type(tensor, new)
    return compatible and type(tensor) is type(new)


def check_can_become(parameter: Tensor) -> None:
    """Raise if `become` would raise for this parameter, without changing it.

    Trying and undoing a swap would make graphs unusable that hold the parameter.

    Raises:
        RuntimeError: torch cannot swap the tensor, because a graph or a weak reference holds it.
    """
    forget_fake(parameter)
    if weakref.getweakrefs(parameter):
        raise RuntimeError("the parameter has a weak reference")
    references: int = cast(Any, parameter)._use_count()
    if references > 1 and parameter.is_leaf and parameter.requires_grad:
        # The node that accumulates its gradient may hold one reference. If there was no such node,
        # `get_gradient_edge` creates one, and the count grows.
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        if references == cast(Any, parameter)._use_count():
            references -= 1
        del node
    if references > 1:
        raise RuntimeError(f"the parameter is referred to {references - 1} times from elsewhere")


def is_traced(data: Tensor) -> bool:
    """Return whether a tensor is fake or functional, and so has no data of its own."""
    return isinstance(data, (FakeTensor, FunctionalTensor))


def wrapper_subclass(cls: type[Tensor], data: Tensor, requires_grad: bool) -> Any:
    """Return an instance of ``cls`` without storage, with the metadata of ``data``."""
    return make_wrapper_subclass(
        cls,
        data.shape,
        strides=data.stride(),
        storage_offset=data.storage_offset(),
        dtype=data.dtype,
        layout=data.layout,
        device=data.device,
        requires_grad=requires_grad,
    )


def is_view_of_flat_parameter(weight: Tensor) -> bool:
    """Return whether FSDP1 (FullyShardedDataParallel) has gathered this weight."""
    return getattr(weight._base, "_is_flat_param", False)


def group_named(name: str) -> Any:
    """Return the process group of that name. Torch has no public function for this."""
    return cast(Any, torch.distributed).distributed_c10d._resolve_process_group(name)


def local_tensor(parameter: Any) -> Any:
    """Return the local tensor of a DTensor itself. ``to_local`` returns a new view."""
    return parameter._local_tensor


def is_distributed(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, without importing the class, which takes seconds."""
    return hasattr(tensor, "_local_tensor")


def reshard(model: Any) -> None:
    """Make the modules of a model hold their shards."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def set_plainly(module: Any) -> None:
    """Let FSDP2 replace parameters of a module that overrides ``__setattr__`` without calling it.

    FSDP2 replaces parameters twice in each all-gather. It writes to ``_parameters`` if the
    module's ``__setattr__`` is that of ``nn.Module``, and otherwise assigns. FSDP2 reads this
    attribute of the instance. Python reads that of the class, so assignments still call the
    override.
    """
    module.__dict__["__setattr__"] = MethodType(torch.nn.Module.__setattr__, module)


def own_part(tensor: Any) -> Any:
    """Return the local tensor of a DTensor, or another tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def set_local_tensor(parameter: Any, local: Tensor) -> None:
    """Replace the local tensor of a DTensor by another one with the same values."""
    parameter._local_tensor = local


def local_shape_and_offset(
    shape: tuple[int, ...], mesh: Any, placements: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's part of a DTensor, and its offset in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    return tuple(size), tuple(offset)


def write_item(fqn: str, tensor: Any) -> Any:
    """Return what DCP writes of a tensor that does not implement DCP's protocol itself."""
    from torch.distributed.checkpoint import planner_helpers

    if is_distributed(tensor):
        return planner_helpers._create_write_items_for_dtensor(fqn, tensor)
    return planner_helpers._create_write_item_for_tensor(fqn, tensor)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor. Torch has no public function for this."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def dtensor_like(parameter: Any, local: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return a DTensor with another local tensor and the placements of a parameter.

    ``DTensor.from_local`` would copy an offloaded tensor to the mesh's device.

    Args:
        parameter: a DTensor.
        local: this rank's part.
        shape: the whole shape, of a contiguous tensor. The default is the parameter's.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec: Any = parameter._spec
    meta = spec.tensor_meta
    if shape is not None:
        meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), local.dtype)
    elif local.dtype != meta.dtype:
        meta = TensorMeta(meta.shape, meta.stride, local.dtype)
    if meta is not spec.tensor_meta:
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    dtensor_class: Any = DTensor
    dtensor: Tensor = dtensor_class(local, spec, requires_grad=False)
    return dtensor


#: Names that torch.compile, checkpoint_wrapper and FSDP1 insert into fully qualified names.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def plain_name(name: str) -> str:
    """Return the name that a module or a tensor has in a model without wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unwrapped(model: Any) -> Any:
    """Return the model inside the modules of torch.compile and DistributedDataParallel.

    A module that ``fully_shard`` was called on stays, because it unshards and reshards the model.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    while not isinstance(model, FSDPModule):
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            break
    return model


def names_of(model: Any, name: str) -> set[str]:
    """Return the names that torch's state-dict functions use for ``name`` in a model."""
    from torch.distributed.checkpoint.state_dict import _get_fqns

    return set(_get_fqns(model, name))


def fsspec_file_system(url: str) -> Any:
    """Return DCP's file system for the URL of a store. Its ``fs`` is fsspec's."""
    from torch.distributed.checkpoint._storage_utils import _storage_setup

    return cast(Any, _storage_setup(None, url, reader=True)).fs


def dtensor_spec(parameter: Any) -> Any:
    """Return a DTensor's spec, the same object until its sharding changes. None for others."""
    return getattr(parameter, "_spec", None)


def fsdp_param_groups(module: Any) -> list[Any]:
    """Return a module's FSDP parameter groups. The attribute's name depends on the release."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        group = getattr(state, "_fsdp_param_group", None)
        groups = [] if group is None else [group]
    return list(groups)


def fsdp_place(fsdp_param: Any) -> tuple[Any, str, Any]:
    """Return the module of an FSDPParam, its name in the module, and the sharded parameter."""
    place = fsdp_param._module_info
    return place.module, place.param_name, fsdp_param.sharded_param


def sharded_local_tensor(fsdp_param: Any) -> Any:
    """Return the local tensor of the sharded parameter of an FSDPParam."""
    return fsdp_param.sharded_param._local_tensor


def fsdp_groups(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield FSDP2's parameter groups below ``root``, with the names of their modules.

    None are yielded for the root None, of a model that no longer exists.
    """
    if root is None:
        return
    from torch.distributed.fsdp import FSDPModule

    # Modules that are sharded together, as in ``fully_shard([a, b])``, share their groups.
    ids = set()
    for name, module in root.named_modules():
        if isinstance(module, FSDPModule):
            for group in fsdp_param_groups(module):
                if id(group) not in ids:
                    ids.add(id(group))
                    yield name, group


def was_gathered(fsdp_param: Any) -> bool:
    """Return whether FSDP2 has gathered a parameter at least once."""
    return hasattr(fsdp_param, "_unsharded_param")


def fsdp_is_initialized(root: Any) -> bool:
    """Return whether FSDP2 has initialized all its units below ``root``, of which there are some.

    FSDP2 does so when its own root is gathered for the first time.
    """
    from torch.distributed.fsdp import FSDPModule

    if root is None:
        return False
    has_units = False
    for module in root.modules():
        if isinstance(module, FSDPModule):
            has_units = True
            if module._get_fsdp_state()._is_root is None:
                return False
    return has_units


def reshards_parameters(group: Any) -> bool:
    """Return whether FSDP2 frees the parameters of a group after a forward. False for None.

    The root's parameters stay. ``set_reshard_after_forward`` changes this at any time.
    """
    return group is not None and group.post_forward_mesh_info is not None


_no_range = contextlib.nullcontext()


def profiler_range(label: str, group: Any) -> contextlib.AbstractContextManager[object]:
    """Return a context that a profiler shows with the name of a group's module, as FSDP2's ranges.

    ``record_function`` takes microseconds also if no profiler runs. There is no public flag.

    Args:
        label: what the range does.
        group: one of `fsdp_groups`, or None if it is not known.
    """
    if not torch.autograd.profiler._is_profiler_enabled:
        return _no_range
    fqn = None if group is None else group._module_fqn
    return torch.profiler.record_function(f"{label} ({fqn})" if fqn else label)


def reshards_after_forward(root: Any, unit: str, group: Any) -> bool:
    """Return whether FSDP2 frees the parameters of a group after its forward.

    The default of the model's root becomes False in its first forward.

    Args:
        root: the model.
        unit: the name of the group's module.
        group: one of `fsdp_groups`.
    """
    default = not unit and root._get_fsdp_state()._auto_reshard_after_forward
    return group.post_forward_mesh_info is not None and not default


def sharded_parameters(root: Any) -> list[Any]:
    """Return the sharded parameters below ``root``, even while modules hold unsharded ones."""
    parameters: list[Any] = []
    for _, group in fsdp_groups(root):
        parameters += [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]
    return parameters


def gathered_parameters(root: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each unsharded parameter that FSDP2 has created below ``root``, and its shard."""
    for _, group in fsdp_groups(root):
        for fsdp_param in group.fsdp_params:
            if was_gathered(fsdp_param):
                yield fsdp_param._unsharded_param, fsdp_param.sharded_param


def own_store() -> Any:
    """Return the default process group's store with a new connection, or None if ranks are fake.

    A wait blocks all other users of its connection, such as NCCL's watchdog.
    """
    import torch.distributed as dist

    if dist.get_backend() == "fake":
        return None
    store = dist.distributed_c10d._get_default_store()
    return None if store is None else store.clone()


def reduces_in_stored_dtype() -> bool:
    """Return whether FSDP2 without a ``reduce_dtype`` reduces gradients in the parameter's dtype.

    Older releases reduce them in the gradients' dtype.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return hasattr(FSDPParamGroup, "_get_reduce_dtype")


def check_graph_capture(optimizer: Any) -> None:
    """Raise if a graph capture is running and the optimizer is not declared capturable."""
    optimizer._accelerator_graph_capture_health_check()


def premultiplied_by(op: Any) -> float:
    """Return the factor of a ``PREMUL_SUM``, which only its pickled state contains."""
    return float(op.__getstate__()[1])


def fills_in_unused(group: Any) -> bool:
    """Return whether FSDP2 reduces zeros for parameters of a group without a gradient."""
    return bool(getattr(group, "reduce_scatter_unused_params", False))


def shard_group(group: Any) -> Any:
    """Return the process group of the ranks that shard an FSDP parameter group, or None for one."""
    process_group = getattr(group.mesh_info, "shard_process_group", None)
    if process_group is None or process_group.size() == 1:
        return None
    return process_group


def computed_in(group: Any) -> set[torch.dtype]:
    """Return the dtypes in which trained parameters of an FSDP parameter group are gathered."""
    dtypes = set()
    for fsdp_param in group.fsdp_params:
        sharded_param = fsdp_param.sharded_param
        if sharded_param.requires_grad:
            dtypes.add(fsdp_param.mp_policy.param_dtype or sharded_param.dtype)
    return dtypes
