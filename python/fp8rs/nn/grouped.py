"""The grouped linear layer of mixture-of-experts models, as a function of tensors.

    y[i] = x[i] @ weight[g].T + bias[g]    for each row i of group g

Rows of one group are consecutive. Activations and gradients are quantized with a scale per row for
forward and dgrad, and with a scale per column of each group for wgrad. A weight has one scale per
expert. Codes are E4M3, because grouped FP8 GEMMs on Hopper support no other format.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8rs._torch import gradients_needed
from fp8rs.gemm.grouped import ALIGNMENT, MAX_GROUPS, grouped_mm, grouped_wgrad
from fp8rs.tensor.formats import INPUT_DTYPES

_E4M3 = torch.float8_e4m3fn
_group_bounds = torch.ops.fp8rs.group_bounds.default
_quantize_groups = torch.ops.fp8rs.quantize_groups.default
_quantize_current = torch.ops.fp8rs.quantize_current.default
_transpose = torch.ops.fp8rs.transpose.default


def grouped_linear(
    x: Tensor, weight: Tensor, offs: Tensor, *, bias: Tensor | None = None
) -> Tensor:
    """Multiply each group of rows by the transpose of its own matrix, on FP8 operands.

    Args:
        x: (rows, in), float32, bfloat16 or float16.
        weight: (experts, out, in), with the dtype of ``x``. ``in`` and ``out`` are multiples of 16.
        offs: int32 (experts,), the row after the last one of each group. Rows after the last group
            give 0 and receive no gradient.
        bias: (experts, out) or None.

    Returns:
        (rows, out), with the dtype of ``x``.

    Raises:
        ValueError: a shape does not fit. On the CPU also if ``offs`` decreases or exceeds the rows.
        TypeError: a dtype is not supported.
    """
    _check(x, weight, offs, bias)
    out: Tensor = _Grouped.apply(x, weight, offs, bias)
    return out


def _check(x: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 3:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be (experts, out, in)")
    experts, n, k = weight.shape
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be (rows, {k}) for the weight")
    if n % ALIGNMENT or k % ALIGNMENT:
        raise ValueError(
            f"weight has matrices of {n} x {k}; both sizes must be multiples of {ALIGNMENT}"
        )
    if experts >= MAX_GROUPS:
        raise ValueError(f"weight has {experts} experts; it must have fewer than {MAX_GROUPS}")
    if offs.shape != (experts,):
        raise ValueError(f"offs has shape {tuple(offs.shape)}; it must be ({experts},)")
    if offs.dtype != torch.int32:
        raise TypeError(f"offs is {offs.dtype}; it must be torch.int32")
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"x is {x.dtype}; it must be float32, bfloat16 or float16")
    if weight.dtype != x.dtype:
        raise TypeError(f"weight is {weight.dtype} and x is {x.dtype}: both must have one dtype")
    if bias is not None and bias.shape != (experts, n):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be ({experts}, {n})")
    for name, other in (("weight", weight), ("offs", offs), ("bias", bias)):
        if other is not None and other.device != x.device:
            raise ValueError(f"{name} is on {other.device} and x is on {x.device}")
    if offs.is_cpu and not torch.compiler.is_compiling():
        ends = [0, *offs.tolist(), x.shape[0]]
        if ends != sorted(ends):
            raise ValueError(
                f"offs is {offs.tolist()}; it must not decrease, nor exceed the {x.shape[0]} rows"
            )


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad[:2]
        ends, padded_ends, _ = _group_bounds(offs.contiguous(), x)
        row, row_scale, col, col_scale = _quantize_groups(
            x, ends, padded_ends, _E4M3, True, needs_w
        )
        codes, _, scale = _quantize_current(weight, _E4M3, True, False, batched=True)
        y: Tensor = grouped_mm(row, row_scale, codes, _per_row(scale, codes), ends, x.dtype, True)
        if bias is not None:
            y = y + _of_rows(bias, ends, x.shape[0])
        saved = (col, col_scale) if needs_w else (None, None)
        ctx.save_for_backward(*saved, codes if needs_x else None, scale, ends, padded_ends)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        col, col_scale, codes, scale, ends, padded_ends = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        needs_x, needs_w, _, needs_bias = gradients_needed(ctx)
        dx = dw = db = None
        if needs_x or needs_w:
            grads = _quantize_groups(dy, ends, padded_ends, _E4M3, needs_x, needs_w)
        if needs_x:
            turned = _transpose(codes, batched=True)
            per_row = _per_row(scale, turned)
            dx = grouped_mm(grads[0], grads[1], turned, per_row, ends, x_dtype, True)
        if needs_w:
            dw = grouped_wgrad(grads[2], grads[3], col, col_scale, padded_ends, weight_dtype, True)
        if needs_bias:
            db = _sums(dy, ends, bias_dtype)
        return dx, dw, None, db


def _per_row(scale: Tensor, codes: Tensor) -> Tensor:
    """Expand scales (experts,) to the rows of the matrices."""
    return scale.view(-1, 1).expand(codes.shape[0], codes.shape[1]).contiguous()


def _groups(ends: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the group of each row, and whether it has one (rows, 1)."""
    index = torch.arange(rows, device=ends.device, dtype=ends.dtype)
    group = torch.searchsorted(ends, index, right=True)
    inside = (group < ends.shape[0]).unsqueeze(1)
    return group.clamp_max(max(ends.shape[0] - 1, 0)), inside


def _of_rows(bias: Tensor, ends: Tensor, rows: int) -> Tensor:
    """Return the bias of each row, 0 for rows without a group."""
    group, inside = _groups(ends, rows)
    return torch.where(inside, bias[group], 0)


def _sums(dy: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum the rows of each group in fp32."""
    group, inside = _groups(ends, dy.shape[0])
    sums = dy.new_zeros((ends.shape[0], dy.shape[1]), dtype=torch.float32)
    return sums.index_add_(0, group, torch.where(inside, dy.float(), 0)).to(dtype)
