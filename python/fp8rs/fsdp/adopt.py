"""FSDP2 puts sharded parameters in their places: have them gathered in FP8."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch import nn

from fp8rs._torch import local_tensor, set_local_tensor
from fp8rs.nn.linear import Float8Linear
from fp8rs.nn.quantized_weight import keep_marks
from fp8rs.nn.registry import ModelState
from fp8rs.tensor.quantized import QuantizedTensor

from . import state_dicts
from .float8_weight import sharded
from .master_weight import MasterWeight
from .model import ShardedModel
from .parameter import Float8Parameter
from .placement import local_part, place
from .weight import Weight, local_of


def sharding_of(state: ModelState) -> ShardedModel:
    """What keeps the sharded weights of a model: see `ModelState`."""
    return ShardedModel(state, adopt)


def own(module: nn.Module, name: str) -> Weight:
    """Have a layer's quantized parameter own its planes: tensors made from it know of it."""
    parameter: Any = module._parameters[name]
    assert isinstance(parameter, QuantizedTensor)
    owner = parameter._store.owner
    if not isinstance(owner, Weight) or owner._module() is not module:
        owner = parameter._store.owner = Weight(module, name)
    return owner


def adopt(model: ShardedModel, module: nn.Module, name: str, parameter: Any) -> None:
    """A sharded parameter is put in its place: quantize it before it is gathered.

    The DTensor stays the object that it is; its local tensor becomes a `MasterWeight` over the same
    storage, or a `Sharded` one over the same planes. A pickled or loaded DTensor comes through here
    too. What a user has set on the parameter goes with it.

    Args:
        model: whose layer.
        module: a converted layer.
        name: of the parameter; only "weight" is quantized.
        parameter: the DTensor; of a whole FP8 weight, itself, which is then owned.
    """
    if name != "weight":
        return
    if isinstance(parameter, QuantizedTensor):
        own(module, name)
        return
    local, state = local_tensor(parameter), model.state
    quantized = isinstance(local, QuantizedTensor)
    if quantized:
        if local._store.gathered:
            return  # under tensor parallelism a gathered weight is a DTensor too
        parameter.__class__ = Float8Parameter
    elif not local.dtype.is_floating_point:
        return
    known = local_of(parameter)
    if known is not None:
        owner = known._weight._module()
        if owner is module or (owner is not None and owner._parameters.get(name) is parameter):
            return  # it is adopted already, by this layer or by one that it is tied to
    state.has(module)
    index: Any = module._fp8_index
    if state.delayed is not None:
        state.delayed.is_sharded_over(parameter.device_mesh, index)
    if not quantized and (index in model.left or not state.fp8_gather):
        state.keep_first()
        return
    if not quantized and (others := tied_to(module, name, parameter)):
        warnings.warn(
            f"the weight of {state.names[index] or 'the layer'} is gathered in high "
            f"precision: it is tied to that of {', '.join(others)}, which would be given what it "
            "was rounded to",
            stacklevel=2,
        )
        model.left.add(index)
        return
    weight = Weight(module, name)
    weight.freshness.written = True
    if quantized:
        before = local._store.owner
        if isinstance(before, Weight):
            weight.keep_init = before.keep_init
            if before.init_value is not None:
                weight.init_value = local_part(before.init_value, parameter)
        set_local_tensor(parameter, sharded(local, weight))
    else:
        set_local_tensor(parameter, MasterWeight(local, weight))
    before_it = module._parameters.get(name)
    if before_it is not None:
        keep_marks(before_it.__dict__, parameter)
    state_dicts.register(module)
    model.add(weight)
    if state.delayed is not None:
        state.delayed.set_weight_groups(index, place(parameter).groups)
    state.keep_first()


#: The modules of converted models that have parameters and are not converted, with their names:
#: to look for them takes as long as a model has modules, and each weight asks.
_others: weakref.WeakKeyDictionary[Any, list[tuple[str, weakref.ref[nn.Module]]]] = (
    weakref.WeakKeyDictionary()
)


def tied_to(module: nn.Module, name: str, parameter: Any) -> list[str]:
    """The modules that have a layer's weight as theirs, and do not multiply by it in FP8."""
    state: Any = module._fp8_state
    mine = (parameter, module._parameters.get(name))  # not all are given their shard at once
    others = _others.get(state)
    if others is None and state.root is not None:
        others = _others[state] = [
            (other or type(part).__name__, weakref.ref(part))
            for other, part in state.root.named_modules()
            if part._parameters and not isinstance(part, Float8Linear)
        ]
    return [
        other
        for other, reference in others or ()
        if (part := reference()) is not None
        and any(p is not None and any(p is one for one in mine) for p in part._parameters.values())
    ]
