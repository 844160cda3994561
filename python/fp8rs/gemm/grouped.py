"""Grouped GEMMs of experts on FP8 operands with one scale per row.

On Hopper they run as ``torch._scaled_grouped_mm``. It requires E4M3 codes, bf16 outputs, fewer than
1,024 groups, and sizes that are multiples of 16. Elsewhere operands are dequantized and multiplied
group by group in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8rs.gemm.devices import capability

#: The compute capability whose GPUs have grouped FP8 GEMMs in torch.
SUPPORTED = (9, 0)
#: torch supports fewer groups than this.
MAX_GROUPS = 1024
#: Sizes of matrices are multiples of this number.
ALIGNMENT = 16


def has_grouped_gemm(device: torch.device) -> bool:
    """Whether grouped GEMMs on FP8 operands run on a device."""
    return device.type == "cuda" and capability(device.index) == SUPPORTED


@torch.library.custom_op("fp8rs::grouped_mm", mutates_args=())
def grouped_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """Multiply each group of rows by its own matrix: out[i] = a[i] @ b[group of i].T.

    Args:
        a: codes (rows, k), contiguous.
        a_scale: fp32 (rows, 1).
        b: codes (groups, n, k), contiguous.
        b_scale: fp32 (groups, n).
        ends: int32 (groups,), from ``fp8rs::group_bounds``.
        out_dtype: dtype of the result.
        use_fast_accum: accumulate with reduced precision on CUDA.

    Returns:
        (rows, n). Rows after the last group are 0.
    """
    if has_grouped_gemm(a.device) and a.numel() and b.numel():
        out = torch._scaled_grouped_mm(
            a,
            b.transpose(-1, -2),
            a_scale.view(-1),
            b_scale.contiguous(),
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=use_fast_accum,
        )
        # The GEMM does not write rows after the last group.
        rows = torch.arange(a.shape[0], device=a.device).unsqueeze(1)
        out = torch.where(rows < ends[-1], out, 0) if ends.numel() else torch.zeros_like(out)
        return out.to(out_dtype)
    out = a.new_zeros((a.shape[0], b.shape[1]), dtype=torch.float32)
    start = 0
    for group, end in enumerate(ends.tolist()):
        values = a[start:end].float() * a_scale[start:end]
        weight = b[group].float() * b_scale[group].unsqueeze(1)
        out[start:end] = values @ weight.t()
        start = end
    return out.to(out_dtype)


@grouped_mm.register_fake
def _(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


@torch.library.custom_op("fp8rs::grouped_wgrad", mutates_args=())
def grouped_wgrad(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    padded_ends: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """Multiply columns of each group: out[g] = a[:, columns of g] @ b[:, columns of g].T.

    Args:
        a: codes (n, columns), contiguous, from ``fp8rs::quantize_groups``.
        a_scale: fp32 (groups, n).
        b: codes (k, columns), contiguous.
        b_scale: fp32 (groups, k).
        padded_ends: int32 (groups,), from ``fp8rs::group_bounds``.
        out_dtype: dtype of the result.
        use_fast_accum: accumulate with reduced precision on CUDA.

    Returns:
        (groups, n, k).
    """
    groups, n, k = padded_ends.shape[0], a.shape[0], b.shape[0]
    if has_grouped_gemm(a.device) and a.numel() and b.numel() and groups:
        out = torch._scaled_grouped_mm(
            a,
            b.t(),
            a_scale.view(-1),
            b_scale.view(-1),
            offs=padded_ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=use_fast_accum,
        )
        return out.to(out_dtype)
    out = a.new_zeros((groups, n, k), dtype=torch.float32)
    start = 0
    for group, end in enumerate(padded_ends.tolist()):
        left = a[:, start:end].float() * a_scale[group].unsqueeze(1)
        right = b[:, start:end].float() * b_scale[group].unsqueeze(1)
        out[group] = left @ right.t()
        start = end
    return out.to(out_dtype)


@grouped_wgrad.register_fake
def _(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    padded_ends: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    shape = (padded_ends.shape[0], a.shape[0], b.shape[0])
    return a.new_empty(shape, dtype=out_dtype)
