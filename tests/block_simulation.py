"""Linear layers with a scale for each row or block, in plain torch. Shares no code with fp8rs.

What the GEMMs multiply are rounded values in fp32. ``rebased`` is MXFP8 where there are no GEMMs
for it: weights rewritten for one power of two a row, activations rounded straight to such scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from block_reference import expand, quantize
from simulation import E4M3

Block = tuple[int, int]


@dataclass(frozen=True)
class Blocks:
    """The blocks of a recipe; ``rounding`` says that the scales are E8M0.

    ``wgrad_input`` is the block of the input's transpose, where it is not ``input``.
    """

    input: Block
    weight: Block
    rounding: str | None = None
    power_of_2: bool = False
    wgrad_input: Block | None = None


RECIPES = {
    "rowwise": Blocks((1, -1), (1, -1)),
    "block": Blocks((1, 128), (128, 128)),
    "block of squares": Blocks((1, 128), (128, 128), wgrad_input=(128, 128)),
    "mxfp8": Blocks((1, 32), (32, 32), "ceil"),
}


def values(x: Tensor, dtype: torch.dtype, block: Block, **options: Any) -> tuple[Tensor, Tensor]:
    """A matrix as quantizing rounds it, in fp32, and its scales."""
    if x.numel() == 0:
        return x.float(), x.new_ones(x.shape[0], 1)
    codes, scale = quantize(x, dtype, block, **options)
    return codes.float() * expand(scale, block, tuple(x.shape)), scale


def rebase(x: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """Rounded values rounded again for the largest of their row's scales."""
    row = expand(scale, block, tuple(x.shape)).amax(1, keepdim=True).clamp(min=2.0**-126)
    return (x / row).to(dtype).float() * row


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
            w, scale = values(weight, E4M3, (1, -1), power_of_2=blocks.power_of_2)
            folded = dy2.float() * scale.view(1, -1)
            dx = _operand(folded, grad_dtype, blocks, rebased) @ (w / scale)
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
        return values(x, dtype, (1, -1), power_of_2=True)[0]
    options = {"rounding": blocks.rounding, "power_of_2": blocks.power_of_2}
    return values(x, dtype, blocks.input, **options)[0]


def _weight(weight: Tensor, blocks: Blocks, rebased: bool) -> Tensor:
    options = {"rounding": blocks.rounding, "power_of_2": blocks.power_of_2}
    rounded, scale = values(weight, E4M3, blocks.weight, **options)
    return rebase(rounded, scale, blocks.weight, E4M3) if rebased else rounded


def rebases(blocks: Blocks, device: torch.device) -> bool:
    """Whether a device multiplies MXFP8 rebased to one scale a row."""
    if blocks.rounding is None or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) < (10, 0)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    blocks: Blocks,
    grad_dtype: torch.dtype = E4M3,
) -> Tensor:
    """A linear layer whose operands are rounded by blocks, as the device of ``x`` has GEMMs for."""
    return _Linear.apply(x, weight, bias, blocks, grad_dtype, rebases(blocks, x.device))
