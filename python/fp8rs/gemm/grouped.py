"""Grouped GEMMs of experts, on FP8 operands with one scale per row or on high-precision operands.

On Hopper, FP8 GEMMs run as ``torch._scaled_grouped_mm``. It requires E4M3 codes, bf16 outputs,
fewer than 1,024 groups, and sizes that are multiples of 16. On the CPU, operands are dequantized
and multiplied group by group in fp32. Other devices have high-precision GEMMs only.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from fp8rs._core import zero_tail as native_zero_tail
from fp8rs._torch import constant_when_traced
from fp8rs.gemm.devices import capability
from fp8rs.gemm.estimates import MAX_WGRAD_ROWS
from fp8rs.ops.define import python_op
from fp8rs.quantize.formats import BlockFormat

#: The compute capability whose GPUs have grouped FP8 GEMMs in torch.
SUPPORTED = (9, 0)
#: torch supports fewer groups than this.
MAX_GROUPS = 1024
#: Sizes of matrices are multiples of this number.
ALIGNMENT = 16


def reads_format(format: BlockFormat) -> bool:
    """Return whether grouped FP8 GEMMs support weights in a format: a scale per expert or row."""
    return (format.per_tensor or format.per_row) and not format.microscaled


@constant_when_traced
def has_grouped_gemm(device: torch.device) -> bool:
    """Return whether a device runs grouped GEMMs on FP8 operands. The CPU emulates them."""
    if device.type == "cuda":
        return capability(device.index) == SUPPORTED
    return device.type in ("cpu", "meta")


def _scaled(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    zero_tail: bool,
) -> Tensor:
    if not (a.numel() and b.numel()):
        return a.new_zeros((a.shape[0], b.shape[1]), dtype=out_dtype)
    if a.is_cuda:
        out = torch._scaled_grouped_mm(
            a,
            b.transpose(-1, -2),
            a_scale.view(-1),
            b_scale.expand(b.shape[:2]).contiguous(),
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        if zero_tail:
            native_zero_tail(out, ends)
        return out.to(out_dtype)
    out = a.new_zeros((a.shape[0], b.shape[1]), dtype=torch.float32)
    with torch.autocast("cpu", enabled=False):
        for group, rows in _spans(ends):
            weight = b[group].float() * b_scale[group].unsqueeze(1)
            out[rows] = (a[rows].float() * a_scale[rows]) @ weight.t()
    return out.to(out_dtype)


def _spans(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each group, and its rows or columns."""
    start = 0
    for group, end in enumerate(ends.tolist()):
        yield group, slice(start, end)
        start = end


