"""A linear layer whose three GEMMs (forward, dgrad, wgrad) multiply FP8 operands."""

from __future__ import annotations

import copyreg
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp8rs._torch import constant_when_traced, is_distributed
from fp8rs.quantize.recipes import Recipe, RecipeName, describe
from fp8rs.scaling.delayed import DelayedScalingState, keep_buffers_local, note_compiled
from fp8rs.scaling.histories import NOTHING_READY, keep_local
from fp8rs.tensor.formats import INPUT_DTYPES
from fp8rs.tensor.quantized import QuantizedTensor

from . import buffers, quantized_weight
from .debug import Debug, debugged_linear
from .function import Slots, linear
from .init import is_sharded, reset_linear
from .model_state import ModelState


@constant_when_traced
def warn_on_export() -> bool:
    """Warn, while a layer is exported with gradients enabled, that the program has no backward.

    Runs at trace time. Inside a traced function, torch 2.11 always reports an export.
    """
    if torch.compiler.is_exporting():
        warnings.warn(
            "an exported FP8 layer has no backward: its weight and its input silently get no "
            "gradient. For inference, export under torch.no_grad()",
            stacklevel=1,
        )
    return True


def before_load(
    layer: Float8Linear, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
) -> None:
    """Prepare a layer for a state dict: a load-state-dict pre-hook."""
    key, delayed = prefix + "weight", layer._fp8_state.delayed
    if key not in state_dict:
        return
    quantized_weight.refuse_codes(layer, state_dict, prefix)
    buffers.reset_scales(layer, delayed)
    if local_metadata.get("assign_to_params_buffers", False):
        if not state_dict[key].is_meta:
            # A write to the weight needs the buffers.
            buffers.materialize(layer, delayed, state_dict[key].device)
        state_dict[key] = quantized_weight.copy_into_fp8_weight(layer, "weight", state_dict[key])


def after_load(layer: Float8Linear, incompatible: Any) -> None:
    """Allocate buffers that are still on the meta device: a load-state-dict post-hook."""
    weight = layer._parameters.get("weight")
    if weight is not None and not weight.is_meta:
        buffers.materialize(layer, layer._fp8_state.delayed, weight.device)


