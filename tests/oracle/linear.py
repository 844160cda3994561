"""Linear layers on operands rounded to FP8, in plain torch with fp32 accumulation.

GEMMs multiply rounded values in fp32. ``rebased`` computes MXFP8 on devices without MXFP8 GEMMs:
weights are converted to one power of two per row, and activations are quantized with such scales.
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
    """The blocks of a recipe. ``rounding`` is set if the scales are E8M0.

    ``wgrad_input`` is the block of the transposed input, if it differs from ``input``. The GEMMs in
    ``high_precision`` multiply operands that are not rounded.
    """

    input: Block
    weight: Block
    rounding: str | None = None
    power_2_scale: bool = False
    wgrad_input: Block | None = None
    high_precision: tuple[str, ...] = ()


#: Current scaling, and delayed scaling in its first forward.
TENSORWISE = Blocks((-1, -1), (-1, -1))


def blocks_of(recipe: Any) -> Blocks:
    """Return the blocks that a recipe declares. The tests of recipes compare them with a table."""
    input = recipe.block_format("input")
    wgrad_input = recipe.wgrad_input_format
    return Blocks(
        input.block,
        recipe.block_format("weight").block,
        getattr(recipe, "scale_rounding", None),
        recipe.power_2_scale,
        None if wgrad_input == input else wgrad_input.block,
        recipe.high_precision_gemms,
    )


def rounded(x: Tensor, dtype: torch.dtype, block: Block, **options: Any) -> tuple[Tensor, Tensor]:
    """Return a quantized and dequantized matrix in fp32, and its scales."""
    if x.numel() == 0:
        return x.float(), torch.ones(x.shape[0], 1, device=x.device)
    codes, scale = quantize(x, dtype, block, **options)
    return codes.float() * expand(scale, block, tuple(x.shape)), scale


def rebase(x: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """Round quantized values again with the largest scale of their row."""
    row = expand(scale, block, tuple(x.shape)).amax(1, keepdim=True).clamp(min=2.0**-126)
    return cast(x / row, dtype).float() * row


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, blocks, grad_dtype, rebased):
        x2 = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x2, weight)
        ctx.of = x.shape, blocks, grad_dtype, rebased, None if bias is None else bias.dtype
        if "forward" in blocks.high_precision:
            y = x2.float() @ weight.float().t()
        else:
            y = _operand(x2, E4M3, blocks, rebased) @ _weight(weight, blocks, rebased).t()
        if bias is not None:
            y = y + bias
        return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, dy):
        x2, weight = ctx.saved_tensors
        shape, blocks, grad_dtype, rebased, b_dtype = ctx.of
        dy2 = dy.reshape(-1, dy.shape[-1])
        if "dgrad" in blocks.high_precision:
            dx = dy2.float() @ weight.float()
        elif blocks.weight == (1, -1):
            w, scale = rounded(weight, E4M3, (1, -1), power_2_scale=blocks.power_2_scale)
            scaled = dy2.float() * scale.view(1, -1)
            dx = _operand(scaled, grad_dtype, blocks, rebased) @ (w / scale)
        else:
            w = _weight(weight.t(), blocks, rebased).t()
            dx = _operand(dy2, grad_dtype, blocks, rebased) @ w
        if "wgrad" in blocks.high_precision:
            dw = dy2.float().t() @ x2.float()
        else:
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
    """Return whether a device computes MXFP8 with operands rebased to one scale per row."""
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
    """Compute a linear layer with quantized operands, as the device of ``x`` multiplies them."""
    return _Linear.apply(x, weight, bias, blocks, grad_dtype, rebases(blocks, x.device))


def tensor_core_error(k: int) -> float:
    """Return a bound on the error of FP8 tensor cores in a sum of ``k`` products.

    The bound is relative to the largest sum. A Hopper tensor core aligns 32 products and the
    running sum to the largest of them and truncates what is below 13 fraction bits (DeepSeek-V3
    Technical Report, arXiv:2412.19437, sections 3.3.2 and 3.5.2: "around 14 bits"). Each product
    loses less than 2^-13 of the largest, in the direction of its sign. ``k`` independent losses add
    up to the square root of their number.
    """
    return math.sqrt(k) * 2.0**-13


def tensor_core_sums(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b.T of matrices of codes with the additions of `tensor_core_error`."""
    sums = torch.zeros(a.shape[0], b.shape[0], 1, dtype=torch.float64)
    for left, right in zip(a.double().split(32, 1), b.double().split(32, 1), strict=True):
        addends = torch.cat([sums, left[:, None] * right[None]], 2)
        _, exponent = torch.frexp(addends.abs().amax(2, keepdim=True))
        unit = torch.ldexp(torch.ones_like(sums), exponent - 1 - 13)
        sums = ((addends / unit).trunc() * unit).sum(2, keepdim=True)
    return sums[..., 0].float()
