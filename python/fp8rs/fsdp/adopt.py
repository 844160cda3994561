"""FSDP2 puts sharded parameters in their places: have them gathered in FP8."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch import nn

from fp8rs._torch import local_tensor, set_local_tensor
from fp8rs.nn.linear import Float8Linear, keep_marks
from fp8rs.tensor.quantized import QuantizedTensor

from . import agreement, passes, state_dicts
from .float8_weight import Sharded, sharded
from .master_weight import MasterWeight
from .parameter import Float8Parameter
from .placement import local_part
from .weight import Weight


def own(module: nn.Module, name: str) -> Weight:
    """Have a layer's quantized parameter own its planes: tensors made from it know of it."""
    parameter: Any = module._parameters[name]
    assert isinstance(parameter, QuantizedTensor)
    owner = parameter._store.owner
    if not isinstance(owner, Weight) or owner._module() is not module:
        owner = parameter._store.owner = Weight(module, name)
    return owner


def adopt(module: nn.Module, name: str, parameter: Any) -> None:
    """A sharded parameter is put in its place: quantize it before it is gathered.

    The DTensor stays the object that it is; its local tensor becomes a `MasterWeight` over the same
    storage, or a `Sharded` one over the same planes. A pickled or loaded DTensor comes through here
    too. What a user has set on the parameter goes with it.

    Args:
        module: a converted layer.
        name: of the parameter; only "weight" is quantized.
        parameter: the DTensor; of a whole FP8 weight, itself, which is then owned.
    """
    if name != "weight":
        return
    if isinstance(parameter, QuantizedTensor):
        own(module, name)
        return
    local = local_tensor(parameter)
    state: Any = module._fp8_state
    quantized = isinstance(local, QuantizedTensor)
    if quantized and local._store.gathered:
        return  # under tensor parallelism a gathered weight is a DTensor too
    if quantized:
        parameter.__class__ = Float8Parameter
    if isinstance(local, (MasterWeight, Sharded)):
        owner = local._weight._module()
        if owner is module or (owner is not None and owner._parameters.get(name) is parameter):
            return  # it is adopted already, by this layer or by one that it is tied to
    elif not quantized and not local.dtype.is_floating_point:
        return
    if not quantized and not state.fp8_gather:
        if state.delayed is not None:
            state.delayed.is_sharded_over(parameter.device_mesh)
        compare_first(state)
        return
    state.has(module)
    if not quantized and (others := tied_to(module, name, parameter)):
        warnings.warn(
            f"the weight of {state.names[module._fp8_index] or 'the layer'} is gathered in high "
            f"precision: it is tied to that of {', '.join(others)}, which would be given what it "
            "was rounded to",
            stacklevel=2,
        )
        module._fp8_on_shard = None  # type: ignore[assignment]
        return
    if state.fsdp is not None:
        state.fsdp.replaced(module, name)
    weight = Weight(module, name)
    weight.written = True
    if quantized:
        before = local._store.owner
        if isinstance(before, Weight):
            weight.keep_init = before.keep_init
            if before.init_value is not None:
                weight.init_value = local_part(before.init_value, parameter)
        set_local_tensor(parameter, sharded(local, weight))
        passes.of(state)
    else:
        set_local_tensor(parameter, MasterWeight(local, weight))
    before_it = module._parameters.get(name)
    if before_it is not None:
        keep_marks(before_it.__dict__, parameter)
    if not getattr(module, "_fp8_plain_state_dict", False):
        state_dicts.register(module)
        module._fp8_plain_state_dict = True  # type: ignore[assignment]
    compare_first(state)


def compare_first(state: Any) -> None:
    """Have ranks compare what they converted before FSDP2, whose hooks it has just put first."""
    agreement.of(state)
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
