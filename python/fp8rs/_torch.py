"""torch's private names, in one place: what breaks with a new torch breaks here.

Each has the reason why nothing public serves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

#: For writes that autograd must not count: FSDP2 refills what it gathered while a graph holds it.
preserve_version_counter = _unsafe_preserve_version_counter

#: Tensor subclasses whose operators go straight to ``__torch_dispatch__``.
disabled_torch_function = torch._C._disabled_torch_function_impl

#: A context in which no ``__torch_dispatch__`` runs, modes' included: what happens in it is not
#: traced.
no_torch_dispatch = torch._C._DisableTorchDispatch

#: Whether two tensors have one storage.
is_alias: Callable[[Tensor, Tensor], bool] = cast(Any, torch._C)._is_alias_of

#: Tells autograd of a write that an operator made on its own.
increment_version = torch._C._increment_version


def note_write(x: Tensor) -> None:
    """Tell autograd of a write that was made below it. (What is traced is seen as it is.)"""
    if not torch.compiler.is_compiling() and not x.is_inference():
        increment_version([x])


def in_backward() -> bool:
    """Whether this thread is inside a backward pass (a recomputation included)."""
    return bool(torch._C._current_graph_task_id() != -1)


_will_engine_execute_node: Callable[[Any], bool] = torch._C._will_engine_execute_node


def gradients_needed(ctx: Any) -> tuple[bool, ...]:
    """Return, for each input of an autograd Function, whether this backward needs its gradient.

    ``ctx.needs_input_grad`` is set in the forward. `torch.autograd.grad` and
    ``backward(inputs=...)`` may need fewer gradients than that, and zero-bubble pipeline schedules
    compute those of inputs and of weights in two backwards. Torch's own operators ask the engine.

    Dynamo cannot trace the private call, so compiled code uses ``ctx.needs_input_grad``.
    """
    needs: tuple[bool, ...] = ctx.needs_input_grad
    if torch.compiler.is_compiling() or sum(needs) < 2:
        return needs
    # Inputs that are not tensors have no edge, and inputs without a gradient have no node.
    run = [_will_run(node) for node, _ in ctx.next_functions if node is not None]
    if all(run):
        return needs
    found = iter(run)
    return tuple(need and next(found) for need in needs)


def _will_run(node: Any) -> bool:
    """Return whether the running backward executes a node or returns its gradient."""
    try:
        return _will_engine_execute_node(node)
    except RuntimeError:
        # Torch raises this for a leaf whose gradient `torch.autograd.grad` returns.
        return True


def current_stream_id(x: Tensor) -> int:
    """The current stream of a CUDA tensor's device as a number, 0 elsewhere.

    ``torch.cuda.current_stream`` makes an object for it, which takes ten times as long.
    """
    if not x.is_cuda:
        return 0
    return int(torch._C._cuda_getCurrentRawStream(x.device.index))


def in_fake_mode() -> bool:
    """Return whether a FakeTensorMode is active, alone or below other dispatch modes."""
    fake = torch._C._TorchDispatchModeKey.FAKE
    return torch._C._get_dispatch_mode(fake) is not None


def dispatch_mode() -> object:
    """The innermost ``TorchDispatchMode`` that is entered, or None.

    What torch has in public for it costs an import and some frames.
    """
    depth = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(depth - 1) if depth else None


class Itself:
    """A value that equals itself alone, whatever its own ``==`` gives."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def memory_of(x: Tensor) -> object:
    """Where a tensor's values are: what was given earlier equals it, unless writes changed it.

    These may have moved no version. Of a real one the address, which ``x.data = y`` changes; in a
    compiler's trace the value that ``x`` stands for at present, which any write changes.
    """
    if isinstance(x, FunctionalTensor):
        return Itself(x.from_functional())
    try:
        return x.data_ptr() if type(x) is not FakeTensor else None
    except RuntimeError:
        if torch._C._functorch.is_batchedtensor(x):
            raise RuntimeError(
                "FP8 layers do not run under torch.func.vmap: use it before the conversion"
            ) from None
        return None


#: ``torch.compiler.disable`` as torch's own optimizers use it: it imports Dynamo at the first call.
not_traced: Callable[..., Any] = torch._compile._disable_dynamo


