"""FP8 training in plain torch: rounded operands, fp32 accumulation. Shares no code with fp8rs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MAX = {E4M3: 448.0, E5M2: 57344.0}


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The per-tensor scale of finite data."""
    # By a tensor: CUDA multiplies by the reciprocal of a Python number.
    scale = (amax.float() / torch.full_like(amax.float(), MAX[dtype])).clamp(min=2.0**-126)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def codes_of(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """FP8 codes of finite data under a scale; torch's cast is right once the range is clamped."""
    q = torch.ones_like(scale) / scale
    return (x.float() * q).clamp(-MAX[dtype], MAX[dtype]).to(dtype)


def rounded(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(codes as fp32, scale) of a tensor, by its own amax unless the scale is given."""
    if scale is None:
        amax = x.float().abs().max() if x.numel() else torch.zeros((), device=x.device)
        scale = scale_of(amax, dtype)
    return codes_of(x, scale, dtype).float(), scale


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, grad_dtype):
        x2 = x.reshape(-1, x.shape[-1])
        xq, xs = rounded(x2, E4M3)
        wq, ws = rounded(weight, E4M3)
        ctx.save_for_backward(xq, xs, wq, ws)
        ctx.of = x.shape, x.dtype, weight.dtype, None if bias is None else bias.dtype, grad_dtype
        y = (xq @ wq.t()) * xs * ws
        if bias is not None:
            y = y + bias
        return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, dy):
        xq, xs, wq, ws = ctx.saved_tensors
        shape, x_dtype, w_dtype, b_dtype, grad_dtype = ctx.of
        dy2 = dy.reshape(-1, dy.shape[-1])
        dq, ds = rounded(dy2, grad_dtype)
        dx = ((dq @ wq) * ds * ws).to(x_dtype).view(shape)
        dw = ((dq.t() @ xq) * ds * xs).to(w_dtype)
        db = None if b_dtype is None else dy2.sum(0, dtype=b_dtype)
        return dx, dw, db, None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, grad_dtype: torch.dtype = E4M3
) -> Tensor:
    """A linear layer with current scaling, its gradients rounded to ``grad_dtype``."""
    return _Linear.apply(x, weight, bias, grad_dtype)


def relative(a: Tensor, b: Tensor) -> float:
    """The norm of the difference by that of ``b``."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def tensor_core_error(k: int) -> float:
    """How far FP8 tensor cores may be off a sum of ``k`` products, relative to the largest sum.

    A Hopper tensor core aligns 32 products and the sum so far to the largest of them and cuts off
    what is below 13 bits of fraction (DeepSeek-V3 Technical Report, arXiv:2412.19437, sections
    3.3.2 and 3.5.2: "around 14 bits"). So each product loses less than 2^-13 of the largest, in
    the direction of its own sign: ``k`` independent losses add up as the root of their number.
    """
    return math.sqrt(k) * 2.0**-13


def tensor_core_sums(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T of matrices of codes, with the additions that :func:`tensor_core_error` describes."""
    sums = torch.zeros(a.shape[0], b.shape[0], 1, dtype=torch.float64)
    for left, right in zip(a.double().split(32, 1), b.double().split(32, 1), strict=True):
        addends = torch.cat([sums, left[:, None] * right[None]], 2)
        _, exponent = torch.frexp(addends.abs().amax(2, keepdim=True))
        unit = torch.ldexp(torch.ones_like(sums), exponent - 1 - 13)
        sums = ((addends / unit).trunc() * unit).sum(2, keepdim=True)
    return sums[..., 0].float()
