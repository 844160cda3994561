"""Bytes of a model's parameters and gradients under FSDP2, computed before any rank runs.

FSDP2 gathers the parameters of a `Group` together, each padded to equal shards, and reduces their
gradients together. The size of a converted weight comes from its `AllGatherLayout`. Tests compare
these numbers with the collectives that ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fp8rs._torch import (
    fsdp_groups,
    fsdp_place,
    own_part,
    reduces_in_stored_dtype,
    reshards_after_forward,
)
from fp8rs.fsdp.layout import AllGatherLayout
from fp8rs.model.handle import local_of
from fp8rs.model.shard_spec import ShardSpec
from fp8rs.quantize.recipes import Recipe, quant_spec
from fp8rs.tensor.quantized import QuantizedTensor

UnitFn = Callable[[nn.Module, str], bool]


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """One parameter, as it is sharded or will be.

    Attributes:
        parameter: the parameter.
        spec: how it is sharded, on rank 0, which has the longest shard.
        gathered_dtype: dtype of the gathered parameter without FP8, and of its gradient.
        layout: layout of the gathered FP8 weight. None if it is gathered in high precision.
        is_fp8_weight: whether only codes and scales are stored.
        is_in_fp8_layer: whether it is the weight of an FP8 layer, however it is gathered.
    """

    parameter: nn.Parameter
    spec: ShardSpec
    gathered_dtype: torch.dtype
    layout: AllGatherLayout | None
    is_fp8_weight: bool
    is_in_fp8_layer: bool

    @property
    def trained(self) -> bool:
        """Whether the parameter has a gradient."""
        return self.parameter.requires_grad

    @property
    def shard_bytes(self) -> int:
        """Bytes of the stored shard."""
        if self.layout is None or not self.is_fp8_weight:
            return self.plain_bytes
        scales = 0
        if self.layout.gathers_codes_alone(self.spec):
            format = self.layout.format
            batch = self.spec.unsharded_shape[:1] if self.spec.batched else ()
            count = prod(format.scale_shape(*self.spec.matrix_shape, batch))
            scales = count * format.scale_dtype.itemsize
        return self.layout.nbytes(self.spec) + scales

    @property
    def plain_bytes(self) -> int:
        """Bytes of the shard in the parameter's dtype, which its sharded gradient has too."""
        return self.spec.padded_numel * self.parameter.dtype.itemsize

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the unsharded parameter, as it is gathered."""
        if self.layout is not None:
            return self.spec.num_shards * self.layout.nbytes(self.spec)
        return self._padded_numel * self.gathered_dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the unsharded gradient, as the backward computes it."""
        return self._padded_numel * self.gathered_dtype.itemsize if self.trained else 0

    def reduced_bytes(self, reduce_dtype: torch.dtype | None) -> int:
        """Return the bytes of the unsharded gradient as it is reduced.

        Args:
            reduce_dtype: ``reduce_dtype`` of the mixed-precision policy.
        """
        if reduce_dtype is None:
            if reduces_in_stored_dtype():
                reduce_dtype = self.parameter.dtype
            else:
                reduce_dtype = self.gathered_dtype
        return self._padded_numel * reduce_dtype.itemsize if self.trained else 0

    @property
    def _padded_numel(self) -> int:
        """Number of elements of the unsharded parameter with FSDP2's padding."""
        return self.spec.num_shards * self.spec.padded_numel


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters that FSDP2 gathers in one collective.

    Attributes:
        name: name of the module that ``fully_shard`` is called on. The root is "".
        parameters: the parameters below the module and not below another sharded module.
        gathers: all-gathers per step: 1, or 2 if the backward gathers again.
    """

    name: str
    parameters: tuple[ShardedParameter, ...]
    gathers: int

    @property
    def is_sharded(self) -> bool:
        """Whether there are several ranks, so that the group has collectives."""
        return any(p.spec.num_shards > 1 for p in self.parameters)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the unsharded parameters, which an all-gather returns. Padding is included."""
        return sum(p.gathered_bytes for p in self.parameters)

    def reduced_bytes(self, reduce_dtype: torch.dtype | None) -> int:
        """Return the bytes of the unsharded gradients, the input of a reduce-scatter."""
        return sum(p.reduced_bytes(reduce_dtype) for p in self.parameters)


