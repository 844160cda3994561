"""Rotary position embeddings (RoFormer, arXiv:2104.09864).

A rotation mixes the two halves of a head, as in Llama. In eager mode, one call of an operator
rotates queries or keys. It computes in float32 and rounds the result once. A composition of torch's
operators needs six calls, and more in the backward, most of them with float32 results. Compiled
code is a composition, which the compiler fuses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .fused import is_plain

_rotate = torch.ops.fp8rs._rotate.default
_unsafe_view = torch.ops.aten._unsafe_view.default

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
        x: (..., length, heads, kv_channels).
        rotation: cosines and sines, each (length, kv_channels) or (batch, length, kv_channels). In
            eager mode, they are converted to float32.

    Raises:
        ValueError: the shapes of the angles do not fit ``x``, or ``kv_channels`` is odd.
    """
    cos, sin = rotation
    _check_angles(x, cos, sin)

    # The operator has no gradients of the angles.
    angles_are_constant = not cos.requires_grad and not sin.requires_grad
    if angles_are_constant and is_plain(x) and not torch.compiler.is_compiling():
        out: Tensor = _Rotate.apply(x, cos, sin, False)
        return out

    cos = cos.unsqueeze(-2)
    sin = sin.unsqueeze(-2)
    first_half, second_half = x.chunk(2, dim=-1)
    rotated = torch.cat((-second_half, first_half), dim=-1)
    return (x * cos + rotated * sin).to(x.dtype)


def _check_angles(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ValueError unless there is an angle for each position and channel of ``x``."""
    *batch, length, _, channels = x.shape
    if channels % 2:
        raise ValueError(f"kv_channels must be even, but got {channels}")

    one_for_all_rows = [1] * len(batch)
    fits_batch = list(cos.shape[:-2]) in ([], one_for_all_rows, batch)
    if cos.shape == sin.shape and fits_batch and cos.shape[-2:] == (length, channels):
        return
    raise ValueError(
        f"rotary_pos_emb has the shapes {tuple(cos.shape)} and {tuple(sin.shape)}: both must be "
        f"(length, kv_channels), which is ({length}, {channels}), or that for each row of the batch"
    )


class _Rotate(torch.autograd.Function):
    """Rotate by the angles, or back. The backward of either is the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.back = back
        y = _rotate(x.flatten(-2), cos.float().contiguous(), sin.float().contiguous(), back)
        # Autograd forbids writing in place to a view that a function returns.
        heads: Tensor = _unsafe_view(y, x.shape)
        return heads

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(dy, cos, sin, not ctx.back), None, None, None
