"""State shared by the converted layers of one model: a recipe, counters, delayed scaling's state.

One `ModelState` belongs to one converted root module. It has the layers by index, and notifies
delayed scaling and the sharded model of the root's forwards and of optimizer steps.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from fp8rs._torch import (
    give_to_ddp,
    in_backward,
    is_view_of_flat_parameter,
    keep_from_ddp,
    outside_selective_checkpoints,
    sharded_parameters,
)
from fp8rs.gemm.estimates import is_measured
from fp8rs.quantize.formats import FP8_MAX
from fp8rs.quantize.recipes import DelayedScaling, Recipe, quant_spec, resolve_recipe
from fp8rs.scaling import steps
from fp8rs.scaling.delayed import DelayedScalingState, note_compiled
from fp8rs.scaling.histories import BUFFERS
from fp8rs.scaling.steps import StepTracker
from fp8rs.tensor.quantized import is_fp8

from .gemm_choice import min_tokens_of, tokens_of
from .input_cache import this_thread
from .linear_spec import ROLES, register
from .lost_writes import LostWrites
from .notice import notice

_log = logging.getLogger("fp8rs")

#: Which GEMMs of linear layers run on FP8 operands: all, or each where FP8 is faster.
Gemms = Literal["auto", "fp8"]


class FSDPObserver(Protocol):
    """What a model's state notifies: the `fp8rs.fsdp.sharded_model.ShardedModel`."""

    def fsdp_may_initialize(self) -> None:
        """Notify that FSDP2, or other code, registers a hook on a module with FP8 parameters."""

    def forward_begins(self, root: nn.Module) -> None:
        """Notify that a forward of the root module begins."""

    def stepped(self) -> None:
        """Notify that an optimizer with parameters of this model has stepped."""

    def precompute(self) -> None:
        """Compute the scales of the next forward."""

    def sync_module(self, module: nn.Module) -> None:
        """Synchronize the scales of a module's FP8 weights, which shards share."""

    def choose_gathers(self, tokens: int | None) -> None:
        """Gather master weights in high precision if the first forward has few tokens."""