def constant_when_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compiler.assume_constant_result``, which imports Dynamo for a second."""
    cast(Any, function)._dynamo_marked_constant = True
    return function


def keep_from_ddp(module: Any, names: list[str]) -> None:
    """Have DistributedDataParallel leave parameters and buffers of a module that it wraps alone.

    It has no argument for it: it would make all ranks' buffers those of the first.
    """
    known = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    module._ddp_params_and_buffers_to_ignore = [*known, *(n for n in names if n not in known)]


def keep_address(x: Tensor) -> Tensor:
    """Tell compilers that a tensor stays where it is; gives the tensor.

    CUDA graphs read a copy of other inputs, into which what is written to them goes.
    """
    cast(Any, x)._dynamo_static_input_type = "unguarded"
    return x


def inductor_decomposition(operator: Any, function: Callable[..., Any]) -> None:
    """Have Inductor trace ``function`` in the place of calls of ``operator``.

    Of all calls: it refuses to call an operator that is in its table. There is no public way to
    tell it; a torch with another table calls the operator. The table is imported, and Dynamo: not
    to be called at import.
    """
    from torch._inductor import decomposition

    table = getattr(decomposition, "fast_random_decomps", None)
    if table is not None:
        table()[operator] = function


def inductor_reads_memory(operator: Any) -> None:
    """Have Inductor put what ``operator`` reads into memory before anything else reads it.

    It learns so when it first meets the operator: what it met before that, of the same input, makes
    the input again for itself, by other code. It imports Inductor: for when something is compiled.
    """
    from torch._inductor import lowering

    known = getattr(lowering, "needs_realized_inputs", None)
    if known is not None:
        known.add(operator)


def may_be_empty(x: Tensor) -> bool:
    """Whether a tensor has no elements, or, in a trace, nobody can tell."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return bool(guard_or_true(x.numel() == 0))


def depends_on_data(*sizes: int) -> bool:
    """Whether traced sizes are those of what data selects (``x[mask]``): nothing is known of them.

    Where one decides what is called, a trace ends with an error.
    """
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

    return any(type(size) is not int and has_free_unbacked_symbols(size) for size in sizes)


def real_subclass(cls: type[Tensor], data: Tensor, requires_grad: bool) -> Any:
    """An instance of ``cls`` over the storage of ``data``: its pointer is real.

    ``_make_wrapper_subclass``, the documented way, gives tensors without a storage.
    """
    return torch.Tensor._make_subclass(cls, data, requires_grad)


def make_wrapper_subclass(cls: type[Tensor], size: Any, **kwargs: Any) -> Any:
    """A tensor of a subclass that has no storage of its own.

    What reads its memory past the dispatcher gets a RuntimeError for it, and no null pointer.
    """
    wrapper = torch.Tensor._make_wrapper_subclass(cls, size, **kwargs)
    torch._C._set_throw_on_mutable_data_ptr(wrapper)
    return wrapper


def hooks_of(parameter: Any) -> tuple[Any, Any]:
    """The hooks that users have registered for a parameter's gradient, for `set_hooks`."""
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def set_hooks(parameter: Any, hooks: tuple[Any, Any]) -> None:
    """Have a parameter's hooks run, after what autograd knows of it was swapped.

    Autograd has them from a tensor's other half: it is to have them anew. Of the same dictionaries,
    which the handles that users have remove them from.
    """
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks


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
    """Have a parameter be ``new`` from now on, as the object that it is, for all who refer to it.

    Its hooks stay, those that users have registered for its gradient.

    Raises:
        RuntimeError: torch cannot swap them: a graph or a weak reference holds on to one.
    """
    forget_fake(parameter)
    hooks = hooks_of(parameter)
    other: Any = torch.nn.Parameter(new, requires_grad=parameter.requires_grad)
    for mark, value in parameter.__dict__.items():
        if not hasattr(other, mark):
            other.__dict__[mark] = value
    other.grad = parameter.grad
    torch.utils.swap_tensors(parameter, other)
    set_hooks(parameter, hooks)


def check_can_become(parameter: Tensor) -> None:
    """Raise what `become` would of this parameter, and change nothing.

    A swap that is tried and undone marks a graph that still knows the parameter as unusable.

    Raises:
        RuntimeError: torch cannot swap it: a graph or a weak reference holds on to it.
    """
    forget_fake(parameter)
    if weakref.getweakrefs(parameter):
        raise RuntimeError("the parameter has a weak reference")
    held: int = cast(Any, parameter)._use_count()
    if held > 1 and parameter.is_leaf and parameter.requires_grad:
        # One more than its own may be that of the node that its gradient is added up by.
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        held -= held == cast(Any, parameter)._use_count()
        del node
    if held > 1:
        raise RuntimeError(f"the parameter is referred to {held - 1} times from elsewhere")


def is_traced(data: Tensor) -> bool:
    """Whether a tensor stands for another one in a compiler's trace, or has no data at all."""
    return isinstance(data, FakeTensor | FunctionalTensor)


def wrapper_subclass(cls: type[Tensor], data: Tensor, requires_grad: bool) -> Any:
    """An instance of ``cls`` with the sizes of ``data``, which may be fake, and no storage."""
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
    """Whether FSDP's first version (FullyShardedDataParallel) has gathered this weight."""
    return getattr(weight._base, "_is_flat_param", False)


def group_named(name: str) -> Any:
    """The process group of that name, which has no public function that finds it."""
    return cast(Any, torch.distributed).distributed_c10d._resolve_process_group(name)


def local_tensor(parameter: Any) -> Any:
    """The local tensor of a DTensor as the object that it is; ``to_local`` gives a new view."""
    return parameter._local_tensor


def is_distributed(tensor: Any) -> bool:
    """Whether a tensor is a DTensor. (To import its class takes seconds.)"""
    return hasattr(tensor, "_local_tensor")


