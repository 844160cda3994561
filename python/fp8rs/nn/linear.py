"""A linear layer whose three GEMMs run on FP8 operands."""

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
from fp8rs.scaling.delayed import keep_buffers_local, note_compiled
from fp8rs.scaling.histories import NOTHING_READY, keep_local
from fp8rs.tensor.formats import INPUT_DTYPES
from fp8rs.tensor.quantized import QuantizedTensor

from . import buffers, quantized_weight
from .debug import Debug, debugged_linear
from .function import linear
from .init import is_sharded, reset_linear
from .model_state import ModelState


@constant_when_traced
def note_export() -> bool:
    """Say, while a layer is being exported, what the program will not do.

    Run while it is traced: of a trace itself torch 2.11 says that it is an export, always.
    """
    if torch.compiler.is_exporting():
        warnings.warn(
            "an exported FP8 layer computes its forward alone: no gradient reaches its weight or "
            "its input, and none is asked for with an error. Export under torch.no_grad() if that "
            "is meant",
            stacklevel=1,
        )
    return True


def before_load(
    layer: Float8Linear, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
) -> None:
    """A state dict is loaded into a layer."""
    key, delayed = prefix + "weight", layer._fp8_state.delayed
    if key not in state_dict:
        return
    quantized_weight.refuse_codes(layer, state_dict, prefix)
    buffers.begin_anew(layer, delayed)
    if local_metadata.get("assign_to_params_buffers", False):
        if not state_dict[key].is_meta:
            buffers.give_memory(layer, delayed, state_dict[key].device)  # which a write needs
        state_dict[key] = quantized_weight.write_instead(layer, "weight", state_dict[key])


def after_load(layer: Float8Linear, incompatible: Any) -> None:
    """A state dict has been loaded into a layer."""
    state = layer._fp8_state
    weight = layer._parameters.get("weight")
    if weight is not None and not weight.is_meta:
        buffers.give_memory(layer, state.delayed, weight.device)
    if state.sharded_model is not None:
        state.sharded_model.scale_sync.sync_module(layer)