class ModelState:
    """The state of one converted model.

    Args:
        recipe: a recipe or its short name.
        amax_reduction_group: see ``convert_to_float8_training``.
        standalone: its layers were made with a ``recipe`` and not by a conversion. FSDP2 gathers
            their weights as they are.
        gemms: see ``convert_to_float8_training``.

    Attributes:
        recipe: the recipe of every layer.
        key: names recipe, group and ``min_tokens`` in graphs (`fp8rs.model.linear_spec`).
        tracker: counts the model's forwards.
        layer_refs: weak references to the linear layers and the modules of experts, by index.
        names: their fully qualified names, for messages.
        fp8_gather: whether weights are quantized before FSDP gathers them. "auto": linear layers
            are, unless the first forward is in training and has fewer than ``min_tokens``.
        min_tokens: the number of tokens from which linear layers have FP8 GEMMs. 0 for any number.
        group: the ``amax_reduction_group``.
        experts: the conversion's ``experts``, for reports and later conversions.
        delayed: the state of delayed scaling, or None for other recipes.
        lost_writes: warns when arithmetic on FP8 weights is lost to rounding.
        sharded_model: the `fp8rs.fsdp.sharded_model.ShardedModel`. None while no weight is sharded.
    """

    def __init__(
        self,
        recipe: Recipe | str,
        *,
        amax_reduction_group: Any = None,
        standalone: bool = False,
        gemms: Gemms = "fp8",
    ) -> None:
        self.recipe = resolve_recipe(recipe)
        if amax_reduction_group is not None and not self.recipe.block_format("input").per_tensor:
            raise ValueError(
                f"amax_reduction_group is for recipes with one scale a tensor, not for "
                f"{self.recipe.name!r}: its scales come from rows or blocks that a rank has whole"
            )
        self.layer_refs: list[Callable[[], nn.Module | None]] = []
        self.names: list[str] = []
        self.fp8_gather: bool | Literal["auto"] = False
        self.gemms = gemms
        self.min_tokens: float = 0
        self.experts = "off"
        self.sharded_model: FSDPObserver | None = None
        self.standalone = standalone
        self.group = amax_reduction_group
        self._root: weakref.ref[nn.Module] | None = None
        self._warned_of_fsdp1 = False
        self._begin()

    def _begin(self) -> None:
        """Create the state that is not copied or pickled."""
        self._register()
        self.tracker = StepTracker()
        self.lost_writes = LostWrites()
        self.delayed: DelayedScalingState | None = None
        if isinstance(self.recipe, DelayedScaling):
            specs = [quant_spec(self.recipe, role) for role in ROLES]
            self.delayed = DelayedScalingState(
                self.recipe, specs, self.tracker, self.layers, self.group
            )
        # `stepped` notifies delayed scaling, the sharded model and the warning of lost writes. A
        # layer that is not part of a conversion has only the first of these.
        if not self.standalone or self.delayed is not None:
            steps.subscribe(self)

    def _register(self) -> None:
        """Set the key, which compiled graphs contain."""
        group_name = self.group.group_name if self._reduces_each_amax else None
        self.key = register(self.recipe, group_name, self.min_tokens)

    @property
    def _reduces_each_amax(self) -> bool:
        """Whether each quantization of an activation or a gradient is a collective."""
        return self.group is not None and not self.recipe.delayed

    def find_min_tokens(self) -> None:
        """Find the number of tokens from which linear layers have FP8 GEMMs, for their sizes now.

        If quantizations are collectives, ranks with different numbers of tokens must not differ in
        their GEMMs.
        """
        if self.gemms == "auto" and not self._reduces_each_amax:
            self.min_tokens = min_tokens_of(self.recipe, self.layers())
            self._register()

    # --- layers and the root ---------------------------------------------------------------------

    def add_layer(self, module: nn.Module, name: str) -> int:
        """Register a layer and return its index."""
        self.layer_refs.append(weakref.ref(module))
        self.names.append(name)
        return len(self.names) - 1

    def remove_layer(self, module: nn.Module) -> None:
        """Remove a layer. The indices of the others stay."""
        index = cast(int, cast(Any, module)._fp8_index)
        if index < len(self.layers()):  # a copy of the layer alone is not in the list
            self.layer_refs[index] = _dead_reference

    def layers(self) -> Sequence[nn.Module | None]:
        """Return the layers by index, with None for a layer that was freed."""
        if not self.layer_refs and self.root is not None:
            self._link(self.root)  # the state was copied and no forward ran since
        return [reference() for reference in self.layer_refs]

    def replaced_layers(self) -> list[str]:
        """Return the names of layers that a plain ``nn.Linear`` has replaced since the conversion.

        ``resize_token_embeddings`` of transformers replaces the head, for example.
        """
        replaced = []
        for name in self.names:
            try:
                module = cast(nn.Module, self.root).get_submodule(name)
            except AttributeError:
                continue  # the layer was removed or moved
            if isinstance(module, nn.Linear) and state_of(module) is None:
                replaced.append(name)
        return replaced

    @property
    def root(self) -> nn.Module | None:
        """The module whose forwards this state observes, or None if it is not known yet."""
        return None if self._root is None else self._root()

    def attach(self, root: nn.Module) -> None:
        """Make ``root`` the root of the model: register hooks on its forward and on its loads.

        Torch numbers hooks, and compiled graphs guard on the numbers, so each model would compile
        graphs of its own. These hooks therefore have names, which are equal for all models.
        """
        pre_hooks = cast(Any, root._forward_pre_hooks)
        hooks = cast(Any, root._forward_hooks)
        number = 0
        while f"fp8rs {number}" in pre_hooks:
            number += 1
        name: Any = f"fp8rs {number}"
        pre_hooks[name] = RootHook(self, "begin_forward", root)
        root._forward_pre_hooks_with_kwargs[name] = True
        hooks[name] = RootHook(self, "end_forward", root)
        root._forward_hooks_always_called[name] = True
        self.move_hooks_first()

        # On the root too, so that nothing has been loaded when it raises.
        load_hooks: Any = root._load_state_dict_pre_hooks.values()
        if refuse_codes not in [registered.hook for registered in load_hooks]:
            root.register_load_state_dict_pre_hook(refuse_codes)
        if self.delayed is not None:
            keep_from_ddp(root, self._buffer_names())

    def detach(self) -> None:
        """Undo `attach`."""
        root = self.root
        if root is None:
            return
        for name in self._hook_names():
            del root._forward_pre_hooks[name], root._forward_hooks[name]
            del root._forward_pre_hooks_with_kwargs[name]
            del root._forward_hooks_always_called[name]
        if not any(isinstance(hook, RootHook) for hook in root._forward_pre_hooks.values()):
            # It was the last state with this root.
            remove_hook(root._load_state_dict_pre_hooks, refuse_codes)
        if self.delayed is not None:
            give_to_ddp(root, self._buffer_names())

    def _buffer_names(self) -> list[str]:
        """Return the names of the buffers of delayed scaling, below the root."""
        return [f"{name}.{buffer}".lstrip(".") for name in self.names for buffer in BUFFERS]

    def move_hooks_first(self) -> None:
        """Move the root's pre-hook before hooks that were prepended later, such as FSDP's."""
        for name in self._hook_names():
            hooks: Any = self.root._forward_pre_hooks  # type: ignore[union-attr]
            hooks.move_to_end(name, last=False)

    def _hook_names(self) -> list[Any]:
        if self.root is None:
            return []
        names = []
        for name, hook in self.root._forward_pre_hooks.items():
            if isinstance(hook, RootHook) and hook.state is self:
                names.append(name)
        return names

    def _link(self, root: nn.Module) -> None:
        """Find the layers of a copied or unpickled model by its root."""
        self._root = weakref.ref(root)
        references: dict[int, weakref.ref[nn.Module]] = {}
        for module in root.modules():
            if state_of(module) is self:
                references[cast(int, module._fp8_index)] = weakref.ref(module)
        # Layers that were removed from the model get a dead reference.
        self.layer_refs = [references.get(i, _dead_reference) for i in range(len(self.names))]

    def relink(self, layer: nn.Module) -> None:
        """Register a layer again if it is not found below the root.

        The layers of a copied model are found below its root. An adapter may have moved a layer
        into a module that is not below it.
        """
        self.layers()
        index = cast(int, cast(Any, layer)._fp8_index)
        while len(self.layer_refs) <= index:
            self.layer_refs.append(_dead_reference)
        if self.layer_refs[index]() is None:
            self.layer_refs[index] = weakref.ref(layer)

    def begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a forward of the model, as the root's forward pre-hook."""
        if torch.compiler.is_compiling():
            if self.delayed is not None:
                note_compiled(self.delayed.mark, "model")
        else:
            self._begin_eager_forward(module, args, kwargs)

    # A recomputation of the whole model does not count as a forward, and skips most of this.
    @outside_selective_checkpoints
    def _begin_eager_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a forward of the model that is not compiled."""
        if self._root is None or not self.layer_refs:
            self._link(module)
        # Collectives write receive buffers without a new version. Layers that were made one by one
        # are roots themselves, for which clearing would disable the cache.
        if not self.standalone or len(self.names) > 1:
            this_thread.input_cache.clear()
        if not self.tracker.forward_id:
            self._begin_first_forward(module, args, kwargs)

        is_new_forward = self.tracker.begin_forward(
            training=module.training, grad=torch.is_grad_enabled(), in_backward=in_backward()
        )
        if is_new_forward and module.training and self.delayed is not None:
            self.delayed.forward_begins()
        self.lost_writes.poll()
        if is_new_forward and self.sharded_model is not None:
            self.sharded_model.forward_begins(module)

    def _begin_first_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin the first forward of the model."""
        self._log_replaced_layers()
        # Tensor parallelism may have divided the layers since the conversion.
        self.find_min_tokens()
        if not self.min_tokens or not module.training or not torch.is_grad_enabled():
            return
        tokens = tokens_of(args, kwargs)
        if self.fp8_gather == "auto" and self.sharded_model is not None:
            self.sharded_model.choose_gathers(tokens)
        device_type = next(module.parameters()).device.type
        if tokens is not None and tokens < self.min_tokens and is_measured(device_type):
            reason = _where_fp8_is_faster(self.min_tokens)
            notice(
                f"linear layers run in high precision: {reason}, and the first forward has "
                f"{tokens:,}. To run them in FP8 anyway, convert with gemms='fp8'"
            )

    def _log_replaced_layers(self) -> None:
        names = self.replaced_layers()
        if names:
            _log.warning(
                "%s has replaced a converted layer and runs in high precision. Convert the model "
                "after changes such as resize_token_embeddings",
                ", ".join(names),
            )

    def end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a forward, as the root's forward hook. It runs after an exception too."""
        if not torch.compiler.is_compiling():
            self.tracker.end_forward()

    def warn_if_fsdp1(self, weight: Tensor) -> None:
        """Warn once if FullyShardedDataParallel (FSDP1) gathered a layer's weight."""
        if self.fp8_gather and not self._warned_of_fsdp1 and is_view_of_flat_parameter(weight):
            self._warned_of_fsdp1 = True
            warnings.warn(
                "FullyShardedDataParallel gathers weights in high precision, in one flat tensor: "
                "layers quantize the gathered weight. For gathers in FP8 use fully_shard; to "
                "silence this warning convert with enable_fsdp_float8_all_gather=False",
                stacklevel=2,
            )

    # --- steps -----------------------------------------------------------------------------------

    def owns(self, parameters: set[int]) -> bool:
        """Return whether this model has a parameter with one of these ids."""
        root = self.root
        if root is not None:
            # While FSDP2 has gathered parameters, the modules hold other objects than optimizers.
            return _has_any(root.parameters(), parameters) or _has_any(
                sharded_parameters(root), parameters
            )
        for layer in self.layers():
            if layer is not None and _has_any(layer.parameters(), parameters):
                return True
        return False

    def stepped(self) -> None:
        """Handle the step of an optimizer that has parameters of this model.

        Torch's optimizers call this through a hook. For others, training loops call
        ``fp8rs.optimizer_stepped``.
        """
        self.lost_writes.in_step = False
        if self.sharded_model is not None:
            self.sharded_model.stepped()
        if self.delayed is not None:
            self.delayed.stepped()

    # --- copies ----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelState:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(self._contents())
        return new

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            warnings.warn(
                "a pickle cannot hold the amax_reduction_group of a converted model: amaxes of "
                "the model that is loaded are reduced as if none had been given",
                stacklevel=2,
            )
        return {**self._contents(), "group": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        has_recorded = state.pop("delayed")
        self.__dict__.update(state)
        self._begin()
        if self.delayed is not None:
            self.delayed.recorded = has_recorded

    def _contents(self) -> dict[str, Any]:
        """Return the attributes that a copy keeps.

        References to the root, the layers and the sharding are dropped. The hooks of the copied
        root set the root, and the layers are found at the first use.
        """
        state = dict(self.__dict__)
        state["names"] = list(self.names)
        state["layer_refs"] = []
        state["_root"] = None
        state["sharded_model"] = None
        state["delayed"] = self.delayed is not None and self.delayed.recorded
        del state["key"]
        del state["tracker"]
        del state["lost_writes"]
        return state


def _where_fp8_is_faster(min_tokens: float) -> str:
    if min_tokens == inf:
        return "layers of these sizes are estimated to be slower in FP8 with any number of tokens"
    return f"FP8 is estimated to be faster from {min_tokens:,} tokens on"


def _dead_reference() -> None:
    """Stand for a layer that is no longer in the model, as a weak reference to a freed one."""


def _has_any(parameters: Iterable[Tensor], ids: set[int]) -> bool:
    """Return whether one of the parameters has one of these ids."""
    return any(id(parameter) in ids for parameter in parameters)


def state_of(module: nn.Module | None) -> ModelState | None:
    """Return the state of the model that a converted module belongs to.

    This is also how to find out whether a module is converted. A wrapper may pass unknown
    attributes on to the module inside it, so ``hasattr`` would take it for a converted one.

    Returns:
        None if the module is None or not converted.
    """
    if module is None:
        return None
    return cast("ModelState | None", module.__dict__.get("_fp8_state"))


class RootHook:
    """A method of a model's state as a hook of the root.

    If the root is copied or unpickled, the copied hook sets the root of the copied state.
    ``fully_shard`` needs the root before the first forward.
    """

    def __init__(self, state: ModelState, method: str, root: nn.Module) -> None:
        self.state = state
        self._method = method
        self._call = getattr(state, method)
        self._root = weakref.ref(root)
        state._root = self._root

    def __call__(self, *args: Any) -> None:
        """Call the method with the arguments of the hook."""
        self._call(*args)

    def __reduce__(self) -> Any:
        return RootHook, (self.state, self._method, self._root())


def remove_hook(hooks: Any, function: Any) -> None:
    """Remove a function from a module's dictionary of hooks, some of which torch has wrapped."""
    for key, hook in list(hooks.items()):
        if getattr(hook, "hook", hook) is function:
            del hooks[key]


def refuse_codes(module: nn.Module, state_dict: Any, prefix: str, *args: Any) -> None:
    """Load-state-dict pre-hook: refuse quantized weights, whose codes torch would copy as values.

    Raises:
        TypeError: the state dict has FP8 codes, or scales for a weight. Nothing was loaded.
    """
    quantized_keys: list[str] = []
    for layer_name, layer in module.named_modules():
        if state_of(layer) is None:
            continue
        layer_prefix = f"{prefix}{layer_name}." if layer_name else prefix
        for name in cast(Any, layer)._fp8_params:
            key = layer_prefix + name
            if _is_quantized(state_dict.get(key), key, state_dict):
                quantized_keys.append(key)
    if quantized_keys:
        first = quantized_keys[0]
        raise TypeError(
            f"the state dict has {len(quantized_keys)} quantized weights, the first of them "
            f"{first} of {state_dict[first].dtype}: load_state_dict would take their codes as "
            "values. "
            "Expected values in high precision. Load a checkpoint of fp8rs.checkpoint by "
            "fp8rs.checkpoint.load. In other files multiply each code by its scale first"
        )


def _is_quantized(value: Any, key: str, state_dict: Any) -> bool:
    if not isinstance(value, Tensor) or is_fp8(value):
        return False
    scales = (f"{key}_scale", f"{key}_scale_inv")
    return value.dtype in FP8_MAX or any(scale in state_dict for scale in scales)
