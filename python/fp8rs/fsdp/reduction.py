"""Gradients that travel in bfloat16 and are summed in float32.

FSDP2 asks a reduction (``set_custom_reduce_scatter``) for memory, copies a group's gradients there
in the policy's ``reduce_dtype``, and has them reduced. Where they are bfloat16, to copy them as
float32 doubles the bytes and adds nothing. So what it is given here is a `Gradients`, which has no
memory before the copy shows what is copied:

- what is bfloat16 is sent as it is, and each rank adds up what it receives in float32, in the order
  of ranks (``sum_rows_``). No gradient is rounded, and the sum is float32's and always the same.
- what is float32 (of a norm, say, that computes in it; or what micro-batches added up) is reduced
  in ``reduce_dtype`` by torch's own collective, as without all this.

Ranks have to decide alike, and each sees its own gradients alone. They do: of one backward a
gradient has the dtype of the computation, which conversion and policy give all ranks. Where several
forwards came before this reduction, parameters may have been used on some ranks only in some of
them, and what has been added up is float32 here and bfloat16 there: then it is float32 for all.
"""

from __future__ import annotations

import itertools
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

    def sum(
        self, outs: Sequence[Tensor], sent: Tensor, divisor: float, group: dist.ProcessGroup
    ) -> None:
        """Put the sum of this rank's parts of what all ranks have ``sent``, divided, in ``outs``.

        These follow each other in a part.
        """


