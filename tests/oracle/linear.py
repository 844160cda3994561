"""Linear layers on operands that are rounded to FP8, in plain torch with fp32 accumulation.

What the GEMMs multiply are rounded values in fp32. ``rebased`` is MXFP8 where there are no GEMMs
for it: weights rewritten for one power of two a row, activations rounded straight to such scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oracle.blocks import expand, quantize
from oracle.elements import E4M3, cast

Block = tuple[int, int]


@dataclass(frozen=True)
class Blocks:
    """The blocks of a recipe; ``rounding`` says that the scales are E8M0.

    ``wgrad_input`` is the block of the input's transpose, where it is not ``input``.
    """

    input: Block
    weight: Block
    rounding: str | None = None
    power_2_scale: bool = False
    wgrad_input: Block | None = None


#: Current scaling, and delayed scaling in its first forward.
TENSORWISE = Blocks((-1, -1), (-1, -1))


def blocks_of(recipe: Any) -> Blocks:
    """The blocks that a recipe says it has, of which its own tests have a table."""
    input, wgrad_input = recipe.block_format("input"), recipe.wgrad_input_format
    return Blocks(
        input.block,
        recipe.block_format("weight").block,
        getattr(recipe, "scale_rounding", None),
        recipe.power_2_scale,
        None if wgrad_input == input else wgrad_input.block,
    )


def rounded(x: Tensor, dtype: torch.dtype, block: Block, **options: Any) -> tuple[Tensor, Tensor]:
    """A matrix as quantizing rounds it, in fp32, and its scales."""
    if x.numel() == 0:
        return x.float(), torch.ones(x.shape[0], 1, device=x.device)
    codes, scale = quantize(x, dtype, block, **options)
    return codes.float() * expand(scale, block, tuple(x.shape)), scale


def rebase(x: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """Rounded values rounded again for the largest of their row's scales."""
    row = expand(scale, block, tuple(x.shape)).amax(1, keepdim=True).clamp(min=2.0**-126)
    return cast(x / row, dtype).float() * row


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, blocks, grad_dtype, rebased):
        x2 = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x2, weight)
        ctx.of = x.shape, blocks, grad_dtype, rebased, None if bias is None else bias.dtype
        y = _operand(x2, E4M3, blocks, rebased) @ _weight(weight, blocks, rebased).t()
        if bias is not None:
            y = y + bias
        return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, dy):
        x2, weight = ctx.saved_tensors
        shape, blocks, grad_dtype, rebased, b_dtype = ctx.of
        dy2 = dy.reshape(-1, dy.shape[-1])
        if blocks.weight == (1, -1):
            w, scale = rounded(weight, E4M3, (1, -1), power_2_scale=blocks.power_2_scale)
            scaled = dy2.float() * scale.view(1, -1)
            dx = _operand(scaled, grad_dtype, blocks, rebased) @ (w / scale)
        else:
            w = _weight(weight.t(), blocks, rebased).t()
            dx = _operand(dy2, grad_dtype, blocks, rebased) @ w
        left = _operand(dy2.t(), grad_dtype, blocks, rebased)
        transposed = replace(blocks, input=blocks.wgrad_input or blocks.input)
        dw = left @ _operand(x2.t(), E4M3, transposed, rebased).t()
        db = None if b_dtype is None else dy2.sum(0, dtype=b_dtype)
        return dx.to(x2.dtype).view(shape), dw.to(weight.dtype), db, None, None, None


def _operand(x: Tensor, dtype: torch.dtype, blocks: Blocks, rebased: bool) -> Tensor:
    if rebased:
        return rounded(x, dtype, (1, -1), power_2_scale=True)[0]
    options = {"rounding": blocks.rounding, "power_2_scale": blocks.power_2_scale}
    return rounded(x, dtype, blocks.input, **options)[0]


def _weight(weight: Tensor, blocks: Blocks, rebased: bool) -> Tensor:
    options = {"rounding": blocks.rounding, "power_2_scale": blocks.power_2_scale}
    w, scale = rounded(weight, E4M3, blocks.weight, **options)
    return rebase(w, scale, blocks.weight, E4M3) if rebased else w


def rebases(blocks: Blocks, device: torch.device) -> bool:
    """Whether a device multiplies MXFP8 rebased to one scale a row."""
    if blocks.rounding is None or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) < (10, 0)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    blocks: Blocks = TENSORWISE,
    grad_dtype: torch.dtype = E4M3,
) -> Tensor:
    """A linear layer whose operands are rounded by blocks, as the device of ``x`` has GEMMs for."""
    return _Linear.apply(x, weight, bias, blocks, grad_dtype, rebases(blocks, x.device))


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
