"""The operator that sums what ranks have sent to each other."""

from __future__ import annotations

from torch import Tensor

from fp8rs import _core
from fp8rs.ops.define import in_python


@in_python(_core.sum_rows, writes=["out"])
def sum_rows_(out: Tensor, x: Tensor, divisor: float) -> None:
    """The sum of the rows of ``x`` in float32, from the first row to the last, divided.

    Each addition and the division are rounded once, as IEEE has it; CPU and CUDA give the same
    bytes. What float32 addition makes infinite or NaN comes out so.

    Args:
        out: float32, one element for each column.
        x: bfloat16, a row for each rank, in the order of ranks. Strides are free; rows that begin
            at multiples of 16 bytes are read at copy speed.
        divisor: finite and not zero.
    """
