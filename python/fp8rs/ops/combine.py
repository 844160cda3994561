"""The operators that sum the rows of each token, and compute the gradients of the sum."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8rs.ops.define import native_op


@native_op
def combine_rows(rows: Tensor, token_rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum the rows of each token: out[t] = sum of weights[t, j] * rows[token_rows[t, j]] over j.

    Rows are added in the order of ``j`` to a float32 sum that starts from 0. Each product and each
    addition is rounded to float32, without fused multiply-add, and the sum is rounded to the dtype
    of ``rows``. CPU and CUDA give the same bytes. Infinities and NaNs of the sum are kept.

    Args:
        rows: (M, H), float32, bfloat16 or float16. Any strides. Rows at 16-byte boundaries are read
            at copy speed.
        token_rows: int64 (T, k), the indices of each token's rows, contiguous. On CUDA, an index
            that is not a row counts as a row of zeros, because the host does not wait for the
            device.
        weights: (T, k), contiguous, float32 or with the dtype of ``rows``. If None, all are 1.

    Returns:
        (T, H), with the dtype of ``rows``.

    Raises:
        ValueError: on the CPU, an index is not a row.
    """
    return rows.new_empty((token_rows.shape[0], rows.shape[1]))


@native_op
def combine_rows_backward(
    grad: Tensor,
    rows: Tensor | None,
    token_rows: Tensor,
    weights: Tensor,
    needs_rows: bool = True,
    needs_weights: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the rows and the weights of `combine_rows`.

    The gradient of row ``token_rows[t, j]`` is weights[t, j] * grad[t], rounded to float32 and then
    to the dtype of ``grad``. CPU and CUDA give the same bytes. The gradient of weights[t, j] is the
    float32 sum of grad[t] * rows[token_rows[t, j]]. Its order is fixed, but depends on the device.

    Args:
        grad: (T, H), float32, bfloat16 or float16. Any strides.
        rows: (T * k, H), with the dtype of ``grad``. It may be None without ``needs_weights``.
        token_rows: int64 (T, k), a permutation of all rows, contiguous. On CUDA, an index that is
            not a row has no gradient, and the gradients of rows that are not in ``token_rows`` are
            undefined.
        weights: (T, k), contiguous, float32 or with the dtype of ``grad``.
        needs_rows: whether to compute the gradient of the rows.
        needs_weights: whether to compute the gradient of the weights.

    Returns:
        The gradients of the rows (T * k, H), with the dtype of ``grad``, and of the weights (T, k),
        float32. A result that is not requested has the shape (0,).

    Raises:
        ValueError: neither result is requested, ``rows`` is missing, or, on the CPU,
            ``token_rows`` is not a permutation of all rows.
    """
    tokens, k = token_rows.shape
    d_rows = (tokens * k, grad.shape[1]) if needs_rows else (0,)
    d_weights = (tokens, k) if needs_weights else (0,)
    return grad.new_empty(d_rows), grad.new_empty(d_weights, dtype=torch.float32)
