"""Rotary position embeddings (RoFormer, arXiv:2104.09864).

They rotate the two halves of a head, as in Llama. In eager mode, a rotation is one function with
three elementwise operations in each direction. Composed of torch's operators it would be six, and
more in the backward, most of them on float32 results. Each operation computes in float32 if the
angles are float32, so a 16-bit result is rounded twice: after the product with the cosines, and
after the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .fused import is_plain

Rotation = tuple[Tensor, Tensor]


def rotary_pos_emb(
    length: int, kv_channels: int, base: float = 10_000.0, *, device: Any = None
) -> Rotation:
    """Compute cosines and sines of rotary positions.

    Args:
        length: number of positions, from 0 on.
        kv_channels: size of a head.
        base: the angle of position 1 falls from 1 to nearly 1 / ``base`` along a head.
        device: device of the result.

    Returns:
        Two tensors (length, kv_channels), fp32.

    Raises:
        ValueError: ``kv_channels`` is odd.
    """
    if kv_channels % 2:
        raise ValueError(f"kv_channels must be even, but got {kv_channels}")
    exponents = torch.arange(0, kv_channels, 2, device=device).float() / kv_channels
    positions = torch.arange(length, device=device).float()
    angles = torch.outer(positions, base**-exponents).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Apply rotary position embeddings.

    Args:
        x: (batch, heads, length, kv_channels).
        rotation: cosines and sines, each (length, kv_channels) or (batch, length, kv_channels).
    """
    cos, sin = rotation
    cos = cos.unsqueeze(-3)
    sin = sin.unsqueeze(-3)
    # The function has no gradients of the angles.
    angles_are_constant = not cos.requires_grad and not sin.requires_grad
    if angles_are_constant and is_plain(x) and not torch.compiler.is_compiling():
        out: Tensor = _Rotate.apply(x, cos, sin, False)
        return out

    first_half, second_half = x.chunk(2, dim=-1)
    rotated = torch.cat((-second_half, first_half), dim=-1)
    return (x * cos + rotated * sin).to(x.dtype)


class _Rotate(torch.autograd.Function):
    """Rotate by the angles, or back. The backward of either is the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.back = back
        y = torch.empty_like(x)
        torch.mul(x, cos, out=y)

        # The backward multiplies by the transposed matrix: signs change, and so do the halves that
        # the sines belong to.
        x_first, x_second = x.chunk(2, dim=-1)
        y_first, y_second = y.chunk(2, dim=-1)
        sin_first, sin_second = sin.chunk(2, dim=-1)
        if back:
            y_first.addcmul_(x_second, sin_second)
            y_second.addcmul_(x_first, sin_first, value=-1)
        else:
            y_first.addcmul_(x_second, sin_first, value=-1)
            y_second.addcmul_(x_first, sin_second)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(dy, cos, sin, not ctx.back), None, None, None
