"""Reduce-scatters that send bfloat16 gradients and sum them in float32.

For each reduce-scatter, FSDP2 calls ``allocate`` for the input, copies the gradients of a parameter
group into it in the policy's ``reduce_dtype``, calls ``allocate`` for the output, and calls the
reduce-scatter. Copying bfloat16 gradients to float32 doubles the bytes and adds no information.
`SummedReduceScatter` therefore returns a `GradientTensor` for the input. It has no memory until the
copy shows the dtypes of the gradients:

- bfloat16 gradients are sent as they are. Each rank sums what it receives in float32, in the order
  of ranks (``sum_rows_``), so that the bytes of the sum never vary.
- float32 gradients are reduced in ``reduce_dtype`` by torch. Examples are the gradients of a norm
  that computes in float32, and gradients that micro-batches accumulated.

All ranks must send the same dtypes, and a rank sees only its own gradients. In one backward, a
gradient has the dtype of its computation, which is the same on all ranks. After several forwards,
ranks may have used a parameter in different numbers of them. An accumulated gradient is float32, so
the dtypes may differ, and all gradients are sent in ``reduce_dtype``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8rs._torch import (
    disabled_torch_function,
    fills_in_unused,
    make_wrapper_subclass,
    premultiplied_by,
)

from .choice import FSDPComm

_BF16, _F32 = torch.bfloat16, torch.float32


class Transport:
    """Sends bfloat16 gradients with ``all_to_all_single``: NCCL, also between hosts, or gloo."""

    def allocate(self, numel: int, device: torch.device, group: dist.ProcessGroup) -> Tensor:
        """Return a flat bfloat16 tensor for ``numel`` elements, one row for each rank."""
        return torch.empty(numel, dtype=torch.bfloat16, device=device)

    def reduce(
        self, outs: Sequence[Tensor], sent: Tensor, divisor: float, group: dist.ProcessGroup
    ) -> None:
        """Sum this rank's rows of the tensors that all ranks sent, and divide.

        Args:
            outs: consecutive parts of the result, flat.
            sent: the tensor that `allocate` returned.
            divisor: divisor of the sum.
            group: the ranks.
        """
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        sum_rows(outs, received.view(group.size(), -1), divisor)


def sum_rows(outs: Sequence[Tensor], rows: Tensor, divisor: float) -> None:
    """Sum ``rows`` of shape ``(ranks, numel)`` and divide.

    Args:
        outs: consecutive parts of the result, flat.
        rows: bfloat16 rows.
        divisor: divisor of the sum.
    """
    parts = rows.split([out.numel() for out in outs], dim=1)
    for out, part in zip(outs, parts, strict=True):
        torch.ops.fp8rs.sum_rows_(out, part, divisor)


@dataclass(eq=False)
class GradientBuffer:
    """Memory of a `GradientTensor` and its views, allocated when gradients are copied into it.

    Attributes:
        dtype: ``reduce_dtype`` of the policy.
        numel: number of elements of all gradients.
        allocate: returns a tensor for a number of elements; the second argument is whether it is
            for ``bf16``.
        split: whether bfloat16 gradients may be sent as bfloat16 if ``dtype`` is float32.
        bf16: the gradients that the transport sends, flat, one row for each rank.
        rest: the gradients that torch reduces, likewise, in ``dtype``.
        runs: consecutive gradients that are in the same of these tensors: whether it is ``bf16``,
            and their number of elements in a row.
    """

    dtype: torch.dtype
    numel: int
    allocate: Callable[[int, bool], Tensor]
    split: bool
    bf16: Tensor | None = None
    rest: Tensor | None = None
    runs: list[tuple[bool, int]] = field(default_factory=list)

    @property
    def is_allocated(self) -> bool:
        """Whether there is memory."""
        return self.bf16 is not None or self.rest is not None

    def fill(
        self, copy: Callable[[list[Tensor], Tensor], Any], gradients: Sequence[Tensor], ranks: int
    ) -> None:
        """Allocate memory, and call ``copy`` for the gradients of each of the two tensors."""
        sizes = [-(-x.shape[0] // ranks) * x.shape[1:].numel() for x in gradients]
        is_bf16 = [self.dtype == _BF16 or (self.split and x.dtype == _BF16) for x in gradients]
        # If most elements are float32, one collective for all of them is cheaper than two.
        if 2 * sum(itertools.compress(sizes, is_bf16)) < sum(sizes):
            is_bf16 = [False] * len(sizes)
        for kind in dict.fromkeys(is_bf16):
            chosen = [i for i, found in enumerate(is_bf16) if found is kind]
            memory = self.allocate(ranks * sum(sizes[i] for i in chosen), kind)
            copy([gradients[i] for i in chosen], memory.view(ranks, -1))
            self.bf16, self.rest = (memory, self.rest) if kind else (self.bf16, memory)
        for kind, run in itertools.groupby(zip(is_bf16, sizes, strict=True), lambda pair: pair[0]):
            self.runs.append((kind, sum(n for _, n in run)))

    def whole(self) -> Tensor:
        """Return all memory as one flat tensor of ``dtype``."""
        if self.bf16 is not None and self.dtype == _BF16:
            return self.bf16
        assert self.bf16 is None, "FSDP2 reads float32 gradients that are stored in bfloat16"
        if self.rest is None:
            self.rest = self.allocate(self.numel, False)
        return self.rest


class GradientTensor(Tensor):
    """The tensor that FSDP2 copies gradients into.

    Every operator but that copy runs on the memory in ``reduce_dtype``.

    Attributes:
        buffer: its memory, which its views share.
    """

    buffer: GradientBuffer

    @staticmethod
    def __new__(cls, buffer: GradientBuffer, size: Any, device: torch.device) -> GradientTensor:
        """Return a tensor of this size."""
        self: GradientTensor = make_wrapper_subclass(cls, size, dtype=buffer.dtype, device=device)
        self.buffer = buffer
        return self

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Allocate the memory in the copy of the gradients; run other operators on it."""
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.view.default and not args[0].buffer.is_allocated:
            size = torch.empty(args[0].shape, device="meta").view(args[1]).shape
            return GradientTensor(args[0].buffer, size, args[0].device)
        out = kwargs.get("out")
        if isinstance(out, GradientTensor) and isinstance(args[0], (list, tuple)):
            return out.buffer.fill(
                lambda gradients, to: func(gradients, *args[1:], **{**kwargs, "out": to}),
                args[0],
                out.shape[0],
            )
        return func(*map(_memory, args), **{name: _memory(x) for name, x in kwargs.items()})