@python_op(_scaled)
def grouped_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    zero_tail: bool,
) -> Tensor:
    """Multiply each group of rows by its own matrix: out[i] = a[i] @ b[group of i].T.

    CUDA accumulates with reduced precision. With full precision, the GEMM is slower than bf16's.

    Args:
        a: codes (rows, k), contiguous.
        a_scale: fp32 (rows, 1).
        b: codes (groups, n, k), contiguous.
        b_scale: fp32 (groups, n) or (groups, 1).
        ends: int32 (groups,), from ``fp8rs::group_bounds``.
        out_dtype: dtype of the result.
        zero_tail: whether rows after the last group are 0. Otherwise CUDA does not write them.

    Returns:
        (rows, n).
    """
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _scaled_wgrad(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    padded_ends: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    groups = padded_ends.shape[0]
    n = a.shape[0]
    k = b.shape[0]
    if not (a.numel() and b.numel() and groups):
        return a.new_zeros((groups, n, k), dtype=out_dtype)

    rows = a.shape[1] - (ALIGNMENT - 1) * groups  # without the columns between groups
    parts = min(-(-rows // (MAX_WGRAD_ROWS * groups)), (MAX_GROUPS - 1) // groups)
    if parts <= 1:
        return _products(a, b, a_scale, b_scale, padded_ends).to(out_dtype)

    # Sum the products of the parts of a group in fp32.
    out = _products(
        a,
        b,
        a_scale.repeat_interleave(parts, 0),
        b_scale.repeat_interleave(parts, 0),
        part_ends(padded_ends, parts),
    )
    return out.view(groups, parts, n, k).sum(1, dtype=torch.float32).to(out_dtype)


def part_ends(ends: Tensor, parts: int) -> Tensor:
    """Divide each group into parts of equal length, and return where they end.

    Parts begin at multiples of 16. If a group is too short, its last parts are empty.

    Args:
        ends: int32 (groups,), multiples of 16.
        parts: the number of parts of a group.

    Returns:
        int32 (groups * parts,).
    """
    starts = functional.pad(ends[:-1], (1, 0))
    unit = parts * ALIGNMENT
    length = (ends - starts + (unit - 1)) // unit * ALIGNMENT
    number = torch.arange(1, parts + 1, dtype=ends.dtype, device=ends.device)
    all_ends = starts.unsqueeze(1) + length.unsqueeze(1) * number
    return all_ends.minimum(ends.unsqueeze(1)).flatten()


def _products(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, ends: Tensor) -> Tensor:
    """Return the products of columns of all groups, bf16 on CUDA and fp32 on the CPU."""
    if a.is_cuda:
        return torch._scaled_grouped_mm(
            a,
            b.t(),
            a_scale.view(-1),
            b_scale.view(-1),
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    out = a.new_zeros((ends.shape[0], a.shape[0], b.shape[0]), dtype=torch.float32)
    with torch.autocast("cpu", enabled=False):
        for group, columns in _spans(ends):
            a_values = a[:, columns].float() * a_scale[group].unsqueeze(1)
            b_values = b[:, columns].float() * b_scale[group].unsqueeze(1)
            out[group] = a_values @ b_values.t()
    return out


@python_op(_scaled_wgrad)
def grouped_wgrad(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    padded_ends: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply columns of each group: out[g] = a[:, columns of g] @ b[:, columns of g].T.

    Hopper accumulates with about 14 bits, so long sums of terms with a nonzero mean lose accuracy.
    If groups have more than `MAX_WGRAD_ROWS` rows on average, each is divided into equal parts of
    at most that many rows on average, and the products of the parts are summed in fp32.

    Args:
        a: codes (n, columns), contiguous, from ``fp8rs::quantize_groups``.
        a_scale: fp32 (groups, n).
        b: codes (k, columns), contiguous.
        b_scale: fp32 (groups, k).
        padded_ends: int32 (groups,), from ``fp8rs::group_bounds``.
        out_dtype: dtype of the result.

    Returns:
        (groups, n, k).
    """
    return a.new_empty((padded_ends.shape[0], a.shape[0], b.shape[0]), dtype=out_dtype)


def _plain(a: Tensor, b: Tensor, ends: Tensor, zero_tail: bool) -> Tensor:
    if not (a.numel() and b.numel() and ends.shape[0]):
        return _empty_like_product(a, b, ends).zero_()
    out = torch._grouped_mm(a, b, offs=ends)
    if zero_tail and b.dim() == 3:
        native_zero_tail(out, ends)
    return out


@python_op(_plain)
def grouped_mm_plain(a: Tensor, b: Tensor, ends: Tensor, zero_tail: bool) -> Tensor:
    """Multiply high-precision operands as ``torch.nn.functional.grouped_mm`` does.

    Args:
        a: (rows, k), or (n, rows) if ``b`` has two dimensions.
        b: (groups, k, n), or (rows, k).
        ends: int32 (groups,), the row after the last one of each group.
        zero_tail: whether rows of the result after the last group are 0.

    Returns:
        (rows, n), or (groups, n, k) if ``b`` has two dimensions, with the dtype of ``a``.
    """
    return _empty_like_product(a, b, ends)


def _empty_like_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if b.dim() == 3:
        return a.new_empty((a.shape[0], b.shape[2]))
    return a.new_empty((ends.shape[0], a.shape[0], b.shape[1]))
