"""Gradients that travel in bfloat16 and are summed in float32.

FSDP2 asks a reduction (``set_custom_reduce_scatter``) for memory, copies a group's gradients there
in the policy's ``reduce_dtype``, and has them reduced. Where they are bfloat16, to copy them as
float32 doubles the bytes and adds nothing. So what it is given here is a `Gradients`, which has no
memory before the copy shows what is copied:

- all of it bfloat16, from one backward: it is sent as it is, and each rank adds up what it receives
  in float32, in the order of ranks (``sum_rows_``). No gradient is rounded, and the sum is
  float32's and always the same.
- anything else (float32 gradients, mixed ones, what micro-batches added up in float32): it is
  copied in ``reduce_dtype`` and reduced by torch's own collective, as without all this.

Ranks have to decide alike, and each sees its own gradients alone. They do: of one backward a
gradient has the dtype of the computation, which conversion and policy give all ranks. Where several
forwards came before this reduction, parameters may have been used on some ranks only in some of
them, and what has been added up is float32 here and bfloat16 there: then it is float32 for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fp8rs._torch import (
    disabled_torch_function,
    fills_in_unused,
    make_wrapper_subclass,
    premultiplied_by,
)

_BF16, _F32 = torch.bfloat16, torch.float32


class Wire(Protocol):
    """What carries bfloat16 gradients to the rank that adds them up."""

    def room(self, numel: int, device: torch.device, group: dist.ProcessGroup) -> Tensor:
        """Where gradients of ``numel`` elements are copied to: bfloat16."""

    def sum(self, out: Tensor, sent: Tensor, divisor: float, group: dist.ProcessGroup) -> None:
        """Put the sum of this rank's parts of what all ranks have ``sent``, divided, in ``out``."""


class AllToAll:
    """A `Wire` over a collective of torch's: NCCL, also between hosts, or gloo."""

    def room(self, numel: int, device: torch.device, group: dist.ProcessGroup) -> Tensor:
        """Fresh memory."""
        return torch.empty(numel, dtype=_BF16, device=device)

    def sum(self, out: Tensor, sent: Tensor, divisor: float, group: dist.ProcessGroup) -> None:
        """One ``all_to_all_single``, and the sum of its rows."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        torch.ops.fp8rs.sum_rows_(out, received.view(group.size(), -1), divisor)


class Room:
    """The memory of one `Gradients` and its views: made when it is known what goes there."""

    def __init__(self, dtype: torch.dtype, make: Callable[[torch.dtype], Tensor]) -> None:
        self.dtype = dtype
        self._make = make
        self.memory: Tensor | None = None

    def filled_with(self, sources: Sequence[Tensor]) -> Tensor:
        """Memory of the dtype in which these can be copied without a rounding."""
        narrow = all(source.dtype == _BF16 for source in sources)
        return self.of(_BF16 if narrow else self.dtype)

    def of(self, dtype: torch.dtype) -> Tensor:
        """The memory, which is of ``dtype`` if there was none."""
        if self.memory is None:
            self.memory = self._make(dtype)
        return self.memory


class Gradients(Tensor):
    """What FSDP2 copies gradients into. Any operator but that copy sees ``reduce_dtype``'s memory.

    Attributes:
        room: its memory, which its views share.
    """

    room: Room

    @staticmethod
    def __new__(cls, room: Room, size: Any, device: torch.device) -> Gradients:
        """Gradients of this size."""
        self: Gradients = make_wrapper_subclass(cls, size, dtype=room.dtype, device=device)
        self.room = room
        return self

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Find out the dtype at the copy; else run ``func`` on the memory."""
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.view.default and args[0].room.memory is None:
            size = torch.empty(args[0].shape, device="meta").view(args[1]).shape
            return Gradients(args[0].room, size, args[0].device)
        out = kwargs.get("out")
        if isinstance(out, Gradients) and isinstance(args[0], (list, tuple)):
            kwargs["out"] = out.room.filled_with(args[0]).view(out.shape)
        return func(*map(_memory, args), **{name: _memory(x) for name, x in kwargs.items()})


def _memory(x: Any) -> Any:
    return x.room.of(x.dtype).view(x.shape) if isinstance(x, Gradients) else x


class SummedReduction:
    """What ``set_custom_reduce_scatter`` takes, for one module.

    A reduction is one call of FSDP2's, in one thread: `allocate` for the gradients, the copy,
    `allocate` for the result, and the call. So whether gradients have been copied and not yet
    reduced tells what memory is asked for.
    """

    def __init__(
        self,
        wire: Wire,
        group: dist.ProcessGroup,
        parameters: Any,
        forwards: Callable[[], int],
        reductions: Counter[str],
    ) -> None:
        """Reduce over ``group``.

        Args:
            wire: what bfloat16 gradients travel by.
            group: the ranks that shard the module.
            parameters: FSDP2's group of the module's parameters.
            forwards: how many forwards of the model have begun that a backward may follow.
            reductions: counts what travelled, by the dtype's name.
        """
        self._wire = wire
        self._group = group
        self._parameters = parameters
        self._forwards = forwards
        self._reductions = reductions
        self._reduced_at = 0
        self._pending: Room | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Room for gradients, or for their float32 sum."""
        if self._pending is not None and self._pending.memory is not None:
            return torch.empty(*size, dtype=dtype if dtype.itemsize > 2 else _F32, device=device)
        if dtype not in (_BF16, _F32):
            return torch.empty(*size, dtype=dtype, device=device)
        (numel,) = map(int, size)

        def make(fit: torch.dtype) -> Tensor:
            if fit == _BF16 and (dtype == _BF16 or not self._added_up()):
                return self._wire.room(numel, device, self._group)
            return torch.empty(numel, dtype=dtype, device=device)

        self._pending = Room(dtype, make)
        return Gradients(self._pending, (numel,), device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce; what comes next on the current stream finds the result."""
        self._pending, self._reduced_at = None, self._forwards()
        sent = _memory(input_tensor)
        self._reductions[str(sent.dtype).removeprefix("torch.")] += 1
        if sent.dtype == _BF16:
            self._wire.sum(output_tensor, sent, _divisor(op, group.size()), group)
            return None
        work: dist.Work | None = dist.reduce_scatter_tensor(
            output_tensor, sent, op=op, group=group, async_op=async_op
        )
        return work

    def _added_up(self) -> bool:
        """Whether ranks may have gradients of different dtypes: of more than one backward, or none.

        What FSDP2 fills in for parameters without a gradient may be float32.
        """
        return self._forwards() - self._reduced_at > 1 or fills_in_unused(self._parameters)


def _divisor(op: Any, ranks: int) -> float:
    """What a sum is divided by, to give what ``op`` asks for."""
    if op == dist.ReduceOp.AVG:
        return float(ranks)
    if op == dist.ReduceOp.SUM:
        return 1.0
    return 1 / premultiplied_by(op)