class Float8Linear(nn.Linear):
    """What every converted layer is an instance of.

    ``isinstance(module, fp8rs.nn.Float8Linear)`` tells whether a layer is FP8: an ``nn.Linear``
    becomes an ``fp8rs.nn.Linear``, and a subclass of it gets a class that has this and the subclass
    as its bases. It is made by ``convert_to_float8_training`` alone, not by calling it.
    """

    _fp8_state: ModelState
    fp8_scale: Tensor
    fp8_amax: Tensor
    _fp8_index: int
    _fp8_slots: buffers.KnownSlots
    #: The handle of each FP8 parameter, by the parameter's name.
    _fp8_params: dict[str, Any]
    #: Delayed scaling: for weight, input and gradient, whether there is a scale. One roll behind
    #: the buffers, which need not be read for it.
    fp8_ready: tuple[bool, bool, bool] = NOTHING_READY
    #: What reduces the partial sums of a layer whose weight is sharded along its inputs.
    _fp8_reduce: Callable[[Float8Linear, Any], Any] | None = None
    #: What it does otherwise while a run is debugged.
    _fp8_debug: Debug | None = None

    def _join(self, state: ModelState, name: str) -> None:
        """Be one of the layers of ``state``, from now on."""
        self._fp8_state = state
        self._fp8_index = state.add_linear(self, name)
        self._fp8_slots = buffers.KnownSlots()
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
        """The recipe that the operands are quantized by."""
        return self._fp8_state.recipe

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features).

        Raises:
            ValueError: the last dim is not in_features, or the input is 0-d.
            TypeError: the input is nested, or not float32, bfloat16 or float16.
            RuntimeError: without autocast, input and weight have two dtypes.
            UnsupportedError: the device cannot run the recipe.
        """
        compiling = torch.compiler.is_compiling()
        weight, bias = (self.weight, self.bias) if compiling else self._operands()
        if compiling and torch.is_grad_enabled():
            note_export()
        plain = type(input) is Tensor and type(weight) is nn.Parameter
        if not plain:
            if not isinstance(input, Tensor):
                raise TypeError(f"input must be a Tensor, not {type(input).__name__}")
            if is_distributed(weight) or is_distributed(input):
                from .sharded import on_shards  # of DTensors

                reduce = self._fp8_reduce
                if reduce is not None:
                    reduce = functools.partial(reduce, self)
                return on_shards(self._compute, input, weight, bias, reduce)
        return self._compute(input, weight, bias)

    def _compute(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The forward, of local tensors."""
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
        # To ask for a device's name takes longer.
        device = "cuda" if input.is_cuda else input.device.type
        if device == "meta":  # which has no autocast
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
        training = self.training
        if not torch.compiler.is_compiling():
            amax = self._buffers["fp8_amax"]
            if type(amax) is not Tensor or amax.dtype != torch.float32:
                keep_local(self._buffers)
            delayed.layer_begins(training)
            scales, amaxes = self._fp8_slots.of(self._buffers)
        else:
            keep_buffers_local(delayed.mark)
            if training:
                note_compiled(delayed.mark, "layer")
            scales, amaxes = buffers.slots(self.fp8_scale, self.fp8_amax)
        return run(input, weight, bias, state.key, dtype, scales, amaxes, self.fp8_ready, training)

    def _operands(self) -> tuple[Tensor, Tensor | None]:
        """The weight, if FSDP2 has not freed what was gathered of it, and the bias.

        From where modules keep parameters: asking a module takes ten times as long. What has been
        parametrized is no parameter, and is asked for.
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
                self._fp8_state.met_plain(weight)
        if "bias" in parameters:
            return weight, parameters["bias"]
        return weight, self.bias

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter) and name in self._parameters:
            # FSDP2 comes here with each shard and each gathered weight.
            sharded = is_distributed(value)
            if sharded:
                self._tell_of_shard(name, value)
            if sharded or isinstance(value, QuantizedTensor):
                self._parameters[name] = value
                return
        super().__setattr__(name, value)

    def _tell_of_shard(self, name: str, parameter: Any) -> None:
        sharded_model = self._fp8_state.shard()
        if sharded_model is not None:
            sharded_model.wrap(self, name, parameter)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As torch's. What parallel styles cut of an FP8 weight is one."""
        quantized_weight.cut_as(self._parameters.get(name), param)
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Initialize as nn.Linear does; sharded, the same whole weight for any number of ranks."""
        state = self.__dict__.get("_fp8_state")
        if state is None:  # the constructor's call
            super().reset_parameters()
            return
        buffers.begin_anew(self, state.delayed)
        kind = type(self).__dict__.get("_fp8_kind", nn.Linear)
        own = kind.reset_parameters is not nn.Linear.reset_parameters
        if own or not is_sharded(self.weight):
            super().reset_parameters()
        else:
            reset_linear(self)
        if state.sharded_model is not None:
            state.sharded_model.scale_sync.sync_module(self)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        delayed = self._fp8_state.delayed
        with quantized_weight.kept(self, "weight"), buffers.kept(self, delayed):
            out = super()._apply(fn, recurse)
        weight = self._parameters["weight"]
        if is_distributed(weight):
            self._tell_of_shard("weight", weight)  # which may be another tensor now
        return out

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._fp8_debug = None
        weight: Any = self._parameters.get("weight")
        if isinstance(weight, QuantizedTensor) and weight._store.observer is None:
            self._tell_of_shard("weight", weight)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={describe(self.recipe)}"


class Linear(Float8Linear):
    """y = x @ weight.T + bias, with operands quantized as a recipe says.

    The parameters are those of torch.nn.Linear, in high precision. Forward, dgrad and wgrad run
    on FP8 operands; what is saved for the backward is the input's FP8 columnwise plane, not the
    input. The input may have any number of dims from one, and any sizes; its dtype, which is the
    weight's, (or autocast's) is the output's. Gradients have the dtypes of what they are of.

    Args:
        in_features: as in torch.nn.Linear.
        out_features: as there.
        bias: as there.
        device: as there.
        dtype: as there.
        recipe: a recipe or its short name.

    Layers that ``fp8rs.convert_to_float8_training`` makes share one
    ``fp8rs.nn.model_state.ModelState``; a layer made by hand has its own.
    """

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
        self._own(ModelState(recipe, standalone=True))

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, recipe: Recipe | RecipeName = "current") -> Linear:
        """A layer with the parameters (the same objects), hooks and mode of ``linear``."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be a torch.nn.Linear, not {type(linear).__name__}")
        state = ModelState(recipe, standalone=True)
        new = cls.__new__(cls)
        for name, value in linear.__dict__.items():
            new.__dict__[name] = value.copy() if isinstance(value, dict) else value
        new._own(state)
        return new

    def _own(self, state: ModelState) -> None:
        """Be the root and only layer of ``state``."""
        self._join(state, "")
        state.attach(self)


_classes: dict[type[nn.Linear], type[Float8Linear]] = {nn.Linear: Linear}


def float8_class(kind: type[nn.Linear]) -> type[Float8Linear]:
    """The FP8 class of a class of linear layers: its subclass with ``Float8Linear``'s forward.

    As FSDP2 makes classes for the modules that it shards; made once a class.
    """
    found = _classes.get(kind)
    if found is None:
        namespace = {"_fp8_kind": kind, "__module__": kind.__module__}
        found = _classes[kind] = type(f"Float8{kind.__name__}", (Float8Linear, kind), namespace)
        copyreg.pickle(found, _reduce)
    return found


def _reduce(layer: Float8Linear) -> Any:
    """How a layer is pickled whose class nobody could import."""
    return _blank, (type(layer).__dict__["_fp8_kind"],), layer.__dict__


def _blank(kind: type[nn.Linear]) -> Float8Linear:
    """A layer without state, for pickle and copy to fill."""
    return object.__new__(float8_class(kind))
