"""Count the bytes that a training step gathers and reduces.

A dispatch mode counts the collectives. The share of converted weights is the size of the tensors
that their pre-all-gather hooks return. Without hooks, it is calculated from the sizes of the
gathers and of the padded parameters. An all-gather counts the bytes of its output, including
padding.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

#: Operators of all-gathers, with the position of the output.
_GATHERS = {
    "c10d::_allgather_base_": 0,
    "c10d::allgather_": 0,
    "c10d::allgather_coalesced_": 0,
    "c10d::allgather_into_tensor_coalesced_": 0,
    "_c10d_functional::all_gather_into_tensor": None,
    "_c10d_functional::all_gather_into_tensor_out": None,
    "_c10d_functional::all_gather_into_tensor_coalesced": None,
}
#: Operators that reduce gradients, with the position of the input. `fp8rs.comm` sends gradients in
#: bf16 with an all-to-all.
_SCATTERS = {
    "c10d::alltoall_base_": 1,
    "c10d::_reduce_scatter_base_": 1,
    "c10d::reduce_scatter_": 1,
    "c10d::reduce_scatter_tensor_coalesced_": 1,
    "_c10d_functional::reduce_scatter_tensor": 0,
    "_c10d_functional::reduce_scatter_tensor_out": 0,
}
_ALL_REDUCES = {
    "c10d::allreduce_": 0,
    "_c10d_functional::all_reduce": 0,
    "_c10d_functional::all_reduce_": 0,
}


@dataclass
class Traffic:
    """Bytes that a rank gathered and reduced in one step."""

    gathers: list[int] = field(default_factory=list)
    handed_over: int = 0
    scatters: list[int] = field(default_factory=list)
    all_reduces: list[int] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Return the bytes of all all-gathers."""
        return sum(self.gathers)


@contextmanager
def counted(model: nn.Module, ranks: int) -> Iterator[Traffic]:
    """Count the collectives within the block."""
    traffic = Traffic()
    with ExitStack() as stack:
        for kind in _hooked_types(model):
            hook = _counting_hook(kind, traffic, ranks)
            stack.enter_context(mock.patch.object(kind, "fsdp_pre_all_gather", hook))
        stack.enter_context(_Counter(traffic))
        yield traffic


def converted_share(
    traffic: Traffic, model: nn.Module, names: set[str], ranks: int, itemsize: int
) -> int:
    """Return the bytes of the parameters ``names`` in the all-gathers of a model without hooks.

    The size of an all-gather identifies its module.

    Raises:
        RuntimeError: no module has this size, or several modules with different shares have it.
    """
    # By the bytes of a gather, the bytes of the named parameters in it.
    shares: dict[int, set[int]] = {}
    for unit in _units(model, names, ranks):
        gather_bytes = unit.padded_numel * itemsize
        shares.setdefault(gather_bytes, set()).add(unit.named_numel * itemsize)

    total = 0
    for gather_bytes in traffic.gathers:
        possible_shares = shares.get(gather_bytes, set())
        if len(possible_shares) != 1:
            raise RuntimeError(
                f"a gather of {gather_bytes} bytes fits {len(possible_shares)} kinds of module"
            )
        (share,) = possible_shares
        total += share
    return total


class _Counter(TorchDispatchMode):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _GATHERS:
            position = _GATHERS[name]
            output = result if position is None else args[position]
            self._traffic.gathers.append(_bytes(output))
        elif name in _SCATTERS:
            self._traffic.scatters.append(_bytes(args[_SCATTERS[name]]))
        elif name in _ALL_REDUCES:
            self._traffic.all_reduces.append(_bytes(args[_ALL_REDUCES[name]]))
        return result


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_bytes(item) for item in value)
    return 0


def _hooked_types(model: nn.Module) -> set[Any]:
    types = set()
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            # A property, which some tensors of a type do not have.
            if hasattr(local, "fsdp_pre_all_gather"):
                types.add(type(local))
    return types


def _counting_hook(kind: Any, traffic: Traffic, ranks: int) -> property:
    descriptor = inspect.getattr_static(kind, "fsdp_pre_all_gather")  # a function or a property

    def counting(local: Any) -> Callable[..., Any]:
        hook = descriptor.__get__(local)

        # `wraps` keeps the signature. FSDP2 counts the parameters of the hook.
        @functools.wraps(hook)
        def count(*args: Any, **kwargs: Any) -> Any:
            gather_inputs, metadata = hook(*args, **kwargs)
            # With one rank, FSDP2 gathers nothing.
            if ranks > 1:
                traffic.handed_over += _bytes(gather_inputs) * ranks
            return gather_inputs, metadata

        return count

    return property(counting)


@dataclass
class _Unit:
    """The padded elements of a sharded module, and of the named parameters in it."""

    padded_numel: int = 0
    named_numel: int = 0


def _units(model: nn.Module, names: set[str], ranks: int) -> list[_Unit]:
    """Return the sizes of all sharded modules."""
    unit_of_parameter: dict[str, _Unit] = {}
    units = []
    for prefix, module in model.named_modules():
        is_sharded = isinstance(module, FSDPModule)
        if is_sharded:
            unit = _Unit()
            units.append(unit)
            # Parents come before children, so the innermost sharded module owns a parameter.
            for name, _ in module.named_parameters(prefix):
                unit_of_parameter[name] = unit

    for name, parameter in model.named_parameters():
        rows = -(-parameter.shape[0] // ranks) * ranks
        padded_numel = rows * parameter.shape[1:].numel()
        unit = unit_of_parameter[name]
        unit.padded_numel += padded_numel
        if name in names:
            unit.named_numel += padded_numel
    return units