def own_part(tensor: Any) -> Any:
    """This rank's part of a tensor: itself where it is not distributed."""
    return getattr(tensor, "_local_tensor", tensor)


def set_local_tensor(parameter: Any, local: Tensor) -> None:
    """Replace the local tensor of a DTensor by another one over the same values."""
    parameter._local_tensor = local


def local_shape_and_offset(
    shape: tuple[int, ...], mesh: Any, placements: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's part of a DTensor, and where it begins in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    return tuple(size), tuple(offset)


def dtensor_like(parameter: Any, local: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """A DTensor that is laid out as a parameter is, over another local tensor.

    ``DTensor.from_local`` would copy what is offloaded to the mesh's device.

    Args:
        parameter: a DTensor.
        local: this rank's part.
        shape: of the whole, contiguous; the parameter's by default.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec: Any = parameter._spec
    meta = spec.tensor_meta
    if shape is not None:
        meta = TensorMeta(torch.Size(shape), (shape[1], 1), local.dtype)
    if (local.dtype, shape) != (spec.tensor_meta.dtype, None):
        meta = TensorMeta(meta.shape, meta.stride, local.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    make: Any = DTensor
    made: Tensor = make(local, spec, requires_grad=False)
    return made


#: What wrappers put into the names of what they wrap: torch.compile, checkpoint_wrapper, FSDP.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def plain_name(name: str) -> str:
    """The name that a module or a tensor has in a model without wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def names_of(model: Any, name: str) -> set[str]:
    """The names that torch's state-dict functions have for what a model has under ``name``."""
    from torch.distributed.checkpoint.state_dict import _get_fqns

    return set(_get_fqns(model, name))


def fsspec_file_system(url: str) -> Any:
    """Return DCP's file system for the URL of a store. Its ``fs`` is fsspec's."""
    from torch.distributed.checkpoint._storage_utils import _storage_setup

    return cast(Any, _storage_setup(None, url, reader=True)).fs


def spec(parameter: Any) -> Any:
    """A DTensor's specification: the same object for as long as its sharding is the same."""
    return parameter._spec


def fsdp_param_groups(module: Any) -> list[Any]:
    """A module's FSDP parameter groups, under the names that torch has had for them."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        group = getattr(state, "_fsdp_param_group", None)
        groups = [] if group is None else [group]
    return list(groups)


def fsdp_place(fsdp_param: Any) -> tuple[Any, str, Any]:
    """The module of one of a group's parameters, its name there, and the sharded parameter."""
    place = fsdp_param._module_info
    return place.module, place.param_name, fsdp_param.sharded_param


def fsdp_groups(root: Any) -> Iterator[tuple[str, Any]]:
    """FSDP2's groups of parameters below ``root``, each with the name of its module."""
    from torch.distributed.fsdp import FSDPModule

    for name, module in root.named_modules():
        if isinstance(module, FSDPModule):
            for group in fsdp_param_groups(module):
                yield name, group


def sharded_parameters(root: Any) -> list[Any]:
    """What FSDP2 has sharded below ``root``, whatever stands in the modules at the moment."""
    return [p.sharded_param for _, group in fsdp_groups(root) for p in group.fsdp_params]


def own_store() -> Any:
    """The store through which the ranks of this process met, over a connection of its own.

    None where there are no other ranks in truth. (While one waits on a connection, who else uses it
    waits too: NCCL's watchdog.)
    """
    import torch.distributed as dist

    if dist.get_backend() == "fake":
        return None
    store = dist.distributed_c10d._get_default_store()
    return None if store is None else store.clone()


def reduces_in_stored_dtype() -> bool:
    """Whether FSDP2 without a ``reduce_dtype`` reduces gradients in the parameters' own dtype.

    Newer torch does; older ones reduce them in the dtype that they come in.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return hasattr(FSDPParamGroup, "_get_reduce_dtype")


def check_graph_capture(optimizer: Any) -> None:
    """Refuse a step of an optimizer in a graph capture for which it is not declared capturable."""
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        check = getattr(optimizer, name, None)
        if check is not None:
            check()
            return


def premultiplied_by(op: Any) -> float:
    """The factor of a ``PREMUL_SUM``, which is readable where it is pickled alone."""
    return float(op.__getstate__()[1])


def fills_in_unused(group: Any) -> bool:
    """Whether FSDP2 has zeros reduced for parameters of a group that have no gradient."""
    return bool(getattr(group, "reduce_scatter_unused_params", False))


def shard_group(group: Any) -> Any:
    """Return the process group of the ranks that shard an FSDP parameter group, or None for one."""
    found = getattr(group.mesh_info, "shard_process_group", None)
    return None if found is None or found.size() == 1 else found


def computed_in(group: Any) -> set[torch.dtype]:
    """The dtypes that trained parameters of an FSDP parameter group are gathered in."""
    trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    return {p.mp_policy.param_dtype or p.sharded_param.dtype for p in trained}


def symmetric_memory() -> Any:
    """``torch.distributed._symmetric_memory``: private in name, documented since torch 2.9."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory
