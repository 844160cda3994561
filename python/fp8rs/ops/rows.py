"""The operator that sums the gradients that a rank has received from all ranks."""

from __future__ import annotations

from torch import Tensor

from fp8rs import _core
from fp8rs.ops.define import in_python


@in_python(_core.sum_rows, writes=["out"])
def sum_rows_(out: Tensor, x: Tensor, divisor: float) -> None:
    """Write the sum of the rows of ``x``, divided by ``divisor``, to ``out``.

    Rows are added in float32, from the first to the last. Each addition and the division are
    rounded once, as in IEEE arithmetic. CPU and CUDA return the same bytes. Infinities and NaN
    propagate.

    Args:
        out: float32 (columns,).
        x: bfloat16 (ranks, columns), in the order of ranks, with any strides. Rows that are aligned
            to 16 bytes are read at the speed of a copy.
        divisor: finite and not zero.
    """
