"""One scale per tensor: amax, scale, codes and dequantization of any data, including NaN."""

import torch
from torch import Tensor

from oracle.compare import canonical
from oracle.elements import MAX, decode, encode, power_of_2


def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude, or 0 without elements. NaN exceeds infinity."""
    bits = x.cpu().float().contiguous().view(torch.int32) & 0x7FFFFFFF
    largest = bits.max() if bits.numel() else torch.zeros((), dtype=torch.int32)
    return canonical(largest.view(torch.float32))


def scale_from_amax(
    amax: Tensor,
    fp8_dtype: torch.dtype,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    margin: int = 0,
) -> Tensor:
    """Convert amaxes to float32 scales on their device."""
    amax = amax.float().clamp(min=amax_epsilon)
    # Divide by a tensor: with a Python number, CUDA multiplies by the reciprocal.
    scale = amax / torch.full_like(amax, MAX[fp8_dtype]) * 2.0**margin
    scale = scale.clamp(2.0**-126, 2.0**127)
    if power_2_scale:
        mantissa, exponent = torch.frexp(scale)
        scale = power_of_2(torch.where(mantissa == 0.5, exponent - 1, exponent)).float()
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(amax.isfinite(), scale, torch.nan)


def quantize(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Return codes (uint8) of ``x`` for known scales that broadcast to its shape."""
    return encode(x.float() * (torch.ones_like(scale) / scale), fp8_dtype)


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes times a scale that broadcasts, computed in float32 on the CPU and cast once."""
    return (decode(codes.cpu().view(torch.uint8), codes.dtype) * scale.cpu()).to(dtype)


def matrix(x: Tensor) -> Tensor:
    """Return ``x`` as (product of the leading dimensions, last dimension)."""
    return x.reshape(-1, x.shape[-1]) if x.dim() and x.numel() else x.reshape(matrix_shape(x))


def matrix_shape(x: Tensor) -> tuple[int, int]:
    """Return the shape of `matrix(x)`."""
    if x.dim() == 0:
        return 1, 1
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return rows, x.shape[-1]
