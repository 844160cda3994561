"""The operator that sums the values received from all ranks."""

from __future__ import annotations

from torch import Tensor

from fp8rs._core import sum_rows as native_sum_rows
from fp8rs.ops.define import python_op


@python_op(native_sum_rows, mutates_args=["out"])
def sum_rows_(out: Tensor, x: Tensor, divisor: float) -> None:
    """Sum the rows of ``x`` in float32, from first to last, and divide.

    Each addition and the division are IEEE operations, rounded once. CPU and CUDA give the same
    bytes. Infinities and NaNs of the sum are kept.

    Args:
        out: float32, one element for each column.
        x: bfloat16, one row for each rank, in rank order. Any strides. Rows at 16-byte boundaries
            are read at copy speed.
        divisor: finite and not zero.
    """