class Float8Linear(nn.Linear):
    """A linear layer, y = x @ weight.T + bias, that quantizes its operands as a recipe says.

    It has the parameters of torch.nn.Linear, in high precision. Forward, dgrad and wgrad multiply
    FP8 operands. The backward uses the input's columnwise FP8 plane, which is saved instead of the
    input. The input may have one or more dims of any sizes. The output has the dtype of the input,
    which must be the weight's, or autocast's dtype. Each gradient has the dtype of its tensor.

    Every converted layer is an instance of this class. ``convert_to_float8_training`` turns an
    instance of a subclass of ``nn.Linear`` into an instance of a new class with the bases
    ``Float8Linear`` and that subclass. The layers of a converted model share one
    ``fp8rs.nn.model_state.ModelState``. A layer that is constructed directly has its own.

    Args:
        in_features: see torch.nn.Linear.
        out_features: see torch.nn.Linear.
        bias: see torch.nn.Linear.
        device: see torch.nn.Linear.
        dtype: see torch.nn.Linear.
        recipe: a recipe or its short name.
    """

    _fp8_state: ModelState
    fp8_scale: Tensor
    fp8_amax: Tensor
    _fp8_index: int
    _fp8_slots: buffers.SlotCache
    #: The handle of each FP8 parameter, by the parameter's name.
    _fp8_params: dict[str, Any]
    #: With delayed scaling, whether weight, input and gradient are known to have a scale. This is
    #: one roll behind the buffers, so that the host need not wait for the device.
    fp8_ready: tuple[bool, bool, bool] = NOTHING_READY
    #: Reduces the partial sums of a layer whose weight is sharded along in_features.
    _fp8_reduce: Callable[[Float8Linear, Any], Any] | None = None
    #: The debug options, if there are any.
    _fp8_debug: Debug | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | RecipeName = "current",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._join_own_state(recipe)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, recipe: Recipe | RecipeName = "current"
    ) -> Float8Linear:
        """Return an FP8 layer that shares the parameters, hooks and mode of ``linear``."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be a torch.nn.Linear, not {type(linear).__name__}")
        new = cls.__new__(cls)
        for name, value in linear.__dict__.items():
            new.__dict__[name] = value.copy() if isinstance(value, dict) else value
        new._join_own_state(recipe)
        return new

    def _join_own_state(self, recipe: Recipe | RecipeName) -> None:
        """Make this layer the root and the only layer of a new state."""
        state = ModelState(recipe, standalone=True)
        self._join(state, "")
        state.attach(self)

    def _join(self, state: ModelState, name: str) -> None:
        """Add this layer to the layers of ``state``, under its fully qualified name."""
        self._fp8_state = state
        self._fp8_index = state.add_linear(self, name)
        self._fp8_slots = buffers.SlotCache()
        self._fp8_params = state.handles_of(self, ("weight",))
        self.fp8_ready = NOTHING_READY
        self._fp8_debug = None
        buffers.register(self, state.delayed, self.weight.device)
        hooks: Any = self._load_state_dict_pre_hooks.values()
        if before_load not in (known.hook for known in hooks):
            self.register_load_state_dict_pre_hook(before_load)
            self.register_load_state_dict_post_hook(after_load)

    @property
    def recipe(self) -> Recipe:
        """The recipe that says how operands are quantized."""
        return self._fp8_state.recipe

    def forward(self, input: Tensor) -> Tensor:
        """Compute input @ weight.T + bias on FP8 operands.

        Args:
            input: (..., in_features).

        Returns:
            (..., out_features).

        Raises:
            ValueError: the last dim of the input is not in_features, or the input is 0-d.
            TypeError: the input is nested, or not float32, bfloat16 or float16.
            RuntimeError: input and weight have different dtypes, without autocast.
            UnsupportedError: the device cannot run the recipe.
        """
        compiling = torch.compiler.is_compiling()
        weight, bias = (self.weight, self.bias) if compiling else self._operands()
        if compiling and torch.is_grad_enabled():
            warn_on_export()
        plain = type(input) is Tensor and type(weight) is nn.Parameter
        if not plain:
            if not isinstance(input, Tensor):
                raise TypeError(f"input must be a Tensor, not {type(input).__name__}")
            if is_distributed(weight) or is_distributed(input):
                from .sharded import on_shards

                reduce = self._fp8_reduce
                if reduce is not None:
                    reduce = functools.partial(reduce, self)
                return on_shards(self._compute, input, weight, bias, reduce)
        return self._compute(input, weight, bias)

    def _compute(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the forward of local tensors."""
        if input.is_nested:
            raise TypeError(
                "input must be a dense tensor, not a nested tensor: use nn.TransformerEncoder with "
                "enable_nested_tensor=False, or torch.nested.to_padded_tensor(input, 0.0)"
            )
        shape, dtype = input.shape, input.dtype
        if not shape or shape[-1] != weight.shape[1]:
            name = self._fp8_state.names[self._fp8_index]
            of = f" of {name}" if name else ""
            raise ValueError(
                f"input{of} has shape {tuple(shape)}, but its last dim must be {weight.shape[1]}"
            )
        if dtype not in INPUT_DTYPES:
            raise TypeError(f"input must be float32, bfloat16 or float16, not {dtype}")
        # `device.type` is slower than `is_cuda`.
        device = "cuda" if input.is_cuda else input.device.type
        if device == "meta":  # has no autocast
            pass
        elif torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        elif dtype != weight.dtype:
            raise RuntimeError(
                f"input and weight must have the same dtype, but got {dtype} and {weight.dtype}: "
                "cast one of them, or use torch.autocast"
            )
        state = self._fp8_state
        delayed = state.delayed
        run: Callable[..., Tensor] = linear
        if (debug := self._fp8_debug) is not None:
            run = functools.partial(debugged_linear, debug.now(self.training))
        if delayed is None:
            return run(input, weight, bias, state.key, dtype)
        scales, amaxes = self._begin_delayed(delayed)
        ready, record = self.fp8_ready, self.training
        return run(input, weight, bias, state.key, dtype, scales, amaxes, ready, record)

    def _begin_delayed(self, delayed: DelayedScalingState) -> Slots:
        """Notify delayed scaling of a forward, and return the layer's scales and amaxes for it."""
        training = self.training
        if torch.compiler.is_compiling():
            keep_buffers_local(delayed.mark)
            if training:
                note_compiled(delayed.mark, "layer")
            return buffers.slots(self.fp8_scale, self.fp8_amax)
        amax = self._buffers["fp8_amax"]
        if type(amax) is not Tensor or amax.dtype != torch.float32:
            keep_local(self._buffers)
        delayed.layer_begins(training)
        return self._fp8_slots.get(self._buffers)

    def _operands(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias. Raise if FSDP2 has freed the gathered weight.

        Read ``_parameters`` directly: ``Module.__getattr__`` is about 10x slower. A parametrized
        weight or bias is not in there.
        """
        parameters = self._parameters
        weight: Any = parameters.get("weight")
        if type(weight) is not nn.Parameter:
            if weight is None:
                weight = self.weight
            if isinstance(weight, QuantizedTensor):
                if not (plane := weight.any_plane()).live:
                    name = self._fp8_state.names[self._fp8_index]
                    plane.check_live(f"the weight of {name or 'the layer'}")
            elif type(weight) is Tensor:
                self._fp8_state.warn_if_fsdp1(weight)
        if "bias" in parameters:
            return weight, parameters["bias"]
        return weight, self.bias

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter) and name in self._parameters:
            # FSDP2 sets each shard and each gathered weight.
            sharded = is_distributed(value)
            if sharded:
                self._wrap_param(name, value)
            if sharded or isinstance(value, QuantizedTensor):
                self._parameters[name] = value
                return
        super().__setattr__(name, value)

    def _wrap_param(self, name: str, parameter: Any) -> None:
        sharded_model = self._fp8_state.shard()
        if sharded_model is not None:
            sharded_model.wrap(self, name, parameter)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter. The part of an FP8 weight that a parallel style sets is FP8 too."""
        quantized_weight.quantize_like(self._parameters.get(name), param)
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Initialize as nn.Linear does.

        If the layer is sharded, the whole weight does not depend on the number of ranks.
        """
        state = self.__dict__.get("_fp8_state")
        if state is None:  # called by the constructor
            super().reset_parameters()
            return
        buffers.reset_scales(self, state.delayed)
        kind = type(self).__dict__.get("_fp8_kind", nn.Linear)
        own = kind.reset_parameters is not nn.Linear.reset_parameters
        if own or not is_sharded(self.weight):
            super().reset_parameters()
        else:
            reset_linear(self)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        delayed = self._fp8_state.delayed
        with quantized_weight.preserve_attributes(self, "weight"), buffers.preserve(self, delayed):
            out = super()._apply(fn, recurse)
        weight = self._parameters["weight"]
        if is_distributed(weight):
            self._wrap_param("weight", weight)
        return out

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._fp8_debug = None
        weight: Any = self._parameters.get("weight")
        if isinstance(weight, QuantizedTensor) and weight._store.owner is None:
            self._wrap_param("weight", weight)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={describe(self.recipe)}"


#: An alias of `Float8Linear`.
Linear = Float8Linear

_classes: dict[type[nn.Linear], type[Float8Linear]] = {nn.Linear: Float8Linear}


def float8_class(kind: type[nn.Linear]) -> type[Float8Linear]:
    """Return the class of the converted layers of class ``kind``, created on first use.

    FSDP2 creates classes for the modules that it shards in the same way.
    """
    found = _classes.get(kind)
    if found is None:
        namespace = {"_fp8_kind": kind, "__module__": kind.__module__}
        found = _classes[kind] = type(f"Float8{kind.__name__}", (Float8Linear, kind), namespace)
        copyreg.pickle(found, _reduce)
    return found


def _reduce(layer: Float8Linear) -> Any:
    """Pickle a layer of a created class, which cannot be imported."""
    return _blank, (type(layer).__dict__["_fp8_kind"],), layer.__dict__


def _blank(kind: type[nn.Linear]) -> Float8Linear:
    """Return a layer without attributes. Pickle and copy set them."""
    return object.__new__(float8_class(kind))