def is_sharded_by_fsdp(root: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on a module of a model."""
    return any(isinstance(module, FSDPModule) for module in root.modules())


#: The layout of each weight of an FP8 layer, by the ``id`` of its module and its name. None if the
#: weight is gathered in high precision.
Layouts = dict[tuple[int, str], AllGatherLayout | None]


def layouts_of(recipe: Recipe, parameters: Iterable[tuple[nn.Module, str]]) -> Layouts:
    """Return the layout in which a recipe's weights are gathered, for modules' parameters."""
    spec = quant_spec(recipe, "weight")
    layout = AllGatherLayout(spec.format, spec.fp8_dtype)
    return {(id(module), name): layout for module, name in parameters}


def groups_of(
    root: nn.Module,
    layouts: Layouts,
    *,
    world_size: int,
    param_dtype: torch.dtype | None,
    reshard_after_forward: bool | None = None,
    unit_fn: UnitFn | None = None,
    fp8_weights: bool = False,
) -> list[Group]:
    """Return FSDP2's groups of a sharded model, or the planned groups of another one.

    Args:
        root: the model.
        layouts: the layouts of the weights of FP8 layers.
        world_size: the number of shards of a model that is not sharded yet.
        param_dtype: ``param_dtype`` of the mixed-precision policy. With None, parameters are
            gathered in their stored dtype.
        reshard_after_forward: as in ``fully_shard``. With None, only the root's parameters stay
            unsharded between forward and backward, or what FSDP2 does with a sharded model.
        unit_fn: called with each module and its name, returns whether ``fully_shard`` is called on
            it. The default is `usual_units`. The root is always sharded.
        fp8_weights: count all weights with a layout as FP8 weights, not only those that are.
    """
    is_sharded = is_sharded_by_fsdp(root)

    def sharded(member: _Member) -> ShardedParameter:
        parameter = member.parameter
        if is_sharded and isinstance(parameter, DTensor):
            spec = ShardSpec.from_dtensor(parameter)
        else:
            # FSDP2 shards the part of this rank if another parallelism has divided a parameter.
            shape = tuple(own_part(parameter).shape) or (1,)
            spec = ShardSpec(
                device_type=parameter.device.type,
                matrix_groups=(),
                shard_groups=(),
                num_shards=world_size,
                shard_rank=0,
                shard_dim=0,
                global_shape=shape,
                unsharded_shape=shape,
                global_offset=(0,) * len(shape),
            )
        gathered_dtype = parameter.dtype
        if param_dtype and gathered_dtype.is_floating_point:
            gathered_dtype = param_dtype
        key = (id(member.module), member.name)
        layout = layouts.get(key)
        if is_sharded and isinstance(parameter, DTensor) and local_of(parameter) is None:
            layout = None  # a tie or the number of tokens has decided for high precision
        is_fp8 = fp8_weights or isinstance(own_part(parameter), QuantizedTensor)
        return ShardedParameter(
            parameter,
            spec,
            gathered_dtype,
            layout,
            is_fp8_weight=layout is not None and is_fp8,
            is_in_fp8_layer=key in layouts,
        )

    groups = []
    for unit in _fsdp_units(root) if is_sharded else _planned_units(root, unit_fn):
        reshards = unit.reshards if reshard_after_forward is None else reshard_after_forward
        parameters = tuple(sharded(member) for member in unit.members)
        groups.append(Group(unit.name, parameters, 2 if reshards else 1))
    return groups


def usual_units(root: nn.Module) -> set[str]:
    """Return the names of the modules that ``fully_shard`` is usually called on, without the root.

    These are modules of the classes in ``_no_split_modules``, which transformers' models define. If
    there are none, they are the members of each outermost nn.ModuleList.
    """
    class_names: set[str] = set()
    for module in root.modules():
        class_names.update(getattr(module, "_no_split_modules", None) or ())
    units: set[str] = set()
    for name, module in root.named_modules():
        if name and type(module).__name__ in class_names:
            units.add(name)
    if units:
        return units

    lists: tuple[str, ...] = ()
    for name, module in root.named_modules():
        if isinstance(module, nn.ModuleList) and not name.startswith(lists):
            prefix = f"{name}." if name else ""
            lists += (prefix,)
            units |= {f"{prefix}{child}" for child, _ in module.named_children()}
    return units


class _Member(NamedTuple):
    """A module, and the name and value of one of its parameters."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


@dataclass(frozen=True, eq=False)
class _Unit:
    """A module that ``fully_shard`` is called on.

    Attributes:
        name: the module's name. The root is "".
        members: the parameters that FSDP2 gathers for it.
        reshards: whether they are resharded after the forward.
    """

    name: str
    members: list[_Member]
    reshards: bool


def _planned_units(root: nn.Module, unit_fn: UnitFn | None) -> list[_Unit]:
    """Return the units of a model that is not sharded yet."""
    usual = usual_units(root)
    is_unit = unit_fn or (lambda _, name: name in usual)
    units = {"": _Unit("", [], reshards=False)}
    for name, module in root.named_modules():
        if name and is_unit(module, name):
            units[name] = _Unit(name, [], reshards=True)

    assigned_ids: set[int] = set()
    for module_name, module in root.named_modules():
        # A module's parameters belong to the innermost unit around it.
        around = [unit for unit in units if not unit or f"{module_name}.".startswith(f"{unit}.")]
        unit = units[max(around, key=len)]
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in assigned_ids:
                assigned_ids.add(id(parameter))
                unit.members.append(_Member(module, name, parameter))
    return [unit for unit in units.values() if unit.members]


def _fsdp_units(root: nn.Module) -> list[_Unit]:
    """Return the units of a sharded model, with the sharded parameters."""
    # Modules that are sharded together share a group. It is listed under the first of them.
    units: dict[int, _Unit] = {}
    for name, group in fsdp_groups(root):
        if id(group) not in units:
            members = [_Member(*fsdp_place(fsdp_param)) for fsdp_param in group.fsdp_params]
            units[id(group)] = _Unit(name, members, reshards_after_forward(root, name, group))
    return list(units.values())
