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
from fp8rs.scaling.histories import Slots, slots
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
from .function import linear
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
        compiling = torch.compiler.is_compiling()
        weight, bias = (self.weight, self.bias) if compiling else self._operands()
        if compiling and torch.is_grad_enabled():
            warn_on_export()
        plain = type(weight) is nn.Parameter or isinstance(weight, QuantizedTensor)
        if not plain or type(input) is not Tensor:
            if not isinstance(input, Tensor):
                raise TypeError(f"input must be a Tensor, not {type(input).__name__}")
            if is_distributed(weight) or is_distributed(input):
                from .sharded import on_shards

                reduce = self._fp8_reduce
                if reduce is not None:
                    reduce = functools.partial(reduce, self)
                return on_shards(self._compute, input, weight, bias, reduce)
            if type(weight).__module__.startswith("torchao."):
                # torchao.quantization.quantize_ has replaced the weight.
                return nn.functional.linear(input, weight, bias)
        return self._compute(input, weight, bias)

    def _compute(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the forward on local tensors."""
        if input.is_nested:
            raise TypeError(
                "input must be a dense tensor, not a nested tensor: use nn.TransformerEncoder with "
                "enable_nested_tensor=False, or torch.nested.to_padded_tensor(input, 0.0)"
            )
        shape, dtype = input.shape, input.dtype
        if not shape or shape[-1] != weight.shape[1]:
            needed = f"its last dim must be {weight.shape[1]}" if shape else "it must have a dim"
            name = self._fp8_state.names[self._fp8_index]
            of = f" of {name}" if name else ""
            raise ValueError(f"input{of} has shape {tuple(shape)}, but {needed}")
        if dtype not in INPUT_DTYPES:
            raise TypeError(f"input must be float32, bfloat16 or float16, not {dtype}")
        # Reading `is_cuda` is faster than the device's type.
        device = "cuda" if input.is_cuda else input.device.type
        if (autocast := autocast_dtype(device)) is not None:
            dtype = autocast
        elif dtype != weight.dtype and device != "meta":  # as nn.Linear
            raise RuntimeError(
                f"input and weight must have the same dtype, but got {dtype} and {weight.dtype}: "
                "cast one of them, or use torch.autocast"
            )
        if not torch.compiler.is_compiling() and isinstance(weight, QuantizedTensor):
            check_has_memory(weight, self._fp8_state.names[self._fp8_index] or "the layer")
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
            return slots(self.fp8_scale, self.fp8_amax)
        delayed.layer_begins(training)
        return self._fp8_slots.get(self._buffers)

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
        """Register a parameter. A part that a parallel style takes from an FP8 weight is FP8."""
        before = self._parameters.get(name)
        quantize_like(before, param)
        if before is not None and is_distributed(param):
            layer = self._fp8_state.names[self._fp8_index]
            mark_replaced(before, f"{layer}.{name}".lstrip("."))
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Initialize like nn.Linear. The weight does not depend on the number of ranks."""
        state = self.__dict__.get("_fp8_state")
        if state is None:  # the constructor's call
            super().reset_parameters()
            return
        reset_scales(self)
        own: Any = super().reset_parameters
        if own.__func__ is not nn.Linear.reset_parameters or not is_sharded(self.weight):
            own()
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