def _memory(x: Any) -> Any:
    return x.buffer.whole().view(x.shape) if isinstance(x, GradientTensor) else x


class SummedReduceScatter:
    """A reduce-scatter of one module, for ``set_custom_reduce_scatter``."""

    def __init__(
        self, transport: Transport, group: dist.ProcessGroup, parameters: Any, comm: FSDPComm
    ) -> None:
        """Create a reduce-scatter.

        Args:
            transport: sends the bfloat16 gradients.
            group: the ranks that shard the module.
            parameters: FSDP2's parameter group of the module.
            comm: counts the forwards of the model and what is sent.
        """
        self._transport = transport
        self._group = group
        self._parameters = parameters
        self._comm = comm
        self._reduced_at = 0
        self._pending: GradientBuffer | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the input if no gradients have been copied, else the output."""
        if self._pending is not None and self._pending.is_allocated:
            return torch.empty(*size, dtype=_F32 if dtype == _BF16 else dtype, device=device)
        if dtype not in (_BF16, _F32):
            return torch.empty(*size, dtype=dtype, device=device)
        (numel,) = map(int, size)

        def allocate(count: int, is_bf16: bool) -> Tensor:
            if is_bf16:
                return self._transport.allocate(count, device, self._group)
            return torch.empty(count, dtype=dtype, device=device)

        self._pending = GradientBuffer(dtype, numel, allocate, not self._dtypes_may_differ())
        return GradientTensor(self._pending, (numel,), device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce. Later work on the current stream sees the result."""
        self._pending, self._reduced_at = None, self._comm._forwards
        buffer = input_tensor.buffer if isinstance(input_tensor, GradientTensor) else None
        if buffer is None or buffer.bf16 is None:
            sent = _memory(input_tensor)
            self._comm._count(sent)
            work: dist.Work | None = dist.reduce_scatter_tensor(
                output_tensor, sent, op=op, group=group, async_op=async_op
            )
            return work
        outs: dict[bool, list[Tensor]] = {True: [], False: []}
        parts = output_tensor.split([n for _, n in buffer.runs])
        for (is_bf16, _), out in zip(buffer.runs, parts, strict=True):
            outs[is_bf16].append(out)
        self._comm._count(buffer.bf16)
        self._transport.reduce(outs[True], buffer.bf16, divisor_of(op, group.size()), group)
        if buffer.rest is not None:
            self._comm._count(buffer.rest)
            reduced = buffer.rest.new_empty(buffer.rest.numel() // group.size())
            dist.reduce_scatter_tensor(reduced, buffer.rest, op=op, group=group)
            torch._foreach_copy_(outs[False], reduced.split([out.numel() for out in outs[False]]))
        return None

    def _dtypes_may_differ(self) -> bool:
        """Return whether gradients of one parameter may have different dtypes on the ranks.

        They may after several forwards. Zeros that FSDP2 reduces for unused parameters may be
        float32.
        """
        return self._comm._forwards - self._reduced_at > 1 or fills_in_unused(self._parameters)


def divisor_of(op: Any, ranks: int) -> float:
    """Return the number that a sum is divided by to give the result of ``op``."""
    if op == dist.ReduceOp.AVG:
        return float(ranks)
    if op == dist.ReduceOp.SUM:
        return 1.0
    return 1 / premultiplied_by(op)
