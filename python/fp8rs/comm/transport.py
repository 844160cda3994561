"""Send bfloat16 gradients to the ranks that sum them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


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
