"""A linear layer whose three GEMMs run on FP8 operands."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from fp8rs._torch import autocast_dtype, constant_when_traced, is_distributed
from fp8rs.model.handle import mark_replaced
from fp8rs.model.state import ModelState
from fp8rs.quantize.formats import INPUT_DTYPES
from fp8rs.quantize.recipes import Recipe, RecipeName, describe
from fp8rs.scaling.delayed import DelayedScalingState, keep_buffers_local, note_compiled
from fp8rs.scaling.histories import slots
from fp8rs.tensor.quantized import QuantizedTensor

from .backward import check_has_memory
from .debug import Debug, debugged_linear
from .fp8_params import (
    CLASSES,
    Float8Params,
    add_fp8_params,
    quantize_like,
    reset_scales,
)
from .function import DelayedSlots, linear
from .init import is_sharded, reset_linear


@constant_when_traced
def warn_on_export() -> bool:
    """Warn while a layer is exported that the program has no backward.

    It runs at trace time, because torch 2.11 reports every trace as an export.
    """
    if torch.compiler.is_exporting():
        warnings.warn(
            "an exported FP8 layer computes only its forward: no gradient reaches its weight or "
            "its input, and no error reports it. If that is intended, export under "
            "torch.no_grad()",
            stacklevel=1,
        )
    return True


class Float8Linear(Float8Params, nn.Linear):
    """Computes y = x @ weight.T + bias on operands that are quantized by a recipe.

    The parameters are high-precision ones, as in torch.nn.Linear. Forward, dgrad and wgrad run on
    FP8 operands. The input's FP8 columnwise plane is saved for the backward instead of the input.
    The input has one or more dimensions of any sizes. Its dtype (or autocast's) is the weight's and
    the output's. Gradients have the dtypes of their tensors.

    Every converted layer is an instance of this class. Conversion turns an instance of a subclass
    of ``nn.Linear`` into an instance of a new class that inherits from this class and the subclass.
    Layers of one ``fp8rs.convert_to_float8_training`` share a ``ModelState``. A layer that is
    constructed directly has its own.

    Args:
        in_features: see torch.nn.Linear.
        out_features: see torch.nn.Linear.
        bias: see torch.nn.Linear.
        device: see torch.nn.Linear.
        dtype: see torch.nn.Linear.
        recipe: a recipe or its short name.
    """

    fp8_scale: Tensor
    fp8_amax: Tensor
    #: Reduces the partial sums of a layer whose weight is sharded along its input features.
    _fp8_reduce: Callable[[Float8Linear, Any], Any] | None = None
    #: Changes to the layer's computation while a run is debugged.
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
        """Return a layer with the same parameter objects, hooks and mode as ``linear``."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be a torch.nn.Linear, not {type(linear).__name__}")
        new = cls.__new__(cls)
        for name, value in linear.__dict__.items():
            new.__dict__[name] = value.copy() if isinstance(value, dict) else value
        new._join_own_state(recipe)
        return new

    def _join_own_state(self, recipe: Recipe | RecipeName) -> None:
        """Make this the root and only layer of a new state."""
        state = ModelState(recipe, standalone=True)
        self._join(state, "")
        state.attach(self)

    def _join(self, state: ModelState, fqn: str, names: Sequence[str] = ("weight",)) -> None:
        super()._join(state, fqn, names)
        self._fp8_debug = None

    @property
    def recipe(self) -> Recipe:
        """The recipe for quantizing the operands."""
        return self._fp8_state.recipe

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features).

        Raises:
            ValueError: the last dim is not in_features, or the input is 0-d.
            TypeError: the input is nested, or not float32, bfloat16 or float16.
            RuntimeError: without autocast, input and weight have two dtypes; or FSDP2 has freed the
                gathered weight.
            UnsupportedError: the device cannot run the recipe.
        """
        weight: Tensor
        bias: Tensor | None
        if torch.compiler.is_compiling():
            weight = self.weight
            bias = self.bias
            if torch.is_grad_enabled():
                warn_on_export()
        else:
            weight, bias = self._operands()

        plain_weight = type(weight) is nn.Parameter or isinstance(weight, QuantizedTensor)
        if plain_weight and type(input) is Tensor:
            return self._compute(input, weight, bias)
        if not isinstance(input, Tensor):
            raise TypeError(f"input must be a Tensor, not {type(input).__name__}")
        if is_distributed(weight) or is_distributed(input):
            return self._compute_distributed(input, weight, bias)
        if type(weight).__module__.startswith("torchao."):
            # torchao.quantization.quantize_ has replaced the weight.
            return nn.functional.linear(input, weight, bias)
        return self._compute(input, weight, bias)

    def _compute_distributed(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the forward on DTensors."""
        from .sharded import on_shards

        reduce = self._fp8_reduce
        if reduce is not None:
            reduce = functools.partial(reduce, self)
        return on_shards(self._compute, input, weight, bias, reduce)

    def _compute(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the forward on local tensors."""
        if input.is_nested:
            raise TypeError(
                "input must be a dense tensor, not a nested tensor: use nn.TransformerEncoder with "
                "enable_nested_tensor=False, or torch.nested.to_padded_tensor(input, 0.0)"
            )
        shape = input.shape
        if not shape or shape[-1] != weight.shape[1]:
            expected = f"its last dim must be {weight.shape[1]}" if shape else "it must have a dim"
            name = self._fp8_state.names[self._fp8_index]
            of_layer = f" of {name}" if name else ""
            raise ValueError(f"input{of_layer} has shape {tuple(shape)}, but {expected}")
        out_dtype = self._output_dtype(input, weight)
        if not torch.compiler.is_compiling() and isinstance(weight, QuantizedTensor):
            check_has_memory(weight, self._fp8_state.names[self._fp8_index] or "the layer")

        state = self._fp8_state
        delayed = None if state.delayed is None else self._begin_delayed(state.delayed)
        debug = self._fp8_debug
        if debug is None:
            return linear(input, weight, bias, state.key, out_dtype, delayed)
        debug = debug.now(self.training)
        return debugged_linear(debug, input, weight, bias, state.key, out_dtype, delayed)

    @staticmethod
    def _output_dtype(input: Tensor, weight: Tensor) -> torch.dtype:
        """Return the dtype of the output: autocast's, or that of input and weight."""
        dtype = input.dtype
        if dtype not in INPUT_DTYPES:
            raise TypeError(f"input must be float32, bfloat16 or float16, not {dtype}")
        # Reading `is_cuda` is faster than the device's type.
        device_type = "cuda" if input.is_cuda else input.device.type
        autocast = autocast_dtype(device_type)
        if autocast is not None:
            return autocast
        if dtype != weight.dtype and device_type != "meta":  # as nn.Linear
            raise RuntimeError(
                f"input and weight must have the same dtype, but got {dtype} and {weight.dtype}: "
                "cast one of them, or use torch.autocast"
            )
        return dtype

    def _begin_delayed(self, delayed: DelayedScalingState) -> DelayedSlots:
        """Notify delayed scaling of a forward, and return the layer's slots for it."""
        training = self.training
        if torch.compiler.is_compiling():
            keep_buffers_local(delayed.mark)
            if training:
                note_compiled(delayed.mark, "layer")
            scales, amaxes = slots(self.fp8_scale, self.fp8_amax)
        else:
            delayed.layer_begins(training)
            scales, amaxes = self._fp8_slots.get(self._buffers)
        return DelayedSlots(scales, amaxes, self.fp8_ready, training)

    def _operands(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias.

        They are read from ``_parameters``, ten times faster than attributes of a module. A
        parametrized weight is an attribute.
        """
        parameters = self._parameters
        weight: Any = parameters.get("weight")
        if type(weight) is not nn.Parameter:
            if weight is None:
                weight = self.weight
            if type(weight) is Tensor:
                self._fp8_state.warn_if_fsdp1(weight)
        if "bias" in parameters:
            return weight, parameters["bias"]
        return weight, self.bias

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter.

        If a parallel style registers a slice of an FP8 weight, the slice is quantized.
        """
        replaced = self._parameters.get(name)
        quantize_like(replaced, param)
        if replaced is not None and is_distributed(param):
            layer = self._fp8_state.names[self._fp8_index]
            mark_replaced(replaced, f"{layer}.{name}".lstrip("."))
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Initialize like nn.Linear. The weight does not depend on the number of ranks."""
        state = self.__dict__.get("_fp8_state")
        if state is None:  # the constructor's call
            super().reset_parameters()
            return
        reset_scales(self)
        inherited: Any = super().reset_parameters
        is_overridden = inherited.__func__ is not nn.Linear.reset_parameters
        if is_overridden or not is_sharded(self.weight):
            inherited()
        else:
            reset_linear(self)
        if state.sharded_model is not None:
            state.sharded_model.sync_module(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._fp8_debug = None

    @override
    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={describe(self.recipe)}"


#: An alias of `Float8Linear`.
Linear = Float8Linear


CLASSES[Float8Linear, nn.Linear] = Float8Linear
Float8Linear._fp8_bases = Float8Linear, nn.Linear


def make_float8(module: nn.Module, recipe: Recipe | RecipeName | None) -> None:
    """Make all linear layers of a module FP8, with one state whose root is the module.

    Under ``fully_shard``, the weights are gathered in high precision until
    ``convert_to_float8_training`` adds the layers to a model's state.

    Args:
        module: a new module, whose layers are plain.
        recipe: a recipe or its short name, or None to leave the module as it is.
    """
    if recipe is None:
        return
    state = ModelState(recipe, standalone=True)
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            add_fp8_params(layer, ("weight",), state, name, Float8Linear)
    state.attach(module)
