"""The collectives that `set_fsdp_comm` chose for a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fp8rs._torch import in_backward, not_traced


@dataclass(frozen=True)
class CommChoice:
    """The collectives of one module that ``fully_shard`` was called on.

    Attributes:
        module: name of the module. The root is "".
        ranks: number of ranks that shard it.
        all_gather: "symmetric" or "torch".
        all_gather_reason: why "auto" did not choose the best all-gather, or "".
        reduce_scatter: "symmetric", "bf16" or "torch".
        reduce_scatter_reason: why "auto" did not choose the best reduce-scatter, or "".
    """

    module: str
    ranks: int
    all_gather: str
    all_gather_reason: str
    reduce_scatter: str
    reduce_scatter_reason: str


@dataclass
class FSDPComm:
    """The collectives of a model. ``str()`` gives a table.

    Attributes:
        choices: the choice for each module that has parameters of its own.
        reduce_scatters: number of reduce-scatters so far, by the dtype that was sent. They are
            counted unless FSDP2's own reduce-scatter was chosen.
        reduce_scatter_bytes: bytes of their inputs on this rank, by the dtype that was sent.
    """

    choices: tuple[CommChoice, ...] = ()
    reduce_scatters: Counter[str] = field(default_factory=Counter)
    reduce_scatter_bytes: Counter[str] = field(default_factory=Counter)
    #: The `fp8rs.comm.symmetric.DoubleBuffer` of each group and collective.
    _buffers: dict[Any, Any] = field(default_factory=dict, repr=False)
    _forwards: int = 0
    #: Whether gradients were enabled in the last forward outside of a backward.
    _had_grad: bool = False

    @property
    def all_gather_bytes(self) -> int:
        """Bytes of the outputs of all-gathers through symmetric memory so far."""
        return sum(buffer.gathered for buffer in self._buffers.values())

    @property
    def symmetric_memory(self) -> int:
        """Bytes of symmetric memory that this rank has allocated."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def __str__(self) -> str:
        modules: dict[CommChoice, list[str]] = {}  # those with the same collectives share a row
        for choice in self.choices:
            modules.setdefault(replace(choice, module=""), []).append(choice.module or "the root")
        lines = []
        for choice, names in modules.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            plural = "s" if choice.ranks > 1 else ""
            lines.append(f"{', '.join(names[:3])}{more}: {choice.ranks} rank{plural}")
            for collective, chosen, reason in (
                ("all-gather", choice.all_gather, choice.all_gather_reason),
                ("reduce-scatter", choice.reduce_scatter, choice.reduce_scatter_reason),
            ):
                lines.append(f"  {collective}: {chosen}" + (f" ({reason})" if reason else ""))
        counts = ", ".join(f"{n} in {dtype}" for dtype, n in sorted(self.reduce_scatters.items()))
        lines.append(f"symmetric memory: {self.symmetric_memory:,} B")
        return "\n".join([*lines, f"reduce-scatters so far: {counts or 'none'}"])

    def _count(self, sent: torch.Tensor) -> None:
        dtype = str(sent.dtype).removeprefix("torch.")
        self.reduce_scatters[dtype] += 1
        self.reduce_scatter_bytes[dtype] += sent.nbytes

    @not_traced
    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        """Count a forward that a backward may follow.

        A recomputed forward counts if it first ran without gradients (reentrant checkpoints).
        """
        grad, recomputed = torch.is_grad_enabled(), in_backward()
        self._forwards += grad and not (recomputed and self._had_grad)
        self._had_grad = self._had_grad if recomputed else grad
