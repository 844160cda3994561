"""What sharding a model makes of its parameters, in bytes, before any rank runs.

FSDP2 gathers the parameters of a `Group` together, each padded to equal shards, and reduces their
gradients together. The bytes of a converted weight come from its `AllGatherLayout`. Tests compare
these numbers with the collectives that ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fp8rs._torch import fsdp_groups, fsdp_place, own_part, reduces_in_stored_dtype
from fp8rs.quantize.recipes import Recipe
from fp8rs.quantize.spec import quant_spec
from fp8rs.tensor.quantized import QuantizedTensor

from .layout import AllGatherLayout
from .shard_spec import ShardSpec, shard_spec

UnitFn = Callable[[nn.Module, str], bool]


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """One parameter, as it is or would be sharded.

    Attributes:
        parameter: itself.
        placement: of rank 0's shard, the longest.
        gathered_dtype: what FSDP2 gathers, and what its gradient has, where it has no codec.
        codec: of a weight that is quantized before it is gathered.
        at_rest: whether the codes and scales of a weight with a codec are all that is stored.
    """

    parameter: nn.Parameter
    placement: ShardSpec
    gathered_dtype: torch.dtype
    codec: AllGatherLayout | None
    at_rest: bool

    @property
    def trained(self) -> bool:
        """Whether it has a gradient."""
        return self.parameter.requires_grad

    @property
    def shard_bytes(self) -> int:
        """Bytes of the stored shard."""
        if self.codec is None or not self.at_rest:
            return self.plain_bytes
        format = self.codec.format
        scale = format.scale_dtype.itemsize if format.per_tensor else 0  # which is not gathered
        return self.codec.nbytes(self.placement) + scale

    @property
    def plain_bytes(self) -> int:
        """Bytes of the shard in the parameter's dtype: FSDP2 leaves gradients of it in that."""
        return self.placement.padded_numel * self.parameter.dtype.itemsize

    @property
    def gathered_bytes(self) -> int:
        """Bytes that a rank holds after a gather."""
        if self.codec is not None:
            return self.placement.ranks * self.codec.nbytes(self.placement)
        return self._padded * self.gathered_dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the whole gradient as the backward makes it."""
        return self._padded * self.gathered_dtype.itemsize if self.trained else 0

    def reduced_bytes(self, reduce_dtype: torch.dtype | None) -> int:
        """Bytes of the whole gradient as it is reduced, under a policy's ``reduce_dtype``."""
        if reduce_dtype is None:
            stored = reduces_in_stored_dtype()
            reduce_dtype = self.parameter.dtype if stored else self.gathered_dtype
        return self._padded * reduce_dtype.itemsize if self.trained else 0

    @property
    def _padded(self) -> int:
        return self.placement.ranks * self.placement.padded_numel


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters that FSDP2 gathers in one collective.

    Attributes:
        name: of the module that ``fully_shard`` is called on; "" is the root.
        parameters: those of the module that no sharded module below it has.
        gathers: how often a step gathers them: once, or in the backward too.
        all_gather: the all-gather that ``set_fsdp_comm`` chose.
        reduce_scatter: the reduce-scatter that ``set_fsdp_comm`` chose.
    """

    name: str
    parameters: tuple[ShardedParameter, ...]
    gathers: int
    all_gather: str = "torch"
    reduce_scatter: str = "torch"

    @property
    def gathered_bytes(self) -> int:
        """Bytes that a rank holds after a gather, padding included."""
        if not any(p.placement.ranks > 1 for p in self.parameters):
            return 0
        return sum(p.gathered_bytes for p in self.parameters)

    @property
    def whole_bytes(self) -> int:
        """Bytes of the parameters while they are there as a whole."""
        return sum(p.gathered_bytes for p in self.parameters)

    def scattered_bytes(self, reduce_dtype: torch.dtype | None) -> int:
        """Bytes that a rank hands to the reduce-scatter, padding included."""
        if not any(p.placement.ranks > 1 for p in self.parameters):
            return 0
        narrow = self.reduce_scatter != "torch"
        return sum(
            p.gradient_bytes if narrow else p.reduced_bytes(reduce_dtype) for p in self.parameters
        )

    def reducing_bytes(self, reduce_dtype: torch.dtype | None) -> int:
        """Bytes of the temporary tensors of a reduce-scatter, without symmetric memory."""
        if self.reduce_scatter == "torch":
            return sum(p.reduced_bytes(reduce_dtype) for p in self.parameters)
        return {"bf16": 2, "symmetric": 0}[self.reduce_scatter] * self.scattered_bytes(reduce_dtype)


def codecs_of(recipe: Recipe, layers: Iterable[nn.Module]) -> dict[int, AllGatherLayout]:
    """For `groups_of`: a recipe's codec for each of the layers that are gathered by it."""
    spec = quant_spec(recipe, "weight")
    codec = AllGatherLayout(spec.format, spec.fp8_dtype)
    return {id(layer): codec for layer in layers}