class AllToAll:
    """A `Wire` over a collective of torch's: NCCL, also between hosts, or gloo."""

    def room(self, numel: int, device: torch.device, group: dist.ProcessGroup) -> Tensor:
        """Fresh memory."""
        return torch.empty(numel, dtype=_BF16, device=device)

    def sum(
        self, outs: Sequence[Tensor], sent: Tensor, divisor: float, group: dist.ProcessGroup
    ) -> None:
        """One ``all_to_all_single``, and the sums of its rows."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        add_up(outs, received.view(group.size(), -1), divisor)


def add_up(outs: Sequence[Tensor], rows: Tensor, divisor: float) -> None:
    """The sum of ``rows``, divided, in tensors that follow each other in a row."""
    parts = rows.split([out.numel() for out in outs], dim=1)
    for out, part in zip(outs, parts, strict=True):
        torch.ops.fp8rs.sum_rows_(out, part, divisor)


class Room:
    """The memory of one `Gradients` and its views: made when it is known what goes there.

    Attributes:
        dtype: the policy's ``reduce_dtype``.
        narrow: what is sent in bfloat16: of each rank's part the gradients that are, in order.
        wide: the others, in ``dtype``.
        runs: of the gradients in FSDP2's order, those after each other that go the same way:
            whether they are ``narrow``, and how many elements of a part they have.
    """

    def __init__(
        self, dtype: torch.dtype, numel: int, make: Callable[[int, bool], Tensor], split: bool
    ) -> None:
        """Room for ``numel`` elements.

        Args:
            dtype: the policy's ``reduce_dtype``.
            numel: of the gradients.
            make: memory for a number of elements, ``narrow`` or not.
            split: what is bfloat16 may be sent so.
        """
        self.dtype = dtype
        self._numel = numel
        self._make = make
        self._split = split
        self.narrow: Tensor | None = None
        self.wide: Tensor | None = None
        self.runs: list[tuple[bool, int]] = []

    @property
    def is_made(self) -> bool:
        """Whether there is memory."""
        return self.narrow is not None or self.wide is not None

    def fill(
        self, copy: Callable[[list[Tensor], Tensor], Any], gradients: Sequence[Tensor], ranks: int
    ) -> None:
        """Have ``copy`` put each gradient where it can be without a rounding."""
        sizes = [-(-x.shape[0] // ranks) * x.shape[1:].numel() for x in gradients]
        narrow = [self.dtype == _BF16 or (self._split and x.dtype == _BF16) for x in gradients]
        if 2 * sum(n for n, is_narrow in zip(sizes, narrow, strict=True) if is_narrow) < sum(sizes):
            narrow = [False] * len(sizes)  # one collective, then
        for way in dict.fromkeys(narrow):
            chosen = [i for i, is_narrow in enumerate(narrow) if is_narrow is way]
            memory = self._make(ranks * sum(sizes[i] for i in chosen), way)
            copy([gradients[i] for i in chosen], memory.view(ranks, -1))
            self.narrow, self.wide = (memory, self.wide) if way else (self.narrow, memory)
        for way, run in itertools.groupby(zip(narrow, sizes, strict=True), lambda pair: pair[0]):
            self.runs.append((way, sum(n for _, n in run)))

    def whole(self) -> Tensor:
        """The memory as one tensor of ``dtype``, which nothing is split off from."""
        if self.narrow is not None and self.dtype == _BF16:
            return self.narrow
        if self.wide is None:
            self.wide = self._make(self._numel, False)
        assert self.narrow is None, "FSDP2 reads gradients that it has handed over"
        return self.wide


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
        if func is torch.ops.aten.view.default and not args[0].room.is_made:
            size = torch.empty(args[0].shape, device="meta").view(args[1]).shape
            return Gradients(args[0].room, size, args[0].device)
        out = kwargs.get("out")
        if isinstance(out, Gradients) and isinstance(args[0], (list, tuple)):

            def copy(gradients: list[Tensor], to: Tensor) -> None:
                func(gradients, *args[1:], **{**kwargs, "out": to})

            return out.room.fill(copy, args[0], out.shape[0])
        return func(*map(_memory, args), **{name: _memory(x) for name, x in kwargs.items()})


def _memory(x: Any) -> Any:
    return x.room.whole().view(x.shape) if isinstance(x, Gradients) else x


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
        reduces: Callable[[Tensor], None],
    ) -> None:
        """Reduce over ``group``.

        Args:
            wire: what bfloat16 gradients travel by.
            group: the ranks that shard the module.
            parameters: FSDP2's group of the module's parameters.
            forwards: how many forwards of the model have begun that a backward may follow.
            reduces: told what is sent.
        """
        self._wire = wire
        self._group = group
        self._parameters = parameters
        self._forwards = forwards
        self._reduces = reduces
        self._reduced_at = 0
        self._pending: Room | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Room for gradients, or for their float32 sum."""
        if self._pending is not None and self._pending.is_made:
            return torch.empty(*size, dtype=_F32 if dtype == _BF16 else dtype, device=device)
        if dtype not in (_BF16, _F32):
            return torch.empty(*size, dtype=dtype, device=device)
        (numel,) = map(int, size)

        def make(count: int, narrow: bool) -> Tensor:
            if narrow:
                return self._wire.room(count, device, self._group)
            return torch.empty(count, dtype=dtype, device=device)

        self._pending = Room(dtype, numel, make, not self._may_differ())
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
        room = input_tensor.room if isinstance(input_tensor, Gradients) else None
        if room is None or room.narrow is None:
            sent = _memory(input_tensor)
            self._reduces(sent)
            work: dist.Work | None = dist.reduce_scatter_tensor(
                output_tensor, sent, op=op, group=group, async_op=async_op
            )
            return work
        parts = output_tensor.split([n for _, n in room.runs])
        ways = [way for way, _ in room.runs]
        self._reduces(room.narrow)
        divisor = _divisor(op, group.size())
        self._wire.sum(list(itertools.compress(parts, ways)), room.narrow, divisor, group)
        if room.wide is not None:
            self._reduces(room.wide)
            others = [part for part, way in zip(parts, ways, strict=True) if not way]
            reduced = room.wide.new_empty(room.wide.numel() // group.size())
            dist.reduce_scatter_tensor(reduced, room.wide, op=op, group=group)
            for part, found in zip(
                others, reduced.split([part.numel() for part in others]), strict=True
            ):
                part.copy_(found)
        return None

    def _may_differ(self) -> bool:
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
