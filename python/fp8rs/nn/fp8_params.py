"""FP8 parameters of modules that are not linear layers, such as batched weights of experts.

A converted `Float8Linear` has one FP8 parameter. `add_fp8_params` gives any other module handles
for some of its parameters, so that FSDP2 gathers them in FP8. It does not change the module's
forward, which must accept the gathered `fp8rs.tensor.quantized.QuantizedTensor`.
"""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

from torch import nn

from fp8rs._torch import is_distributed
from fp8rs.scaling.histories import NOTHING_READY
from fp8rs.tensor.quantized import QuantizedTensor

from . import buffers
from .model_state import ModelState
from .quantized_weight import preserve_attributes, register_load_hooks


class Float8Params(nn.Module):
    """Mixin of modules with FP8 parameters. It notifies the sharded model of their shards.

    Attributes:
        _fp8_state: the state of the converted model.
        _fp8_index: the module's index among the converted modules.
        _fp8_params: the handle of each FP8 parameter, by the parameter's name.
    """

    _fp8_state: ModelState
    _fp8_index: int
    _fp8_params: dict[str, Any]
    fp8_ready: tuple[bool, bool, bool] = NOTHING_READY

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter) and name in self.__dict__.get("_fp8_params", ()):
            # FSDP2 sets each shard and each gathered weight.
            sharded = is_distributed(value)
            if sharded and (sharded_model := self._fp8_state.shard()) is not None:
                sharded_model.wrap(self, name, value)
            if sharded or isinstance(value, QuantizedTensor):
                self._parameters[name] = value
                return
        super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with ExitStack() as stack:
            for name in self._fp8_params:
                stack.enter_context(preserve_attributes(self, name))
            stack.enter_context(buffers.preserve(self, self._fp8_state.delayed))
            out = super()._apply(fn, recurse)
        for name in self._fp8_params:
            parameter = self._parameters[name]
            if is_distributed(parameter):
                setattr(self, name, parameter)  # it may have another local tensor
        return out


@cache
def _class_of(mixin: Any, kind: Any) -> type[nn.Module]:
    namespace = {"__module__": kind.__module__, "_fp8_kinds": (mixin, kind)}
    found = type(f"Float8{kind.__name__}", (mixin, kind), namespace)
    copyreg.pickle(found, _reduce)
    return found


def _reduce(module: Any) -> Any:
    """Pickle a module whose class was created at run time."""
    return _blank, type(module).__dict__["_fp8_kinds"], module.__dict__


def _blank(mixin: Any, kind: Any) -> nn.Module:
    """Create a module without state, for pickle and copy."""
    return object.__new__(_class_of(mixin, kind))


def add_fp8_params(
    module: nn.Module,
    names: Sequence[str],
    state: ModelState,
    fqn: str,
    mixin: type[Float8Params] = Float8Params,
) -> None:
    """Make FSDP2 gather parameters of a module in FP8.

    Call it before ``fully_shard``. A parameter in high precision is quantized for each all-gather.
    An FP8 weight is gathered as it is stored. A parameter of three or more dimensions is a batch of
    matrices, each of which is quantized by itself.

    Args:
        module: a module that is not a converted linear layer. Its class is changed to a subclass.
        names: names of its parameters (N, K), (E, N, K) or (E, \\*, N, K).
        state: the state of the converted model, whose root contains the module.
        fqn: the module's fully qualified name, for messages.
        mixin: the class that the subclass also inherits from.
    """
    parameters = [module.get_parameter(name) for name in names]
    kind: Any = type(module)
    own: Any = mixin
    module.__class__ = _class_of(own, kind)
    converted: Any = module
    converted._fp8_state = state
    converted._fp8_index = state.add_linear(module, fqn)
    converted._fp8_params = state.handles_of(module, names)
    buffers.register(module, state.delayed, parameters[0].device)
    register_load_hooks(module)