def groups_of(
    root: nn.Module,
    codecs: dict[int, AllGatherLayout],
    *,
    world_size: int,
    param_dtype: torch.dtype | None,
    reshard_after_forward: bool | None = None,
    unit_fn: UnitFn | None = None,
    fp8_weights: bool = False,
) -> list[Group]:
    """The groups of a model: FSDP2's own where it is sharded, else those that are to be.

    Args:
        root: the model.
        codecs: of the layers whose ``weight`` is quantized before it is gathered, by their ``id``.
        world_size: the number of shards, of a model that is not sharded.
        param_dtype: the mixed-precision policy's; None gathers what is stored.
        reshard_after_forward: as in ``fully_shard``: None keeps the root's parameters from the
            forward to the backward, and no others.
        unit_fn: called with each module and its name: whether ``fully_shard`` is called on it. By
            default on :func:`usual_units`. The root always is one.
        fp8_weights: all weights with a codec are to be FP8 weights, not only those that are.
    """

    def sharded(module: nn.Module, name: str, parameter: nn.Parameter) -> ShardedParameter:
        if isinstance(parameter, DTensor):
            placement = shard_spec(parameter)
        else:
            shape = tuple(parameter.shape) or (1,)
            start = (0,) * len(shape)
            kind = parameter.device.type
            placement = ShardSpec(kind, (), (), world_size, 0, 0, shape, shape, start)
        stored = parameter.dtype
        gathered = param_dtype if param_dtype and stored.is_floating_point else stored
        codec = codecs.get(id(module)) if name == "weight" else None
        is_fp8 = isinstance(own_part(parameter), QuantizedTensor)
        at_rest = codec is not None and (fp8_weights or is_fp8)
        return ShardedParameter(parameter, placement, gathered, codec, at_rest)

    groups = []
    for unit, parameters in _owned(root, unit_fn):
        again = (unit != "") if reshard_after_forward is None else reshard_after_forward
        groups.append(Group(unit, tuple(sharded(*p) for p in parameters), 2 if again else 1))
    return groups


def usual_units(root: nn.Module) -> set[str]:
    """The names of the modules that ``fully_shard`` is usually called on, beside the root.

    Those of the classes in ``_no_split_modules`` (transformers' models name their blocks there);
    else the members of each nn.ModuleList that is not inside another one.
    """
    kinds = {kind for m in root.modules() for kind in getattr(m, "_no_split_modules", None) or ()}
    units = {name for name, m in root.named_modules() if name and type(m).__name__ in kinds}
    if units:
        return units
    lists: list[str] = []
    for name, module in root.named_modules():
        if isinstance(module, nn.ModuleList) and not name.startswith(tuple(f"{n}." for n in lists)):
            lists.append(name)
            units |= {f"{name}.{child}".lstrip(".") for child, _ in module.named_children()}
    return units


#: A module, and the name and value of a parameter in it.
_Place = tuple[nn.Module, str, nn.Parameter]


def _owned(root: nn.Module, unit_fn: UnitFn | None) -> list[tuple[str, list[_Place]]]:
    """Names of units, and the parameters that FSDP2 gathers for each."""
    if any(isinstance(m, FSDPModule) for m in root.modules()):
        return _fsdp_groups(root)
    if unit_fn is None:
        usual = usual_units(root)
        units = ["", *(name for name, _ in root.named_modules() if name in usual)]
    else:
        units = ["", *(name for name, m in root.named_modules() if name and unit_fn(m, name))]
    owned: dict[str, list[_Place]] = {unit: [] for unit in units}
    seen: set[int] = set()
    for prefix, module in root.named_modules():
        # Of the units around a module the innermost one has its parameters.
        owner = max((u for u in units if not u or f"{prefix}.".startswith(f"{u}.")), key=len)
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                owned[owner].append((module, name, parameter))
    return [(name, parameters) for name, parameters in owned.items() if parameters]


def _fsdp_groups(root: nn.Module) -> list[tuple[str, list[_Place]]]:
    """The groups that FSDP2 has made of a model, with the sharded parameters."""
    found: list[tuple[str, list[_Place]]] = []
    seen: set[int] = set()
    for unit, group in fsdp_groups(root):
        if id(group) not in seen:
            seen.add(id(group))
            found.append((unit, [fsdp_place(p) for p in group.fsdp_params]))
    return found
