"""FSDP2 puts sharded parameters in their places: have them gathered in FP8."""

from __future__ import annotations

import warnings
from typing import Any, cast

from torch import nn

from fp8rs._torch import local_tensor, set_local_tensor
from fp8rs.nn.model_state import ModelState
from fp8rs.nn.quantized_weight import keep_marks
from fp8rs.tensor.quantized import QuantizedTensor

from . import state_dicts
from .float8_weight import sharded
from .master_weight import MasterWeight
from .model import ShardedModel
from .param import ParamHandle, local_of
from .placement import local_part, place
from .planes_owner import PlanesOwner, own


def sharding_of(state: ModelState) -> ShardedModel:
    """What keeps the sharded weights of a model: see `ModelState`."""
    return ShardedModel(state, adopt)


def adopt(model: ShardedModel, module: nn.Module, name: str, parameter: Any) -> None:
    """A sharded parameter is put in its place: quantize it before it is gathered.

    The DTensor stays the object that it is; its local tensor becomes a `MasterWeight` over the same
    storage, or a `Sharded` one over the same planes. A pickled or loaded DTensor comes through here
    too. What a user has set on the parameter goes with it.

    Args:
        model: whose layer.
        module: a converted layer.
        name: of the parameter; those in ``_fp8_params`` are quantized.
        parameter: the DTensor; of a whole FP8 weight, itself, which is then owned.
    """
    handles: dict[str, ParamHandle] = cast(Any, module)._fp8_params
    if name not in handles:
        return
    if isinstance(parameter, QuantizedTensor):
        own(module, name)
        return
    local, state = local_tensor(parameter), model.state
    quantized = isinstance(local, QuantizedTensor)
    # Under tensor parallelism a gathered weight is a DTensor too.
    if local._store.gathered if quantized else not local.dtype.is_floating_point:
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
    if not quantized and (others := tied_to(model, module, name, parameter)):
        warnings.warn(
            f"the weight of {state.names[index] or 'the layer'} is gathered in high "
            f"precision: it is tied to that of {', '.join(others)}, which would be given what it "
            "was rounded to",
            stacklevel=2,
        )
        model.left.add(index)
        return
    weight: ParamHandle
    if quantized:
        handles[name] = weight = owner_of_shard(model, local, module, name, parameter)
        set_local_tensor(parameter, sharded(local, weight))
    else:
        weight = handles[name]
        if type(weight) is not ParamHandle:  # an FP8 weight was here before
            weight = handles[name] = ParamHandle(module, name)
        set_local_tensor(parameter, MasterWeight(local, weight))
    weight.written = True
    before_it = module._parameters.get(name)
    if before_it is not None:
        keep_marks(before_it.__dict__, parameter)
    state_dicts.register(module)
    model.add(weight)
    if state.delayed is not None:
        state.delayed.set_weight_groups(index, place(parameter).groups)
    state.keep_first()


def owner_of_shard(
    model: ShardedModel, local: QuantizedTensor, module: nn.Module, name: str, parameter: Any
) -> PlanesOwner:
    """That of an FP8 shard, with what the owner of the whole weight has kept of its values."""
    weight, whole = PlanesOwner(module, name, model.scales), local._store.owner
    if isinstance(whole, PlanesOwner):
        weight.keep_init = whole.keep_init
        if whole.init_value is not None:
            weight.init_value = local_part(whole.init_value, parameter)
    return weight


def tied_to(model: ShardedModel, module: nn.Module, name: str, parameter: Any) -> list[str]:
    """The modules that have a layer's weight as theirs, and do not multiply by it in FP8."""
    mine = (parameter, module._parameters.get(name))  # not all are given their shard at once
    return [
        other
        for other, reference in model.others()
        if (part := reference()) is not None
        and any(p is not None and any(p is one for one in mine) for p in part._parameters.values())
    ]
