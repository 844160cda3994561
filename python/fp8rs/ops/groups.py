"""Operators on rows grouped by expert: the rows of each expert are consecutive.

Scales are float32 and follow the rule of per-tensor scales. CPU and CUDA give the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8rs.ops.define import native_op


def padded_columns(rows: int, groups: int) -> int:
    """Return a number of columns for columnwise codes that suffices for groups of any lengths.

    Each group starts at a multiple of 16 columns, which grouped GEMMs require.
    """
    return (rows + 15 * min(groups, rows)) // 16 * 16


@native_op
def group_bounds(offs: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Check offsets, and compute where groups end.

    An offset is invalid if it is negative, larger than the number of rows or smaller than the
    offset before it. On CUDA, invalid offsets are replaced by the nearest valid ones, and the
    kernel sets the device's flag, which is in host memory. A later call, or
    ``fp8rs.nn.functional.check_offsets``, raises the error and clears the flag. This needs no
    synchronization, and replays of CUDA graphs set the flag too.

    Args:
        offs: int32 (groups,), the row after the last one of each group. Rows from the last offset
            on belong to no group.
        x: a tensor whose first dimension is the number of rows.

    Returns:
        The ends of the groups, with invalid offsets replaced, and the same with each group's length
        padded to a multiple of 16.

    Raises:
        ValueError: on the CPU, an offset is invalid.
        RuntimeError: on CUDA, an offset was invalid in this call or an earlier one.
    """
    return offs.new_empty(offs.shape), offs.new_empty(offs.shape)


@native_op
def route_rows(
    row_experts: Tensor, row_pairs: Tensor, experts: int, k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the bounds of experts, the token of each row and the row of each pair.

    A pair is a token and one of its ``k`` experts, with the number token * k + position. Rows are
    pairs in the order of their experts.

    Args:
        row_experts: int64 (rows,), the expert of each row, in ascending order. Rows of experts from
            ``experts`` on are after the last end.
        row_pairs: int64 (rows,), the pair of each row, a permutation of all pairs.
        experts: the number of experts.
        k: the number of experts of a token. It may be 0 if there are no rows.

    Returns:
        As from `group_bounds`, the row after the last one of each expert and the same with padding,
        int32 (experts,). The token of each row and the row of each pair, int64 (rows,).

    Raises:
        ValueError: ``experts`` is negative, or ``k`` is not positive although there are rows. On
            the CPU, also if a pair is negative or not less than the number of rows. On CUDA, a row
            with such a pair has the token 0. The rows of pairs that are missing are undefined.
    """
    ends = row_experts.new_empty((experts,), dtype=torch.int32)
    padded_ends = torch.empty_like(ends)
    row_tokens = row_experts.new_empty((row_experts.numel(),))
    return ends, padded_ends, row_tokens, torch.empty_like(row_tokens)


def _outputs(
    x: Tensor,
    shape: tuple[int, int],
    groups: int,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, cols = shape

    def empty(wanted: bool, dtype: torch.dtype, *shape: int) -> Tensor:
        return x.new_empty(shape if wanted else (0,), dtype=dtype)

    return (
        empty(rowwise, fp8_dtype, rows, cols),
        empty(rowwise, torch.float32, rows, 1),
        empty(columnwise, fp8_dtype, cols, padded_columns(rows, groups)),
        empty(columnwise, torch.float32, groups, cols),
    )


@native_op
def quantize_groups(
    x: Tensor,
    ends: Tensor,
    padded_ends: Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = True,
    *,
    index: Tensor | None = None,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize groups of rows with a scale per row, and a scale per column of each group.

    Args:
        x: the values (rows, cols), float32, bfloat16 or float16.
        ends: the first result of `group_bounds`.
        padded_ends: its second result.
        fp8_dtype: the dtype of the codes.
        rowwise: whether rows are quantized. Rows that belong to no group have codes 0 and scale 1.
        columnwise: whether columns are quantized.
        index: int64 (rows,). Row i of the values is row ``index[i]`` of ``x``. An index outside of
            ``x`` is replaced by the nearest row.
        power_2_scale: whether scales are rounded up to powers of two.
        amax_epsilon: lower bound for absolute maxima.

    Returns:
        Rowwise codes (rows, cols) and their scales (rows, 1), columnwise codes
        (cols, ``padded_columns``) and their scales (groups, cols). Row i of group g is column
        ``padded_ends[g - 1] + i`` of the columnwise codes. All other columns have code 0. A group
        without rows has scales of 1. A result that is not requested has the shape (0,).
    """
    shape = (x.shape[0] if index is None else index.shape[0], x.shape[1])
    return _outputs(x, shape, ends.shape[0], fp8_dtype, rowwise, columnwise)


@native_op
def quantize_gated(
    h: Tensor,
    ends: Tensor,
    padded_ends: Tensor,
    activation: str,
    fp8_dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = True,
    *,
    dy: Tensor | None = None,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute a gated activation or its gradient, and quantize it like `quantize_groups`.

    The values are activation(gate) * up, computed in float32 and rounded to the dtype of ``h``.

    Args:
        h: (rows, 2 * cols): the gate, then ``up``. float32, bfloat16 or float16.
        ends: the first result of `group_bounds`.
        padded_ends: its second result.
        activation: "silu" or "gelu_tanh".
        fp8_dtype: the dtype of the codes.
        rowwise: whether rows are quantized.
        columnwise: whether columns are quantized.
        dy: the gradient (rows, cols) of the result, with the dtype of ``h``. The values are then
            the gradient (rows, 2 * cols) of ``h``.
        power_2_scale: whether scales are rounded up to powers of two.
        amax_epsilon: lower bound for absolute maxima.
    """
    rows, width = h.shape
    shape = (rows, width // 2 if dy is None else width)
    return _outputs(h, shape, ends.shape[0], fp8_dtype, rowwise, columnwise)
