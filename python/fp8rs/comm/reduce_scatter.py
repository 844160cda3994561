"""The reduce-scatter that sends bfloat16 gradients and sums them in float32.

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

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8rs._torch import (
    disabled_torch_function,
    fills_in_unused,
    in_backward,
    make_wrapper_subclass,
    not_traced,
    premultiplied_by,
)

_BF16 = torch.bfloat16
_F32 = torch.float32


@dataclass
class FSDPComm:
    """What `set_fsdp_comm` set on a model.

    Attributes:
        unchanged: the modules that keep FSDP2's reduce-scatter, with the reason. The root is "".
        reduce_scatters: number of reduce-scatters of other modules, by the dtype that was sent.
        reduce_scatter_bytes: bytes of their inputs on this rank, by the dtype that was sent.
    """

    unchanged: dict[str, str] = field(default_factory=dict)
    reduce_scatters: Counter[str] = field(default_factory=Counter)
    reduce_scatter_bytes: Counter[str] = field(default_factory=Counter)
    _forwards: int = 0
    #: Whether gradients were enabled in the last forward outside of a backward.
    _had_grad: bool = False

    def _count(self, sent: Tensor) -> None:
        dtype = str(sent.dtype).removeprefix("torch.")
        self.reduce_scatters[dtype] += 1
        self.reduce_scatter_bytes[dtype] += sent.nbytes

    @not_traced
    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        """Count a forward that a backward may follow.

        A recomputed forward counts if it first ran without gradients (reentrant checkpoints).
        """
        has_grad = torch.is_grad_enabled()
        recomputed = in_backward()
        if has_grad and not (recomputed and self._had_grad):
            self._forwards += 1
        if not recomputed:
            self._had_grad = has_grad


@dataclass(frozen=True)
class GradientRun:
    """Consecutive gradients that are sent in the same dtype.

    Attributes:
        in_bf16: whether they are sent in bfloat16.
        numel: number of elements that one rank receives.
    """

    in_bf16: bool
    numel: int


@dataclass(eq=False)
class GradientBuffer:
    """Memory of a `GradientTensor` and its views, allocated when gradients are copied into it.

    Attributes:
        dtype: ``reduce_dtype`` of the policy.
        numel: number of elements of all gradients.
        device: where the memory is.
        may_split: whether bfloat16 gradients may be sent as bfloat16 if ``dtype`` is float32.
        bf16: the gradients that are sent in bfloat16, flat, one row for each rank.
        others: the gradients that torch reduces in ``dtype``, likewise.
        runs: the gradients in their order, as they were divided between the two.
    """

    dtype: torch.dtype
    numel: int
    device: torch.device
    may_split: bool
    bf16: Tensor | None = None
    others: Tensor | None = None
    runs: list[GradientRun] = field(default_factory=list)

    @property
    def is_allocated(self) -> bool:
        """Whether there is memory."""
        return self.bf16 is not None or self.others is not None

    def fill(
        self, copy: Callable[[list[Tensor], Tensor], Any], gradients: Sequence[Tensor], ranks: int
    ) -> None:
        """Allocate memory and copy the gradients into it.

        Args:
            copy: FSDP2's copy of gradients into a tensor (ranks, elements of one rank).
            gradients: the gradients, in FSDP2's order.
            ranks: number of ranks.
        """
        sizes = []  # of the part that one rank receives
        sent_in_bf16 = []
        for gradient in gradients:
            rows = -(-gradient.shape[0] // ranks)
            sizes.append(rows * gradient.shape[1:].numel())
            splits = self.may_split and gradient.dtype == _BF16
            sent_in_bf16.append(self.dtype == _BF16 or splits)

        # If most elements are float32, one collective for all of them is cheaper than two.
        bf16_size = sum(size for size, in_bf16 in zip(sizes, sent_in_bf16, strict=True) if in_bf16)
        if 2 * bf16_size < sum(sizes):
            sent_in_bf16 = [False] * len(sizes)

        bf16_gradients: list[Tensor] = []
        other_gradients: list[Tensor] = []
        for gradient, size, in_bf16 in zip(gradients, sizes, sent_in_bf16, strict=True):
            if in_bf16:
                bf16_gradients.append(gradient)
            else:
                other_gradients.append(gradient)
            self._add_to_runs(in_bf16, size)

        if bf16_gradients:
            self.bf16 = self._rows(_BF16, ranks, in_bf16=True)
            copy(bf16_gradients, self.bf16.view(ranks, -1))
        if other_gradients:
            self.others = self._rows(self.dtype, ranks, in_bf16=False)
            copy(other_gradients, self.others.view(ranks, -1))

    def _add_to_runs(self, in_bf16: bool, numel: int) -> None:
        if self.runs and self.runs[-1].in_bf16 == in_bf16:
            numel += self.runs.pop().numel
        self.runs.append(GradientRun(in_bf16, numel))

    def _rows(self, dtype: torch.dtype, ranks: int, *, in_bf16: bool) -> Tensor:
        """Allocate memory for the runs of one kind, flat, one row for each rank."""
        numel = sum(run.numel for run in self.runs if run.in_bf16 == in_bf16)
        return torch.empty(ranks * numel, dtype=dtype, device=self.device)

    def flat_memory(self) -> Tensor:
        """Return all memory as one flat tensor of ``dtype``."""
        if self.bf16 is not None and self.dtype == _BF16:
            return self.bf16
        assert self.bf16 is None, "FSDP2 reads float32 gradients that are stored in bfloat16"
        if self.others is None:
            self.others = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        return self.others


class GradientTensor(Tensor):
    """The tensor that FSDP2 copies gradients into.

    Every operator but that copy runs on the memory in ``reduce_dtype``.

    Attributes:
        buffer: its memory, which its views share.
    """

    buffer: GradientBuffer

    @staticmethod
    def __new__(cls, buffer: GradientBuffer, size: Sequence[int]) -> GradientTensor:
        """Return a tensor of this size."""
        self: GradientTensor = make_wrapper_subclass(
            cls, size, dtype=buffer.dtype, device=buffer.device
        )
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
            # A tensor on the meta device computes sizes of -1.
            size = torch.empty(args[0].shape, device="meta").view(args[1]).shape
            return GradientTensor(args[0].buffer, size)

        out = kwargs.get("out")
        if isinstance(out, GradientTensor) and isinstance(args[0], (list, tuple)):

            def copy(gradients: list[Tensor], to: Tensor) -> None:
                func(gradients, *args[1:], **{**kwargs, "out": to})

            return out.buffer.fill(copy, args[0], out.shape[0])

        plain_args = [_memory(arg) for arg in args]
        plain_kwargs = {name: _memory(arg) for name, arg in kwargs.items()}
        return func(*plain_args, **plain_kwargs)


def _memory(x: Any) -> Any:
    """Return the memory of a `GradientTensor` in ``reduce_dtype``, or another value itself."""
    return x.buffer.flat_memory().view(x.shape) if isinstance(x, GradientTensor) else x


class SummedReduceScatter:
    """A reduce-scatter of one module, for ``set_custom_reduce_scatter``.

    Args:
        group: the ranks that shard the module.
        fsdp_group: FSDP2's parameter group of the module.
        comm: counts the forwards of the model and what is sent.
    """

    def __init__(self, group: dist.ProcessGroup, fsdp_group: Any, comm: FSDPComm) -> None:
        self._group = group
        self._fsdp_group = fsdp_group
        self._comm = comm
        #: The number of forwards before the last reduce-scatter.
        self._reduced_at = 0
        #: The memory of an input that FSDP2 has allocated and not reduced yet.
        self._pending: GradientBuffer | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the input if no gradients have been copied, else the output."""
        if self._pending is not None and self._pending.is_allocated:
            output_dtype = _F32 if dtype == _BF16 else dtype
            return torch.empty(*size, dtype=output_dtype, device=device)
        if dtype not in (_BF16, _F32):
            return torch.empty(*size, dtype=dtype, device=device)
        numel = int(size[0])
        may_split = not self._dtypes_may_differ()
        self._pending = GradientBuffer(dtype, numel, device, may_split)
        return GradientTensor(self._pending, (numel,))

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce. Later work on the current stream sees the result."""
        self._pending = None
        self._reduced_at = self._comm._forwards
        buffer = input_tensor.buffer if isinstance(input_tensor, GradientTensor) else None
        if buffer is None or buffer.bf16 is None:
            sent = _memory(input_tensor)
            self._comm._count(sent)
            work: dist.Work | None = dist.reduce_scatter_tensor(
                output_tensor, sent, op=op, group=group, async_op=async_op
            )
            return work

        bf16_outputs = []
        other_outputs = []
        outputs = output_tensor.split([run.numel for run in buffer.runs])
        for run, output in zip(buffer.runs, outputs, strict=True):
            if run.in_bf16:
                bf16_outputs.append(output)
            else:
                other_outputs.append(output)

        self._comm._count(buffer.bf16)
        received = torch.empty_like(buffer.bf16)
        dist.all_to_all_single(received, buffer.bf16, group=group)
        sum_rows(bf16_outputs, received.view(group.size(), -1), divisor_of(op, group.size()))

        if buffer.others is not None:
            self._comm._count(buffer.others)
            reduced = buffer.others.new_empty(buffer.others.numel() // group.size())
            dist.reduce_scatter_tensor(reduced, buffer.others, op=op, group=group)
            parts = reduced.split([output.numel() for output in other_outputs])
            torch._foreach_copy_(other_outputs, parts)
        return None

    def _dtypes_may_differ(self) -> bool:
        """Return whether gradients of one parameter may have different dtypes on the ranks.

        They may after several forwards. Zeros that FSDP2 reduces for unused parameters may be
        float32.
        """
        forwards = self._comm._forwards - self._reduced_at
        return forwards > 1 or fills_in_unused(self._fsdp_group)


def sum_rows(outputs: Sequence[Tensor], rows: Tensor, divisor: float) -> None:
    """Sum the rows that all ranks sent, in their order, and divide.

    Args:
        outputs: consecutive parts of the result, flat.
        rows: (ranks, elements), bfloat16.
        divisor: divisor of the sum.
    """
    parts = rows.split([output.numel() for output in outputs], dim=1)
    for output, part in zip(outputs, parts, strict=True):
        torch.ops.fp8rs.sum_rows_(output, part, divisor)


def divisor_of(op: Any, ranks: int) -> float:
    """Return the number that a sum is divided by to give the result of ``op``."""
    if op == dist.ReduceOp.AVG:
        return float(ranks)
    if op == dist.ReduceOp.SUM:
        return 1.0
    return 1 / premultiplied_by(op)
